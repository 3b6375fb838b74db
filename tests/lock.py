"""Which files may be installed to develop and to release muster? `python -m tests.lock` writes the locks anew.

The versions are those that are installed here; the hashes are of every file of those versions that the package index
has for Linux, so that other machines and mirrors get the same. Only wheels: nothing is built on the way but muster.

torch is apart, twice: pip would take the index's build, with CUDA, before one that is small and on no index.
"""

from __future__ import annotations

import html.parser
import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
OWN = "muster-train"
BUILDS = ("setuptools",)  # what muster itself is built with
PYTHONS = range(11, 15)  # 3.11 to 3.14
MACHINES = ("x86_64", "aarch64")
_PIN = re.compile(r"([-.\w]+)==([^ ]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


TORCH = "torch"
ALL = ROOT / "requirements.lock"  # what `make venv` installs, and so CI; torch is apart
SERVER = ROOT / "requirements-server.lock"  # what a control plane in an image needs
WITH_CUDA, WITHOUT_CUDA = ROOT / "requirements-torch.lock", ROOT / "requirements-torch-cpu.lock"
EXTRAS = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@dataclass(frozen=True)
class Pin:
    version: str
    hashes: tuple[str, ...]


def read(lock: Path) -> dict[str, Pin]:
    text = lock.read_text() if lock.exists() else ""
    return {name: Pin(version, tuple(re.findall("[0-9a-f]{64}", said))) for name, version, said in _PIN.findall(text)}


# What is needed ----------------------------------------------------------------------------------


def closure(extras: Iterable[str]) -> dict[str, str]:
    """All that muster with these extras brings, as it is installed here: name → version."""
    found = {name: metadata.version(name) for name in BUILDS}
    wanted = list(_needs(OWN, frozenset(extras)))
    seen = set()
    while wanted:
        name, more = wanted.pop()
        found[name] = metadata.version(name)
        if (name, more) not in seen:
            seen.add((name, more))
            wanted += _needs(name, more)
    return found


def _needs(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    for text in metadata.requires(name) or ():
        one = Requirement(text)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(one.name), frozenset(one.extras)


# What the index has ------------------------------------------------------------------------------


class _Page(html.parser.HTMLParser):
    """A project's page of a package index: file → sha256."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address, _, digest = (dict(attrs).get("href") or "").partition("#sha256=")
        if tag == "a" and digest:
            self.files[urllib.parse.unquote(address.rpartition("/")[2])] = digest


def _index() -> str:
    """Where pip looks; only pip knows, where nobody has set it."""
    from pip._internal.models.index import PyPI

    return os.environ.get("PIP_INDEX_URL") or PyPI.simple_url


def published(name: str, version: str) -> Iterator[str]:
    with urllib.request.urlopen(f"{_index().rstrip('/')}/{name}/", timeout=60) as answer:
        page = _Page()
        page.feed(answer.read().decode())
    for file, digest in page.files.items():
        try:
            _, found, _, tags = parse_wheel_filename(file)
        except (InvalidWheelFilename, ValueError):
            continue  # what is no wheel would have to be built
        if found == Version(version) and any(map(_is_for_us, tags)):
            yield digest


def _is_for_us(tag: Tag) -> bool:
    if tag.platform != "any" and not (tag.platform.startswith("manylinux") and tag.platform.endswith(MACHINES)):
        return False
    if (compiled := re.fullmatch(r"cp3(\d+)", tag.interpreter)) is None:
        return tag.interpreter == "py3" and tag.abi == "none"
    minor = int(compiled[1])
    return (minor in PYTHONS and tag.abi == tag.interpreter) or (tag.abi == "abi3" and minor < PYTHONS.stop)


def taken_here(name: str, version: str) -> str:
    """The hash of the file that pip chooses on this machine."""
    asked = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    said = subprocess.run([*asked, "--report", "-", f"{name}=={version}"], stdout=subprocess.PIPE, check=True)
    (chosen,) = json.loads(said.stdout)["install"]
    return str(chosen["download_info"]["archive_info"]["hashes"]["sha256"])


# Writing -----------------------------------------------------------------------------------------


def write(lock: Path, pins: Mapping[str, Pin]) -> None:
    if missing := [name for name, pin in pins.items() if not pin.hashes]:
        raise SystemExit(f"{lock.name}: the index has no wheel of {', '.join(missing)}")
    lines = ["# Made by `make lock`: do not edit.", *(_shown(name, pin) for name, pin in sorted(pins.items()))]
    lock.write_text("\n".join(lines) + "\n")
    print(f"{lock.name}: {len(pins)} packages, {sum(len(pin.hashes) for pin in pins.values())} files")


def _shown(name: str, pin: Pin) -> str:
    return " \\\n    ".join([f"{name}=={pin.version}", *(f"--hash=sha256:{digest}" for digest in sorted(pin.hashes))])


def main() -> None:
    everything = closure(EXTRAS)
    pins = {
        name: Pin(public, tuple(published(name, public)))
        for name, public in ((name, Version(version).public) for name, version in everything.items())
    }
    write(WITH_CUDA, {TORCH: pins.pop(TORCH)})
    write(ALL, pins)
    write(SERVER, {name: pins[name] for name in closure(("server", "kube"))})
    if Version(everything[TORCH]).local is not None:  # for the Pythons whose file was known before, too
        before = read(WITHOUT_CUDA).get(TORCH)
        known = before.hashes if before is not None and before.version == everything[TORCH] else ()
        write(WITHOUT_CUDA, {TORCH: Pin(everything[TORCH], (*{*known, taken_here(TORCH, everything[TORCH])},))})


if __name__ == "__main__":
    main()
