"""May a leader speak? Only what enough electors have kept, and only while enough have promised to elect nobody else.

Both are answers to `keep`: a promise counts from when that was sent, on the leader's own clock, and for a little less
than a lease, for clocks differ. An elector that dies while its promise holds has given it for good.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from muster.core.succession import electorate
from muster.core.succession.electorate import Groups
from muster.core.succession.orders import Announce, Remember, SuccessionOrder
from muster.types.frames import KeepFrame, KeptFrame, RunRecord
from muster.types.world import Elector, MemberId

DRIFT = 0.1  # by how much one clock may be slower than another
KEEP_EVERY = 0.25  # of a lease
HEARD_LATELY = 20  # leases: who has not answered for so long is not asked any more


class Known(StrEnum):
    """Who knows what was announced last?"""

    BY_ALL = "by all"
    NOT_BY_LOST = "not by some who are gone"  # their leases run out
    NOT_BY_ALL = "not by some who are here"


class Leadership:
    def __init__(self, me: Elector, record: RunRecord, lease_s: float, now: float) -> None:
        self._me = me
        self._lease_s = lease_s
        self._began = now
        known = electorate.everyone(record.electorate.groups)
        self._succeeded = [one for one in known if one.returns and one.member_id != me.member_id]
        self._promised: dict[MemberId, float] = {}
        self._kept: dict[MemberId, int] = {}
        self._dead: set[MemberId] = set()
        self._told: dict[MemberId, int] = {}  # the revision that was sent, over the connection that is up
        self._needed = record.revision  # without it nothing more may be said
        self._named_in = record.revision  # the revision that changed the electors last
        self.term = record.electorate.term
        self.record = record
        self.learning: tuple[Elector, ...] = ()  # not yet electors
        self.keep_at = now
        self.sure_at = now  # when enough promises were last in force
        self._ended_in = record.revision if record.outcome is not None else None  # the revision with the outcome
        self._told_at: float | None = None  # when members were told that others may lead

    @property
    def groups(self) -> Groups:
        return self.record.electorate.groups

    @property
    def others(self) -> list[Elector]:
        """With whom to be in touch."""
        known = electorate.everyone((*self.groups, self.learning))
        return [elector for elector in known if elector.member_id != self._me.member_id]

    def write(self, record: RunRecord, now: float, *, needed: bool) -> RunRecord:
        """The next revision; where it is not `needed`, what is said does not have to wait for it."""
        last = self.record
        self.record = replace(record, revision=last.revision + 1, promised=self.term)
        if needed:
            self.record = replace(self.record, electorate=last.electorate)
            self._needed = self.record.revision
        if record.outcome is not None and self._ended_in is None:
            self._ended_in = self.record.revision
        self.keep_at = now
        return self.record

    # Asking and answers

    def keep(self, elector: Elector, now: float) -> KeepFrame:
        """What that one is told now: the record only if it was not sent yet."""
        new = self._told.get(elector.member_id, 0) < self.record.revision
        self._told[elector.member_id] = self.record.revision
        return KeepFrame(term=self.term, stamp=now, leader=self._me, record=self.record.shortened() if new else None)

    def unheard(self, elector_id: MemberId) -> None:
        """Its connection is new, or over: whatever was sent may not have come."""
        self._told.pop(elector_id, None)

    def kept(self, elector_id: MemberId, frame: KeptFrame) -> None:
        if frame.term == self.term:
            self._promised[elector_id] = max(self._promised.get(elector_id, frame.stamp), frame.stamp)
            self._kept[elector_id] = max(self._kept.get(elector_id, 0), frame.revision)
            self._dead.discard(elector_id)

    def died(self, elector_id: MemberId, now: float) -> None:
        """It is certain that its process is gone. It cannot elect anybody any more, and if it has promised has not."""
        returns = any(one.returns for one in self.others if one.member_id == elector_id)
        if self._promises(elector_id, now) and not returns:
            self._dead.add(elector_id)

    def _promises(self, elector_id: MemberId, now: float) -> bool:
        return now < self._promised.get(elector_id, -self._lease_s) + self._lease_s * (1 - DRIFT)

    # What follows

    def promising(self, now: float) -> set[MemberId]:
        return {self._me.member_id, *self._dead, *(one for one in self._promised if self._promises(one, now))}

    def is_sure(self, now: float) -> bool:
        return electorate.is_enough(self.groups, self.promising(now))

    def is_kept(self, revision: int) -> bool:
        keeping = {one for one, kept in self._kept.items() if kept >= revision}
        return electorate.is_enough(self.groups, {self._me.member_id, *self._dead, *keeping})

    def may_speak(self, now: float) -> bool:
        return self.is_over or (self.is_kept(self._needed) and self.is_sure(now))

    @property
    def is_over(self) -> bool:
        """The run has ended, and enough know it: whoever led after us would say the same.

        What is written later does not matter: those who leave with the outcome may not have kept it.
        """
        return self._ended_in is not None and self.is_kept(self._ended_in)

    def is_settled(self, groups: Groups) -> bool:
        """Return True if these are the electors, and enough of them have kept the record that names them.

        Electors are announced earlier; a leader that is lost in between may have no successor.
        """
        return len(groups) < 2 and groups == self.groups and self.is_kept(self._named_in)

    def has_learned(self, elector: Elector, now: float) -> bool:
        known = self._kept.get(elector.member_id, 0) >= self.record.revision
        return known and elector.member_id not in self._dead and self._promises(elector.member_id, now)

    # Who else has a voice

    def widen(self, host: str, able: list[tuple[Elector, str]], now: float, known: Known) -> list[SuccessionOrder]:
        """Change the electors, only when the last change is settled. `known`: who knows what was announced.

        While a record names two groups, both have to agree. It names the new group alone if the old one is never enough
        without the leader: the leader agrees for it by writing the change down. So electors that have the record do not
        wait for the vote of a lost leader.
        """
        self.learning = electorate.wanted(self._me, host, able, self.groups[-1])[1:] + self._bystanders(now)
        if not self.is_kept(self.record.revision) or not self.is_sure(now):
            return []
        current = self.groups[-1]
        if len(self.groups) > 1:
            return self._change((current,), now, known)
        voices = {one.member_id: one for one in current}
        ready = [one for one in able if voices.get(one[0].member_id) == one[0] or self.has_learned(one[0], now)]
        wanted = electorate.wanted(self._me, host, ready, current)
        if wanted == current:
            return []
        agreeing = (current,) if electorate.can_do_without((current,), self._me) else ()
        return self._change((*agreeing, wanted), now, known)

    def _bystanders(self, now: float) -> tuple[Elector, ...]:
        """Who led before us without being a member has no voice, for it does not see us die. It hears who leads."""
        return tuple(
            one
            for one in self._succeeded
            if now < max(self._began, self._promised.get(one.member_id, self._began)) + HEARD_LATELY * self._lease_s
        )

    def _change(self, groups: Groups, now: float, known: Known) -> list[SuccessionOrder]:
        if self._may_do_without_us(groups):
            if self._told_at is None:
                self._told_at = now
                return [self._announcement(groups[-1:])]
            lost_by = self._told_at + self._lease_s * (1 + DRIFT)
            if known is Known.NOT_BY_ALL or (known is Known.NOT_BY_LOST and now < lost_by):
                return []
        changed = replace(self.record.electorate, groups=groups)
        made = Remember(self.write(replace(self.record, electorate=changed), now, needed=False))
        self._named_in = self.record.revision
        if len(groups) > 1:
            return [made]
        if not electorate.can_do_without(groups, self._me):
            self._told_at = None
        return [made, self._announcement(groups)]

    def _may_do_without_us(self, groups: Groups) -> bool:
        """Whether others could lead in our place, for the first time. Every member has to know it before, or to have
        lost its lease: one that does not know keeps its ranks when it finds us dead.
        """
        return not electorate.can_do_without(self.groups, self._me) and electorate.can_do_without(groups[-1:], self._me)

    def _announcement(self, groups: Groups) -> Announce:
        return Announce(replace(self.record.electorate, groups=groups))
