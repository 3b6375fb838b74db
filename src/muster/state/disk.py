"""State in a folder, one safetensors file for each rank and step, which anybody can read. Standard library only.

    FOLDER/step-000000000120-MARK/rank-00003-of-00008.safetensors
    FOLDER/step-000000000120-MARK/index.json

A file gets its name when all of it is on the disk, and a step counts when all its files have theirs. The attempt is the
same for all who write a step together, so that files of two attempts never make one step. What the file format does not
know (which part of which tensor a piece is, hashes, all that is no tensor) is in the file's metadata.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from muster import files
from muster.node.fencing import check_lease
from muster.state import layout
from muster.state.layout import Manifest, Piece

KEEP = 2  # whole steps, at least
DCP = "dcp"  # how attempts of what torch's distributed checkpoint has written begin
INDEX = "index.json"
MOST_HEADER = 100_000_000  # as much as readers of this format take
_STEP = re.compile(r"step-([0-9]{1,18})-([0-9A-Za-z]{1,64})")
_FILE = re.compile(r"rank-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors")
_DAMAGED = "damaged.txt"
_SET_ASIDE = f"it was set aside, see {_DAMAGED}"
_REST = "muster.rest"
_CHUNK = 8 << 20
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def step_folder(folder: Path, step: int, attempt: str) -> Path:
    return folder / f"step-{step:012d}-{attempt}"


def attempt_of(manifest: Manifest) -> str:
    return manifest.attempt or f"r{manifest.round}"


def attempt_here(env: Mapping[str, str] = os.environ) -> str:
    """The same for all ranks of a round and for nobody else, as far as their surroundings tell."""
    names = ("MUSTER_RUN_ID", "MUSTER_ROUND", "MASTER_ADDR", "MASTER_PORT")
    told = json.dumps([env.get(name, "") for name in names]).encode()
    return hashlib.blake2b(told, digest_size=6).hexdigest()


def file_name(rank: int, ranks: int) -> str:
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


# Writing


def write(folder: Path, manifest: Manifest, memory: memoryview) -> Path:
    """Keep one rank's step; OSError where that cannot be done, and then nothing of it counts."""
    where = step_folder(folder, manifest.step, attempt_of(manifest))
    if not where.is_dir():
        where.mkdir(parents=True, exist_ok=True)
        files.sync_folder(folder)
    path = where / file_name(manifest.rank, manifest.ranks)
    header = _header(manifest)
    for left in where.glob(f".{path.name}.*"):  # by one that was killed
        left.unlink(missing_ok=True)
    partial = where / f".{path.name}.{os.getpid()}"
    try:
        with partial.open("wb") as out:
            out.write(header)
            for index in _order(manifest):
                piece = manifest.every[index]
                for begin in range(piece.offset, piece.offset + piece.length, _CHUNK):
                    out.write(memory[begin : min(begin + _CHUNK, piece.offset + piece.length)])
            out.flush()
            os.fsync(out.fileno())
        check_lease()  # in a rank whose lease is over this ends the process: the step counts from the next line on
        if manifest.rank == 0:
            replace_text(where / INDEX, _index(manifest))
        partial.replace(path)
        files.sync_folder(where)
    finally:
        partial.unlink(missing_ok=True)
    return path


def replace_text(path: Path, text: str) -> None:
    """In one step, for everybody who may read the folder."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _order(manifest: Manifest) -> list[int]:
    """The largest numbers first: nothing may lie between two pieces, and each has to begin at a multiple of its own."""
    every = manifest.every
    return sorted(
        range(len(every)),
        key=lambda index: (index == len(every) - 1, -(every[index].itemsize & -every[index].itemsize)),
    )


def _header(manifest: Manifest) -> bytes:
    told: dict[str, object] = {"__metadata__": {"muster": manifest.write().decode(), "format": "pt"}}
    at = 0
    every = manifest.every
    for index in _order(manifest):
        piece = every[index]
        known = _DTYPES.get(piece.dtype)
        shape = list(piece.shape) if known else [piece.length]
        name = piece.name if piece is not manifest.rest else _REST
        while name in told or not name:
            name = f"{name}.{index}"
        told[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [at, at + piece.length]}
        at += piece.length
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % layout.ALIGN)
    if len(text) > MOST_HEADER:
        raise OSError(f"{len(every)} tensors are more than a file can name")
    return struct.pack("<Q", len(text)) + text


def _index(manifest: Manifest) -> str:
    """What a reader who does not know muster wants to know; parts are described in the metadata of each file."""
    tensors = {
        piece.name: {
            "dtype": piece.dtype,
            "shape": list(piece.shape if piece.whole is None else piece.whole),
            "in_parts": piece.whole is not None,
        }
        for piece in manifest.pieces
    }
    names = [file_name(rank, manifest.ranks) for rank in range(manifest.ranks)]
    told = {"format": "muster", "step": manifest.step, "ranks": manifest.ranks, "files": names, "tensors": tensors}
    return json.dumps(told, indent=1) + "\n"


# Reading


class OtherFormat(Exception):
    """A version of muster with another format wrote the file. Whether the file is damaged is unknown."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """Open one rank's file. ValueError: the file is damaged. OSError: the file cannot be read but may be whole."""
    try:
        file = _open(path)
        try:
            yield Opened(file)
        finally:
            os.close(file)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


class Opened:
    def __init__(self, file: int) -> None:
        self._file = file

    def manifest(self, path: Path) -> Manifest:
        """What it is, with places in the file."""
        size = os.fstat(self._file).st_size
        if size < 8:
            raise ValueError("it is empty")
        (length,) = struct.unpack("<Q", self._bytes(0, 8))
        if length > min(size - 8, MOST_HEADER):
            raise ValueError("it is shorter than it says")
        header = self._bytes(8, length)
        try:
            told = json.loads(header)["__metadata__"]["muster"].encode()
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"not a file of muster: {error}") from None
        _check_format(told)
        manifest = layout.read(told, 1 << 61)
        if _header(manifest)[8:] != header:
            raise ValueError("its header is damaged")
        _check_name(path, manifest)
        return _moved(manifest, 8 + length, size)

    def _bytes(self, offset: int, length: int) -> bytearray:
        found = bytearray(length)
        self.fill(memoryview(found), offset)
        return found

    def fill(self, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._file, [into[done : done + (1 << 30)]], offset + done)
            if not count:
                raise ValueError("it is torn: its end is missing")
            done += count


def _check_format(text: bytes) -> None:
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        number = json.loads(text)["format"]
        if isinstance(number, int) and number != layout.FORMAT:
            raise OtherFormat(f"it has format {number}, and this version of muster reads format {layout.FORMAT} only")


def _open(path: Path) -> int:
    """Only a regular file is touched, and nobody waits for it."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise ValueError("it is not a regular file")
    return opened


def _check_name(path: Path, manifest: Manifest) -> None:
    """A file that was moved here from another step, rank, world or attempt says something else than its name."""
    name, place = _FILE.fullmatch(path.name), _STEP.fullmatch(path.parent.name)
    told = (manifest.step, attempt_of(manifest), manifest.rank, manifest.ranks)
    if name is None or place is None or (int(place[1]), place[2], int(name[1]), int(name[2])) != told:
        raise ValueError(
            f"it is step {manifest.step} of rank {manifest.rank} of {manifest.ranks}, attempt {attempt_of(manifest)}"
        )


def _moved(manifest: Manifest, begin: int, size: int) -> Manifest:
    """In the file pieces lie one after the other."""
    found: dict[int, Piece] = {}
    every = manifest.every
    for index in _order(manifest):
        found[index] = replace(every[index], offset=begin)
        begin += every[index].length
    if begin != size:
        raise ValueError("it is torn: its end is missing" if begin > size else "it goes on behind its end")
    pieces = tuple(found[index] for index in range(len(every)))
    return replace(manifest, pieces=pieces[:-1], rest=pieces[-1])


# Which steps there are


@dataclass(frozen=True)
class Listing:
    """The steps of a folder."""

    usable: dict[int, list[Path]]  # newest first: the files of all ranks
    unusable: dict[Path, str]  # newest first: the folder of a step, and why no rank can use the step


def look(folder: Path, kind: str = "") -> Listing:
    """List the steps of a folder; `kind` is how their attempts begin. OSError: the folder cannot be read.

    A failing disk must never look like an empty folder: the training would start over and replace its own steps.
    """
    usable: dict[int, list[Path]] = {}
    unusable: dict[Path, str] = {}
    for step, attempt, where in sorted(_folders(folder), reverse=True):
        if attempt.startswith(DCP) == (kind == DCP):
            paths, why = _files_of(where)
            if paths:
                usable.setdefault(step, paths)
            elif why:
                unusable[where] = why
    return Listing(usable, unusable)


def steps(folder: Path, kind: str = "") -> dict[int, list[Path]]:
    """Return the whole steps, newest first, with the files of their ranks. OSError: the folder cannot be read."""
    return look(folder, kind).usable


def step_of(where: Path) -> int:
    """Return the step of a step's folder."""
    match = _STEP.fullmatch(where.name)
    assert match is not None
    return int(match[1])


def _folders(folder: Path) -> Iterator[tuple[int, str, Path]]:
    for name in _names(folder):
        if (match := _STEP.fullmatch(name)) is not None:
            yield int(match[1]), match[2], folder / name


def _names(folder: Path) -> set[str]:
    """Return the names in a folder, or none if there is no such folder. A link to nothing is an error."""
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        for path in (folder, *folder.parents):
            if path.is_symlink() and not path.exists():
                raise FileNotFoundError(errno.ENOENT, "The target of this link does not exist", str(path)) from None
        return set()


def _files_of(where: Path) -> tuple[list[Path], str]:
    """Return the files of a step, rank by rank, or the reason why the set is not complete.

    Both are empty if no rank has finished its file: then the step never existed.
    """
    try:
        names = _names(where)
    except NotADirectoryError:
        return [], ""
    if _DAMAGED in names:
        return [], _SET_ASIDE
    worlds = {int(match[2]) for name in names if (match := _FILE.fullmatch(name))}
    why = ""
    for ranks in sorted(worlds, reverse=True):
        expected = [file_name(rank, ranks) for rank in range(min(ranks, len(names) + 1))]
        if names.issuperset(expected):
            return [where / name for name in expected], ""
        present = sum(_is_of(name, ranks) for name in names)
        why = why or f"it has {present} of its {ranks} files"
    return [], why


def _is_of(name: str, ranks: int) -> bool:
    match = _FILE.fullmatch(name)
    return match is not None and int(match[2]) == ranks


def whole(where: Path) -> list[Path]:
    """Return the files of a step, rank by rank, if all exist and the step was not set aside. OSError: unreadable."""
    return _files_of(where)[0]


def set_aside(where: Path, why: str) -> None:
    """Mark a damaged step: muster no longer uses it and never removes it."""
    try:
        replace_text(where / _DAMAGED, f"{why}\n")
    except OSError:
        (where / _DAMAGED).touch()  # a full disk often has room for a name


def drop_old(folder: Path, mine: str = "", keep: int = KEEP) -> None:
    """Remove all but the newest whole steps, and unfinished steps that are older. Steps that were set aside stay.

    `mine` is the attempt that writes now: its newest whole step always stays. Unfinished steps of this attempt and of
    earlier attempts are counted separately: the `keep` newest stay until newer steps are whole. OSError: some are left.
    """
    check_lease()
    complete: list[tuple[int, str, Path]] = []
    unfinished: dict[bool, list[tuple[int, str, Path]]] = {True: [], False: []}
    empty = []
    for step, attempt, where in sorted(_folders(folder), reverse=True):
        if attempt.startswith(DCP) != mine.startswith(DCP) or not where.is_dir():
            continue
        paths, why = _files_of(where)
        if paths:
            complete.append((step, attempt, where))
        elif why == _SET_ASIDE:
            continue
        elif why or attempt == mine:
            unfinished[attempt == mine].append((step, attempt, where))
        else:
            empty.append(where)
    last = complete[keep - 1][0] if len(complete) >= keep else -1
    newest = next((where for _, attempt, where in complete if attempt == mine), None)
    old = [where for step, _, where in complete if step < last and where != newest]
    for folders in unfinished.values():
        old += [where for index, (step, _, where) in enumerate(folders) if step < last or index >= keep]
    failure: OSError | None = None
    for where in (*old, *empty):
        try:
            shutil.rmtree(where)
        except FileNotFoundError:
            pass  # another process has removed it
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure
