"""Who takes over from the warm parent? Another that is prepared beside it, at leisure, and knows more.

A parent begins with what stands at the top of the script, because the first start waits for it. What takes longer, and
what ranks turned out to import later, goes into an heir. It replaces the parent between two rounds, when it is ready.
An heir that hangs, dies or finds nothing to import without leaving traces costs time that nobody waits for; a run that
is over at once has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from muster.node.parent_line import ParentLine
from muster.node.program import Program
from muster.types.modules import joined

HEIRS = 8  # as many are prepared at most, those that fail included
DEATHS = 3  # after which nobody tries again on its own
PATIENCE_S = 600.0  # for one to be ready
RETRY_S = 2.0
LEISURE_S = 4.0  # until the first is prepared: a worker that is gone by then has paid nothing

Hire = Callable[[Program, Callable[[dict[str, Any]], None], Callable[[str], None]], ParentLine]


@dataclass
class Experience:
    """What a worker has found out about its program; it outlives the processes that found it out."""

    modules: tuple[str, ...] = ()  # that ranks imported by themselves
    unfit: dict[str, None] = field(default_factory=dict)  # what a parent must not import
    heirs: int = 0
    given: set[str] = field(default_factory=set)  # modules that some heir was told of
    told: set[str] = field(default_factory=set)

    def learn(self, names: tuple[str, ...]) -> bool:
        """True if there are new ones among them."""
        before, self.modules = self.modules, joined(self.modules, names)
        return self.modules != before


class Heirs:
    """`on_ready()` when there is one to `take`."""

    def __init__(
        self,
        program: Program,
        experience: Experience,
        hire: Hire,
        *,
        on_ready: Callable[[], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._program = program
        self._experience = experience
        self._hire = hire
        self._on_ready = on_ready
        self._on_note = on_note
        self._coming: ParentLine | None = None
        self._ready: ParentLine | None = None
        self._has_torch = False
        self._deaths = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ready(self) -> ParentLine | None:
        return self._ready

    def take(self) -> tuple[ParentLine, bool] | None:
        """The one that is ready, and whether it has torch. From now on it is not ours."""
        found, self._ready = self._ready, None
        return (found, self._has_torch) if found is not None else None

    def prepare(self) -> None:
        """There is time, and more to import than a script says: torch.optim alone takes a second and a half."""
        if self._experience.heirs == 0:
            self._soon()

    def compared(self, lacking: list[str]) -> None:
        """The newest parent does not have those modules."""
        if not self._experience.given.issuperset(lacking):
            self._soon()

    def note_unfit(self, news: dict[str, Any]) -> None:
        """A parent begins anew without those."""
        known = self._experience
        known.unfit.update(dict.fromkeys(news["unfit"]))
        if news["why"] not in known.told:
            known.told.add(news["why"])
            self._on_note(f"left to ranks, not preloaded: {news['why']}")

    def close(self) -> None:
        for line in (self._coming, self._ready):
            if line is not None:
                line.close(kill=True)
        self._coming = self._ready = None
        self._wait(None)

    def _soon(self) -> None:
        if self._experience.heirs:
            self._start()
        elif self._timer is None:
            self._wait(LEISURE_S, self._start)

    def _start(self) -> None:
        known = self._experience
        if self._coming is not None or known.heirs >= HEIRS or not self._program.auto:
            return
        known.heirs += 1
        known.given.update(known.modules)
        program = self._program._replace(heir=True, learned=known.modules, without=tuple(known.unfit))
        coming = self._coming = self._hire(
            program, lambda news: self._hear(coming, news), lambda why: self._ended(coming)
        )
        self._wait(PATIENCE_S, self._give_up)

    def _hear(self, line: ParentLine, news: dict[str, Any]) -> None:
        if "warming" in news:
            line.hurry(False)
        elif "unfit" in news:
            self.note_unfit(news)
        elif "lacking" in news:
            self.compared(news["lacking"])
        elif "ready" in news:
            self._wait(None)
            if self._ready is not None:
                self._ready.close()
            self._ready, self._coming, self._has_torch = line, None, bool(news["torch"])
            self._deaths = 0
            self._on_ready()

    def _ended(self, line: ParentLine) -> None:
        if line is self._ready:
            self._ready = None
        if line is self._coming:
            self._coming = None
            self._wait(None)
        self._deaths += 1
        if self._deaths < DEATHS:
            self._wait(RETRY_S, self._start)

    def _give_up(self) -> None:
        if self._coming is not None:
            self._coming.close(kill=True)
            self._coming = None
            self._on_note(f"modules are left to ranks: preloading them has taken more than {PATIENCE_S:g} s")

    def _wait(self, seconds: float | None, then: Callable[[], None] = lambda: None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, then) if seconds is not None else None
