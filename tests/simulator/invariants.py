"""Is everything that must always hold still so? Looked at after every event of a simulation.

It sees more than any part of the real system: every rank that is alive anywhere, every decision, every record that
was kept. A promise that is broken raises `Broken` at the event that broke it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from muster.core.world.run import CallBack, Decision, Dismiss, Farewell, Finish, GiveUpOn, Release, Run, Stay
from muster.types.frames import RunRecord
from muster.types.run_event import RunEvent
from muster.types.world import Cause, MemberId, OutcomeState, Role, Round, RunOutcome, Seat
from tests.simulator.clock import VirtualClock
from tests.simulator.coordinator import SimulatedCoordinator
from tests.simulator.machine import Census, SimulatedRank

if TYPE_CHECKING:
    from tests.simulator.worker import SimulatedWorker

MOST_DECISIONS = 40  # that one moment may need


class Broken(AssertionError):
    """A promise of the world does not hold."""


class Checker:
    def __init__(self, clock: VirtualClock, census: Census, coordinator: SimulatedCoordinator) -> None:
        self._clock = clock
        self._census = census
        self._coordinator = coordinator
        self._seen: Run | None = None
        self._round: Round | None = None
        self._highest = -1
        self._started: dict[tuple[int, int], MemberId] = {}
        self._ever: set[tuple[int, int]] = set()
        self._outcome: RunOutcome | None = None
        self._told: RunOutcome | None = None
        self._earlier: list[RunOutcome] = []
        self._moment = -1.0
        self._decisions = 0
        self._fences: set[tuple[int, MemberId, float]] = set()
        self.on_event: Callable[[RunEvent], None] | None = None
        self.chargeable: set[int] = set()  # rounds in which something happened that may cost a restart

    def watch(self, coordinator: SimulatedCoordinator) -> None:
        """All that it decides and keeps."""
        coordinator.on_decision, coordinator.on_saved = self.decided, self.saved
        coordinator.on_event, coordinator.on_opened = self.on_event, self.next_run
        if coordinator.leading is not None:
            coordinator.leading.on_decision, coordinator.leading.at.on_event = self.decided, self.on_event

    def _demand(self, kept: bool, what: str) -> None:
        if not kept:
            raise Broken(f"at {self._clock.now:.4f} s: {what}")

    def next_run(self) -> None:
        """A new launch begins: nothing of the last run is left, and its outcome stays as it is."""
        alive = sorted(rank.machine.name for ranks in self._census.alive.values() for rank in ranks)
        self._demand(not alive, f"the next run begins while ranks of the last one run on {alive}")
        self._demand(self._outcome is not None, "the next run begins, and the last one has not ended")
        self._earlier += [self._outcome] if self._outcome is not None else []
        self._outcome = self._told = None
        self.forget(-1)
        self._ever.clear()

    # After every event

    def after_event(self) -> None:
        run = self._coordinator.protocol.run
        if run is self._seen or run is None:
            return
        self._seen = run
        if run.outcome is not None:
            self._same_outcome(run.outcome)
        names = [member.name for member in run.members.values()]
        self._demand(len(set(names)) == len(names), f"two members bear one name: {sorted(names)}")
        self._demand(run.restarts_used <= run.settings.max_restarts, "more restarts than allowed")
        if run.round is not None and run.round is not self._round and run.round.recall is None:
            self._well_seated(run, run.round)
        if run.round is not None and run.round is not self._round:
            self._kept_before_told(run.round.number)
            self._look_behind_fences(run.round)
        self._round = run.round

    def _kept_before_told(self, number: int) -> None:
        """What is still to be kept has been told to nobody."""
        if self._coordinator.alive and not self._coordinator.protocol.at.unsaved:
            kept = self._coordinator.saved
            self._demand(kept is not None and kept.round >= number, f"round {number} is told before it is kept")

    def _look_behind_fences(self, current: Round) -> None:
        for member_id, until in current.fences.items():
            fence = (current.number, member_id, until)
            if fence not in self._fences:
                self._fences.add(fence)
                self._clock.at(until, self._fenced_off, current.number, member_id)

    def _fenced_off(self, number: int, member_id: MemberId) -> None:
        """The coordinator may have died meanwhile and know nothing of the fence, or have been told to wait longer."""
        run = self._coordinator.protocol.run
        if run is not None and run.round is not None and run.round.number == number:
            self._demand(
                run.round.fences.get(member_id, math.inf) > self._clock.now or not self._ranks_of(member_id),
                f"ranks of round {number} on {member_id} are behind their fence and still run",
            )

    def _ranks_of(self, member_id: MemberId) -> list[SimulatedRank]:
        return [rank for ranks in self._census.alive.values() for rank in ranks if rank.member_id == member_id]

    def _well_seated(self, run: Run, current: Round) -> None:
        for seat in current.seats:
            member = run.members.get(seat.member_id)
            if member is not None and member.role is Role.ACTIVE:
                self._demand(member.rank == seat.rank, f"{seat.name} has rank {member.rank}, its seat {seat.rank}")
        active = sum(member.role is Role.ACTIVE for member in run.members.values())
        self._demand(active <= current.world_size, "more members are active than there are seats")

    def _same_outcome(self, outcome: RunOutcome) -> None:
        if outcome is self._told:
            return
        self._told, plain = outcome, replace(outcome, finished_at=0.0)
        if self._outcome is None:
            self._outcome = plain
        self._demand(plain == self._outcome, f"the outcome changed from {self._outcome} to {plain}")

    # Ranks

    def rank_started(self, rank: SimulatedRank) -> None:
        for number, ranks in self._census.alive.items():
            if number != rank.round:
                where = ", ".join(sorted(f"rank {one.rank} on {one.machine.name}" for one in ranks))
                self._demand(False, f"a rank of round {rank.round} starts while round {number} trains ({where})")
        key = (rank.round, rank.rank)
        before = self._started.setdefault(key, rank.member_id)
        self._demand(before == rank.member_id, f"rank {rank.rank} of round {rank.round} started on two members")
        alive = self._census.alive.get(rank.round, ()) if key in self._ever else ()  # none is alive that never started
        twins = [one for one in alive if one.rank == rank.rank]
        self._ever.add(key)
        self._demand(not twins, f"rank {rank.rank} of round {rank.round} runs twice")
        self._demand(not self._counts_as_gone(rank), f"rank {rank.rank} of round {rank.round} starts when it is over")

    def _counts_as_gone(self, rank: SimulatedRank) -> bool:
        """Whether the coordinator believes that no rank of that round is left there, and none will start."""
        run = self._coordinator.protocol.run
        if not self._coordinator.alive or run is None or run.round is None or run.recovery_until is not None:
            return False
        last = run.round
        if last.number == rank.round:
            fenced = last.fences.get(rank.member_id, math.inf) <= self._clock.now
            return fenced or rank.member_id in last.gone
        return last.number > rank.round

    # Decisions

    def decided(self, before: Run, decision: Decision, after: Run) -> None:
        self._demand(bool(decision.reason.strip()), f"{decision.action} has no reason")
        self._count()
        match decision.action:
            case Stay():
                self._demand(decision.wake_at > self._clock.now, f"asks again at once for ever: {decision.reason}")
            case Release(round=formed):
                self._released(before, formed, after)
            case Finish(outcome=outcome):
                self._ended(before, outcome)
            case CallBack(recall=recall):
                self._demand(bool(recall.reason.strip()), "a round is called back without a reason")
            case Dismiss(members=ids):
                lent = [before.members[one].name for one in ids if before.members[one].name in before.lent]
                self._demand(not lent, f"{lent} are lent and sent home")
            case Farewell():
                busy = [rank for member_id in before.members for rank in self._ranks_of(member_id)]
                self._demand(not busy, "farewell while ranks of members run")
            case GiveUpOn(members=seats):
                waited = before.recovery_until is not None and self._clock.now >= before.recovery_until
                confirmed = before.round is not None and {seat.member_id for seat in seats} <= before.round.gone
                self._demand(waited or confirmed, "gave up on members too early")

    def _count(self) -> None:
        if self._moment != self._clock.now:
            self._moment, self._decisions = self._clock.now, 0
        self._decisions += 1
        self._demand(self._decisions < MOST_DECISIONS, "decisions do not end")

    def _released(self, before: Run, formed: Round, after: Run) -> None:
        settings = before.settings
        seats = formed.seats
        self._demand([seat.rank for seat in seats] == list(range(len(seats))), "ranks are not contiguous")
        self._demand(len({seat.member_id for seat in seats}) == len(seats), "a member has two seats")
        size = len(seats)
        if settings.gate_timeout_s is not None:
            self._demand(before.coming is not None and before.coming.is_open, "released before the mesh gate opened")
        self._demand(settings.min <= size <= settings.max, f"a world of {size}, not {settings.min} to {settings.max}")
        self._demand(size <= before.aim, f"a world of {size} with target {before.target}, aiming at {before.aim}")
        self._demand(formed.number > self._highest, f"round {formed.number} after round {self._highest}")
        self._demand(formed.store_port > 0, "rank 0 listens nowhere")
        self._demand(before.outcome is None, "a round after the outcome")
        self._demand(bool(formed.why), "a round without a reason")
        self._highest = formed.number
        lent = [seat.name for seat in seats if seat.name in before.lent]
        self._demand(not lent, f"{lent} are lent and get a rank")
        if settings.segment is not None:
            self._whole_segments(formed, settings.segment)
        if before.round is not None:
            self._survivors_keep_ranks(before, before.round, formed)
            self._only_lent_ones_go(before, before.round, formed)
            charged = after.restarts_used - before.restarts_used
            fair = not charged or before.round.number in self.chargeable
            self._demand(fair, f"a restart was charged for round {before.round.number}, which only lost members")

    def _whole_segments(self, formed: Round, segment: int) -> None:
        for start in range(0, formed.world_size, segment):
            part = formed.seats[start : start + segment]
            whole = len(part) == segment and len({seat.domain for seat in part}) == 1
            self._demand(whole, f"segment at rank {start} is not whole: {[seat.domain for seat in part]}")

    def _survivors_keep_ranks(self, before: Run, last: Round, formed: Round) -> None:
        size = before.settings.segment or 1
        kept: list[tuple[int, int]] = []
        for start in range(0, last.world_size, size):
            part = last.seats[start : start + size]
            stayed = [seat for seat in part if _stays(before, seat)]
            if len(stayed) == len(part):
                again = [(seat.rank, found.rank) for seat in part if (found := formed.seat_of(seat.member_id))]
                kept += again
        if formed.world_size >= last.world_size:
            moved = [pair for pair in kept if pair[0] != pair[1]]
            self._demand(not moved, f"survivors changed ranks though the world did not shrink: {moved}")
        order = [new for _, new in kept]
        self._demand(order == sorted(order), f"survivors changed their order: {kept}")

    def _only_lent_ones_go(self, before: Run, last: Round, formed: Round) -> None:
        """Where nobody was lost, and there is room for all that are not lent."""
        others = [seat for seat in last.seats if seat.name not in before.lent]
        planned = last.recall is not None and last.recall.cause is Cause.SHRINK and last.first_failed_at is None
        if before.settings.segment is None and planned and len(others) <= before.aim:
            gone = [seat.name for seat in others if _stays(before, seat) and not formed.seat_of(seat.member_id)]
            self._demand(not gone, f"{gone} have to go, though others are lent")

    def _ended(self, before: Run, outcome: RunOutcome) -> None:
        self._demand(before.outcome is None, "a second outcome")
        self._demand(bool(outcome.message), "an outcome without a message")
        if outcome.state is OutcomeState.FAILED and outcome.reason in ("rank_failed", "hang"):
            spent = before.restarts_used >= before.settings.max_restarts
            self._demand(spent, "failed before the restarts were spent")
            assert before.round is not None
            fair = before.round.number in self.chargeable
            self._demand(fair, f"failed for round {before.round.number}, which only lost members")
        if outcome.reason == "below_minimum" and before.settings.segment is None:
            able = (Role.ACTIVE, Role.SPARE)
            here = [one for one in before.members.values() if one.role in able and one.name not in before.lent]
            self._demand(len(here) < before.settings.min, "below the minimum, with enough that are not lent")

    # Records and members

    def saved(self, record: RunRecord) -> None:
        if record.outcome is not None:
            self._same_outcome(record.outcome)

    def agent_ended(self, agent: SimulatedWorker) -> None:
        if agent.outcome is not None:
            if replace(agent.outcome, finished_at=0.0, first_failure=None) not in self._short_earlier():
                self._same_outcome(agent.outcome)
            if agent.code is not None and agent.outcome.state is OutcomeState.SUCCEEDED and not agent.leaving:
                self._demand(agent.code == 0, f"{agent.name} ends with {agent.code} though the run succeeded")

        if agent.code == 0 and agent.state.late is False and not agent.leaving:
            self._demand(agent.state.at.joined, f"{agent.name} ends with 0 and was never a member")

    def _short_earlier(self) -> list[RunOutcome]:
        return [replace(outcome, first_failure=None) for outcome in self._earlier]

    def lease_renewed(self, agent: SimulatedWorker) -> None:
        """A lease must be over for the member no later than for the coordinator."""
        protocol, me = self._coordinator.protocol, agent.member_id
        if not self._coordinator.alive or protocol.run is None or protocol.run.outcome is not None:
            return  # once it has ended, nobody is let in as a member who has no ranks
        if (member := protocol.run.members.get(me)) is None:
            return
        heard = max(protocol.at.heard.get(me, 0.0), member.lease_until - protocol.run.settings.lease_s)
        since = agent.state.at.lease.since
        self._demand(since <= heard + 1e-9, f"{agent.name} counts its lease from {since:.4f}, heard at {heard:.4f}")

    def ranks_stopped(self, agent: SimulatedWorker) -> None:
        """Only silence ends ranks, not the death of the coordinator where anybody can see it."""
        silent = agent.round is not None and "silent" in agent.round.why_stopped
        unhurt = agent.machine.name not in agent.network.was_cut and not agent.process.was_stopped
        seen = not self._coordinator.alive and self._clock.now > self._coordinator.died_at + 0.5
        self._demand(not (silent and unhurt and seen), f"{agent.name} ends ranks though the coordinator is dead")

    def guard_acts(self, agent: SimulatedWorker) -> None:
        """A guard is for agents that cannot end their ranks themselves."""
        kept = [rank for rank in agent.machine.ranks if not rank.killed]
        able = agent.alive and not agent.process.stopped and agent.outcome is None
        self._demand(not (kept and able), f"the guard of {agent.name} had to end ranks that its agent kept")

    def forget(self, highest: int) -> None:
        """The record was lost with the coordinator: rounds that nobody can present were never known."""
        self._highest = highest
        self._started = {key: value for key, value in self._started.items() if key[0] <= highest}


def _stays(run: Run, seat: Seat) -> bool:
    """Whether its worker is here, and may keep it."""
    member = run.members.get(seat.member_id)
    return member is not None and member.role is Role.ACTIVE and member.name not in run.lent
