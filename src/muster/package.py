"""What is a package of code, and how is it made, checked and unpacked?

A gzipped tar of regular files, and of links that stay inside it, by name, without owners and times: the same files
give the same bytes, and the hash of the bytes is the package's name. Who unpacks one believes nothing that is in it:
what this module would not have written is refused. Standard library only: it runs in users' images.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

MOST_PACKED = 64 << 20
MOST_UNPACKED = 1 << 30
MOST_FILES = 100_000
LONGEST_NAME, LONGEST_PART = 1024, 255
DIGEST = r"sha256:[0-9a-f]{64}"
CHUNK = 1 << 20
_LEVEL = 1  # code is small, and somebody waits
_GZIP = 31  # for zlib: with the frame of gzip, and without a time
_MODES = (0o644, 0o755)
_LONGEST_HEADER = 16 << 10
_RECORD = tarfile.RECORDSIZE
_READ = 20 * _RECORD


class BadPackage(ValueError):
    """Says what is wrong with it."""


@dataclass(frozen=True)
class Entry:
    """A file, or a link, that travels."""

    name: str  # with slashes, from the folder's top
    path: str
    size: int = 0
    executable: bool = False
    link: str | None = None  # where it points


class _Writes(Protocol):
    def write(self, data: bytes, /) -> object: ...


# Packing -----------------------------------------------------------------------------------------


class _Packed:
    """Takes a tar, gives gzip, and its hash."""

    def __init__(self, out: _Writes, most: int) -> None:
        self._out = out
        self._most = most
        self._press = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._give(self._press.compress(data))
        return len(data)

    def finish(self) -> str:
        self._give(self._press.flush())
        return f"sha256:{self._hash.hexdigest()}"

    def _give(self, pressed: bytes) -> None:
        self.size += len(pressed)
        if self.size > self._most:
            raise BadPackage(f"it has more than {shown(self._most)} when packed")
        self._hash.update(pressed)
        self._out.write(pressed)


def pack(entries: Iterable[Entry], out: _Writes, most: int = MOST_PACKED) -> tuple[str, int]:
    """Write a package of those; its name and its size. OSError where a file cannot be read, or changed meanwhile."""
    packed = _Packed(out, most)
    with tarfile.open(
        fileobj=cast(BinaryIO, packed), mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8", bufsize=CHUNK
    ) as archive:
        for entry in sorted(entries, key=lambda one: one.name):
            _add(archive, entry)
    return packed.finish(), packed.size


def _add(archive: tarfile.TarFile, entry: Entry) -> None:
    about = tarfile.TarInfo(entry.name)
    about.mode = _MODES[entry.executable]
    if entry.link is not None:
        about.type, about.linkname = tarfile.SYMTYPE, entry.link
        archive.addfile(about)
        return
    about.size = entry.size
    with open(entry.path, "rb") as file:
        archive.addfile(about, file)


def shown(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{size} bytes"


# Links -------------------------------------------------------------------------------------------


def stays_inside(name: str, target: str) -> bool:
    """Whether a link of that name can only lead to what is in the package, whatever other links are on the way.

    Steps up come first, and not above the top: after a name, which may be a link itself, nobody knows where up is.
    """
    parts = target.split("/")
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    rest = [part for part in parts[ups:] if part not in ("", ".")]
    return bool(target) and not target.startswith("/") and ups <= name.count("/") and ".." not in rest


# Checking and unpacking --------------------------------------------------------------------------


def digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def check(packed: Path, digest: str) -> int:
    """How much it unpacks to. BadPackage says why it must not be used."""
    _check_digest(packed, digest)
    with open(packed, "rb") as file:
        return sum(member.size for member, _ in _members(file))


def unpack(packed: Path, digest: str, into: Path) -> int:
    """Into a folder that is ours and empty; how many files it has now. BadPackage says why it must not be used."""
    _check_digest(packed, digest)
    links: list[tuple[str, str]] = []
    count, made = 0, {""}
    with open(packed, "rb") as file:
        for member, content in _members(file):
            count += 1
            folder = os.path.dirname(member.name)
            if folder not in made:
                os.makedirs(into / folder, exist_ok=True)
                made.add(folder)
            if member.issym():
                links.append((member.name, member.linkname))  # made last: no file is written through one
                continue
            opened = os.open(into / member.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, member.mode)
            with open(opened, "wb") as out:
                for chunk in content:
                    out.write(chunk)
    for name, target in links:
        os.symlink(target, into / name)
    return count


def _check_digest(packed: Path, digest: str) -> None:
    if (found := digest_of(packed)) != digest:
        raise BadPackage(f"it is not what was sent: its hash is {found[:19]}…, and {digest[:19]}… was asked for")


def _members(file: BinaryIO) -> Iterator[tuple[tarfile.TarInfo, Iterator[bytes]]]:
    """What is in it, each with its content. Contents that are not taken are read all the same."""
    plain = _Plain(file)
    names: dict[str, bool] = {}  # whether it is an entry, or a folder of one
    total = 0
    try:
        with tarfile.open(
            fileobj=cast(BinaryIO, plain),
            mode="r|",
            encoding="utf-8",
            errors="strict",
            tarinfo=_Member,
            bufsize=_READ,
        ) as archive:
            for member in archive:
                _check_member(member, names)
                total += member.size
                if total > MOST_UNPACKED:
                    raise BadPackage(f"it has more than {shown(MOST_UNPACKED)} of files")
                yield member, _content(archive, member)
    except (tarfile.TarError, UnicodeError, EOFError) as error:
        raise BadPackage(f"it cannot be read: {error}") from None
    plain.finish(archive.offset)
    if not names:
        raise BadPackage("there is nothing in it")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    source = archive.extractfile(member) if member.isreg() else None
    try:
        while source is not None and (chunk := source.read(CHUNK)):
            yield chunk
    except tarfile.TarError as error:
        raise BadPackage(f"it cannot be read: {error}") from None


def _check_member(member: tarfile.TarInfo, names: dict[str, bool]) -> None:
    name = member.name
    told = f"{name[:120]!r}"
    if member.type not in (tarfile.REGTYPE, tarfile.SYMTYPE) or member.sparse is not None:
        raise BadPackage(f"{told} is neither a plain file nor a link")
    if reason := _wrong_name(name):
        raise BadPackage(f"{told} {reason}")
    if member.issym() and not stays_inside(name, member.linkname):
        raise BadPackage(f"{told} is a link that leaves the package: {member.linkname[:120]!r}")
    if member.mode not in _MODES or (member.issym() and member.size):
        raise BadPackage(f"{told} has rights or a size that no package has")
    if name in names:
        raise BadPackage(f"{told} is in it twice, or is a folder as well")
    parts = name.split("/")
    for depth in range(1, len(parts)):
        if names.setdefault("/".join(parts[:depth]), False):
            raise BadPackage(f"{told} is below something that is no folder")
    names[name] = True
    if len(names) > MOST_FILES:
        raise BadPackage(f"it has more than {MOST_FILES} files and folders")


def _wrong_name(name: str) -> str:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "is not a name within a folder"
    if any(ord(char) < 32 or ord(char) == 127 for char in name):
        return "has control characters in its name"
    if len(name) > LONGEST_NAME or any(len(part.encode(errors="replace")) > LONGEST_PART for part in parts):
        return "has too long a name"
    return ""


class _Member(tarfile.TarInfo):
    """Names that do not fit into a header come in one before it, which is held in memory: ours are short."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type not in (tarfile.REGTYPE, tarfile.SYMTYPE) and self.size > _LONGEST_HEADER:
            raise BadPackage("it has a header that no package has")
        read: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return read


class _Plain:
    """What a gzipped file holds, as far as a package may go."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._unpress = zlib.decompressobj(_GZIP)
        self._ready = b""
        self._at = 0
        self._given = 0
        self._last = b""  # of what was given
        self._left = MOST_UNPACKED + MOST_FILES * 2048 + CHUNK  # with the frames of the files

    def read(self, size: int) -> bytes:
        parts = []
        while size and (self._at < len(self._ready) or self._more()):
            parts.append(self._ready[self._at : self._at + size])
            self._at += len(parts[-1])
            size -= len(parts[-1])
        if read := b"".join(parts):
            self._last = (self._last + read)[-2 * _READ :] if len(read) < _READ else read
            self._given += len(read)
        return read

    def finish(self, end: int) -> None:
        """Nothing comes after the end of the archive, which was found there, but the rest of a tar's last record."""
        rest = self._last[max(0, end - (self._given - len(self._last))) :] + self.read(_RECORD)
        if rest.strip(b"\0") or len(rest) > 2 * _RECORD or self.read(1):
            raise BadPackage("something comes after its end")

    def _more(self) -> bool:
        if self._unpress.eof:
            if self._unpress.unused_data or self._file.read(1):
                raise BadPackage("something comes after its end")
            return False
        given = self._unpress.unconsumed_tail or self._file.read(CHUNK)
        if not given:
            raise BadPackage("it ends too early")
        try:
            plain = self._unpress.decompress(given, CHUNK)
        except zlib.error as error:
            raise BadPackage(f"it is not gzip: {error}") from None
        self._left -= len(plain)
        if self._left < 0:
            raise BadPackage(f"it has more than {shown(MOST_UNPACKED)} when unpacked")
        self._ready, self._at = plain, 0
        return True
