"""A package is the same bytes for the same files, and nothing that is not one is ever unpacked."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import package
from muster.package import BadPackage, Entry


def entries_of(folder: Path) -> list[Entry]:
    found = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found.append(Entry(name, link=os.readlink(path)))
        elif path.is_file():
            found.append(Entry(name, path.stat().st_size, os.access(path, os.X_OK)))
    return found


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "pkg" / "deep").mkdir(parents=True)
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "pkg" / "deep" / "größe.txt").write_bytes(os.urandom(3 << 20))
    (folder / "pkg" / "empty").touch()
    (folder / "pkg" / "link").symlink_to("../train.py")
    return folder


def packed(folder: Path, into: Path) -> str:
    with open(into, "wb") as out:
        digest, size = package.pack(folder, entries_of(folder), out)
    assert size == into.stat().st_size
    return digest


def test_what_was_packed_is_unpacked(code: Path, tmp_path: Path) -> None:
    digest = packed(code, tmp_path / "packed")
    into = tmp_path / "into"
    into.mkdir()
    assert package.check(tmp_path / "packed", digest) == sum(one.size for one in entries_of(code))
    assert package.unpack(tmp_path / "packed", digest, into) == 5
    for one in entries_of(code):
        there = into / one.name
        assert there.is_symlink() == (one.link is not None)
        assert there.read_bytes() == (code / one.name).read_bytes()
        assert os.access(there, os.X_OK) == one.executable or one.link is not None
    assert os.readlink(into / "pkg" / "link") == "../train.py"


def test_the_same_files_are_the_same_package_whenever_and_by_whomever_they_were_written(
    code: Path, tmp_path: Path
) -> None:
    first = packed(code, tmp_path / "a")
    os.utime(code / "train.py", (1, 1))
    (code / "train.py").chmod(0o600)
    with open(tmp_path / "b", "wb") as out:
        second, _ = package.pack(code, reversed(entries_of(code)), out)
    assert first == second
    (code / "train.py").write_text("print('hullo')\n")
    assert packed(code, tmp_path / "c") != first


def test_a_file_that_shrinks_while_it_is_packed_is_an_error(code: Path, tmp_path: Path) -> None:
    entry = Entry("train.py", 10_000)
    with open(tmp_path / "x", "wb") as out, pytest.raises(OSError):
        package.pack(code, [entry], out)


def test_more_than_may_travel_is_an_error(code: Path, tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as out, pytest.raises(BadPackage, match="more than 1 MiB when packed"):
        package.pack(code, entries_of(code), out, most=1 << 20)


# What is refused -----------------------------------------------------------------------------------

Make = Callable[[tarfile.TarFile], None]


def a_file(name: str, content: bytes = b"x", **about: object) -> Make:
    def make(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), 0o644
        for key, value in about.items():
            setattr(member, key, value)
        archive.addfile(member, io.BytesIO(content) if member.type == tarfile.REGTYPE else None)

    return make


def a_link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Make:
    return a_file(name, b"", type=kind, linkname=target)


def both(*makes: Make) -> Make:
    def make(archive: tarfile.TarFile) -> None:
        for one in makes:
            one(archive)

    return make


def archived(*makes: Make) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        both(*makes)(archive)
    return plain.getvalue()


def zipped(plain: bytes) -> bytes:
    return gzip.compress(plain, 1, mtime=0)


def a_long_header() -> bytes:
    """A name of some megabytes, which a reader would have to hold."""
    return archived(a_file("x" * (4 << 20)))


def a_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    about = tarfile.TarInfo(name)
    about.size, about.type, about.mode = size, kind, 0o644
    return about.tobuf(tarfile.USTAR_FORMAT)


def a_raw_header(
    name: str = "a", *, size: bytes = b"00000000001", kind: bytes = b"0", mode: bytes = b"0000644"
) -> bytes:
    """Return a header with these very bytes in its fields, and the right checksum."""
    block = bytearray(a_header(name, 1))
    block[100:108], block[124:136], block[156:157] = mode.ljust(8, b"\0"), size.ljust(12, b"\0"), kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def a_pax_file(content: bytes = b"x", **keys: str) -> bytes:
    return archived(a_file("a", content, pax_headers={key.replace("_", "."): value for key, value in keys.items()}))


def a_packed_link(target: str) -> bytes:
    """Return a link with the header that `pack` would write."""
    header = package._header(package.Member("a", 0o644, 0, target))
    return header + bytes(1024) + bytes(-(len(header) + 1024) % 10_240)


END = bytes(10_240)
SPARSE_MAP = b"2000\n" + b"0\n" * 4000
TRICKS: dict[str, bytes] = {
    "a sparse map": zipped(
        a_pax_file(SPARSE_MAP, GNU_sparse_major="1", GNU_sparse_minor="0", GNU_sparse_name="a", GNU_sparse_realsize="9")
    ),
    "a sparse map in its header": zipped(a_pax_file(GNU_sparse_map="0,1", GNU_sparse_size="9")),
    "a sparse map of words": zipped(a_pax_file(GNU_sparse_map="a,b")),
    "a sparse map of words in its content": zipped(
        a_pax_file(b"many\n", GNU_sparse_major="1", GNU_sparse_minor="0", GNU_sparse_name="a", GNU_sparse_realsize="9")
    ),
    "a sparse size that is no number": zipped(a_pax_file(GNU_sparse_realsize="many")),
    "an old sparse file": zipped(a_raw_header(kind=b"S") + b"x".ljust(512, b"\0") + END),
    "a size in pax": zipped(a_pax_file(size="1")),
    "a negative size in pax": zipped(a_pax_file(size="-1")),
    "a time in pax": zipped(a_pax_file(mtime="1.5")),
    "another charset": zipped(a_pax_file(hdrcharset="BINARY")),
    "a short name in pax": zipped(a_pax_file(path="a")),
    "a name in pax that is no text": zipped(
        a_raw_header("p", size=b"00000000012", kind=b"x") + b"10 path=\xff\n".ljust(512, b"\0") + archived(a_file("a"))
    ),
    "a pax record that goes on behind its header": zipped(
        a_raw_header("p", size=b"00000000014", kind=b"x") + b"9999 path=a\n".ljust(512, b"\0") + archived(a_file("a"))
    ),
    "a pax record of no length": zipped(
        a_raw_header("p", size=b"00000000011", kind=b"x") + b"0 path=a\n".ljust(512, b"\0") + archived(a_file("a"))
    ),
    "a pax header and no file": zipped(a_raw_header("p", size=b"00000000000", kind=b"x") + END),
    "a pax header of a pax header": zipped(2 * a_raw_header("p", size=b"00000000000", kind=b"x") + END),
    "a negative size": zipped(a_raw_header(size=b"\xff" * 12) + END),
    "a minus before its size": zipped(a_raw_header(size=b"-0000000001") + END),
    "a size of many bytes": zipped(a_raw_header(size=b"\x80" + bytes(3) + b"\x7f" * 8) + END),
    "a size with spaces": zipped(a_raw_header(size=b"         1 ") + b"x".ljust(512, b"\0") + END),
    "rights that are no number": zipped(a_raw_header(mode=b"rw-r--r") + END),
    "an old file": zipped(a_raw_header(kind=b"\0") + b"x".ljust(512, b"\0") + END),
    "a file of one piece": zipped(a_raw_header(kind=b"7") + b"x".ljust(512, b"\0") + END),
    "a kind that nobody knows": zipped(a_raw_header(kind=b"Z") + b"x".ljust(512, b"\0") + END),
    "a name of GNU's tar": zipped(
        a_raw_header("././@LongLink", kind=b"L") + b"b".ljust(512, b"\0") + archived(a_file("a"))
    ),
    "a link of GNU's tar": zipped(
        a_raw_header("././@LongLink", kind=b"K") + b"b".ljust(512, b"\0") + archived(a_file("a"))
    ),
    "an owner": zipped(archived(a_file("a", uid=1000))),
    "an owner's name": zipped(archived(a_file("a", uname="root"))),
    "a time": zipped(archived(a_file("a", mtime=1))),
    "something between its files": zipped(archived(a_file("a")).replace(b"x" + bytes(511), b"x" + b"y" * 511)),
    "a record too many": zipped(archived(a_file("a")) + END),
    "a wrong checksum": zipped(archived(a_file("a")).replace(b"0000644", b"0000755")),
    "an absolute name": zipped(archived(a_file("/etc/passwd"))),
    "a step up": zipped(archived(a_file("../outside"))),
    "a step up within": zipped(archived(a_file("a/../../outside"))),
    "a step up that stays": zipped(archived(a_file("a/../b"))),
    "a dot": zipped(archived(a_file("./a"))),
    "an empty part": zipped(archived(a_file("a//b"))),
    "a name of control characters": zipped(archived(a_file("a\x1b[2J"))),
    "a part that is too long": zipped(archived(a_file("x" * 300))),
    "a path that is too long": zipped(archived(a_file("/".join(["x" * 200] * 10)))),
    "a link to somewhere": zipped(archived(a_link("a", "/etc/passwd"))),
    "a link up": zipped(archived(a_link("a", "../outside"))),
    "a link with a zero in it": zipped(a_packed_link("b\0c")),
    "a link to é with a zero in it": zipped(a_packed_link("é\0c")),
    "a link of control characters": zipped(a_packed_link("b\x1b[2J")),
    "a link that is too long": zipped(a_packed_link("b/" * 3000 + "c")),
    "a link with a part that is too long": zipped(a_packed_link("b" * 300)),
    "a link through a link": zipped(archived(a_link("d/e/up", "../.."), a_link("a", "d/e/up/../outside"))),
    "a file below a link": zipped(archived(a_link("a", "b"), a_file("a/passwd"))),
    "a link in the place of a folder": zipped(archived(a_file("a/b"), a_link("a", "c"))),
    "a file below a file": zipped(archived(a_file("a"), a_file("a/b"))),
    "a file twice": zipped(archived(a_file("a"), a_file("a", b"y"))),
    "a hard link": zipped(archived(a_file("a"), a_link("b", "a", tarfile.LNKTYPE))),
    "a hard link to somewhere": zipped(archived(a_link("b", "/etc/passwd", tarfile.LNKTYPE))),
    "a device": zipped(archived(a_file("null", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3))),
    "a pipe": zipped(archived(a_file("pipe", b"", type=tarfile.FIFOTYPE))),
    "a folder": zipped(archived(a_file("folder", b"", type=tarfile.DIRTYPE, mode=0o755))),
    "a program with the rights of its owner": zipped(archived(a_file("su", mode=0o4755))),
    "a bomb behind its end": zipped(archived(a_file("a")) + bytes(1 << 20) * 100),
    "a bomb that says so": zipped(a_header("a", 2 << 30) + bytes(1 << 20)),
    "a global header": zipped(a_header("g", 512, tarfile.XGLTYPE) + bytes(1024) + archived(a_file("a"))),
    "a file that ends too early": zipped(archived(a_file("zeros", bytes(1 << 20)))[:512] + bytes(100)),
    "a name of many megabytes": zipped(a_long_header()),
    "nothing": zipped(archived()),
    "no tar": zipped(b"hello"),
    "no gzip": b"hello",
    "an empty file": b"",
    "its first half": zipped(archived(a_file("a", os.urandom(5000))))[:3000],
    "something behind it": zipped(archived(a_file("a"))) + b"more",
    "another one behind it": zipped(archived(a_file("a"))) * 2,
    "something behind its end": zipped(archived(a_file("a")) + b"more"),
    "another format": zipped(archived(a_file("a")))[:-8] + bytes(8),
}


@pytest.mark.parametrize("kind", TRICKS)
def test_what_is_no_package_is_refused_and_writes_nothing_outside(tmp_path: Path, kind: str) -> None:
    path, into = tmp_path / "packed", tmp_path / "deep" / "into"
    into.mkdir(parents=True)
    path.write_bytes(TRICKS[kind])
    digest = f"sha256:{hashlib.sha256(TRICKS[kind]).hexdigest()}"
    with pytest.raises(BadPackage) as checked:
        package.check(path, digest)
    with pytest.raises(BadPackage):
        package.unpack(path, digest, into)
    assert "\n" not in str(checked.value) and len(str(checked.value)) < 400
    outside = [one for one in tmp_path.rglob("*") if not one.is_relative_to(into)]
    assert sorted(outside) == sorted([tmp_path / "deep", path])


def test_more_files_or_bytes_than_a_package_may_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = zipped(archived(*(a_file(f"d{n}/f", bytes(1000)) for n in range(20))))
    (tmp_path / "packed").write_bytes(content)
    digest = package.digest_of(tmp_path / "packed")
    assert package.check(tmp_path / "packed", digest) == 20_000
    for name, most, why in (("MOST_FILES", 39, "more than 39 files"), ("MOST_UNPACKED", 19_999, "19.5 KiB of files")):
        monkeypatch.setattr(package, name, most)
        with pytest.raises(BadPackage, match=why):
            package.check(tmp_path / "packed", digest)
        monkeypatch.undo()


def test_every_flipped_byte_is_seen(code: Path, tmp_path: Path) -> None:
    path = tmp_path / "packed"
    digest = packed(code, path)
    whole = path.read_bytes()
    for at in (*range(0, 40), *range(40, len(whole), 97_003), len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(BadPackage, match="not what was sent"):
            package.check(path, digest)


def test_other_tools_read_a_package(code: Path, tmp_path: Path) -> None:
    (code / ("long" * 40)).symlink_to("größe" * 30)
    packed(code, tmp_path / "packed")
    with tarfile.open(tmp_path / "packed") as archive:
        read = {member.name: (member.mode, member.size, member.linkname or None) for member in archive}
    assert read == {
        one.name: (0o755 if one.executable else 0o644, one.size if one.link is None else 0, one.link)
        for one in entries_of(code)
    }


def test_names_that_fill_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = zipped(archived(*(a_file(f"{n}/{'x' * 200}") for n in range(20))))
    (tmp_path / "packed").write_bytes(content)
    monkeypatch.setattr(package, "MOST_NAME_BYTES", 4000)
    with pytest.raises(BadPackage, match=r"its names have more than 3\.9 KiB"):
        package.check(tmp_path / "packed", package.digest_of(tmp_path / "packed"))


FIELDS = {"name": 0, "mode": 100, "uid": 108, "size": 124, "mtime": 136, "kind": 156, "link": 157, "magic": 257}


@given(
    st.lists(st.tuples(st.sampled_from([*FIELDS]), st.integers(0, 2), st.binary(min_size=1, max_size=14)), max_size=4),
    st.binary(max_size=600),
    st.dictionaries(st.sampled_from(["path", "linkpath", "size", "GNU.sparse.map"]), st.text(max_size=150), max_size=3),
    st.integers(0, 5000),
)
def test_whatever_a_header_says_a_check_ends_with_a_package_or_a_reason(
    changes: list[tuple[str, int, bytes]], content: bytes, keys: dict[str, str], cut: int
) -> None:
    """The checksum of a changed header is right, so that the check comes to the changed field."""
    plain = bytearray(archived(a_file("a/b", content, pax_headers=keys), a_link("c", "a/b")))
    for field, block, data in changes:
        start = 512 * block
        header = plain[start : start + 512]
        header[FIELDS[field] : FIELDS[field] + len(data)] = data
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        plain[start : start + 512] = header
    whole = zipped(bytes(plain))
    for packed_bytes in (whole, whole[:cut]):
        with contextlib.suppress(BadPackage):
            for member, read in package._members(io.BytesIO(packed_bytes)):
                assert sum(map(len, read)) == member.size >= 0


@given(st.binary(max_size=2000), st.integers(0, 511), st.binary(min_size=1, max_size=40))
def test_whatever_is_in_a_tar_is_a_package_or_refused(content: bytes, at: int, damage: bytes) -> None:
    plain = bytearray(archived(a_file("a/b", content), a_link("c", "a/b")))
    plain[at : at + len(damage)] = damage
    with contextlib.suppress(BadPackage):
        for member, read in package._members(io.BytesIO(zipped(bytes(plain)))):
            assert member.name and not member.name.startswith(("/", "..")) and b"".join(read) is not None


NAMES = st.lists(st.sampled_from(["a", "b", "..", ".", ""]), min_size=1, max_size=6).map("/".join)


@given(NAMES, NAMES)
def test_a_link_that_stays_inside_does_wherever_links_lead(name: str, target: str) -> None:
    """Every name on its way may itself be a link to the top: only steps up that come first are counted."""
    if package.stays_inside(name, target):
        depth = name.count("/")
        for part in target.split("/"):
            depth = depth - 1 if part == ".." else 0 if part not in ("", ".") else depth
            assert depth >= 0
