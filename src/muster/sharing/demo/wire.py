"""What do the demo and its worker processes say to each other? Records, pickled, over a socket pair per worker.

Both ends are processes that the demo itself started; nothing from outside is ever unpickled.
Frames are those of `multiprocessing.connection`: the workers use it as it is, the demo speaks it on its event loop.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from muster.sharing.demo.tasks import Digits

_HEADER = struct.Struct("!i")


class Role(StrEnum):
    GENERATOR = "generator"
    TRAINER = "trainer"


# To and from the warmed parent ---------------------------------------------------------------------


@dataclass(frozen=True)
class Fork:
    """Fork a worker; its socket travels with this message."""

    name: str
    role: Role


@dataclass(frozen=True)
class Kill:
    pid: int


@dataclass(frozen=True)
class Warm:
    """The parent has imported torch and takes orders."""


@dataclass(frozen=True)
class Forked:
    name: str
    pid: int


@dataclass(frozen=True)
class Ended:
    """A worker is gone and has been reaped; minus the signal's number if one ended it."""

    pid: int
    status: int


FromParent = Warm | Forked | Ended


# Orders to workers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Take these weights, and the optimiser's state where there is one."""

    weights: Path
    optimiser: Path | None = None


@dataclass(frozen=True)
class Drop:
    """Stop what you are doing and free every tensor."""


@dataclass(frozen=True)
class Weigh:
    """How much do you hold?"""


@dataclass(frozen=True)
class Generate:
    """Answer a prompt several times; `pace_s` is the time that a digit takes on the GPU that this imitates."""

    prompt: Digits
    count: int
    seed: int
    pace_s: float


@dataclass(frozen=True)
class Join:
    """Meet the other data-parallel ranks at a file."""

    rank: int
    world: int
    meeting: Path


@dataclass(frozen=True)
class Begin:
    """Make new weights."""

    seed: int


@dataclass(frozen=True)
class Group:
    """The answers to one prompt and what they earned."""

    prompt: Digits
    answers: tuple[Digits, ...]
    rewards: tuple[float, ...]


@dataclass(frozen=True)
class LogProbs:
    """How likely was each digit of each answer? Each rank answers for its part."""

    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Learn:
    """Improve the policy; `old` has a row per answer. Every rank gets all of it and works on its part."""

    groups: tuple[Group, ...]
    old: tuple[tuple[float, ...], ...]
    seed: int


@dataclass(frozen=True)
class Publish:
    """Write the weights and the optimiser's state; they appear whole or not at all."""

    weights: Path
    optimiser: Path


Order = Load | Drop | Weigh | Generate | Join | Begin | LogProbs | Learn | Publish


# Answers from workers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    pass


@dataclass(frozen=True)
class Memory:
    """What a worker holds: bytes in living tensors, and bytes of the process that are resident."""

    tensors: int
    resident: int


@dataclass(frozen=True)
class Answers:
    """To a prompt; None if the weights were taken away in the middle."""

    answers: tuple[Digits, ...] | None


@dataclass(frozen=True)
class Rows:
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Failed:
    why: str


Answer = Done | Memory | Answers | Rows | Failed


@dataclass(frozen=True)
class Letter:
    """An order or an answer; an answer has its order's number."""

    number: int
    content: Order | Answer


def frame(letter: Letter) -> bytes:
    body = pickle.dumps(letter)
    return _HEADER.pack(len(body)) + body


def length_of(header: bytes) -> int:
    size: int = _HEADER.unpack(header)[0]
    return size


def opened(body: bytes) -> Letter:
    letter = pickle.loads(body)
    if not isinstance(letter, Letter):
        raise TypeError(f"not a letter: {letter!r}")
    return letter


HEADER_SIZE = _HEADER.size
