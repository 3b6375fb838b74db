"""The locks name every needed package, exactly and by hash, and the installer announces what it fetches."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from requirements import install
from tests import lock
from tests.lock import ALL, BUILDS, CONSTRAINTS, DEMO, IMAGE, PARTS, ROOT, TORCH, WITH_CUDA, WITHOUT_CUDA


def installed(*extras: str) -> dict[str, str]:
    return {name: Version(version).public for name, version in lock.closure(extras).items()}


@pytest.mark.parametrize("path", [ALL, *PARTS, WITH_CUDA, WITHOUT_CUDA], ids=lambda path: path.name)
def test_every_line_pins_a_version_and_its_files_and_names_no_index(path: Path) -> None:
    held = lock.read(path)
    lines = path.read_text().splitlines()[1:]
    assert held and len(held) == len([line for line in lines if not line.startswith("    --hash=")]) / 2
    allowed = r"# \d+ bytes|[-a-z0-9]+==[^ ]+ \\|    --hash=sha256:[0-9a-f]{64}(?: \\)?"
    assert all(re.fullmatch(allowed, line) for line in lines)
    assert all(pin.fetched_bytes > 1000 for pin in held.values())


def test_all_that_is_installed_for_development_is_locked_and_nothing_else() -> None:
    """Run in a venv that `make venv` made."""
    needed = installed(*lock.EXTRAS)
    torch = needed.pop(TORCH)
    assert {name: pin.version for name, pin in lock.read(ALL).items()} == needed
    assert lock.read(WITH_CUDA)[TORCH].version == torch
    assert Version(lock.read(WITHOUT_CUDA)[TORCH].version).public == torch


@pytest.mark.parametrize(("path", "extras"), PARTS.items(), ids=lambda value: getattr(value, "name", None))
def test_a_part_has_what_its_extras_need_from_the_same_files(path: Path, extras: tuple[str, ...]) -> None:
    everything, part = lock.read(ALL), lock.read(path)
    needed = installed(*extras)
    needed.pop(TORCH, None)
    assert {name: pin.version for name, pin in part.items()} == needed
    assert all(everything[name] == pin for name, pin in part.items())


def test_the_demo_needs_no_tool_of_tests() -> None:
    demo = lock.read(DEMO).keys()
    assert demo >= {"httpx2", "starlette", "uvicorn", "numpy"}
    assert not demo & {"ray", "playwright", "mypy", "ruff", "pytest", "hypothesis", "mkdocs", "matplotlib", "lightkube"}
    recipe = (ROOT / "Makefile").read_text()
    assert re.search(r"(?m)^demo: \$\(DEMO_STAMP\) ##", recipe), "make demo needs one stamp only"
    assert IMAGE.name in (ROOT / "Containerfile").read_text()


def test_the_lock_and_the_constraints_say_the_same() -> None:
    pinned = re.findall(r"(?m)^([-\w]+)==(\S+)", CONSTRAINTS.read_text())
    assert pinned
    held = {name: pin.version for name, pin in (lock.read(ALL) | lock.read(WITH_CUDA)).items()}
    named = {canonicalize_name(name): version for name, version in pinned}
    assert {name: held.get(name, version) for name, version in named.items()} == named


def test_muster_itself_is_built_with_what_is_locked() -> None:
    assert set(BUILDS) <= lock.read(DEMO).keys() and metadata.version(BUILDS[0])
    assert "--no-deps --no-build-isolation -e ." in (ROOT / "Makefile").read_text()


# The installer -----------------------------------------------------------------------------------


class RecordedPip:
    """Record pip's command lines instead of running them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failing: str, installed: dict[str, str] | None = None) -> None:
        self.commands: list[str] = []
        self._failing = failing
        monkeypatch.setattr(subprocess, "run", self._run)
        monkeypatch.setattr(install, "installed_version", (installed or {}).get)

    def _run(self, command: list[str], *, check: bool, **_: object) -> subprocess.CompletedProcess[bytes]:
        text = " ".join(command).removeprefix(f"{sys.executable} -m pip --disable-pip-version-check install ")
        self.commands.append(text)
        code = int(any(part in text for part in self._failing))
        if check and code:
            raise subprocess.CalledProcessError(code, command)
        return subprocess.CompletedProcess(command, code)


def test_what_is_missing_is_announced_and_installed_by_hash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = RecordedPip(monkeypatch, installed={"numpy": lock.read(DEMO)["numpy"].version})
    install.install([DEMO])
    pins = lock.read(DEMO)
    megabytes = sum(pin.fetched_bytes for name, pin in pins.items() if name != "numpy") / 1e6
    said = capsys.readouterr().out
    assert said == f"Installing {len(pins) - 1} packages of demo.lock. pip fetches about {round(megabytes)} MB.\n"
    assert pip.commands == [f"--require-hashes --no-deps --only-binary :all: --requirement {DEMO}"]


def test_what_is_there_is_not_announced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    versions = {name: pin.version for name, pin in lock.read(ALL).items()}
    pip = RecordedPip(monkeypatch, installed=versions | {TORCH: lock.read(WITHOUT_CUDA)[TORCH].version})
    install.install([ALL])
    install.install_torch()
    assert (pip.commands, capsys.readouterr().out) == ([], "")


@pytest.mark.parametrize("failing", [("--dry-run",), (WITHOUT_CUDA.name,)], ids=["not offered", "another file"])
def test_torch_comes_with_cuda_where_the_locked_build_without_it_cannot_be_had(
    failing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = RecordedPip(monkeypatch, *failing)
    install.install_torch()
    version = lock.read(WITH_CUDA)[TORCH].version
    assert pip.commands[-2:] == [
        f"--require-hashes --no-deps --only-binary :all: --requirement {WITH_CUDA}",
        f"--constraint {CONSTRAINTS} torch=={version}",
    ]
    size = install.size(install.packages(WITH_CUDA))
    assert f"Installing torch {version} with CUDA. pip fetches {size}" in capsys.readouterr().out


def test_torch_comes_without_cuda_where_pip_finds_that_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = RecordedPip(monkeypatch)
    install.install_torch()
    assert pip.commands[1:] == [f"--require-hashes --no-deps --only-binary :all: --requirement {WITHOUT_CUDA}"]
    assert f"has no CUDA. pip fetches {install.size(install.packages(WITHOUT_CUDA))}.\n" in capsys.readouterr().out


def test_a_failure_of_pip_is_the_installers() -> None:
    command = [sys.executable, str(ROOT / "requirements" / "install.py"), "missing.lock"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "missing.lock" in done.stderr
