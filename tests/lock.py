"""The locks: files that are installed to try, develop and release muster. `python -m tests.lock` writes them again.

The versions are those of the running environment. The hashes are those of every wheel of these versions that the
package index has for Linux, so that other machines and mirrors install the same files. muster itself is the only
package that is built. Each package has the size of the wheel that suits this machine: `requirements/install.py` adds
them up.

torch has two locks of its own, because its builds with and without CUDA share one version.
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
_PIN = re.compile(r"# (\d+) bytes\n([-.\w]+)==([^ ]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


TORCH = "torch"
FOLDER = ROOT / "requirements"
CONSTRAINTS = FOLDER / "constraints.txt"
ALL = FOLDER / "dev.lock"  # `make venv` and CI install it
DEMO = FOLDER / "demo.lock"  # `make demo` installs it
IMAGE = FOLDER / "image.lock"  # a control plane in an image needs it
WITH_CUDA, WITHOUT_CUDA = FOLDER / "torch-cuda.lock", FOLDER / "torch-cpu.lock"
PARTS = {DEMO: ("server", "torch"), IMAGE: ("server", "kube")}  # the extras of each part of ALL
EXTRAS = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@dataclass(frozen=True)
class Pin:
    version: str
    hashes: tuple[str, ...]
    fetched_bytes: int


def read(lock: Path) -> dict[str, Pin]:
    text = lock.read_text() if lock.exists() else ""
    return {
        name: Pin(version, tuple(re.findall("[0-9a-f]{64}", hashes)), int(count))
        for count, name, version, hashes in _PIN.findall(text)
    }


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


@dataclass(frozen=True)
class ChosenFile:
    """The file of a package that pip chooses on this machine."""

    digest: str
    fetched_bytes: int


def chosen_files(*requirements: str, dependencies: bool = False, index_only: bool = False) -> dict[str, ChosenFile]:
    """Return pip's choices by package name. Nothing is installed.

    With `index_only`, pip looks into its package index and nowhere else.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    if not dependencies:
        command.append("--no-deps")
    environment = dict(os.environ)
    if index_only:
        environment["PIP_CONFIG_FILE"] = os.devnull
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
            environment.pop(name, None)
    report = subprocess.run([*command, *requirements], stdout=subprocess.PIPE, check=True, env=environment)
    return {
        canonicalize_name(entry["metadata"]["name"]): ChosenFile(
            str(entry["download_info"]["archive_info"]["hashes"]["sha256"]), _size(entry["download_info"]["url"])
        )
        for entry in json.loads(report.stdout)["install"]
    }


def _size(url: str) -> int:
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"])


# Writing -----------------------------------------------------------------------------------------


def write(lock: Path, pins: Mapping[str, Pin]) -> None:
    if missing := [name for name, pin in pins.items() if not pin.hashes]:
        raise SystemExit(f"{lock.name}: the index has no wheel of {', '.join(missing)}")
    lines = ["# Made by `make lock`: do not edit.", *(_shown(name, pin) for name, pin in sorted(pins.items()))]
    lock.write_text("\n".join(lines) + "\n")
    print(f"{lock.name}: {len(pins)} packages, {sum(len(pin.hashes) for pin in pins.values())} files")


def _shown(name: str, pin: Pin) -> str:
    files = " \\\n    ".join([f"{name}=={pin.version}", *(f"--hash=sha256:{digest}" for digest in sorted(pin.hashes))])
    return f"# {pin.fetched_bytes} bytes\n{files}"


def main() -> None:
    everything = closure(EXTRAS)
    versions = {name: Version(version).public for name, version in everything.items()}
    torch = versions.pop(TORCH)
    chosen = chosen_files(*(f"{name}=={version}" for name, version in versions.items()))
    pins = {
        name: Pin(version, tuple(published(name, version)), chosen[name].fetched_bytes)
        for name, version in versions.items()
    }
    write(ALL, pins)
    for path, extras in PARTS.items():
        write(path, {name: pins[name] for name in closure(extras) if name != TORCH})
    with_cuda = chosen_files(f"{TORCH}=={torch}", dependencies=True, index_only=True)
    # The other dependencies of torch are in the locks above.
    fetched_bytes = sum(file.fetched_bytes for name, file in with_cuda.items() if name not in pins)
    write(WITH_CUDA, {TORCH: Pin(torch, tuple(published(TORCH, torch)), fetched_bytes)})
    if Version(everything[TORCH]).local is not None:  # the hashes for other Pythons were written by other machines
        before = read(WITHOUT_CUDA).get(TORCH)
        known = before.hashes if before is not None and before.version == everything[TORCH] else ()
        file = chosen_files(f"{TORCH}=={everything[TORCH]}")[TORCH]
        write(WITHOUT_CUDA, {TORCH: Pin(everything[TORCH], (*{*known, file.digest},), file.fetched_bytes)})


if __name__ == "__main__":
    main()
