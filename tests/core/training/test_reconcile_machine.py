"""Random lives of one training: users, workers, crashes and time against a model of what must always hold."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st

from muster import errors
from muster.core.steady import TOGETHER
from muster.core.training import edits, lifecycle, metering, moments, waits
from muster.core.training.admission import Grant
from muster.core.training.reconcile import (
    CloseRun,
    Confirm,
    EndRun,
    LetGo,
    OpenRun,
    Remove,
    StartWorker,
    StopWorker,
    reconcile,
    world_outcome,
)
from muster.core.training.status import Observed
from muster.core.world import decisions, transitions
from muster.core.world import run as runs
from muster.types.event import FINISHED, TERMINAL_EDIT, WORKER_EXITED, WORKER_STARTED, Event
from muster.types.training import Status, Training, Uid
from muster.types.worker import Worker
from muster.types.world import Member, MemberId, RankEnd, Role, Round, RunOutcome

START = datetime(2026, 1, 1, tzinfo=UTC)
DEADLINE_S = 300.0


class TrainingLife(stateful.RuleBasedStateMachine):
    """The store, the backend and the coordinator in one; only decisions are the product's."""

    @stateful.initialize(
        least=st.integers(1, 2), more=st.integers(0, 1), room=st.integers(0, 2), spares=st.integers(0, 1)
    )
    def submit(self, least: int, more: int, room: int, spares: int) -> None:
        size = {"min": least, "target": least + more, "max": least + more + room}
        body = {
            "metadata": {"name": "demo"},
            "spec": {
                "script": "t.py",
                "worldSize": size,
                "spares": spares,
                "maxRestarts": 1,
                "activeDeadlineSeconds": DEADLINE_S,
            },
        }
        self.clock = 0.0
        self.ahead = timedelta()
        self.training = edits.created(
            body, namespace="default", now=self.now, uid=Uid("u"), actor="a", backends={"local"}
        ).training
        self.run: runs.Run | None = None
        self.kept: tuple[int, Round | None, int] | None = None
        self.confirmed = False
        self.workers: dict[str, Worker] = {}
        self.reports: dict[str, dict[int, dict[int, RankEnd]]] = {}  # what each worker knows: round → rank → end
        self.journal: list[Event] = []
        self.history: list[Status] = [self.training.status]
        self.removed = False

    @property
    def now(self) -> datetime:
        return START + timedelta(seconds=self.clock)

    # The control plane

    @stateful.rule()
    def look(self) -> None:
        if self.removed:
            return
        self.settle()
        grant = Grant(self.training.spec.world_size.target + self.training.spec.spares, True, "Admitted", "")
        seen = Observed(self.run, "because", self.confirmed, tuple(self.workers.values()), {}, grant, ahead=self.ahead)
        plan = reconcile(self.training, seen, self.now)
        for action in plan.actions:
            self.carry_out(action)
        if self.removed:
            return
        assert lifecycle.broken_rules(self.training.status, plan.status) == []
        if plan.status.phase in FINISHED and not self.training.is_terminal:
            self.check_exits(plan.status, seen)
        self.journal += [self.stamped(event) for event in plan.events]
        self.training = replace(self.training, status=plan.status)
        self.history.append(plan.status)

    @stateful.rule(times=st.integers(2, 6))
    def look_again(self, times: int) -> None:
        for _ in range(times):
            self.look()

    def carry_out(self, action: object) -> None:
        match action:
            case OpenRun(settings=wanted, target=target):
                opened = self.run or replace(transitions.open_run(wanted), holds_farewell=True)
                self.run = transitions.reconfigure(opened, wanted, target, self.clock)
            case StartWorker(name=name):
                assert not self.training.is_terminal, "no worker for a training that has ended"
                assert name not in self.workers, "a replacement has a new name"
                self.workers[name] = Worker(name, Uid("u"), "node", self.now)
                self.journal.append(self.stamped(Event(WORKER_STARTED, data={"worker": name, "gpus": 1})))
            case StopWorker(name=name):
                self.die(self.workers[name])
            case EndRun(state=state, reason=reason, message=message):
                assert self.run is not None
                self.run = transitions.order(self.run, RunOutcome(state, reason, message))
            case Confirm(outcome=outcome):
                assert self.run is not None and outcome == self.training.status.outcome, "stored before it is told"
                self.run, self.confirmed = transitions.confirm(self.run, world_outcome(outcome)), True
            case LetGo():
                assert self.training.is_terminal and self.run is not None, "members leave after the end is recorded"
                self.run = transitions.let_go(self.run)
                for worker in list(self.workers.values()):
                    self.die(worker)
            case CloseRun():
                self.run = None
            case Remove():
                assert self.training.is_terminal
                self.removed = True

    @stateful.rule(keeps_record=st.booleans())
    def crash(self, keeps_record: bool) -> None:
        """The control plane dies: the run is what was written of it, and workers come back one by one."""
        if self.run is None:
            return
        before = self.run
        if keeps_record and before.round is not None:
            known = before.round
            bare = Round(known.number, known.seats, exits=known.exits, finished=known.finished)
            self.run = transitions.restored(before.settings, before.target, before.restarts_used, bare, self.clock)
            self.run = replace(self.run, holds_farewell=before.holds_farewell)
        elif before.round is None and not self.training.is_terminal:
            self.run = None
        else:
            return
        self.confirmed = False

    def settle(self) -> None:
        for _ in range(50):
            if self.run is None:
                return
            self.run = transitions.tell_time(self.run, self.clock)
            decision = decisions.decide(self.run, self.clock)
            self.run = decisions.carry_out(self.run, decision.action, self.clock)
            if isinstance(decision.action, runs.Stay):
                return
        raise AssertionError("the run does not settle")

    # Workers

    def member(self, worker: Worker) -> Member | None:
        return self.run.members.get(MemberId(worker.name)) if self.run is not None else None

    @stateful.rule()
    def everybody_joins(self) -> None:
        for worker in self.workers.values():
            if self.run is None or not worker.alive or self.member(worker) is not None or self.run.farewell_said:
                continue
            joined = transitions.join(self.run, Member(MemberId(worker.name), worker.name, store_port=1), self.clock)
            assert isinstance(joined, runs.Run)
            self.run = joined
            if self.run.round is not None:
                self.tell_exits(worker, self.run.round)
        self.settle()

    def tell_exits(self, worker: Worker, current: Round) -> None:
        assert self.run is not None
        known = self.reports.get(worker.name, {}).get(current.number, {})
        ends = [(end, self.clock) for end in known.values()]
        self.run = transitions.exited(self.run, MemberId(worker.name), current.number, ends)
        if known and all(end.exit_code == 0 for end in known.values()):
            self.run = transitions.finished(self.run, MemberId(worker.name), current.number)
        elif known:
            self.run = transitions.stopped(self.run, MemberId(worker.name), current.number, 1, self.clock)
        else:
            self.run = transitions.up(self.run, MemberId(worker.name), current.number, self.clock)

    @stateful.rule()
    def ranks_come_up(self) -> None:
        if self.run is not None and (current := self.run.running) is not None:
            for seat in current.seats:
                self.run = transitions.up(self.run, seat.member_id, current.number, self.clock)
            self.settle()

    @stateful.rule(which=st.integers(0, 3), code=st.sampled_from([0, 0, 0, 1, 137]))
    def a_rank_exits(self, which: int, code: int) -> None:
        if self.run is None or (current := self.run.running) is None:
            return
        seat = current.seats[which % len(current.seats)]
        self.end_rank(seat.name, current, seat.rank, code, stopped=False)

    def end_rank(self, name: str, current: Round, rank: int, code: int, *, stopped: bool) -> None:
        worker = self.workers[name]
        if not worker.alive or self.member(worker) is None or self.run is None:
            return
        known = self.reports.setdefault(name, {}).setdefault(current.number, {})
        known.setdefault(rank, RankEnd(rank, code, name, round=current.number, stopped=stopped))
        self.tell_exits(worker, current)

    @stateful.rule()
    def what_was_told_to_stop_stops(self) -> None:
        """Ranks of a recalled round, or all ranks once the outcome was told; then their worker acknowledges."""
        if self.run is None or self.run.round is None:
            return
        current = self.run.round
        told = self.run.outcome is not None and self.confirmed
        if not told and current.recall is None:
            return
        for seat in current.seats:
            self.end_rank(seat.name, current, seat.rank, 143, stopped=True)
            self.run = transitions.gone(self.run, seat.member_id, current.number)
        if told:
            for member_id in self.run.members:
                self.run = transitions.acknowledge(self.run, member_id)
        self.settle()

    @stateful.rule(which=st.integers(0, 5), reason=st.sampled_from(["", "", "OOMKilled", "NodeLost", "Error"]))
    def a_worker_dies(self, which: int, reason: str) -> None:
        alive = [worker for worker in self.workers.values() if worker.alive]
        if alive:
            self.die(alive[which % len(alive)], reason)

    def die(self, worker: Worker, reason: str = "") -> None:
        if not worker.alive:
            return
        self.workers[worker.name] = replace(worker, ended_at=self.now, exit_code=137, reason=reason)
        self.journal.append(self.stamped(Event(WORKER_EXITED, data={"worker": worker.name})))
        if self.run is not None:
            self.run = transitions.disconnected(self.run, MemberId(worker.name), self.clock)

    # Users and time

    @stateful.rule(size=st.integers(1, 5))
    def scale(self, size: int) -> None:
        terminal = self.training.is_terminal
        try:
            self.edit(edits.scaled(self.training, size, actor="a"))
        except errors.UDTerminalState:
            assert terminal
        except errors.WorldSizeOutOfBounds:
            bounds = self.training.spec.world_size
            assert not bounds.min <= size <= bounds.max

    @stateful.rule(rarely=st.integers(0, 5))
    def cancel(self, rarely: int) -> None:
        if rarely == 0:
            self.edit(edits.cancelled(self.training, None, now=self.now, actor="a"))

    @stateful.rule(rarely=st.integers(0, 9))
    def delete(self, rarely: int) -> None:
        if rarely == 0:
            self.edit(edits.deleted(self.training, now=self.now, actor="a"))

    def edit(self, edit: edits.Edit) -> None:
        assert edit.training.generation >= self.training.generation
        assert edit.training.status == self.training.status, "requests write the spec only"
        self.training = edit.training

    @stateful.precondition(lambda self: self.training.is_terminal and not self.removed)
    @stateful.rule()
    def someone_edits_around_the_api(self) -> None:
        before = sum(event.reason == TERMINAL_EDIT for event in self.journal)
        size = replace(self.training.spec.world_size, max=50, target=50)
        spec = replace(self.training.spec, world_size=size)
        metadata = replace(self.training.metadata, generation=self.training.generation + 1)
        self.training = replace(self.training, spec=spec, metadata=metadata)
        self.look()
        self.look()
        after = sum(event.reason == TERMINAL_EDIT for event in self.journal)
        assert self.removed or after == before + 1

    @stateful.rule(by=st.sampled_from([0.1, 1.0, 3.0, 30.0]))
    def time_passes(self, by: float) -> None:
        self.clock += by
        if self.run is not None:  # whoever lives renews its lease
            alive = {MemberId(worker.name): self.clock for worker in self.workers.values() if worker.alive}
            self.run = transitions.renew(self.run, {key: at for key, at in alive.items() if key in self.run.members})
            self.settle()

    def stamped(self, event: Event) -> Event:
        shown = self.now + self.ahead
        data = {**event.data, **metering.when(shown, self.now)}
        return replace(
            event, at=shown, data=data, namespace="default", training="demo", uid="u", id=len(self.journal) + 1
        )

    @stateful.rule(days=st.floats(-400, 400))
    def somebody_sets_the_time_of_day(self, days: float) -> None:
        self.ahead += timedelta(days=days)

    # What must hold

    def check_exits(self, status: Status, seen: Observed) -> None:
        """One exit per rank of the last round, and nothing that a present worker reported is lost."""
        exits = {one.rank: one for one in status.rank_exits or ()}
        last = seen.last_round
        if last is None:
            assert sorted(exits) == sorted(rank.rank for rank in self.training.status.ranks)
            return
        assert sorted(exits) == list(range(last.rank_count))
        for rank, end in last.exits.items():
            assert exits[rank].exit_code == end.exit_code
            assert exits[rank].failed == end.failed or status.phase == "cancelled"
        for rank, one in exits.items():
            known = self.workers[one.worker].reason
            assert rank in last.exits or one.termination_reason == (known or "NodeLost")

    @stateful.invariant()
    def terminal_phases_stay_and_generations_grow(self) -> None:
        if len(getattr(self, "history", [])) < 2:
            return
        before, after = self.history[-2:]
        assert after.observed_generation >= before.observed_generation
        assert after.observed_generation <= self.training.generation
        if before.phase in FINISHED:
            assert (after.phase, after.rank_exits, after.outcome) == (before.phase, before.rank_exits, before.outcome)
        assert (after.rank_exits is None) == (after.phase not in FINISHED)
        if after.phase == "succeeded":
            assert all(one.exit_code == 0 for one in after.rank_exits or ())

    @stateful.invariant()
    def a_wait_is_never_true_early(self) -> None:
        if not hasattr(self, "training"):
            return
        verdict = waits.judge(waits.Wait("target"), self.training, waits.Look(at=0.0))
        if isinstance(verdict, waits.Done) and not self.training.is_terminal:
            status, target = self.training.status, self.training.spec.world_size.target
            assert status.observed_generation == self.training.generation
            assert status.world_size.ready == target
            assert {rank.worker for rank in status.ranks} <= set(self.workers)
            assert len(status.ranks) == target

    @stateful.invariant()
    def every_interval_opens_once_and_closes_once(self) -> None:
        if not getattr(self, "journal", None):
            return
        found = metering.intervals(self.journal, self.now)
        assert sorted(one.worker for one in found) == sorted(self.workers)
        if self.training.is_terminal:
            assert all(one.until is not None for one in found)
        for one in found:
            assert one.until is None or one.until >= one.since
        lives = [(worker.ended_at or self.now) - worker.started_at for worker in self.workers.values()]
        if self.training.is_terminal:
            return  # the end closes what is open, sooner than workers leave
        [usage] = metering.totals(found, now=self.now)
        assert abs(usage.worker_seconds - sum(lives, timedelta()).total_seconds()) < len(lives)

    @stateful.invariant()
    def a_deadline_is_over_when_so_much_time_has_gone_by(self) -> None:
        if not getattr(self, "history", None):
            return
        outcome, began = self.training.status.outcome, moments.started(self.training.status)
        if outcome is not None and outcome.reason == "deadline_exceeded":
            decided = moments.decided(self.training.status) or moments.finished(self.training.status)
            assert began is not None and decided is not None
            assert (decided - began).total_seconds() > DEADLINE_S - 2 * TOGETHER.total_seconds()

    @stateful.invariant()
    def members_are_told_only_what_is_stored(self) -> None:
        if getattr(self, "confirmed", False):
            assert self.training.status.outcome is not None
        for member in self.run.members.values() if getattr(self, "run", None) is not None and self.run else ():
            assert member.role is not Role.LEAVING or not self.training.is_terminal or self.confirmed


@pytest.mark.parametrize("lives", [100, pytest.param(3_000, marks=pytest.mark.soak)])
def test_random_lives_of_a_training_keep_every_rule(lives: int) -> None:
    limits = settings(max_examples=lives, stateful_step_count=50, deadline=None)
    stateful.run_state_machine_as_test(TrainingLife, settings=limits)


def test_an_unobserved_training_is_told_apart_from_one_that_is_below_its_minimum() -> None:
    fresh = edits.created(
        {"metadata": {"name": "demo"}, "spec": {"script": "t.py"}},
        namespace="default",
        now=START,
        uid=Uid("u"),
        actor="a",
        backends={"local"},
    ).training
    assert isinstance(fresh, Training)
    plan = reconcile(fresh, Observed(grant=Grant(0, False, "InsufficientGPUs", "needs 2 GPUs")), START)
    assert plan.actions == () and plan.status.phase == "pending"
    admitted = plan.status.condition("Admitted")
    assert admitted is not None and (admitted.status, admitted.message) == ("False", "needs 2 GPUs")
