"""State in a folder, one safetensors file for each rank and step, which anybody can read. Standard library only.

    FOLDER/step-000000000120-MARK/rank-00003-of-00008.safetensors
    FOLDER/step-000000000120-MARK/index.json

A file gets its name when all of it is on the disk, and a step counts when all its files have theirs. The attempt is the
same for all who write a step together, so that files of two attempts never make one step. What the file format does not
know (which part of which tensor a piece is, sums, all that is no tensor) is in the file's metadata.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
    where.mkdir(parents=True, exist_ok=True)
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
        check_lease()  # in a rank: what it writes counts from the next line on
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


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """One rank's step on disk. ValueError or OSError says why it cannot be used."""
    file = _open(path)
    try:
        yield Opened(file)
    finally:
        os.close(file)


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


def steps(folder: Path, kind: str = "") -> dict[int, list[Path]]:
    """Whole steps, newest first, with the files of their ranks. Of which kind shows at the beginning of an attempt."""
    found: dict[int, list[Path]] = {}
    for step, attempt, where in sorted(_folders(folder)):
        if attempt.startswith(DCP) == (kind == DCP) and (paths := whole(where)):
            found[step] = paths
    return dict(sorted(found.items(), reverse=True))


def _folders(folder: Path) -> Iterator[tuple[int, str, Path]]:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if (one := _STEP.fullmatch(name)) is not None:
                yield int(one[1]), one[2], folder / name


def whole(where: Path) -> list[Path]:
    """The files of a step, rank by rank, if all are there and nobody found one of them damaged."""
    try:
        names = set(os.listdir(where))
    except OSError:
        return []
    worlds = {int(match[2]) for name in names if (match := _FILE.fullmatch(name))}
    for ranks in sorted(worlds, reverse=True):
        expected = [file_name(rank, ranks) for rank in range(min(ranks, len(names) + 1))]
        if _DAMAGED not in names and names.issuperset(expected):
            return [where / name for name in expected]
    return []


def set_aside(where: Path, why: str) -> None:
    """Nobody takes this step any more."""
    replace_text(where / _DAMAGED, f"{why}\n")


def drop_old(folder: Path, mine: str = "", keep: int = KEEP) -> None:
    """All but the newest whole steps. What is not whole goes when enough that is newer is.

    `mine`: those that write now. What others have begun, and not ended, has nobody any more.
    """
    check_lease()
    found = sorted((one for one in _folders(folder) if one[1].startswith(DCP) == mine.startswith(DCP)), reverse=True)
    complete = [one for one in found if whole(one[2])]
    last = complete[keep - 1][0] if len(complete) >= keep else -1
    unfinished = [one for one in found if one not in complete]
    waiting = [one for one in unfinished if one[1] == mine][:keep]
    for one in found:
        step, _, where = one
        left = bool(mine) and one in unfinished and one not in waiting
        if step < last or left:
            shutil.rmtree(where, ignore_errors=True)
