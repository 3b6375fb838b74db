"""What did a training use? A fold over the journal: from each worker's start to its exit, and what that costs.

While a worker's GPUs are lent it is there, and they do not count: they are somebody else's (`lent_spans`).

The journal may hold an entry twice, late, or in another order than things happened: the control plane writes again
what it is not sure to have written, and learns of exits that took place while it was down. So the answer never
depends on the order of entries: a worker starts at its earliest start and ends at its earliest end. A replacement
always has a new name, which is why a name starts once. Who wrote the entries, and when, is left to the control loop.
All times here are those of the clock that durations are measured with: whoever sets the time of day changes no sum.

A journal does not grow for ever. `folded` makes one entry of a training's oldest, which tells the same as they did.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from muster.core.steady import apart
from muster.core.training import lent_spans
from muster.core.training.lent_spans import Marks, Span
from muster.types.codec import Invalid, Problem, from_wire, limited, to_wire
from muster.types.event import (
    FINISHED,
    STEADY,
    SYSTEM,
    TRIMMED,
    WORKER_BACK,
    WORKER_EXITED,
    WORKER_LENT,
    WORKER_STARTED,
    Event,
)
from muster.types.usage import Dropped, Interval, OpenWorker, Usage

_Name = tuple[str, str]  # of a worker, after its training's
By = Literal["training", "namespace"]

_ENDS = frozenset(FINISHED.values())
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Rates:
    """What an hour costs."""

    worker_hour: float = limited(0.0, ge=0)
    gpu_hour: float = limited(0.0, ge=0)
    currency: str = limited("", max_length=16)

    def cost(self, worker_seconds: float, gpu_seconds: float) -> float:
        return (worker_seconds * self.worker_hour + gpu_seconds * self.gpu_hour) / _HOUR_S


def read_rates(text: str) -> Rates:
    """Rates from JSON, {"currency": "EUR", "workerHour": 0.1, "gpuHour": 2.5}, or the same as TOML."""
    try:
        data: object = json.loads(text) if text.lstrip().startswith(("{", "[")) else tomllib.loads(text)
    except ValueError as error:
        raise Invalid([Problem("rates", f"is neither JSON nor TOML: {error}")]) from error
    return from_wire(Rates, data)


def when(shown: datetime, steady: datetime) -> dict[str, str]:
    """What an entry has to say beside the time that it shows, where that is not the time to measure with."""
    far = apart(shown, steady)
    return {} if far is None else {STEADY: far.isoformat()}


def folded(events: Sequence[Event], now: datetime) -> Event:
    """One entry that stands for these, the oldest of one training."""
    told = _Told(events, now)
    found = told.intervals()
    closed = [one for one in found if one.until is not None]
    totals = _Sum(now)
    for one in closed:
        totals.add(one, since=None, now=now)
    before = sum(_dropped(event).entries for event in events if event.reason == TRIMMED)
    running = (one for one in found if one.until is None)
    dropped = Dropped(
        entries=before + sum(event.reason != TRIMMED for event in events),
        workers=totals.workers,
        worker_seconds=totals.worker_seconds,
        gpu_seconds=totals.gpu_seconds,
        since=min((one.since for one in closed), default=None),
        until=max((one.until for one in closed if one.until is not None), default=None),
        running=tuple(OpenWorker(one.worker, one.gpus, one.since, told.lent(one)) for one in running),
    )
    message = f"{dropped.entries} older entries were dropped; what they tell of usage is kept"
    last = events[-1]
    return replace(
        last, reason=TRIMMED, message=message, type="Normal", actor=SYSTEM, round=None, data=to_wire(dropped)
    )


def _dropped(event: Event) -> Dropped:
    return from_wire(Dropped, event.data, strict=False)


def intervals(events: Iterable[Event], now: datetime) -> list[Interval]:
    """Every worker's interval, oldest first. One that is open has no end."""
    return _Told(events, now).intervals()


class _Told:
    """What the entries of a journal tell, whatever their order."""

    def __init__(self, events: Iterable[Event], now: datetime) -> None:
        self._starts: dict[_Name, _Start] = {}
        self._exits: dict[_Name, datetime] = {}
        self._ends: dict[str, tuple[datetime, str]] = {}
        self._sums: list[Interval] = []
        self._marks: defaultdict[_Name, Marks] = defaultdict(Marks)
        for event in events:
            self._enter(event, _time_of(event, now), now)

    def _enter(self, event: Event, at: datetime, now: datetime) -> None:
        owner = event.uid or f"{event.namespace}/{event.training}"
        worker = (owner, str(event.data.get("worker", "")))
        if event.reason == WORKER_STARTED:
            self._start(worker, _Start(at, -_gpus_of(event.data), event))
        elif event.reason == WORKER_EXITED:
            self._exits[worker] = min(self._exits.get(worker, at), at)
        elif event.reason == WORKER_LENT:
            self._marks[worker].lent.add(at)
        elif event.reason == WORKER_BACK:
            self._marks[worker].back.add(at)
        elif event.reason in _ENDS:
            self._ends[owner] = min(self._ends.get(owner, (at, event.reason)), (at, event.reason))
        elif event.reason == TRIMMED:
            dropped = _dropped(event)
            if dropped.since is not None:
                place = (event.namespace, event.training, event.uid)
                self._sums.append(Interval(*place, "", 0, dropped.since, dropped.until, TRIMMED, dropped))
            for one in dropped.running:
                start = _Start(min(one.since, now), -one.gpus, replace(event, data={"worker": one.worker}))
                self._start((owner, one.worker), start)
                if one.lent:
                    self._marks[owner, one.worker].add(one.lent)

    def _start(self, worker: _Name, start: _Start) -> None:
        self._starts[worker] = min(self._starts.get(worker, start), start)

    def intervals(self) -> list[Interval]:
        found = [
            _interval(start, self._exits.get(worker), self._ends.get(worker[0]), self._marks.get(worker))
            for worker, start in self._starts.items()
        ]
        return sorted(
            (*self._sums, *found), key=lambda one: (one.since, one.namespace, one.training, one.uid, one.worker)
        )

    def lent(self, one: Interval) -> tuple[Span, ...]:
        """All that is told of the absence of a worker's GPUs, to be told again."""
        marks = self._marks.get((one.uid or f"{one.namespace}/{one.training}", one.worker))
        return lent_spans.kept(marks) if marks is not None else ()


def totals(
    intervals: Iterable[Interval],
    *,
    now: datetime,
    since: datetime | None = None,
    by: By = "training",
    rates: Rates | None = None,
) -> list[Usage]:
    """Sums from `since` to `now`, in order of namespace, name and age. What is open counts up to now."""
    sums: dict[tuple[str, str, str], _Sum] = {}
    for one in intervals:
        if since is not None and one.until is not None and one.until <= since:
            continue
        owner = (one.namespace, one.training, one.uid) if by == "training" else (one.namespace, "", "")
        sums.setdefault(owner, _Sum(one.since)).add(one, since, now)
    ordered = sorted(sums, key=lambda owner: (owner[0], owner[1], sums[owner].first, owner[2]))
    return [sums[owner].usage(owner, rates) for owner in ordered]


@dataclass(frozen=True, order=True)
class _Start:
    """Compared by time; of two that are equal, the one with more GPUs counts, so that order does not matter."""

    at: datetime
    minus_gpus: int
    event: Event = field(compare=False)


@dataclass
class _Sum:
    first: datetime
    workers: int = 0
    worker_seconds: float = 0.0
    gpu_seconds: float = 0.0
    running: int = 0

    def add(self, one: Interval, since: datetime | None, now: datetime) -> None:
        self.first = min(self.first, one.since)
        seconds = _seconds(one, since, now)
        if one.dropped is not None:  # spread evenly over its time: nobody knows better any more
            whole = _seconds(one, None, now)
            share = seconds / whole if whole else 1.0
            self.workers += one.dropped.workers
            self.worker_seconds += one.dropped.worker_seconds * share
            self.gpu_seconds += one.dropped.gpu_seconds * share
            return
        self.workers += 1
        self.worker_seconds += seconds
        self.gpu_seconds += (seconds - _lent_seconds(one, since, now)) * one.gpus
        self.running += one.until is None

    def usage(self, owner: tuple[str, str, str], rates: Rates | None) -> Usage:
        cost = None if rates is None else rates.cost(self.worker_seconds, self.gpu_seconds)
        return Usage(*owner, self.workers, self.worker_seconds, self.gpu_seconds, self.running, cost)


def _interval(
    start: _Start, exited: datetime | None, ended: tuple[datetime, str] | None, marks: Marks | None
) -> Interval:
    event = start.event
    owner = (event.namespace, event.training, event.uid)
    closes = [] if exited is None else [(exited, WORKER_EXITED)]
    closes += [] if ended is None else [ended]
    until, why = min(closes, default=(None, ""))
    if until is not None:
        until = max(until, start.at)  # clocks differ: an exit is never before its start
    lent = lent_spans.within(lent_spans.spans(marks), start.at, until) if marks is not None else ()
    worker = str(event.data.get("worker", ""))
    return Interval(*owner, worker, -start.minus_gpus, start.at, until, why, lent=lent)


def _seconds(one: Interval, since: datetime | None, now: datetime) -> float:
    begin, end = _bounds(one, since, now)
    return max(0.0, (end - begin).total_seconds())


def _lent_seconds(one: Interval, since: datetime | None, now: datetime) -> float:
    return lent_spans.seconds(one.lent, *_bounds(one, since, now)) if one.lent else 0.0


def _bounds(one: Interval, since: datetime | None, now: datetime) -> tuple[datetime, datetime]:
    begin = one.since if since is None else max(one.since, since)
    return begin, now if one.until is None else min(one.until, now)


def _time_of(event: Event, now: datetime) -> datetime:
    """When it happened; never in the future, which a clock that was set back would otherwise make of the past."""
    meant = event.data.get(STEADY) or event.data.get("at")
    at = event.at or now
    if isinstance(meant, str):
        with contextlib.suppress(ValueError):  # the time of writing is the next best
            at = datetime.fromisoformat(meant)
    return min(at if at.tzinfo else at.replace(tzinfo=UTC), now)


def _gpus_of(data: Mapping[str, Any]) -> int:
    """How many, given as a number or as the list of their indices."""
    gpus = data.get("gpus")
    if isinstance(gpus, list | tuple):
        return len(gpus)
    return max(0, gpus) if isinstance(gpus, int) else 0
