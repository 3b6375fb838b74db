"""Somebody changes a library of the page, in the repository or on its way here: is it still what was released?"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest

from muster.server.routes import web

FOLDER = web.FOLDER / "assets/vendor"
TEXTS = {"CHECKSUMS.txt", "LICENSES.txt"}  # no code


@dataclass(frozen=True)
class Vendored:
    sha256: str
    file: str
    package: str
    source: str
    released: str  # its sha256 in the package
    licence: str


LINES = [line for line in (FOLDER / "CHECKSUMS.txt").read_text().splitlines() if not line.startswith("#")]
LIBRARIES = [Vendored(*line.split()) for line in LINES]


def as_released(library: Vendored) -> bytes:
    """Our two changes taken back: another module is imported by its file, and no source map is named."""
    held = (FOLDER / library.file).read_bytes().replace(b'from"./preact.js"', b'from"preact"')
    mapped = f"//# sourceMappingURL={PurePosixPath(library.source).name}.map\n".encode()
    return held[:-1] + mapped if held.endswith(b"\n\n") else held


def test_no_file_is_without_its_checksum() -> None:
    assert {one.file for one in LIBRARIES} == {file.name for file in FOLDER.rglob("*")} - TEXTS


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda one: one.file)
def test_a_library_is_as_it_was_released(library: Vendored) -> None:
    assert hashlib.sha256((FOLDER / library.file).read_bytes()).hexdigest() == library.sha256
    assert hashlib.sha256(as_released(library)).hexdigest() == library.released
    name, _, version = library.package.partition("@")
    licences = (FOLDER / "LICENSES.txt").read_text()
    assert f"{name} {version}".lower() in licences.lower(), "its licence is there"
