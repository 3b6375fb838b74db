"""How ranks ended: what agents reported and what the platform says, whichever tells more."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from muster.core.training import exits, waits
from muster.core.training.admission import Grant
from muster.core.training.reconcile import EndRun, MarkDead, Plan, StartWorker, StopWorker, reconcile
from muster.core.training.status import Observed
from muster.core.world.run import Run, lose
from muster.types.training import Outcome, RankExit, Training, Uid
from muster.types.worker import Worker
from muster.types.world import Cause, Loss, RunOutcome
from muster.types.world import OutcomeState as State
from tests.core.builders import NOW as ROLL_NOW
from tests.core.builders import a_recall, a_run, an_exit, an_id, settle
from tests.training_builders import BIRTH, a_status, a_training

NOW = BIRTH + timedelta(minutes=10)
GRANT = Grant(9, True, "Admitted", "")


def a_worker(name: str, reason: str = "", code: int | None = None, *, ended: float | None = 5, **more: Any) -> Worker:
    over = NOW - timedelta(seconds=ended) if ended is not None else None
    return Worker(name, Uid("u"), f"node-of-{name}", BIRTH, ended_at=over, exit_code=code, reason=reason, **more)


def running(name: str) -> Worker:
    return a_worker(name, ended=None)


def seen(run: Run, *workers: Worker) -> Observed:
    return Observed(run, "because", False, workers, grant=GRANT)


def lost_one(*, at: float = ROLL_NOW, **exits_: Any) -> Run:
    """Rank 1 on w1 was lost at that time and rank 0 called back for it."""
    run = lose(a_run("w0 w1", min=2, max=2), an_id("w1"), at, "its connection closed")
    assert run.round is not None
    return replace(run, round=replace(run.round, recall=a_recall(Cause.LOSS), **exits_))


def ends(run: Run, *workers: Worker, state: str = "failed") -> dict[int, RankExit]:
    found = exits.collected(a_training("w", world=(2, 2, 2)), seen(run, *workers), state, NOW)
    return {end.rank: end for end in found}


def test_a_rank_that_died_with_its_worker_ended_as_the_platform_says() -> None:
    end = ends(lost_one(), running("w0"), a_worker("w1", "OOMKilled", 137))[1]
    assert (end.exit_code, end.termination_reason, end.signal) == (137, "OOMKilled", "SIGKILL")
    assert end.finished_at == NOW - timedelta(seconds=5) and end.node == "node-of-w1"
    assert str(end) == "rank 1: exit_code=137 reason=OOMKilled" and end.failed


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        (a_worker("w1", "NodeLost", None), (None, "NodeLost", None)),
        (a_worker("w1", "Evicted", 143), (143, "Evicted", "SIGTERM")),
        (a_worker("w1", "Error", 1), (1, "Error", None)),
        (a_worker("w1", "Error", 255), (255, "Error", "SIG127")),
        (a_worker("w1", "Preempted", 0), (None, "Preempted", None)),
        (a_worker("w1", "", 137), (None, "NodeLost", None)),
        (running("w1"), (None, "NodeLost", None)),
    ],
    ids=lambda value: f"{value.reason}-{value.exit_code}" if isinstance(value, Worker) else "",
)
def test_an_end_that_nobody_reported_is_as_well_known_as_the_platform_knows_it(
    worker: Worker, told: tuple[int | None, str, str | None]
) -> None:
    end = ends(lost_one(), running("w0"), worker)[1]
    assert (end.exit_code, end.termination_reason, end.signal) == told


def test_a_killed_rank_was_killed_for_memory_if_the_platform_says_so_of_its_worker() -> None:
    killed = {1: an_exit(1, 137, "w1", signal="SIGKILL")}
    assert ends(lost_one(exits=killed), a_worker("w1", "OOMKilled", 137))[1].termination_reason == "OOMKilled"
    assert ends(lost_one(exits=killed), a_worker("w1", "Error", 137))[1].termination_reason == "Signal SIGKILL"
    hung = {1: an_exit(1, 137, "w1", signal="SIGKILL", hung=True)}
    assert ends(lost_one(exits=hung), a_worker("w1", "OOMKilled", 137))[1].termination_reason == "HangDetected"


def test_what_a_rank_did_by_itself_is_not_overruled() -> None:
    own = {0: an_exit(0, 0, "w0"), 1: an_exit(1, 3, "w1")}
    found = ends(lost_one(exits=own), a_worker("w0", "Evicted", 143), a_worker("w1", "OOMKilled", 137))
    assert [found[rank].termination_reason for rank in (0, 1)] == ["Completed", "Exit 3"]


def test_ranks_of_an_evicted_worker_count_as_evicted_if_the_run_fails_and_it_was_the_first_to_leave() -> None:
    stopped = {rank: an_exit(rank, 143, f"w{rank}", signal="SIGTERM", stopped=True) for rank in (0, 1)}
    workers = (a_worker("w0", "Evicted", 143), a_worker("w1", "Evicted", 143))
    found = ends(lost_one(exits=stopped), *workers)
    assert (found[1].termination_reason, found[1].failed) == ("Evicted", True)
    assert (found[0].termination_reason, found[0].failed) == ("Stopped", False), "it was called back before"
    assert ends(lost_one(exits=stopped, losses=()), *workers)[1].termination_reason == "Stopped"
    late = (Loss(an_id("w1"), "w1", ROLL_NOW + 1, "left"),)
    assert ends(lost_one(exits=stopped, losses=late), *workers)[1].termination_reason == "Stopped"
    assert ends(lost_one(exits=stopped), *workers, state="cancelled")[1].termination_reason == "Cancelled"


# What a run fails for ------------------------------------------------------------------------------


def first(proposal: RunOutcome, run: Run, *workers: Worker) -> RankExit | None:
    return exits.first_failure(a_training("w", world=(2, 2, 2)), seen(run, *workers), proposal, NOW)


def test_the_first_failure_of_a_run_that_lost_its_workers_is_the_rank_that_the_platform_ended_first() -> None:
    below = RunOutcome(State.FAILED, "below_minimum", "too few")
    workers = (a_worker("w0", "NodeLost", ended=3), a_worker("w1", "OOMKilled", 137, ended=4))
    found = first(below, lost_one(), *workers)
    assert found is not None and str(found) == "rank 1: exit_code=137 reason=OOMKilled"
    assert first(below, lost_one(), running("w0"), running("w1")) is None, "nobody knows why yet"
    assert first(RunOutcome(State.FAILED, "deadline_exceeded", "late"), lost_one(), *workers) is None
    assert first(RunOutcome(State.CANCELLED, "cancelled", "asked"), lost_one(), *workers) is None


def test_the_first_failure_that_was_reported_is_told_with_the_platforms_reason() -> None:
    kill = an_exit(1, 137, "w1", signal="SIGKILL")
    found = first(RunOutcome(State.FAILED, "rank_failed", "x", 0, kill), lost_one(), a_worker("w1", "OOMKilled", 137))
    assert found is not None and found.termination_reason == "OOMKilled"


# Killed for memory, ranks and all ------------------------------------------------------------------


def look(training: Training, run: Run, *workers: Worker, now: datetime = NOW) -> Plan:
    return reconcile(training, seen(run, *workers), now)


def test_a_worker_killed_for_memory_costs_a_restart_and_fails_the_run_when_none_is_left() -> None:
    killed = a_worker("w-1", "OOMKilled", 137)
    spared = look(a_training("w", world=(2, 2, 2), max_restarts=1), a_run(max=2), running("w-0"), killed)
    assert spared.status.restarts == 1 and StartWorker("w-2") in spared.actions

    run = lose(a_run("w-0 w-1", min=2, max=2), an_id("w-1"), ROLL_NOW, "its connection closed")
    training = a_training("w", world=(2, 2, 2), max_restarts=0, status=a_status(world=(2, 2, 2)))
    plan = look(training, run, running("w-0"), killed)
    order = next(action for action in plan.actions if isinstance(action, EndRun))
    assert (order.state, order.reason) == (State.FAILED, "rank_failed")
    assert order.message == "OOMKilled (rank 1); worker w-1, round 0; 0 of 0 restarts used"
    assert not [action for action in plan.actions if isinstance(action, StartWorker)]

    ended, _ = settle(replace(run, ordered=RunOutcome(order.state, order.reason, order.message)), ROLL_NOW)
    stored = replace(training, status=look(training, ended, running("w-0"), killed).status)
    assert stored.status.outcome is not None
    assert str(stored.status.outcome.first_failure) == "rank 1: exit_code=137 reason=OOMKilled"
    late = NOW + timedelta(minutes=5)
    told = replace(seen(ended, a_worker("w-0", "", 0), killed), confirmed=True)
    over = replace(stored, status=reconcile(stored, told, late).status)
    assert over.status.phase == "failed"
    assert "rank 1: exit_code=137 reason=OOMKilled" in str(waits.failure(waits.Wait("result"), over))


def test_a_worker_killed_for_memory_outside_of_the_last_round_is_named_itself() -> None:
    killed = a_worker("w-7", "OOMKilled", 137)
    plan = look(a_training("w", world=(2, 2, 2), max_restarts=0), a_run("w-0 w-1", max=2), killed)
    order = next(action for action in plan.actions if isinstance(action, EndRun))
    assert order.message.startswith("worker w-7: exit_code=137 reason=OOMKilled")


def test_workers_killed_for_memory_together_are_one_incident_and_others_are_none() -> None:
    together = [a_worker("w-0", "OOMKilled", 137, ended=30), a_worker("w-1", "OOMKilled", 137, ended=29)]
    later = a_worker("w-2", "OOMKilled", 137, ended=20)
    left = a_worker("w-3", "OOMKilled", 0, ended=10)
    evicted = a_worker("w-4", "Evicted", 137, ended=9)
    found = Observed(workers=(later, *together, left, evicted, running("w-5"))).killed_for_memory
    assert [worker.name for worker in found] == ["w-0", "w-2"]


def test_a_run_that_stayed_below_its_minimum_says_whom_the_platform_let_wait() -> None:
    waiting = replace(running("w-1"), waiting="0/2 nodes are available")
    run = replace(a_run(max=2), outcome=RunOutcome(State.FAILED, "below_minimum", "below the minimum for 300 s"))
    plan = look(a_training("w", world=(2, 2, 2)), run, running("w-0"), waiting)
    outcome = plan.status.outcome
    assert isinstance(outcome, Outcome)
    assert outcome.message == "below the minimum for 300 s; w-1 waits: 0/2 nodes are available"


def test_a_worker_that_the_platform_lets_wait_goes_when_its_training_has_ended() -> None:
    """One that runs leaves by itself; in one that never ran there is nobody who would."""
    ended = a_training("w", status=a_status(phase="cancelled", finished_at=NOW), world=(2, 2, 2))
    waiting = replace(running("w-1"), waiting="0/2 nodes are available")
    stopping = replace(waiting, name="w-2", stopping=True)
    plan = reconcile(ended, Observed(None, "", True, (running("w-0"), waiting, stopping), grant=GRANT), NOW)
    assert [action.name for action in plan.actions if isinstance(action, StopWorker)] == ["w-1"]


def test_ranks_that_ended_with_their_worker_are_not_waited_for() -> None:
    """Only where the platform says that nothing is left, and nobody speaks for it any more."""
    training, dead = a_training("w", world=(2, 2, 2)), a_worker("w1", "Error", 137, cleared=True)

    def marked_dead(run: Run, worker: Worker) -> list[str]:
        plan = look(training, run, running("w0"), worker)
        return [name for action in plan.actions if isinstance(action, MarkDead) for name in action.names]

    assert marked_dead(lost_one(), dead) == ["w1"]
    assert marked_dead(lost_one(), replace(dead, cleared=False)) == []
    assert marked_dead(a_run("w0 w1", min=2, max=2), dead) == [], "what it reported last may still be on its way"
    assert marked_dead(lost_one(gone=frozenset({an_id("w1")})), dead) == []
