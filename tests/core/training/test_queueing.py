"""What Kueue says of a Workload is what a queued training does, and it gives back what it was given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.training import queueing
from muster.core.training.queueing import Admit, Finish, GiveBack, Queue, Verdict, Withdraw, Workload
from muster.types.training import QUEUE, Outcome, Spec, Training, WorldSize
from tests.training_builders import a_status, a_training


def queued(*, suspend: bool = True, least: int = 1, target: int = 3, spares: int = 1) -> Training:
    spec = Spec(command=("true",), world_size=WorldSize(least, target, 8), spares=spares, suspend=suspend)
    made = a_training("demo")
    return replace(made, metadata=replace(made.metadata, labels={QUEUE: "team"}), spec=spec)


ASKED = Workload(3, 1)
RESERVED = replace(ASKED, reserved=True)
ADMITTED = replace(RESERVED, admitted=4)
EVICTED = replace(ADMITTED, evicted="preempted by another")


@pytest.mark.parametrize(
    ("suspend", "workload", "alive", "expected"),
    [
        (True, None, 0, Queue()),
        (False, None, 2, Queue()),
        (True, ASKED, 0, None),
        (True, RESERVED, 0, None),
        (True, ADMITTED, 0, Admit(3, 1, "its queue has admitted it")),
        (True, replace(ADMITTED, admitted=2), 0, Admit(1, 1, "its queue has admitted it, for 2 workers")),
        (True, replace(ADMITTED, admitted=1), 0, Admit(1, 0, "its queue has admitted it, for 1 worker")),
        (False, ADMITTED, 4, None),
        (False, ASKED, 0, Withdraw(3, 1, "its queue has not admitted it")),
        (False, EVICTED, 4, Withdraw(3, 1, "preempted by another")),
        (True, EVICTED, 4, None),
        (True, EVICTED, 0, GiveBack("preempted by another")),
        (True, replace(EVICTED, admitted=None, reserved=False), 0, None),
    ],
)
def test_what_is_done_for_a_queued_training(
    suspend: bool, workload: Workload | None, alive: int, expected: Verdict | None
) -> None:
    assert queueing.verdict(queued(suspend=suspend), workload, alive) == expected


def test_one_that_is_not_queued_is_nobodys_business() -> None:
    plain = replace(queued(), metadata=a_training("demo").metadata)
    assert queueing.verdict(plain, None, 0) is None


def test_its_end_is_told_once_and_when_nothing_of_it_runs_any_more() -> None:
    over = replace(queued(), status=replace(a_status(phase="succeeded"), outcome=Outcome("succeeded", message="done")))
    assert queueing.verdict(over, ADMITTED, 1) is None
    assert queueing.verdict(over, ADMITTED, 0) == Finish("done")
    assert queueing.verdict(over, replace(ADMITTED, finished=True), 0) is None
    assert queueing.verdict(over, None, 0) is None


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 4), st.integers(1, 20))
def test_no_more_run_than_were_admitted_and_at_least_min_train(least: int, more: int, spares: int, count: int) -> None:
    target = min(least + more, 8)
    training = queued(least=least, target=max(target, least), spares=spares)
    workload = Workload(max(target, least), spares)
    got, rest = queueing.shares(training, workload, count)
    assert least <= got <= workload.asked_target and 0 <= rest <= spares
    if count >= least:  # Kueue admits no fewer than minCount
        assert got + rest <= max(count, least)
