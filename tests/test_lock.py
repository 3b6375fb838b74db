"""A file that nobody chose is installed: does each lock name all that is needed, exactly and by hash?"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests import lock
from tests.lock import ALL, BUILDS, ROOT, SERVER, TORCH, WITH_CUDA, WITHOUT_CUDA


def installed(*extras: str) -> dict[str, str]:
    return {name: Version(version).public for name, version in lock.closure(extras).items()}


@pytest.mark.parametrize("path", [ALL, SERVER, WITH_CUDA, WITHOUT_CUDA], ids=lambda path: path.name)
def test_every_line_pins_a_version_and_its_files_and_names_no_index(path: Path) -> None:
    held = lock.read(path)
    said = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert held and len(held) == len([line for line in said if not line.startswith("    --hash=")])
    assert all(re.fullmatch(r"[-a-z0-9]+==[^ ]+ \\|    --hash=sha256:[0-9a-f]{64}(?: \\)?", line) for line in said)


def test_all_that_is_installed_for_development_is_locked_and_nothing_else() -> None:
    """Run in a venv that `make venv` made."""
    needed = installed(*lock.EXTRAS)
    torch = needed.pop(TORCH)
    assert {name: pin.version for name, pin in lock.read(ALL).items()} == needed
    assert lock.read(WITH_CUDA)[TORCH].version == torch
    assert Version(lock.read(WITHOUT_CUDA)[TORCH].version).public == torch


def test_the_image_gets_what_its_extras_need_from_the_same_files() -> None:
    everything, server = lock.read(ALL), lock.read(SERVER)
    assert {name: pin.version for name, pin in server.items()} == installed("server", "kube")
    assert all(everything[name] == pin for name, pin in server.items())


def test_the_lock_and_the_constraints_say_the_same() -> None:
    pinned = re.findall(r"(?m)^([-\w]+)==(\S+)", (ROOT / "constraints.txt").read_text())
    assert pinned
    held = {name: pin.version for name, pin in (lock.read(ALL) | lock.read(WITH_CUDA)).items()}
    named = {canonicalize_name(name): version for name, version in pinned}
    assert {name: held.get(name, version) for name, version in named.items()} == named


def test_muster_itself_is_built_with_what_is_locked() -> None:
    assert set(BUILDS) <= lock.read(ALL).keys() and metadata.version(BUILDS[0])
    recipe = (ROOT / "Makefile").read_text()
    assert "--no-deps --no-build-isolation -e ." in recipe and "--require-hashes --no-deps --only-binary" in recipe
