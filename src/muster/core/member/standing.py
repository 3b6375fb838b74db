"""How does a member stand with its coordinator? What the parts of its decisions share.

Orders gather here until the driver takes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from muster.core.member.orders import Beat, Order, Renew, Send
from muster.types.frames import Frame, RunRecord
from muster.types.world import Electorate, MemberId, RunOutcome, Settings

STANDSTILL_S = 1.0  # between two looks at the clock, or half a lease if that is less: longer than any load explains
JUST_NOW_S = 0.1  # after it, what is heard may be as old as its beginning


@dataclass
class MemberLease:
    """Until when may ranks run that nobody has confirmed?

    It counts from the moment at which the renewal was *sent* that has been answered, so it ends here no later than the
    coordinator believes.
    """

    since: float
    hello_sent: float = -math.inf
    renews_sent: list[float] = field(default_factory=list)  # each is answered once, in this order
    dead_at: float = -math.inf  # when the coordinator was last found dead: the connection was closed or refused

    def welcomed(self) -> None:
        self.since = max(self.since, self.hello_sent)
        self.renews_sent.clear()

    def renewed(self) -> None:
        if self.renews_sent:
            self.since = max(self.since, self.renews_sent.pop(0))

    def delivered(self, now: float, lease_s: float) -> None:
        """Prolong the lease by a renewal that the coordinator has, though it has not answered.

        It reads all that has come before it gives a worker up. So it cannot have given up one whose renewals came
        without a gap of a lease, however long it stands still itself.
        """
        if now <= self.since + lease_s:
            self.since = max(self.since, now)

    def over_at(self, lease_s: float) -> float:
        """When ranks have to end. A coordinator that is dead gives nothing away; only silence is dangerous."""
        return max(self.since, self.dead_at) + lease_s


class Standing:
    def __init__(self, member_id: MemberId, settings: Settings, now: float) -> None:
        self.member_id = member_id
        self.settings = settings
        self.now = now
        self.lease = MemberLease(now)
        self.record: RunRecord | None = None
        self.outcome: RunOutcome | None = None
        self.electorate = Electorate()
        self.incarnation = ""  # the id of the run that it is a member of
        self.joined = False
        self.connected = False
        self.leaving = False
        self.session = 0  # grows with every connection that ends
        self.unsaid: list[Frame] | None = None  # since a hello that has no welcome yet
        self.stood_still = (-math.inf, -math.inf)  # from when to when, last
        self._orders: list[Order] = []

    def reach(self, now: float) -> None:
        """Time never goes back, also if two that bring something have looked at the clock at once."""
        if now > self.now + min(STANDSTILL_S, self.settings.lease_s / 2):
            self.stood_still = (self.now, now)
        self.now = max(self.now, now)

    def last_ran(self) -> float:
        """Now; or, when we have just stood still, before that."""
        began, ended = self.stood_still
        return began if self.now - ended < JUST_NOW_S else self.now

    def do(self, *orders: Order) -> None:
        self._orders += orders

    def send(self, frame: Frame) -> None:
        """What must not be lost is presented in the next hello; what was not in that one is sent with its welcome."""
        if self.connected:
            self.do(Send(frame))
        elif self.unsaid is not None:
            self.unsaid.append(frame)

    def taken(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def renew(self) -> None:
        """Ask for another lease."""
        self.lease.renews_sent.append(self.now)
        self.do(Renew(self.record.round if self.record is not None and self.record.round >= 0 else None))

    def beat(self, number: int | None, *, runs: bool) -> None:
        """Tell the guard that we live, and until when ranks may run."""
        until = self.lease.over_at(self.settings.lease_s) if runs else math.inf
        self.do(Beat(until, self.settings.lease_s, number, until + self.settings.kill_margin_s))
