"""What does a worker's agent do? It keeps its place in the run, obeys the coordinator, and leaves when it should.

It never waits: an order that takes time is answered later (`HeldRound.cleared`, `saves_over`, `restarted`, `checked`).
What it does about its round is decided by `held_round`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from muster.core.member.held_round import HeldRound, InRound
from muster.core.member.orders import (
    CheckOwnHealth,
    Drop,
    Exit,
    Hurry,
    KillRanks,
    Listen,
    Order,
    ReachPeers,
    Say,
)
from muster.core.member.standing import Standing
from muster.core.succession import electorate
from muster.types.frames import (
    AckFrame,
    AwareFrame,
    CheckFrame,
    DismissFrame,
    ElectorsFrame,
    FarewellFrame,
    FitFrame,
    Frame,
    HoldFrame,
    HoldsFrame,
    LeavingFrame,
    NoticeFrame,
    OutcomeFrame,
    Presented,
    ReachFrame,
    RecallFrame,
    RecordFrame,
    ReleaseFrame,
    RenewedFrame,
    UnfitFrame,
    WelcomeFrame,
)
from muster.types.state import Holding
from muster.types.world import COORDINATOR_SILENT, LARGE, MemberId, OutcomeState, RunId, RunOutcome, Settings

EXIT_FAILED = 1
EXIT_COORDINATOR_LOST = 75
RENEW_S = 0.7  # at least that often, however long the lease: steps travel with it
HEALTH_RETRY_S = 30.0
PRESENTED_WHOLE = 2048  # seats: more might not fit into a hello
HELD_S = 5.0  # how long a worker waits after a hold before it sends another hello
WARN_AFTER_S = 1.0  # without a coordinator


class MemberState:
    def __init__(
        self,
        member_id: MemberId,
        run_id: RunId,
        settings: Settings,
        now: float,
        *,
        join_timeout_s: float = 60.0,
        no_requeue_code: int = 93,
    ) -> None:
        self.at = Standing(member_id, settings, now)
        self.held = HeldRound(self.at)
        self.farewell = False
        self.late = False  # this worker came after the run of its launch had ended
        self.unfit = ""  # what the health check says, if it failed
        self.ended: Exit | None = None
        self._holding: Holding | None = None
        self._run_id = run_id
        self._join_timeout_s = join_timeout_s
        self._no_requeue_code = no_requeue_code
        self._born_at = now
        self._down_since: float | None = now
        self._why_down = "not connected yet"
        self._warned = False
        self._reason = ""
        self._renew_at = now
        self._look_at = -math.inf  # when silence is next looked at
        self._leave_at = math.inf  # when an outcome is known and nobody bids farewell

    # Time

    @property
    def wake_at(self) -> float:
        """When `tick` has something to do."""
        return min(self._renew_at, self._silent_at, self._patience_ends, self._leave_at, self.held.going_at)

    @property
    def _renew_every(self) -> float:
        """Of ten thousand the coordinator cannot hear more than it needs: there steps travel more slowly."""
        third = self.at.settings.lease_s / 3
        return third if self.at.settings.max > LARGE else min(RENEW_S, third)

    @property
    def _silent_at(self) -> float:
        return max(self.at.lease.over_at(self.at.settings.lease_s), self._look_at)

    @property
    def _patience_ends(self) -> float:
        """Return when to give up: after `join_timeout_s` without a first welcome, later after `_search_s`."""
        if self._down_since is None:
            return math.inf
        if self.at.joined:
            return self._down_since + self._search_s
        return self._born_at + (self._join_timeout_s if self._warned else min(WARN_AFTER_S, self._join_timeout_s))

    @property
    def _search_s(self) -> float:
        """Return how long to search for a lost coordinator. A worker without a rank has nothing to lose."""
        settings = self.at.settings
        if self._has_rank:
            return settings.orphan_s
        return min(settings.orphan_s, settings.lease_s + settings.spare_orphan_s)

    @property
    def _has_rank(self) -> bool:
        """Return True with ranks, also if they ended with the lease: the round may need the state that is kept here."""
        record = self.at.record
        return self.held.runs or (record is not None and record.place_of(self.at.member_id) is not None)

    def tick(self, now: float) -> list[Order]:
        self.at.reach(now)
        if now >= self._renew_at:
            self._renew()
        if now >= self._silent_at:
            self._silence()
        if now >= self._patience_ends:
            self._lose_patience()
        if now >= self._leave_at:
            self._leave_with_outcome()
        if now >= self.held.going_at:
            self.held.go()
        return self.at.taken()

    def _renew(self) -> None:
        at = self.at
        self._renew_at = at.now + self._renew_every
        self.held.beat()
        if at.connected:
            at.renew()

    def _silence(self) -> None:
        """Nothing from the coordinator for a lease: on the other side of a partition our ranks may be given away."""
        self._look_at = self.at.now + self.at.settings.lease_s / 3
        current = self.held.current
        if current is not None and current.running and self.at.outcome is None:
            if not current.stopping:
                self.at.do(Say("the coordinator is silent: ending ranks, the world may go on without them"))
            self.held.stop(current, 0.0, self._drop_silent, why=COORDINATOR_SILENT)
        else:
            self._drop_silent()

    def _drop_silent(self) -> None:
        self._look_at = self.at.now + self.at.settings.lease_s / 3
        self.at.do(Drop("silent for a lease"))

    def _lose_patience(self) -> None:
        at = self.at
        limit = self._search_s if at.joined else self._join_timeout_s
        began = self._down_since if at.joined and self._down_since is not None else self._born_at
        if at.now >= began + limit:
            what = "the coordinator was lost" if at.joined else "no coordinator"
            spare = ", for no rank runs here" if at.joined and not self._has_rank else ""
            self._end(EXIT_COORDINATOR_LOST, f"{what} ({self._why_down}); gave up after {limit:g} s{spare}")
        elif not self._warned:
            self._warned = True
            at.do(Say(f"cannot reach the coordinator ({self._why_down}); trying for {limit:g} s"))

    # The connection

    def delivered(self, sent_at: float) -> None:
        """The coordinator of this machine has a renewal of that time. One that can be succeeded may be by now."""
        if self.at.connected and not electorate.can_succeed(self.at.electorate):
            self.at.lease.delivered(sent_at, self.at.settings.lease_s)

    def hello(self, now: float) -> Presented:
        """A connection is open: everything that a coordinator which knows nothing of us needs to know."""
        at = self.at
        at.reach(now)
        at.lease.hello_sent = now
        at.unsaid = []
        return _presented(at, self.held.current, self._holding, now)

    def found_dead(self, now: float) -> None:
        """Somebody answered, and it was not a coordinator.

        A lease that was over before is not given back: it may have been a coordinator that has given us up; and none
        where others may lead. It counts from when we last ran: if we stood still, the answer may be as old as that.
        """
        lease = self.at.lease
        if now < lease.over_at(self.at.settings.lease_s) and not electorate.can_succeed(self.at.electorate):
            lease.dead_at = max(lease.dead_at, self.at.last_ran())

    def down(self, why: str, now: float) -> list[Order]:
        """The connection ended, or could not be made."""
        at = self.at
        at.reach(now)
        if at.connected and self.ended is None and at.outcome is None and not at.leaving:
            ranks = "ranks go on, " if self.held.runs else ""
            at.do(Say(f"lost the coordinator ({why}); {ranks}reconnecting"))
        at.connected, at.unsaid = False, None
        self.held.go()  # nobody can tell the world any more that this worker leaves
        at.session += 1
        self._why_down = why
        if self._down_since is None:
            self._down_since = now
        self.held.beat()  # the coordinator may just have been found dead, which gives ranks more time
        return at.taken()

    def holds(self, holding: Holding, now: float) -> list[Order]:
        """What state this worker has in memory has changed; said again to each coordinator."""
        self.at.reach(now)
        self._holding = holding
        self.at.send(HoldsFrame(holding=holding))
        return self.at.taken()

    def refused(self, why: str, now: float) -> list[Order]:
        self.at.reach(now)
        self._end(EXIT_FAILED, why)
        return self.at.taken()

    def heard(self, frame: Frame, now: float) -> list[Order]:
        at = self.at
        at.reach(now)
        match frame:
            case WelcomeFrame():
                at.electorate, at.incarnation = frame.electorate, frame.incarnation
                self._welcomed(frame.settings)
            case ElectorsFrame(electorate=known, number=number):
                at.electorate = known
                at.send(AwareFrame(number=number))
            case RenewedFrame(reason=reason):
                at.lease.renewed()
                self.held.beat()  # else the guard may end ranks that were given another lease just in time
                self.held.renewed()
                self._reasoned(reason)
            case HoldFrame(reason=reason):
                self._put_off(reason)
            case ReleaseFrame(record=record):
                at.record = record
                self.held.released(record)
                self._spare_the_slow()
            case RecordFrame(record=record):
                at.record = record
                at.do(Hurry(False))
            case NoticeFrame():
                self.held.notice(frame)
            case RecallFrame():
                self.held.recalled(frame)
            case CheckFrame():
                at.do(CheckOwnHealth(0.0))
            case ReachFrame(peers=peers, gone=gone):
                at.do(ReachPeers(peers, gone))
            case DismissFrame(reason=reason):
                self._end(0, f"leaving: {reason}")
            case OutcomeFrame():
                self._told_outcome(frame)
            case FarewellFrame():
                self.farewell = True
                if self._leave_at < math.inf:
                    self._leave_with_outcome()
        return at.taken()

    def _put_off(self, reason: str) -> None:
        """Wait as the coordinator asked, without a lease; send another hello after `HELD_S` without a reply."""
        if not self.held.runs:
            self._look_at = max(self._look_at, self.at.now + HELD_S)
        if reason != self._reason:
            self._reason = reason
            self.at.do(Say(f"waiting: {reason}"))

    def _welcomed(self, settings: Settings | None) -> None:
        at = self.at
        if not at.joined:
            at.do(Say(f"joined run {self._run_id}"))
        at.settings = settings or at.settings
        at.lease.welcomed()
        at.joined = at.connected = True
        self._down_since, self._look_at = None, -math.inf
        unsaid, at.unsaid = at.unsaid or [], None
        if self._holding is not None:
            at.send(HoldsFrame(holding=self._holding))
        if at.now - at.lease.since > self._renew_every:
            self._renew()
        self._spare_the_slow()
        self.held.beat()
        if at.settings.gate_timeout_s is not None:
            at.do(Listen())
        for one in unsaid:
            at.send(one)

    def _spare_the_slow(self) -> None:
        """On a busy machine a lease can be over when its welcome is read. Without ranks there is nothing to end."""
        if not self.held.runs and self.at.now >= self.at.lease.over_at(self.at.settings.lease_s):
            self._look_at = self.at.now + self.at.settings.lease_s / 3

    def _reasoned(self, reason: str | None) -> None:
        if reason and reason != self._reason:
            self._reason = reason
            if not self.held.runs:
                self.at.do(Say(f"waiting: {reason}"))

    # The end

    def _told_outcome(self, frame: OutcomeFrame) -> None:
        """Stop what runs, say so, and stay until everyone knows."""
        at = self.at
        if at.outcome is not None:
            if not self.held.runs:  # else it is acknowledged when ranks are gone
                self._acknowledge()
            return
        at.outcome, self.late = frame.outcome, frame.late
        farewell_s = at.settings.farewell_s if frame.farewell_s is None else frame.farewell_s

        def stopped() -> None:
            self._acknowledge()
            self._leave_at = at.now + farewell_s
            if self.farewell:
                self._leave_with_outcome()

        if self.held.current is not None:
            self.held.stop_after_saves(self.held.current, frame.grace_s, stopped, at_most_s=frame.grace_s)
        else:
            stopped()

    def _acknowledge(self) -> None:
        current = self.held.current
        if current is None:
            self.at.send(AckFrame())
        else:
            self.at.send(AckFrame(round=current.number, exits=current.reported(self.at.now)))

    def _leave_with_outcome(self) -> None:
        outcome = self.at.outcome
        assert outcome is not None
        failed = self._no_requeue_code if outcome.reason == "no_progress" else EXIT_FAILED
        code = 0 if outcome.state is OutcomeState.SUCCEEDED else failed
        self._leave_at = math.inf
        self._end(code, ended_late(outcome) if self.late else f"{outcome.state}: {outcome.message}")

    def leave(self, signal: str, code: int, now: float) -> list[Order]:
        """Told to go; told again, to go at once."""
        at = self.at
        at.reach(now)
        if at.leaving:
            self.held.go()
            at.do(KillRanks())
            return at.taken()
        at.leaving = True
        at.do(Say(f"{signal}: leaving"))
        at.send(LeavingFrame(why=f"it was told to leave ({signal})", planned=True))
        self.held.leave(at.settings.stop_grace_s, f"it left ({signal})", lambda: self._end(code, ""))
        return at.taken()

    def cannot_start(self, why: str, now: float) -> list[Order]:
        """Ranks cannot be started here: somebody else has to."""
        self.at.reach(now)
        self.at.send(LeavingFrame(why=f"it cannot start ranks: {why}"))
        self._end(EXIT_FAILED, f"cannot start ranks: {why}")
        return self.at.taken()

    def _end(self, code: int, why: str) -> None:
        if self.ended is None:
            self.ended = Exit(code, why)
            self.at.do(self.ended)

    # Health

    def checked(self, unfit: str | None, now: float) -> list[Order]:
        """The health check has run; a failed one is repeated until it passes."""
        self.at.reach(now)
        self.unfit = unfit or ""
        if unfit is None:
            self.at.send(FitFrame())
        else:
            self.at.do(Say(f"parked: {unfit}"))
            self.at.send(UnfitFrame(why=unfit))
            self.at.do(CheckOwnHealth(HEALTH_RETRY_S))
        return self.at.taken()


def ended_late(outcome: RunOutcome) -> str:
    """Return the last line of a worker that came after the run of its launch had ended."""
    again = "to run the program again, choose another --launch-id"
    return f"the run ended before this worker joined: {outcome.state}: {outcome.message}; {again}"


def _presented(at: Standing, current: InRound | None, holding: Holding | None, now: float) -> Presented:
    long = at.record is not None and len(at.record.seats) > PRESENTED_WHOLE
    record = at.record.outlined(at.member_id) if at.record is not None and long else at.record
    shown = Presented(
        record=record, outcome=at.outcome, electorate=at.electorate, holding=holding, incarnation=at.incarnation
    )
    if current is None:
        return shown
    return replace(
        shown,
        round=current.number,
        running=current.running,
        up=current.up,
        finished=current.finished,
        exits=current.reported(now),
        why=current.why_stopped,
    )
