"""What ranks wrote: files of all workers, in order of rounds and ranks, as they are or as they grow."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from muster.ports import LogQuery

LOOK_S = 0.05  # how often a followed file is looked at: what writes it does not tell us
CHUNK = 1 << 18
MOST_TAIL = 1 << 24
_FILE = re.compile(r"rank-(\d+)\.(out|err)")
_FOLDER = re.compile(r"round-(\d+)")


@dataclass(frozen=True, order=True)
class _File:
    round: int
    rank: int
    error: bool
    path: Path


def _files(root: Path, query: LogQuery) -> list[_File]:
    found = []
    for folder in root.glob("*/round-*"):
        numbered = _FOLDER.fullmatch(folder.name)
        if numbered is None or (query.round is not None and int(numbered[1]) != query.round):
            continue
        for path in folder.iterdir():
            named = _FILE.fullmatch(path.name)
            if named is not None and (query.rank is None or int(named[1]) == query.rank):
                found.append(_File(int(numbered[1]), int(named[1]), named[2] == "err", path))
    return sorted(found)


async def read(root: Path, query: LogQuery, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Whole lines. With several ranks each has its rank in front."""
    tag = query.rank is None
    offsets: dict[Path, int] = {}
    if query.tail is not None:
        whole = not query.follow or ended()
        for chunk in await asyncio.to_thread(_tail, _files(root, query), query.tail, tag, whole, offsets):
            yield chunk
    while True:
        over = not query.follow or ended()
        for file in await asyncio.to_thread(_files, root, query):
            while chunk := _next(file, offsets, tag, over):
                yield chunk
        if over:
            return
        await asyncio.sleep(LOOK_S)


def _next(file: _File, offsets: dict[Path, int], tag: bool, over: bool) -> bytes:
    """The next whole lines of a file; at the very end also a line that is not finished."""
    at = offsets.get(file.path, 0)
    try:
        with open(file.path, "rb") as opened:
            opened.seek(at)
            data = opened.read(CHUNK)
    except OSError:
        return b""
    if not data:
        return b""
    cut = data.rfind(b"\n") + 1
    if cut == 0 and not over and len(data) < CHUNK:
        return b""
    whole = data[:cut] or data
    offsets[file.path] = at + len(whole)
    return _tagged(whole, file, tag)


def _tagged(data: bytes, file: _File, tag: bool) -> bytes:
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    mark = f"[{file.rank}] ".encode() if tag else b""
    return b"".join(mark + line + b"\n" for line in lines)


def _tail(files: list[_File], count: int, tag: bool, whole: bool, offsets: dict[Path, int]) -> list[bytes]:
    """The last lines of each rank's files of the last round; older rounds are passed over."""
    last = max((file.round for file in files), default=0)
    shown = []
    for file in files:
        try:
            with open(file.path, "rb") as opened:
                size = opened.seek(0, os.SEEK_END)
                data = _end_of(opened, size, count) if file.round == last else b""
        except OSError:
            continue
        cut = len(data) if whole else data.rfind(b"\n") + 1  # a line that still grows is left for later
        offsets[file.path] = size - len(data) + cut
        if lines := data[:cut].removesuffix(b"\n").split(b"\n")[-count:] if cut and count else []:
            shown.append(_tagged(b"\n".join(lines) + b"\n", file, tag))
    return shown


def _end_of(opened: BinaryIO, size: int, count: int) -> bytes:
    """As much of the end of a file as has that many lines, read backwards and within a limit."""
    data, at = b"", size
    while at > 0 and data.count(b"\n") <= count + 1 and len(data) < MOST_TAIL:
        step = min(CHUNK, at)
        at -= step
        opened.seek(at)
        data = opened.read(step) + data
    return data
