"""When does a coordinator tell of a heal? Once for each, as `core.world.heals` says it.

It is known to this coordinator alone: one that takes over tells nothing of what it has not seen.
"""

from __future__ import annotations

import math

from muster.core.world import heals
from muster.core.world.run import CallBack, Decision, Finish, Release, Run
from muster.types.run_event import Kind
from muster.world.conversation import Conversation


class HealsTold:
    def __init__(self, at: Conversation) -> None:
        self._at = at
        self._known: heals.Healing | None = None

    def follow(self, before: Run, decision: Decision, now: float) -> None:
        """A decision is carried out: what it begins, and what it cuts short."""
        match decision.action:
            case Release(round=formed):
                self._known = heals.begun(before, formed, self._known)
            case CallBack(recall=recall) if recall.cause.planned:
                self._look(before, now, final=True)
            case Finish():
                self._look(before, now, final=True)
                self._known = None

    def look(self, now: float) -> float:
        """Tell what is over; returns when to ask again."""
        run = self._at.run
        if self._known is None or run is None:
            return math.inf
        self._look(run, now)
        return math.inf if self._known is None else heals.due(self._known, run)

    def _look(self, run: Run, now: float, *, final: bool = False) -> None:
        if self._known is not None and (told := heals.over(self._known, run, now, final=final)) is not None:
            self._known = None
            self._at.tell(Kind.HEALED, told.text, now, told.data)
