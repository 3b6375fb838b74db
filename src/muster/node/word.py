"""`muster.should_save()`: a rank learns that its round is about to end, because somebody planned it.

The agent gives each rank a small file (`node.progress` has its first two numbers). A rank counts its calls there; in a
program whose ranks work together, the same call is the same place in each of them. Before a planned recall the agents
hold ranks at their next call for a moment, count, and say from which call on the answer is yes. So it is yes in all of
them at the same call, or in none. A rank that has saved since, or that asks once more, has done what it could and waits
for its end. Without an agent the answer is no.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from dataclasses import dataclass

from muster import files
from muster.node.fencing import check_lease
from muster.node.progress import FILE_SIZE, FILE_VARIABLE, content

_CALLS, _SAVED, _WORD, _CALL, _UNTIL = range(2, 7)  # numbers of 8 bytes each; the rank writes the first two
_NONE, _HELD, _TOLD, _OVER = range(4)
_LOOK_S = 0.002

_memory: memoryview | None = None
_memory_of: str | None = None
_script_asks = False


def should_save() -> bool:
    """Whether to save now: this rank will soon be asked to end. Cheap enough for every step; call it on every rank."""
    global _script_asks
    check_lease()
    memory = _mine()
    if memory is None:
        return False
    _script_asks = True
    memory[_CALLS] += 1
    return memory[_WORD] != _NONE and _answer(memory, memory[_CALLS])


def asked_by_state() -> bool:
    """The same for `muster.State`, which asks at each commit; where the script asks by itself, it has been told."""
    memory = _mine()
    if memory is None:
        return False
    if _script_asks:
        return bool(memory[_WORD] == _TOLD and memory[_CALLS] >= memory[_CALL])
    memory[_CALLS] += 1
    return memory[_WORD] != _NONE and _answer(memory, memory[_CALLS])


def saved() -> None:
    """A save is over: if it was asked for, wait for the end, so that nothing is done that would be lost."""
    memory = (
        _memory if os.environ.get(FILE_VARIABLE) == _memory_of else None
    )  # one that never asked is not mapped for it
    if memory is not None and memory[_WORD] == _TOLD and memory[_CALLS] >= memory[_CALL]:
        memory[_SAVED] = memory[_CALLS]
        _wait(memory, _TOLD)


def _answer(memory: memoryview, mine: int) -> bool:
    _wait(memory, _HELD)
    if memory[_WORD] in (_NONE, _HELD) or mine < memory[_CALL]:
        return False
    if mine > memory[_CALL]:
        _wait(memory, _TOLD)
    return True


def _wait(memory: memoryview, word: int) -> None:
    while memory[_WORD] == word and time.monotonic_ns() < memory[_UNTIL]:
        time.sleep(_LOOK_S)
    check_lease()


def _mine() -> memoryview | None:
    global _memory, _memory_of
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return None
    if path != _memory_of:
        _memory, _memory_of = _map(path), path
    return _memory


def _map(path: str) -> memoryview | None:
    try:
        with open(path, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), FILE_SIZE)).cast("q")
    except (OSError, ValueError):  # ValueError: one of an agent that knows of no word
        return None


# The agent's side ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What a rank has written: how often it asked, and at which call it last saved because of that."""

    calls: int
    saved: int

    def has_seen(self, call: int) -> bool:
        return self.calls >= call

    def is_done(self, call: int) -> bool:
        return self.calls > call or self.saved >= call


def hold(path: str, for_s: float) -> None:
    """Its next call does not return before it is told more, or the time is up."""
    _write(path, _HELD, for_s=for_s)


def tell(path: str, call: int, for_s: float) -> None:
    """From that call on the answer is yes. At the next one it is kept waiting for its end."""
    _write(path, _TOLD, call, for_s)


def over(path: str) -> None:
    """It is asked to end: nothing keeps it any more."""
    _write(path, _OVER)


def withdraw(path: str) -> None:
    _write(path, _NONE)


def asked(path: str) -> Asked:
    """A rank writes it: what cannot be a count is none."""
    try:
        cells = memoryview(content(path)).cast("q")
        return Asked(max(0, cells[_CALLS]), max(0, cells[_SAVED])) if len(cells) * 8 == FILE_SIZE else Asked(0, 0)
    except (OSError, ValueError, TypeError):
        return Asked(0, 0)


def _write(path: str, word: int, call: int | None = None, for_s: float | None = None) -> None:
    """The word itself last: it says what the others mean."""
    numbers = {_CALL: call, _UNTIL: None if for_s is None else time.monotonic_ns() + int(for_s * 1e9), _WORD: word}
    try:
        with files.changing(path) as opened:
            for cell, number in numbers.items():
                if number is not None:
                    os.pwrite(opened, number.to_bytes(8, sys.byteorder, signed=True), cell * 8)
    except OSError:
        return  # the rank has put something else there, and hears nothing
