"""Packages of code: written by `pack`, checked by `check`, extracted by `unpack`.

A package is a gzipped tar of regular files, and of links that stay inside it, without owners and times. The same files
give the same bytes, and the hash of the bytes is the package's name. A reader trusts nothing in a package: it accepts
the headers that `pack` writes, byte for byte, and refuses every other one. Standard library only, because this module
runs in users' images.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, Self

MOST_PACKED = 64 << 20
MOST_UNPACKED = 1 << 30
MOST_FILES = 100_000
MOST_NAME_BYTES = 32 << 20  # of all names and links together: a reader holds them in memory
LONGEST_NAME, LONGEST_PART = 1024, 255  # in bytes
DIGEST = r"sha256:[0-9a-f]{64}"
CHUNK = 1 << 20
_LEVEL = 1  # code is small, and a user waits
_GZIP = 31  # zlib's number for the frame of gzip; the frame then has no time
_MODES = (0o644, 0o755)
_BLOCK, _RECORD = 512, 10_240
_SHORT = 100  # bytes of a name that the header itself holds
_LONGEST_PAX = 8 << 10
_FILE, _LINK, _PAX = b"0", b"2", b"x"
_PAX_NAME = b"././@PaxHeader"
_PAX_KEYS = ("path", "linkpath")
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_ZEROS = bytes(_RECORD)
_NUMBER = re.compile(rb"([0-7]+)\0")
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,3}) ([^=\n]{1,100})=")


class BadPackage(ValueError):
    """Says what is wrong with a package."""


@dataclass(frozen=True)
class Entry:
    """A file, or a link, that travels."""

    name: str  # with slashes, from the folder's top
    size: int = 0
    executable: bool = False
    link: str | None = None  # where it points
    inode: tuple[int, int] | None = None  # device and number of the file that was listed; another one is refused


class Member(NamedTuple):
    """A file, or a link, of a package."""

    name: str
    mode: int
    size: int
    link: str | None


class Tree:
    """The files below a folder, reached through descriptors of folders: no link on the way is followed.

    It keeps the folders of the last name open, so that sorted names cost little.
    """

    def __init__(self, top: Path) -> None:
        self._top = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._opened: list[tuple[str, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_below(0)
        os.close(self._top)

    def stat(self, name: str) -> os.stat_result:
        folder, last = self._folder_of(name)
        return os.stat(last, dir_fd=folder, follow_symlinks=False)

    def link_of(self, name: str) -> str:
        folder, last = self._folder_of(name)
        return os.readlink(last, dir_fd=folder)

    def open(self, name: str) -> int:
        """Return a descriptor of what has that name; a link raises OSError."""
        folder, last = self._folder_of(name)
        try:
            return os.open(last, os.O_RDONLY | _CAREFUL, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "was replaced by a link after it was listed", name) from None
            raise

    def _folder_of(self, name: str) -> tuple[int, str]:
        *folders, last = name.split("/")
        same = 0
        for (opened, _), wanted in zip(self._opened, folders, strict=False):
            if opened != wanted:
                break
            same += 1
        self._close_below(same)
        for folder in folders[same:]:
            within = self._opened[-1][1] if self._opened else self._top
            self._opened.append((folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _CAREFUL, dir_fd=within)))
        return (self._opened[-1][1] if self._opened else self._top), last

    def _close_below(self, depth: int) -> None:
        while len(self._opened) > depth:
            os.close(self._opened.pop()[1])


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
        self._plain = 0
        self.size = 0

    def write(self, data: bytes) -> None:
        self._plain += len(data)
        self._give(self._press.compress(data))

    def pad(self, size: int) -> None:
        """Fill up with zeros to a multiple of that size."""
        self.write(bytes(-self._plain % size))

    def finish(self) -> str:
        self._give(self._press.flush())
        return f"sha256:{self._hash.hexdigest()}"

    def _give(self, pressed: bytes) -> None:
        self.size += len(pressed)
        if self.size > self._most:
            raise BadPackage(f"it has more than {shown(self._most)} when packed")
        self._hash.update(pressed)
        self._out.write(pressed)


def pack(folder: Path, entries: Iterable[Entry], out: _Writes, most: int = MOST_PACKED) -> tuple[str, int]:
    """Write a package of files of that folder; return its name and its size. OSError if a file was replaced."""
    packed = _Packed(out, most)
    with Tree(folder) as tree:
        for entry in sorted(entries, key=lambda one: one.name):
            _add(packed, entry, tree)
    packed.write(bytes(2 * _BLOCK))
    packed.pad(_RECORD)
    return packed.finish(), packed.size


def _add(packed: _Packed, entry: Entry, tree: Tree) -> None:
    size = entry.size if entry.link is None else 0
    if size > MOST_UNPACKED:
        raise BadPackage(f"it has more than {shown(MOST_UNPACKED)} of files")
    packed.write(_header(Member(entry.name, _MODES[entry.executable], size, entry.link)))
    if entry.link is not None:
        return
    left = size
    with open(tree.open(entry.name), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or entry.inode not in (None, (about.st_dev, about.st_ino)):
            raise OSError(errno.ESTALE, "was replaced after it was listed", entry.name)
        while left and (chunk := file.read(min(left, CHUNK))):
            packed.write(chunk)
            left -= len(chunk)
    if left:
        raise OSError(errno.ESTALE, "became shorter after it was listed", entry.name)
    packed.pad(_BLOCK)


def shown(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{size} bytes"


# Headers -----------------------------------------------------------------------------------------


def _header(member: Member) -> bytes:
    """Return the only header that a package has for that member: a tar header, after a pax header for long names."""
    texts = (member.name, member.link or "")
    records = b"".join(
        _pax_record(key, text.encode())
        for key, text in zip(_PAX_KEYS, texts, strict=True)
        if len(text) > _SHORT or not text.isascii()
    )
    name, link = (text.encode("ascii", "replace")[:_SHORT] for text in texts)
    kind = _FILE if member.link is None else _LINK
    header = _block(name, member.mode, member.size, kind, link)
    if not records:
        return header
    return _block(_PAX_NAME, 0, len(records), _PAX) + records + bytes(-len(records) % _BLOCK) + header


def _block(name: bytes, mode: int, size: int, kind: bytes, link: bytes = b"") -> bytes:
    before = struct.pack("100s8s8s8s12s12s", name, b"%07o" % mode, b"0000000", b"0000000", b"%011o" % size, b"0" * 11)
    after = struct.pack("1s100s8s247x", kind, link, b"ustar\x0000")
    checksum = sum(before) + sum(after) + 8 * ord(" ")
    return before + b"%06o\0 " % checksum + after


def _pax_record(key: str, value: bytes) -> bytes:
    """Return a record that begins with its own length."""
    rest = f" {key}=".encode() + value + b"\n"
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length += 1
    return str(length).encode() + rest


def _read_pax(records: bytes) -> dict[str, str]:
    values: dict[str, str] = {}
    while records:
        match = _PAX_RECORD.match(records)
        if match is None:
            raise BadPackage("it has a pax header that cannot be read")
        key, length = match[2].decode(errors="replace"), int(match[1])
        if key not in _PAX_KEYS:
            raise BadPackage(f"it has the pax key {key!r}, which no package has")
        try:
            values[key] = records[match.end() : length - 1].decode()
        except UnicodeDecodeError:
            raise BadPackage(f"its pax key {key!r} is not UTF-8") from None
        records = records[length:] if length > match.end() else b""
    return values


def _number(field: bytes, what: str) -> int:
    if (match := _NUMBER.fullmatch(field)) is None:
        raise BadPackage(f"it has a header with {what} that no package has")
    return int(match[1], 8)


# Links -------------------------------------------------------------------------------------------


def stays_inside(name: str, target: str) -> bool:
    """Return whether a link of that name leads only to what is in the package, whatever other links are on the way.

    Steps up come first, and not above the top. After a name, which may be a link itself, a step up could lead anywhere.
    """
    parts = target.split("/")
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    rest = [part for part in parts[ups:] if part not in ("", ".")]
    return bool(target) and not target.startswith("/") and ups <= name.count("/") and ".." not in rest


def wrong_link(name: str, target: str) -> str:
    """Return why a package cannot have a link of that name to that target; "" if it can."""
    if not stays_inside(name, target):
        return "is a link that leaves the package"
    if reason := _wrong_text(target):
        return f"is a link whose target {reason}"
    return ""


# Checking and unpacking --------------------------------------------------------------------------


def digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def check(packed: Path, digest: str) -> int:
    """Return the size of its files. BadPackage says why it must not be used."""
    _check_digest(packed, digest)
    with open(packed, "rb") as file:
        return sum(member.size for member, _ in _members(file))


def unpack(packed: Path, digest: str, into: Path) -> int:
    """Unpack into an own, empty folder; return the number of its files. BadPackage says why it must not be used."""
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
            if member.link is not None:
                links.append((member.name, member.link))  # made last: no file is written through one
                continue
            opened = os.open(into / member.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, member.mode)
            with open(opened, "wb") as out:
                for chunk in content:
                    out.write(chunk)
    for name, target in links:
        os.symlink(target, into / name)
    return count


def _check_digest(packed: Path, digest: str) -> None:
    if (actual := digest_of(packed)) != digest:
        raise BadPackage(f"it is not what was sent: its hash is {actual[:19]}…, and {digest[:19]}… was asked for")


def _members(file: BinaryIO) -> Iterator[tuple[Member, Iterator[bytes]]]:
    """Read a package member by member, each with its content. Contents that the caller leaves are read all the same."""
    plain = _Plain(file)
    names = _Names()
    total = 0
    while (member := _next_member(plain)) is not None:
        names.add(member)
        total += member.size
        if total > MOST_UNPACKED:
            raise BadPackage(f"it has more than {shown(MOST_UNPACKED)} of files")
        content = plain.chunks(member.size)
        yield member, content
        for _ in content:
            pass
        plain.skip_zeros(-plain.position % _BLOCK)
    plain.skip_zeros(_BLOCK)
    plain.skip_zeros(-plain.position % _RECORD)
    if plain.read(1):
        raise BadPackage("something comes after its end")
    if not total and not names:
        raise BadPackage("there is nothing in it")


def _next_member(plain: _Plain) -> Member | None:
    """Read one header; return None for the first block of the end."""
    header = block = plain.exactly(_BLOCK)
    if block == _ZEROS[:_BLOCK]:
        return None
    values: dict[str, str] = {}
    if block[156:157] == _PAX:
        size = _number(block[124:136], "a size")
        if size > _LONGEST_PAX:
            raise BadPackage("it has a longer header than any package has")
        records = plain.exactly(size + -size % _BLOCK)
        values = _read_pax(records[:size])
        block = plain.exactly(_BLOCK)
        header += records + block
    name = values.get("path", block[:_SHORT].rstrip(b"\0").decode("ascii", "replace"))
    link = values.get("linkpath", block[157:257].rstrip(b"\0").decode("ascii", "replace"))
    if block[156:157] not in (_FILE, _LINK):
        raise BadPackage(f"{name[:120]!r} is neither a plain file nor a link")
    is_link = block[156:157] == _LINK
    mode, size = _number(block[100:108], "rights"), _number(block[124:136], "a size")
    member = Member(name, mode, size, link if is_link else None)
    _check_member(member)
    if header != _header(member):
        raise BadPackage(f"{name[:120]!r} has a header that no package has")
    return member


def _check_member(member: Member) -> None:
    about = f"{member.name[:120]!r}"
    if reason := _wrong_name(member.name):
        raise BadPackage(f"{about} {reason}")
    if member.link is not None and (reason := wrong_link(member.name, member.link)):
        raise BadPackage(f"{about} {reason}: {member.link[:120]!r}")
    if member.mode not in _MODES or (member.link is not None and member.size):
        raise BadPackage(f"{about} has rights or a size that no package has")


def _wrong_name(name: str) -> str:
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "is not a name within a folder"
    if reason := _wrong_text(name):
        return f"has a name that {reason}"
    return ""


def _wrong_text(path: str) -> str:
    """Return why no file system, or no terminal, takes that path; "" if they do."""
    if any(ord(char) < 32 or ord(char) == 127 for char in path):
        return "has control characters"
    if len(path.encode()) > LONGEST_NAME or any(len(part.encode()) > LONGEST_PART for part in path.split("/")):
        return "is too long"
    return ""


class _Names:
    """The names of a package so far, its folders among them."""

    def __init__(self) -> None:
        self._is_member: dict[str, bool] = {}  # False for a folder
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._is_member)

    def add(self, member: Member) -> None:
        about = f"{member.name[:120]!r}"
        if member.name in self._is_member:
            raise BadPackage(f"{about} is in it twice, or is a folder as well")
        self._put(member.name, True, len(member.link or ""))
        folder = os.path.dirname(member.name)
        while folder and (is_member := self._is_member.get(folder)) is not False:
            if is_member:
                raise BadPackage(f"{about} is below something that is no folder")
            self._put(folder, False, 0)
            folder = os.path.dirname(folder)

    def _put(self, name: str, is_member: bool, more: int) -> None:
        self._is_member[name] = is_member
        self._bytes += 4 * (len(name) + more) if not name.isascii() else len(name) + more
        if len(self._is_member) > MOST_FILES:
            raise BadPackage(f"it has more than {MOST_FILES} files and folders")
        if self._bytes > MOST_NAME_BYTES:
            raise BadPackage(f"its names have more than {shown(MOST_NAME_BYTES)}")


class _Plain:
    """The content of a gzipped file, as far as a package may go."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._unpress = zlib.decompressobj(_GZIP)
        self._ready = b""
        self._start = 0  # of what was not read yet
        self._left = MOST_UNPACKED + MOST_FILES * 4096 + CHUNK  # with the headers of the files
        self.position = 0

    def read(self, size: int) -> bytes:
        """Return so many bytes, or fewer at the end."""
        parts = []
        while size and (self._start < len(self._ready) or self._more()):
            parts.append(self._ready[self._start : self._start + size])
            self._start += len(parts[-1])
            size -= len(parts[-1])
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.position += len(data)
        return data

    def exactly(self, size: int) -> bytes:
        data = self.read(size)
        if len(data) < size:
            raise BadPackage("it ends too early")
        return data

    def chunks(self, size: int) -> Iterator[bytes]:
        while size:
            chunk = self.exactly(min(size, CHUNK))
            size -= len(chunk)
            yield chunk

    def skip_zeros(self, size: int) -> None:
        if self.exactly(size) != _ZEROS[:size]:
            raise BadPackage("something comes after its end, or between its files")

    def _more(self) -> bool:
        if self._unpress.eof:
            if self._unpress.unused_data or self._file.read(1):
                raise BadPackage("something comes after its end")
            return False
        packed = self._unpress.unconsumed_tail or self._file.read(CHUNK)
        if not packed:
            raise BadPackage("it ends too early")
        try:
            plain = self._unpress.decompress(packed, CHUNK)
        except zlib.error as error:
            raise BadPackage(f"it is not gzip: {error}") from None
        self._left -= len(plain)
        if self._left < 0:
            raise BadPackage(f"it has more than {shown(MOST_UNPACKED)} when unpacked")
        self._ready, self._start = plain, 0
        return True
