"""What did a training with state do, by its marks? Pure: lines of text in, figures out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mark:
    at: float
    word: str
    rank: int
    pid: int
    step: int
    value: str

    @property
    def seconds(self) -> float | None:
        return None if self.value == "-" else float(self.value)


def parsed(text: str) -> list[Mark]:
    """Of whole lines only: the last may still be written."""
    found = []
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            at, word, rank, pid, step, value = line.split()
            found.append(Mark(float(at), word, int(rank), int(pid), int(step), value))
    return found


def done_by_all(marks: Iterable[Mark], ranks: int, before: float) -> int:
    """The newest step whose commit had returned on every rank by then. A rank that went back is where it is now."""
    newest = _newest(marks, before)
    return min(mark.step for mark in newest.values()) if len(newest) >= ranks else 0


def _newest(marks: Iterable[Mark], before: float) -> dict[int, Mark]:
    found: dict[int, Mark] = {}
    for mark in sorted(marks, key=lambda mark: mark.at):
        if mark.at < before and mark.word == "done":
            found[mark.rank] = mark
    return found


@dataclass(frozen=True)
class Resumed:
    """One loss that was survived."""

    took_s: float  # to the first all-reduce of the step with which it went on
    step: int  # how many were done, as it went on
    lost: int  # of those that every rank had committed
    after_s: float  # since the last commit before it
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds to each, of the slower rank


def resumed(marks: Sequence[Mark], ranks: int, struck: float) -> Resumed | None:
    """What came after the loss; None while not every rank has made its first all-reduce again."""
    again: dict[int, Mark] = {}
    for mark in marks:
        if mark.word == "reduced" and mark.at > struck:
            again.setdefault(mark.rank, mark)
    if len(again) < ranks:
        return None
    step = min(mark.step for mark in again.values())
    committed = max((mark.at for mark in _newest(marks, struck).values()), default=struck)
    lost = max(0, done_by_all(marks, ranks, struck) - step)  # a mark may come later than what it tells of
    took_s = min(mark.at for mark in again.values()) - struck
    return Resumed(took_s, step, lost, struck - committed, stages([mark for mark in marks if mark.at > struck], struck))


def stages(marks: Sequence[Mark], struck: float) -> dict[str, float]:
    """What a new process of a rank goes through. Those that live on, as replicas of torchft, go through none of it."""
    found = {word: [mark.at for mark in marks if mark.word == word] for word in ("grouped", "built", "restored")}
    begun = [mark.at - (mark.seconds or 0.0) for mark in marks if mark.word == "grouped"]
    return {word: max(times) - struck for word, times in ({"script begins": begun} | found).items() if times}


def typical(healed: Sequence[Resumed]) -> dict[str, float]:
    """The median of each stage."""
    words = list(dict.fromkeys(word for one in healed for word in one.stages))
    return {word: statistics.median(one.stages[word] for one in healed if word in one.stages) for word in words}


def waits(marks: Iterable[Mark]) -> list[float]:
    """For how long each save stopped rank 0, without the first, before which nothing is prepared."""
    return [mark.seconds for mark in marks if mark.word == "done" and mark.rank == 0 and mark.seconds is not None][1:]


def values(marks: Iterable[Mark], word: str) -> list[float]:
    return [mark.seconds for mark in marks if mark.word == word and mark.seconds is not None]


def ends(marks: Iterable[Mark]) -> set[tuple[int, str]]:
    """At which step, and with which weights, ranks have ended."""
    return {(mark.step, mark.value) for mark in marks if mark.word == "end"}


@dataclass(frozen=True)
class Taken:
    """What commits take from a step, beside one copy of the same bytes. Medians, in seconds."""

    step_s: float  # without them
    commits_s: float
    memcpy_s: float
    samples: int
    error_s: float  # of what commits take, as the samples spread

    @property
    def copies(self) -> float:
        return self.commits_s / self.memcpy_s

    @property
    def share(self) -> float:
        return self.commits_s / self.step_s


def taken(marks: Iterable[Mark]) -> Taken:
    """By turns in one process; of rank 0, with whom the others keep pace."""
    of_rank = [mark for mark in marks if mark.rank == 0]
    without, with_commits = values(of_rank, "without"), values(of_rank, "with")
    step_s, memcpy_s = statistics.median(without), statistics.median(values(of_rank, "memcpy"))
    spread = statistics.pvariance(without) / len(without) + statistics.pvariance(with_commits) / len(with_commits)
    error_s = 1.25 * spread**0.5  # a median is that much less certain than a mean
    return Taken(step_s, statistics.median(with_commits) - step_s, memcpy_s, len(with_commits), error_s)
