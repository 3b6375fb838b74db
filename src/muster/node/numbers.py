"""`muster.log(loss=0.3, lr=1e-4)`: a rank tells numbers of its training, and its agent reads them.

The agent gives rank 0 a file. A number is a slot of its mapped memory, so a call costs no system call and cannot block;
there are so many slots, and whoever logs faster than they are read overwrites its own oldest ones. What is read was
written by a user's process: it is bounded, and what cannot be a number is dropped. Without an agent nothing happens.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
import threading
import time
from typing import NamedTuple

from muster import files
from muster.node import progress
from muster.node.fencing import check_lease
from muster.types.numbers import LARGEST, LONGEST, MAX_NAMES, is_name

FILE_VARIABLE = "MUSTER_NUMBERS_FILE"
SLOTS = 4096
_NAME_ROOM = 4 * LONGEST  # bytes; a name ends with a zero, or with its room
_NAMES = MAX_NAMES * _NAME_ROOM
# Which name, step, time.monotonic() of the host, value; last its count, by which a slot is known to be whole.
_SLOT = struct.Struct("<H6xqddQ")
FILE_SIZE = _NAMES + SLOTS * _SLOT.size
_NO_STEP = -(1 << 63)


class _Room:
    """The mapped memory of this rank."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.pid = os.getpid()  # what a rank forks is no rank
        self._counts = itertools.count(1)
        self._places: dict[str, int] = {}
        self._naming = threading.Lock()
        self._memory: mmap.mmap | None = None
        try:
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), FILE_SIZE)
        except (OSError, ValueError):
            return

    def write(self, step: int, numbers: dict[str, float]) -> None:
        if self._memory is None:
            return
        now = time.monotonic()
        for name, value in numbers.items():
            place = self._places.get(name)
            if place is None and (place := self._name(name)) is None:
                continue
            count = next(self._counts)
            at = _NAMES + (count - 1) % SLOTS * _SLOT.size
            _SLOT.pack_into(self._memory, at, place, step, now, float(value), count)

    def _name(self, name: str) -> int | None:
        """A place for one that is new, as long as there is room."""
        with self._naming:
            if len(self._places) >= MAX_NAMES or not is_name(name) or self._memory is None:
                return None
            place, told = len(self._places), name.encode()
            self._memory[place * _NAME_ROOM : place * _NAME_ROOM + len(told)] = told
            return self._places.setdefault(name, place)


_room: _Room | None = None


def log(step: int | None = None, **numbers: float) -> None:
    """Tell numbers of this step; without one, of the step last given to `muster.progress`. Only rank 0's are kept."""
    global _room
    check_lease()
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return
    if _room is None or _room.path != path:
        _room = _Room(path)
    if _room.pid != os.getpid():
        return
    if step is None:
        step = progress.last()
    _room.write(_NO_STEP if step is None else int(step), numbers)


# What an agent does with it


class Number(NamedTuple):
    seq: int
    name: str
    step: int | None
    at: float  # time.monotonic() of the host
    value: float


def create(path: str) -> None:
    with open(path, "wb") as file:
        file.truncate(FILE_SIZE)


class Reader:
    """Reads what has come since the last time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._next = 1

    def fresh(self) -> list[Number]:
        data = _content(self._path)
        if len(data) < FILE_SIZE:
            return []
        names = [_named(data[at : at + _NAME_ROOM]) for at in range(0, _NAMES, _NAME_ROOM)]
        slots = self._slots(data)
        if slots:
            self._next = slots[-1][-1] + 1
        return [found for slot in slots if (found := _number(names, *slot)) is not None]

    def _slots(self, data: bytes) -> list[tuple[int, int, float, float, int]]:
        """Those that are new, in order: mostly a few, and all of them where the rank was faster."""
        found: list[tuple[int, int, float, float, int]] = []
        for count in range(self._next, self._next + SLOTS):
            slot = _SLOT.unpack_from(data, _NAMES + (count - 1) % SLOTS * _SLOT.size)
            if slot[-1] != count:
                if slot[-1] > count:
                    break
                return found
            found.append(slot)
        else:
            return found
        every = _SLOT.iter_unpack(data[_NAMES:])
        return sorted((slot for slot in every if self._next <= slot[-1] < LARGEST), key=lambda slot: slot[-1])


def _content(path: str) -> bytes:
    try:
        return files.read_bytes(path, FILE_SIZE)
    except OSError:
        return b""


def _named(room: bytes) -> str:
    return room.partition(b"\0")[0].decode(errors="replace")


def _number(names: list[str], place: int, step: int, at: float, value: float, seq: int) -> Number | None:
    if place >= len(names) or not is_name(names[place]) or not math.isfinite(at):
        return None
    if step != _NO_STEP and not abs(step) < LARGEST:
        return None
    return Number(seq, names[place], None if step == _NO_STEP else step, at, value)
