"""When does a guard end the ranks of its worker, and what does it say then?

It stands by an agent. When that dies, is silent for a lease, or has not heard from the coordinator in time, everything
below has to end, and the coordinator is told so. The driver kills and sends; `tests/sim` and `node.guard` are two.
"""

from __future__ import annotations

import math

from muster.types.frames import AliveFrame, Frame, GoneFrame, ProbeFrame, WelcomeFrame

SLACK_S = 0.2  # the agent ends its ranks itself when its lease is over, unless it cannot


class GuardState:
    def __init__(self, lease_s: float, now: float) -> None:
        self.round: int | None = None
        self.cleared = False  # nothing is left below
        self._lease_s = lease_s
        self._beat_at = now
        self._until = math.inf

    def beat(self, until: float, lease_s: float, number: int | None, now: float) -> None:
        """The agent lives, and may have ranks until then."""
        self._beat_at = now
        self._until = until
        self._lease_s = lease_s
        self.round = number

    @property
    def due_at(self) -> float:
        """When everything below has to end, if no beat comes before."""
        return min(self._beat_at + self._lease_s, self._until + SLACK_S)

    def report(self) -> GoneFrame | None:
        """What the coordinator has to hear, once everything has ended: nothing, if there never was a rank."""
        return GoneFrame(round=self.round) if self.cleared and self.round is not None else None

    def heard(self, frame: Frame) -> Frame | None:
        """What is answered."""
        if isinstance(frame, ProbeFrame):
            return self.report() if self.cleared else AliveFrame()
        return self.report() if isinstance(frame, WelcomeFrame) else None
