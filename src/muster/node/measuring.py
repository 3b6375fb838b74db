"""What has a worker logged and used that nobody was told yet?

Everything that rank 0 logs is kept here as well, thinned, for as long as the agent lives: a coordinator that was away,
or that has lost what it was told, hears all of it again when it is back. It knows by their counts what it has already.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from muster.core.curves import Thinned, fewest
from muster.node import resources
from muster.node.numbers import Number, Reader
from muster.types.frames import Frame, MetricsFrame, WelcomeFrame
from muster.types.measured import LoggedNumber
from muster.types.numbers import MAX_NAMES, MAX_POINTS

LOOK_S = 1.0
MOST_AT_ONCE = MAX_POINTS - MAX_NAMES  # numbers of one look: more than that nobody sees
MOST_KEPT = 4096  # numbers of all names
FRAMES = 4  # at one look, after a reconnect


class _Kept(NamedTuple):
    round: int
    number: Number


class Measuring:
    def __init__(self, send: Callable[[Frame], bool], watch: resources.Watch | None = None) -> None:
        self._send = send
        self._watch = watch or resources.Watch()
        self._reader: Reader | None = None
        self._round = -1
        self._kept: dict[str, Thinned[_Kept]] = {}
        self._unsent: list[_Kept] = []
        self._use_every_s = resources.EVERY_S
        self._use_at = -math.inf

    async def run(self) -> None:
        self._watch.start()
        while True:
            await asyncio.sleep(LOOK_S)
            self.tell()

    def begin(self, number: int, reader: Reader | None, workers: int) -> None:
        """The ranks of another round are about to start; `reader` where the first of them is ours."""
        self._take()
        self._round, self._reader = number, reader
        self._use_every_s = resources.every_s(workers)

    def hear(self, frame: Frame) -> None:
        """Whoever welcomes us may have missed something."""
        if isinstance(frame, WelcomeFrame):
            every = [one for kept in self._kept.values() for one in kept.items]
            self._unsent = sorted(every, key=lambda one: (one.round, one.number.seq))

    def tell(self) -> None:
        """Send what is new."""
        self._take()
        now = time.monotonic()
        for _ in range(FRAMES):
            if not self._unsent or not self._send(self._next(now)):
                break
            self._unsent = self._unsent[len(self._batch()) :]
        if now >= self._use_at and (use := self._watch.take()) is not None:
            self._use_at = now + self._use_every_s
            self._send(MetricsFrame(round=self._round, use=use))

    def _batch(self) -> list[_Kept]:
        """The next that may go together: those of one round."""
        head = self._unsent[:MAX_POINTS]
        return [one for one in head if one.round == head[0].round]

    def _next(self, now: float) -> MetricsFrame:
        batch = self._batch()
        names = {name: place for place, name in enumerate(dict.fromkeys(one.number.name for one in batch))}
        points = tuple(_told(one.number, names[one.number.name], now) for one in batch)
        return MetricsFrame(round=batch[0].round, names=tuple(names), points=points)

    def _take(self) -> None:
        fresh = self._reader.fresh() if self._reader is not None else []
        few = [_Kept(self._round, number) for number in fewest(fresh, MOST_AT_ONCE, lambda one: one.name)]
        self._unsent = [*self._unsent, *self._keep(few)]
        if len(self._unsent) > MOST_KEPT:
            self._unsent = fewest(self._unsent, MOST_KEPT - MAX_NAMES, lambda one: one.number.name)

    def _keep(self, numbers: Iterable[_Kept]) -> list[_Kept]:
        """Those of so many names, whatever a rank calls its numbers from look to look: no message may have more."""
        taken = []
        for one in numbers:
            if one.number.name not in self._kept:
                if len(self._kept) == MAX_NAMES:
                    continue  # of rounds before: the coordinator does not keep more, either
                self._kept[one.number.name] = Thinned(MOST_KEPT)
                for kept in self._kept.values():
                    kept.thin(MOST_KEPT // len(self._kept))
            self._kept[one.number.name].add(one)
            taken.append(one)
        return taken


def _told(number: Number, place: int, now: float) -> LoggedNumber:
    value = number.value if math.isfinite(number.value) else None
    return LoggedNumber(number.seq, place, round(max(0.0, now - number.at), 3), number.step, value)
