"""What are the demo's ranks told, and what do they answer? Records that travel pickled through a pipe.

Both ends are processes that the demo itself started; nothing from outside is ever unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from muster.demos.tasks import Digits

TRAIN, INFER = "actor_train", "actor_infer"

Rows = tuple[tuple[float, ...], ...]
A = TypeVar("A")


class RankOrder(Generic[A]):
    """What a rank can be told; it answers with an `A`, or that it failed."""


@dataclass(frozen=True)
class Failed:
    why: str


@dataclass(frozen=True)
class Memory:
    """What a rank holds: bytes in living tensors, and bytes of the process that are resident."""

    tensors: int
    resident: int


@dataclass(frozen=True)
class Load(RankOrder[Memory]):
    """Take these weights, and the optimiser's state where there is one."""

    weights: Path
    optimiser: Path | None = None


@dataclass(frozen=True)
class Unload(RankOrder[Memory]):
    """Free every tensor."""


@dataclass(frozen=True)
class Weigh(RankOrder[Memory]):
    """How much do you hold?"""


@dataclass(frozen=True)
class Generate(RankOrder[tuple[Digits, ...] | None]):
    """Answer a prompt several times; None if the next order came before the end, or if there are no weights.

    `pace_s` is the time that a digit takes on the GPU that this imitates.
    """

    prompt: Digits
    count: int
    seed: int
    pace_s: float


@dataclass(frozen=True)
class Join(RankOrder[None]):
    """Meet the other data-parallel ranks at a file."""

    rank: int
    world: int
    meeting: Path


@dataclass(frozen=True)
class Begin(RankOrder[None]):
    """Make new weights."""

    seed: int


@dataclass(frozen=True)
class Group:
    """The answers to one prompt and what they earned."""

    prompt: Digits
    answers: tuple[Digits, ...]
    rewards: tuple[float, ...]


@dataclass(frozen=True)
class LogProbs(RankOrder[Rows]):
    """How likely was each digit of each answer? Each rank answers for its part."""

    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Learn(RankOrder[None]):
    """Improve the policy; `old` has a row per answer. Every rank gets all of it and works on its part."""

    groups: tuple[Group, ...]
    old: Rows
    seed: int


@dataclass(frozen=True)
class Publish(RankOrder[None]):
    """Write the weights and the optimiser's state; they appear whole or not at all."""

    weights: Path
    optimiser: Path
