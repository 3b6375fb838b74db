"""Which workers a status lists, and what of the list is worth a write."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from muster.core.training import present
from muster.core.training.status import Observed
from muster.types.training import MOST_LISTED, Status, Uid, WorkerStatus
from muster.types.worker import Worker
from muster.types.world import OutcomeState, Role, RunOutcome
from tests.core.builders import a_member, a_round, a_run, a_seat, an_id, with_members
from tests.training_builders import BIRTH

NOW = BIRTH + timedelta(minutes=10)


def a_worker(name: str, **known: object) -> Worker:
    return Worker(name, Uid("u"), f"node-of-{name}", BIRTH, **known)  # type: ignore[arg-type]


def shown(found: tuple[WorkerStatus, ...]) -> list[tuple[str, ...]]:
    return [(one.name, one.role, one.node, one.ranks, one.note) for one in found]


def test_those_with_ranks_come_first_then_spares_then_who_is_not_here_yet() -> None:
    run = a_run("b a", "s", last=replace(a_round("b a"), seats=(a_seat(0, "b", procs=4), a_seat(1, "a", procs=1))))
    run = with_members(
        run,
        a_member("s", doing="importing torch"),
        a_member("p", role=Role.PARKED, note="its  health\ncheck failed"),
        a_member("l"),
    )
    run = replace(run, lent={"l": "policy has its GPU"}, kept_out={an_id("k"): "not reached"})
    run = with_members(run, a_member("k"))
    seen = Observed(run, workers=(a_worker("a"), a_worker("n"), a_worker("w", waiting="no node is free")))
    assert shown(present.workers(Status(), seen, NOW)) == [
        ("a", "active", "node-of-a", "4", ""),
        ("b", "active", "", "0-3", ""),
        ("s", "spare", "", "", "warming: importing torch"),
        ("l", "lent", "", "", "policy has its GPU"),
        ("k", "parked", "", "", "not reached"),
        ("p", "parked", "", "", "its health check failed"),
        ("n", "starting", "node-of-n", "", ""),
        ("w", "starting", "node-of-w", "", "no node is free"),
    ]


def test_each_says_since_when_it_has_its_role() -> None:
    first = present.workers(Status(), Observed(a_run("a", "s")), NOW)
    later = NOW + timedelta(seconds=9)
    same = present.workers(Status(workers=first), Observed(a_run("a", "s")), later)
    assert same == first and {one.since for one in first} == {NOW}
    promoted = present.workers(Status(workers=first), Observed(a_run("s")), later)
    assert [(one.role, one.since) for one in promoted] == [("active", later)]


def test_a_coordinator_that_comes_back_and_one_that_ends_leave_the_list_as_it_was() -> None:
    old = Status(workers=(WorkerStatus("a", "active"),))
    ended = replace(a_run("b"), outcome=RunOutcome(OutcomeState.SUCCEEDED, "succeeded", ""))
    for run in (replace(a_run("b"), recovery_until=5.0), ended):
        assert present.workers(old, Observed(run), NOW) == old.workers


def test_of_very_many_as_many_as_may_be_are_listed_and_spares_are_among_them() -> None:
    names = " ".join(f"w{i}" for i in range(1000))
    found = present.workers(Status(), Observed(a_run(names, "s t")), NOW)
    assert len(found) == MOST_LISTED and [one.name for one in found[-2:]] == ["s", "t"]
    crowd = present.workers(Status(), Observed(a_run("a", names)), NOW)
    assert len(crowd) == MOST_LISTED and crowd[0].name == "a"


def test_what_a_worker_imports_and_that_it_was_started_is_no_write_of_its_own() -> None:
    joined = (WorkerStatus("a", "active", ranks="0"), WorkerStatus("s", "spare", note="importing torch", since=NOW))
    warm = (joined[0], WorkerStatus("s", "spare"), WorkerStatus("n", "starting"))
    assert present.steady(joined) == present.steady(warm)
    assert present.steady(joined) != present.steady((joined[0],))


def test_a_member_whose_agent_is_gone_is_dead_at_once_and_not_about_to_start() -> None:
    run = a_run("a", "s")
    old = Status(workers=present.workers(Status(), Observed(run), NOW))
    seen = Observed(a_run("a"), workers=(a_worker("a"), a_worker("s"), a_worker("n")))
    found = [(one.name, one.role, one.note) for one in present.workers(old, seen, NOW)]
    assert found == [("a", "active", ""), ("n", "starting", ""), ("s", "dead", present.LOST)]
    leaves = Observed(a_run("a"), workers=(a_worker("s", stopping=True),))
    assert [one.role for one in present.workers(old, leaves, NOW)] == ["active", "leaving"]


def test_workers_that_died_lately_are_listed_with_why_and_those_that_were_asked_to_leave_are_not() -> None:
    died = {"ended_at": NOW - timedelta(seconds=9), "exit_code": -9, "why_ended": "exit code\n-9"}
    seen = Observed(
        a_run("a"),
        workers=(
            a_worker("x", **died),
            a_worker("gone", **died | {"stopping": True}),
            a_worker("done", **died | {"exit_code": 0}),
            a_worker("old", **died | {"ended_at": NOW - present.DEAD_SHOWN}),
        ),
    )
    (_, dead) = present.workers(Status(), seen, NOW)
    assert (dead.name, dead.role, dead.note, dead.since) == ("x", "dead", "exit code -9", died["ended_at"])
    many = Observed(a_run("a"), workers=tuple(a_worker(f"w{i}", **died) for i in range(99)))
    assert len(present.workers(Status(), many, NOW)) == 1 + present.MOST_DEAD


def test_a_run_that_ends_or_comes_back_lists_nobody_as_a_spare_who_is_dead() -> None:
    old = Status(workers=(WorkerStatus("a", "active"), WorkerStatus("s", "spare")))
    seen = Observed(replace(a_run("a"), recovery_until=5.0), workers=(a_worker("s", ended_at=NOW, exit_code=-9),))
    assert [(one.name, one.role) for one in present.workers(old, seen, NOW)] == [("a", "active"), ("s", "dead")]
