"""What did the filling training do, by its own account? Its ranks write a line for all that they do with their GPU.

A rank's use of a GPU begins with its script and goes on until the end of its last step. A step that it begins and does
not end, because it was told to go, is known by its begin only. Times are those of the machine's monotonic clock, which
all processes share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal, Self

from muster.demos.occupancy import Spell

STEPS, STOP = "steps.log", "stop"
_AVERAGED = 5  # losses, of the first and of the last steps

What = Literal["starts", "restored", "begins", "ends"]


@dataclass(frozen=True)
class Line:
    what: What
    gpu: int
    round: int
    at: float
    step: int = 0
    ranks: int = 0
    loss: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} {self.gpu} {self.round} {self.at:.6f} {self.step} {self.ranks} {self.loss:.6f}"


class StepLog:
    """A rank's side. Many processes append to the file, each line at once."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._gpu, self._round = int(env["CUDA_VISIBLE_DEVICES"]), int(env["MUSTER_ROUND"])
        self._file = os.open(folder / STEPS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._ranks = 0
        self._write("starts", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._file)

    def restored(self, step: int, ranks: int) -> None:
        self._ranks = ranks
        self._write("restored", step)

    def begins(self, step: int) -> None:
        self._write("begins", step)

    def ends(self, step: int, loss: float) -> None:
        self._write("ends", step, loss)

    def _write(self, what: What, step: int, loss: float = 0.0) -> None:
        line = Line(what, self._gpu, self._round, time.monotonic(), step, self._ranks, loss)
        os.write(self._file, f"{line}\n".encode())


# Reading it --------------------------------------------------------------------------------------


def read(folder: Path) -> list[Line]:
    """All whole lines so far, in the order in which they were written."""
    try:
        written = (folder / STEPS).read_text()
    except FileNotFoundError:
        return []
    return [_line(text) for text in written.splitlines(keepends=True) if text.endswith("\n")]


def _line(text: str) -> Line:
    what, gpu, number, at, step, ranks, loss = text.split()
    return Line(what, int(gpu), int(number), float(at), int(step), int(ranks), float(loss))  # type: ignore[arg-type]


def spells(lines: Iterable[Line], letter: str) -> list[Spell]:
    """From when to when each rank used its GPU."""
    known: dict[tuple[int, int], tuple[float, float]] = {}
    for line in lines:
        begin, _ = known.get((line.round, line.gpu), (line.at, line.at))
        known[line.round, line.gpu] = begin, line.at
    return [Spell(gpu, letter, begin, end) for (_, gpu), (begin, end) in known.items()]


@dataclass
class Account:
    """What became of it."""

    steps: int = 0  # the newest that is done
    lost: int = 0  # committed steps that had to be done again
    rounds: int = 0
    largest: int = 0  # world in which a step was done
    losses: list[float] = field(default_factory=list)  # of each step, once

    @property
    def first_loss(self) -> float:
        return fmean(self.losses[:_AVERAGED])

    @property
    def last_loss(self) -> float:
        return fmean(self.losses[-_AVERAGED:])


def account(lines: Iterable[Line]) -> Account:
    told = Account()
    begun: set[int] = set()
    for line in lines:
        if line.what == "restored" and line.round not in begun:
            begun.add(line.round)
            told.lost += max(0, told.steps - line.step)
        elif line.what == "ends":
            told.largest = max(told.largest, line.ranks)
            if line.step > told.steps:
                told.steps = line.step
                told.losses.append(line.loss)
    told.rounds = len(begun)
    return told
