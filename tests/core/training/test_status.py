"""What a status says while workers wait for somebody else, and of a spec from which nothing can follow."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.cli.trainings import reason_of
from muster.core.training import explain, lifecycle
from muster.core.training import status as statuses
from muster.core.training.admission import Grant, suspended
from muster.core.training.reconcile import EndRun, OpenRun, Place, Plan, StartWorker, StopWorker, reconcile, settings_of
from muster.core.training.status import Observed
from muster.core.world.pace import Stall
from muster.core.world.run import Run
from muster.core.world.safe_state import Kept
from muster.core.world.transitions import does
from muster.types.bench import Bench
from muster.types.event import TERMINAL_EDIT
from muster.types.state import KeptState
from muster.types.training import (
    QUEUE,
    Cancel,
    Condition,
    Mesh,
    Metadata,
    Resources,
    Spec,
    Training,
    Uid,
    WorldSize,
    problems_of,
)
from muster.types.worker import Worker
from muster.types.world import NEVER_S, Spot
from tests.core.builders import a_run, an_id
from tests.training_builders import BIRTH, a_status, a_training

NOW = BIRTH + timedelta(minutes=10)
GRANT = Grant(9, True, "Admitted", "the cluster places its workers")
FULL = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


def a_worker(name: str, waiting: str = "", *, since: float = 60) -> Worker:
    return Worker(name, Uid("u"), "node", NOW - timedelta(seconds=since), waiting=waiting)


def seen(*workers: Worker, run: Run | None = None, **more: Any) -> Observed:
    return Observed(run, "the coordinator's reason", False, workers, **{"grant": GRANT, **more})


def condition(plan: Plan, kind: str) -> Condition:
    found = plan.status.condition(kind)
    assert found is not None
    return found


def after(training: Training, plan: Plan) -> Training:
    return replace(training, status=plan.status)


def named(plan: Plan, reason: str) -> list[str]:
    return [event.message for event in plan.events if event.reason == reason]


# Waiting for the platform --------------------------------------------------------------------------


def test_the_conditions_say_what_workers_wait_for() -> None:
    training = a_training(world=(2, 3, 3))
    plan = reconcile(training, seen(a_worker("demo-0"), a_worker("demo-1", FULL), a_worker("demo-2", FULL)), NOW)
    why = f"demo-1, demo-2 wait: {FULL}"
    assert condition(plan, "TargetReached").message == f"0 of 3 ready: {why}"
    assert condition(plan, "TargetReached").reason == statuses.WAITING
    assert condition(plan, "BelowMinimum").message == why
    assert not [action for action in plan.actions if isinstance(action, StartWorker | StopWorker)], "it is not absent"
    told = explain.explain(after(training, plan), (), NOW)
    assert FULL in told.summary


def test_a_condition_that_those_who_wait_are_not_to_blame_for_does_not_name_them() -> None:
    spare = a_worker("demo-2", FULL)
    run = a_run("demo-0 demo-1", min=2, max=2)
    plan = reconcile(a_training(world=(2, 2, 2), spares=1), seen(a_worker("demo-0"), a_worker("demo-1"), spare), NOW)
    assert "waits" not in condition(plan, "TargetReached").message
    world = seen(a_worker("demo-0"), a_worker("demo-1"), spare, run=run)
    assert named(reconcile(a_training(world=(2, 2, 2), spares=1), world, NOW), "WorkerWaiting") == []


def test_different_causes_are_told_apart_and_long_ones_cut() -> None:
    workers = [a_worker(f"demo-{index}", f"cause {index} " + "x" * 1000) for index in range(6)]
    told = statuses.waits(seen(*workers))
    assert told.startswith("demo-0 waits: cause 0 x") and "demo-2 waits: cause 2" in told
    assert "demo-3" not in told and len(told) < 1500


def test_each_cause_is_news_once() -> None:
    training = a_training(world=(2, 2, 2))
    waiting = seen(a_worker("demo-0", FULL), a_worker("demo-1", FULL))
    plan = reconcile(training, waiting, NOW)
    assert named(plan, "WorkerWaiting") == [f"demo-0, demo-1: {FULL}"]
    for workers in (waiting, seen(a_worker("demo-0"), a_worker("demo-1", FULL))):
        training = after(training, plan)
        plan = reconcile(training, workers, NOW)
        assert named(plan, "WorkerWaiting") == []
    training = after(training, plan)
    plan = reconcile(training, seen(a_worker("demo-0"), a_worker("demo-1", "ImagePullBackOff")), NOW)
    assert named(plan, "WorkerWaiting") == ["demo-1: ImagePullBackOff"]


def test_a_worker_that_is_only_being_started_is_no_news_before_it_has_waited_a_while() -> None:
    training = a_training(world=(1, 1, 1))
    waiting = seen(a_worker("demo-0", "ContainerCreating", since=1))
    plan = reconcile(training, waiting, NOW)
    assert named(plan, "WorkerWaiting") == []
    assert "demo-0 waits: ContainerCreating" in condition(plan, "TargetReached").message
    assert plan.wake_at == NOW + timedelta(seconds=2)
    plan = reconcile(after(training, plan), waiting, plan.wake_at)
    assert named(plan, "WorkerWaiting") == ["demo-0: ContainerCreating"] and plan.wake_at is None


def test_of_too_many_workers_those_go_first_that_do_not_run_yet() -> None:
    workers = (a_worker("demo-0"), a_worker("demo-1", FULL), a_worker("demo-2", FULL))
    plan = reconcile(a_training(world=(1, 2, 3)), seen(*workers, run=a_run("demo-0", min=1, max=3)), NOW)
    assert [action.name for action in plan.actions if isinstance(action, StopWorker)] == ["demo-2"]


# Where it runs -------------------------------------------------------------------------------------


def test_the_coordinator_is_told_where_workers_are_rack_by_rack() -> None:
    def at(name: str, domain: str | None, node: str) -> Worker:
        return replace(a_worker(name), domain=domain, node=node)

    workers = (
        at("demo-0", "r10", "n1"),
        at("demo-1", "r2", "n9"),
        at("demo-2", "", "n3"),
        at("demo-3", None, ""),
        at("demo-4", "r2", "n10"),
        replace(at("demo-5", "r2", "n8"), ended_at=NOW),
    )
    training = a_training(world=(2, 4, 6), topology_key="rack", segment=2)
    run = a_run(waiting="demo-0 demo-1", min=2, max=6)
    told = [one for one in reconcile(training, seen(*workers, run=run), NOW).actions if isinstance(one, Place)]
    spots = {"demo-1": Spot("r2", 0), "demo-4": Spot("r2", 1), "demo-0": Spot("r10", 2), "demo-2": Spot(None, 3)}
    assert told == [Place(spots)]
    again = reconcile(training, seen(*workers, run=replace(run, spots=spots)), NOW).actions
    assert not [one for one in again if isinstance(one, Place)]


def test_who_knows_its_place_itself_is_told_nothing() -> None:
    plan = reconcile(a_training(segment=1), seen(a_worker("demo-0"), run=a_run(waiting="demo-0")), NOW)
    assert not [one for one in plan.actions if isinstance(one, Place)]
    (opened,) = [one for one in plan.actions if isinstance(one, OpenRun)]
    assert opened.settings.segment == 1


def test_a_field_is_ignored_only_where_it_has_no_effect() -> None:
    training = a_training(image="train:1")
    assert named(reconcile(training, seen(), NOW), "FieldIgnored") == [
        "spec.image has no effect on the local backend in this version"
    ]
    assert named(reconcile(training, seen(backend="kube"), NOW), "FieldIgnored") == []


# Suspended -----------------------------------------------------------------------------------------


def test_a_suspended_training_sends_its_workers_away_and_misses_nobody() -> None:
    training = a_training(suspend=True, world=(1, 2, 3), active_deadline_seconds=1, labels={QUEUE: "team"})
    training = replace(training, status=a_status(phase="ready", world=(1, 2, 3), started_at=BIRTH))
    workers = (a_worker("demo-0"), a_worker("demo-1", FULL), replace(a_worker("demo-2"), stopping=True))
    run = a_run("demo-0", min=1, max=3)
    plan = reconcile(training, seen(*workers, run=run, grant=suspended(training)), NOW)
    assert [one.name for one in plan.actions if isinstance(one, StopWorker)] == ["demo-0", "demo-1"]
    assert [one.settings.below_min_timeout_s for one in plan.actions if isinstance(one, OpenRun)] == [NEVER_S]
    assert not [one for one in plan.actions if isinstance(one, StartWorker | EndRun)], "its deadline is not looked at"
    assert plan.status.phase == "pending" and condition(plan, "Admitted").reason == "Suspended"
    assert "it waits for the queue 'team' to admit it" in condition(plan, "TargetReached").message
    assert [event.type for event in plan.events if event.reason == "Suspended"] == ["Normal"]
    again = reconcile(after(training, plan), seen(grant=suspended(training)), NOW)
    assert again.actions == () and again.events == ()


def test_a_suspended_training_can_be_cancelled_and_one_that_is_invalid_goes_on_as_it_was() -> None:
    training = a_training(suspend=True, cancel=Cancel(NOW))
    run = a_run("demo-0")
    plan = reconcile(training, seen(a_worker("demo-0"), run=run, grant=suspended(training)), NOW)
    assert [type(one) for one in plan.actions] == [OpenRun, EndRun]
    invalid = a_training(suspend=True, **TOO_SMALL)
    assert reconcile(invalid, seen(a_worker("demo-0"), run=run, grant=suspended(invalid)), NOW).actions == ()


# Deadlines -----------------------------------------------------------------------------------------

FULL_HOUSE = Grant(0, False, "NotEnoughGpus", "it needs 8 GPUs, and 2 are free")


def test_a_deadline_ends_what_waits_and_says_for_what() -> None:
    training = a_training(active_deadline_seconds=60)
    first = reconcile(training, seen(grant=FULL_HOUSE), NOW)
    assert first.status.outcome is None, "nobody was there to look at it for ten minutes"
    training, late = after(training, first), NOW + timedelta(seconds=60)
    early = reconcile(training, seen(grant=FULL_HOUSE), late - timedelta(seconds=1))
    assert early.status.outcome is None and early.wake_at == first.wake_at == late
    over = reconcile(training, seen(grant=FULL_HOUSE), late)
    assert over.status.phase == "failed" and over.status.outcome is not None
    assert (over.status.outcome.reason, over.status.outcome.message) == (
        "deadline_exceeded",
        "it did not begin within its deadline of 60 s: it needs 8 GPUs, and 2 are free",
    )


def test_from_its_first_round_on_the_deadline_counts_what_it_runs() -> None:
    training = a_training(active_deadline_seconds=60)
    started = replace(training, status=a_status(phase="ready", started_at=BIRTH + timedelta(seconds=50)))
    run = a_run("demo-0", max=1)
    assert not ends(reconcile(started, seen(a_worker("demo-0"), run=run), BIRTH + timedelta(seconds=109)))
    assert ends(reconcile(started, seen(a_worker("demo-0"), run=run), BIRTH + timedelta(seconds=110))) == [
        "it ran longer than its deadline of 60 s"
    ]


def test_one_that_was_suspended_waits_since_it_was_resumed() -> None:
    held = a_training(suspend=True, active_deadline_seconds=60, labels={QUEUE: "team"})
    plan = reconcile(held, seen(grant=suspended(held)), NOW)
    assert plan.status.outcome is None, "it waits for ten minutes, and is not to begin"
    resumed = replace(after(held, plan), spec=replace(held.spec, suspend=False))
    plan = reconcile(resumed, seen(grant=FULL_HOUSE), NOW + timedelta(minutes=5))
    assert plan.status.outcome is None and plan.wake_at == NOW + timedelta(minutes=6)
    resumed = after(resumed, plan)
    assert "its deadline is in 30s" in explain.explain(resumed, (), NOW + timedelta(minutes=5, seconds=30)).details
    assert reconcile(resumed, seen(grant=FULL_HOUSE), NOW + timedelta(minutes=6)).status.phase == "failed"


def ends(plan: Plan) -> list[str]:
    return [one.message for one in plan.actions if isinstance(one, EndRun)]


# Specs from which nothing can follow ---------------------------------------------------------------

TOO_SMALL: dict[str, Any] = {"world": (3, 2, 1)}


def test_an_invalid_training_does_not_start_and_says_everything_that_is_wrong() -> None:
    training = a_training(**TOO_SMALL, env={"MUSTER_X": "1"}, secret_env=("KEY",), command=("a",), script="b")
    plan = reconcile(training, seen(), NOW)
    assert plan.actions == ()
    valid = condition(plan, "Valid")
    assert (valid.status, valid.reason) == ("False", "InvalidSpec")
    for part in (
        "spec.worldSize: the target (2) is below the minimum (3)",
        "command and script",
        "spec.env.MUSTER_X",
        "spec.secretEnv",
    ):
        assert part in valid.message
    assert plan.status.observed_generation == training.generation
    reached = condition(plan, "TargetReached")
    assert (reached.status, reached.reason, reached.observed_generation) == ("False", "InvalidSpec", 1)
    assert plan.status.condition("Admitted") is None
    assert named(plan, "InvalidSpec") == [valid.message]
    assert "the target (2) is below the minimum (3)" in explain.explain(after(training, plan), (), NOW).summary


def test_an_invalid_spec_is_news_once_for_each_generation() -> None:
    training = a_training(**TOO_SMALL)
    plan = reconcile(training, seen(), NOW)
    training = after(training, plan)
    again = reconcile(training, seen(), NOW + timedelta(hours=1))
    assert again.events == () and again.status == training.status
    edited = replace(training, metadata=replace(training.metadata, generation=2))
    assert len(named(reconcile(edited, seen(), NOW), "InvalidSpec")) == 1


def test_a_spec_that_is_repaired_is_acted_on() -> None:
    training = a_training(**TOO_SMALL)
    training = after(training, reconcile(training, seen(), NOW))
    spec = replace(training.spec, world_size=WorldSize(1, 2, 2))
    repaired = replace(training, spec=spec, metadata=replace(training.metadata, generation=2))
    plan = reconcile(repaired, seen(), NOW)
    assert condition(plan, "Valid").status == "True"
    assert [action.name for action in plan.actions if isinstance(action, StartWorker)] == ["demo-0", "demo-1"]
    assert condition(plan, "Admitted").status == "True"


def test_a_valid_training_says_nothing_about_that() -> None:
    assert reconcile(a_training(), seen(), NOW).status.condition("Valid") is None


def in_training(**edit: Any) -> tuple[Training, Observed]:
    """Two workers train; then the spec is edited."""
    training = a_training(world=(2, 2, 2))
    run = a_run("demo-0 demo-1", min=2, max=2)
    last = run.round
    assert last is not None
    run = replace(run, round=replace(last, up=frozenset({an_id("demo-0"), an_id("demo-1")})))
    world = seen(a_worker("demo-0"), a_worker("demo-1"), run=run)
    training = after(training, reconcile(training, world, NOW))
    assert training.status.holds("TargetReached")
    return replace(
        training, spec=replace(training.spec, **edit), metadata=replace(training.metadata, generation=2)
    ), world


def test_the_journal_says_for_which_generation_a_target_was_reached() -> None:
    training, world = in_training(max_restarts=9)
    unsettled = replace(training, status=replace(training.status, conditions=()))
    [told] = [one for one in reconcile(unsettled, world, NOW).events if one.reason == "TargetReached"]
    assert told.data == {"generation": 2, "target": 2}


@pytest.mark.parametrize(("host", "shown"), [("10.0.0.7", "10.0.0.7:29500"), ("fd00::7", "[fd00::7]:29500")])
def test_the_status_says_where_the_ranks_of_the_round_that_is_out_meet(host: str, shown: str) -> None:
    training, world = in_training()
    run = world.run
    assert run is not None and run.round is not None
    out = replace(run.round, store_addr=host, store_port=29500)
    assert statuses.mirrored(training, replace(world, run=replace(run, round=out)), NOW).rendezvous_endpoint == shown
    unknown = replace(world, run=replace(run, round=replace(out, store_port=0)))
    nobody = replace(world, run=replace(run, round=None))
    for without in (unknown, nobody):
        assert statuses.mirrored(training, without, NOW).rendezvous_endpoint is None


def test_what_was_measured_stays_when_the_coordinator_does_not_know_it_any_more() -> None:
    training, world = in_training()
    found = Bench(0, None, "gloo", 2, 2, 0.1, 1e6)
    assert world.run is not None
    told = statuses.mirrored(training, replace(world, run=replace(world.run, bench=found)), NOW)
    assert told.bench == replace(found, measured_at=NOW)
    later = statuses.mirrored(replace(training, status=told), world, NOW + timedelta(minutes=1))
    assert later.bench == told.bench


def test_what_runs_goes_on_as_it_was_when_its_spec_becomes_invalid() -> None:
    training, world = in_training(world_size=WorldSize(5, 4, 3), spares=7)
    plan = reconcile(training, world, NOW)
    assert plan.actions == ()
    size = plan.status.world_size
    assert (size.ready, size.min, size.target, size.max) == (2, 2, 2, 2) and plan.status.spares.target == 0
    assert plan.status.last_resize is None and plan.status.phase == "ready"
    assert condition(plan, "TargetReached").status == "False", "nothing reaches what cannot be"
    assert condition(plan, "BelowMinimum").status == "False"
    gone = replace(world, workers=(replace(world.workers[0], ended_at=NOW), world.workers[1]))
    assert reconcile(after(training, plan), gone, NOW).actions == (), "nobody is replaced"


def test_a_run_that_an_older_version_opened_keeps_its_longer_lease() -> None:
    training, world = in_training()
    assert world.run is not None
    older = replace(world, run=replace(world.run, target=2, settings=replace(settings_of(training.spec), lease_s=10.0)))
    assert not [action for action in reconcile(training, older, NOW).actions if isinstance(action, OpenRun)]
    wider = replace(training, spec=replace(training.spec, world_size=WorldSize(2, 2, 4)))
    (opened,) = [action for action in reconcile(wider, older, NOW).actions if isinstance(action, OpenRun)]
    assert opened.settings.lease_s == 10.0 and opened.settings.max == 4


def test_an_invalid_training_can_be_cancelled_and_deleted() -> None:
    cancel = Cancel(NOW, 2.0)
    training, world = in_training(world_size=WorldSize(5, 4, 3), cancel=cancel)
    plan = reconcile(training, world, NOW)
    opened = next(action for action in plan.actions if isinstance(action, OpenRun))
    assert (opened.settings.min, opened.settings.max, opened.settings.stop_grace_s) == (2, 2, 2.0)
    assert opened.settings.problems() == []
    assert any(isinstance(action, EndRun) for action in plan.actions)
    unborn = a_training(**TOO_SMALL)
    deleted = replace(unborn, metadata=replace(unborn.metadata, deletion_timestamp=NOW))
    assert reconcile(deleted, seen(), NOW).status.phase == "cancelled"


def test_a_terminal_training_that_is_made_invalid_has_the_usual_warning() -> None:
    training = a_training(phase="succeeded", generation=2, **TOO_SMALL)
    training = replace(training, status=replace(training.status, rank_exits=(), observed_generation=1, finished_at=NOW))
    plan = reconcile(training, seen(), NOW)
    assert [event.reason for event in plan.events] == [TERMINAL_EDIT] and plan.status.condition("Valid") is None


# Whatever somebody stores --------------------------------------------------------------------------

sizes = st.integers(1, 5)
words = st.sampled_from(["", "PATH", "MUSTER_X", "0bad", "A=B", "KEY"])
specs = st.builds(
    Spec,
    command=st.none() | st.lists(st.sampled_from(["", "python"]), max_size=2).map(tuple),
    script=st.none() | st.sampled_from(["", "train.py"]),
    module=st.none() | st.just("train"),
    env=st.dictionaries(words, st.sampled_from(["", "1", "a\0b"]), max_size=2),
    secret_env=st.lists(words, max_size=1).map(tuple),
    world_size=st.builds(WorldSize, sizes, sizes, sizes),
    spares=st.integers(0, 3),
    resources=st.builds(Resources, gpus=st.integers(0, 2)),
    max_restarts=st.integers(0, 2),
    active_deadline_seconds=st.none() | st.sampled_from([1.0, 31_536_000.0]),
    stop_grace_seconds=st.sampled_from([0.0, 86_400.0]),
    ttl_seconds_after_finished=st.none() | st.sampled_from([0.0, 315_360_000.0]),
    cancel=st.none() | st.builds(Cancel, st.just(NOW), st.none() | st.just(86_400.0)),
    backend=st.sampled_from(["local", "moon"]),
    mesh=st.builds(Mesh, st.booleans(), probe_address=st.sampled_from([None, "", "nowhere", "127.0.0.1:1"])),
)
metadata = st.builds(
    Metadata,
    st.just("demo"),
    uid=st.just("u"),
    generation=st.integers(1, 3),
    creation_timestamp=st.just(BIRTH),
    deletion_timestamp=st.none() | st.just(NOW),
    labels=st.dictionaries(st.sampled_from(["a", "!"]), st.sampled_from(["b", "!"]), max_size=1),
)
worlds = st.sampled_from(
    [
        seen(),
        seen(grant=statuses.NOT_LOOKED_AT),
        seen(a_worker("demo-0", FULL), a_worker("demo-1")),
        seen(a_worker("demo-0"), a_worker("demo-1"), run=a_run("demo-0 demo-1", min=2, max=2)),
        seen(replace(a_worker("demo-0"), ended_at=NOW, exit_code=137, reason="OOMKilled"), run=a_run("demo-0", max=1)),
    ]
)


def check_reconciler(edits: list[tuple[Spec, Metadata]], world: Observed) -> None:
    status, generation = a_training().status, 0
    for spec, about in edits:
        generation += about.generation
        training = Training(replace(about, generation=generation), spec, status)
        plan = reconcile(training, world, NOW)
        assert lifecycle.broken_rules(status, plan.status) == []
        if problems_of(training) and not training.is_terminal:
            assert not [action for action in plan.actions if isinstance(action, StartWorker | StopWorker)]
            ends = spec.cancel is not None or about.deletion_timestamp is not None
            assert ends or plan.actions == ()
            assert ends or condition(plan, "Valid").status == "False"
        explain.explain(after(training, plan), plan.events, datetime.now(UTC))
        status = plan.status


@pytest.mark.parametrize("examples", [100, pytest.param(2_000, marks=pytest.mark.soak)])
def test_no_spec_stops_the_reconciler_and_none_that_is_invalid_starts_anything(examples: int) -> None:
    edits = st.lists(st.tuples(specs, metadata), min_size=1, max_size=3)
    settings(max_examples=examples)(given(edits, worlds)(check_reconciler))()


@pytest.mark.parametrize("count", [1, 19, 60])
def test_a_spec_with_very_much_wrong_is_told_within_bounds(count: int) -> None:
    plan = reconcile(a_training(env={f"MUSTER_{index}": "" for index in range(count)}), seen(), NOW)
    message = condition(plan, "Valid").message
    assert message.count("muster's own") == min(count, 20) and ("and 40 more" in message) == (count == 60)


def test_a_field_that_cannot_change_is_named_and_nothing_moves() -> None:
    training = a_training(world=(2, 2, 4), generation=2, status=a_status(world=(2, 2, 4), observed_generation=1))
    plan = reconcile(training, Observed(altered=("args",), grant=Grant(2, True, "Admitted", "")), NOW)
    valid = plan.status.condition("Valid")
    assert valid is not None and "spec.args: cannot change once workers were started" in valid.message
    assert plan.actions == ()


# State ---------------------------------------------------------------------------------------------


def told_of_state(step: int, age_s: float, **known: Any) -> Kept:
    return Kept(KeptState(step=step, round=0, survives="worker", **known), age_s)


def test_the_moment_since_which_a_step_is_safe_is_kept_while_it_is() -> None:
    training, run = a_training(world=(2, 2, 2)), a_run("demo-0 demo-1", min=2, max=2)
    assert reconcile(training, seen(run=run), NOW).status.kept_state is None, "it keeps none"
    plan = reconcile(training, seen(run=run, kept=told_of_state(8, 3.0, durable_step=5)), NOW)
    kept = plan.status.kept_state
    assert kept is not None and (kept.step, kept.safe_at) == (8, NOW - timedelta(seconds=3))
    assert plan.wake_at is not None and plan.wake_at <= NOW + timedelta(seconds=1), "it is looked at again"
    training = after(training, plan)
    plan = reconcile(training, seen(run=run, kept=told_of_state(8, 0.5)), NOW)  # heard anew by one that has come back
    assert plan.status.kept_state is not None and plan.status.kept_state.safe_at == kept.safe_at
    plan = reconcile(training, seen(run=run, kept=told_of_state(9, 0.5)), NOW)
    assert plan.status.kept_state is not None
    assert plan.status.kept_state.safe_at == NOW - timedelta(seconds=0.5)
    back = replace(run, recovery_until=1.0)
    assert reconcile(training, seen(run=back), NOW).status.kept_state == kept, "nobody has told it yet"
    left = reconcile(training, seen(run=run), NOW).status.kept_state
    assert left == KeptState(durable_step=5), "nobody has anything in memory"


# Steps that stop coming ---------------------------------------------------------------------------


def test_a_stall_is_a_condition_in_ps_and_in_the_explanation_until_steps_come_again() -> None:
    warning = "no step for more than 40 s, usually 0.1 s per step"
    run = a_run("demo-0 demo-1", min=2, max=2)
    last = run.round
    assert last is not None
    run = replace(run, round=replace(last, up=frozenset(seat.member_id for seat in last.seats), up_at=0.0))
    workers = [a_worker("demo-0"), a_worker("demo-1")]
    training = after(a_training(world=(2, 2, 2)), reconcile(a_training(world=(2, 2, 2)), seen(*workers, run=run), NOW))
    assert training.status.condition("Stalled") is None and reason_of(training) == ""
    stalled = replace(run, stall=Stall(last.number, 0.0, warning))
    training = after(training, reconcile(training, seen(*workers, run=stalled), NOW))
    assert reason_of(training) == warning
    assert explain.explain(training, (), NOW).summary == f"demo is ready, but its steps have stalled: {warning}."
    training = after(training, reconcile(training, seen(*workers, run=run), NOW))
    assert reason_of(training) == "" and "stalled" not in explain.explain(training, (), NOW).summary


def test_a_spare_that_still_imports_is_not_ready() -> None:
    run, training = a_run("demo-0 demo-1", "demo-2", min=2, max=2), a_training(world=(2, 2, 2), spares=1)
    workers = [a_worker(f"demo-{number}") for number in range(3)]
    warming = does(run, an_id("demo-2"), "importing torch")
    status = reconcile(training, seen(*workers, run=warming), NOW).status
    assert (status.spares.ready, status.workers[-1].note) == (0, "warming: importing torch")
    status = reconcile(training, seen(*workers, run=does(warming, an_id("demo-2"), "")), NOW).status
    assert (status.spares.ready, status.workers[-1].note) == (1, "")
