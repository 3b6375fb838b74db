"""When an agent starts the control plane that it has lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import restart
from muster.core.restart import LostControlPlane, RestartPlan, decide

LOST = LostControlPlane(runs=False, stopped=False)


@pytest.mark.parametrize(
    ("seen", "start", "reason"),
    [
        (LOST, True, "ended without being stopped"),
        (LostControlPlane(runs=True, stopped=False), False, "it runs"),
        (LostControlPlane(runs=False, stopped=True), False, "stopped on purpose"),
        (LostControlPlane(runs=True, stopped=True), False, "stopped on purpose"),
        (LostControlPlane(False, False, "in the foreground"), False, "in the foreground"),
        (LostControlPlane(False, False, "", 1, 1.0), False, "1 times in a row"),
        (LostControlPlane(False, False, "", 1, 2.0), True, "ended without being stopped"),
        (LostControlPlane(False, False, "", 99, 299.0), False, "99 times in a row"),
        (LostControlPlane(False, False, "", 99, 300.0), True, "ended without being stopped"),
        (LostControlPlane(False, False, "", 99, 901.0), True, "ended without being stopped"),
        (LostControlPlane(False, False, "", 99, -50.0), True, "ended without being stopped"),  # the clock was set back
    ],
)
def test_what_an_agent_does_and_why(seen: LostControlPlane, start: bool, reason: str) -> None:
    plan = decide(seen)
    assert plan.start is start
    assert reason in plan.reason


def test_nothing_is_looked_at_again_where_only_a_person_can_help() -> None:
    assert decide(LostControlPlane(False, False, "in the foreground")).look_after_s is None
    assert decide(LostControlPlane(False, True)).look_after_s is not None, "its mark may be taken away"


@given(st.integers(0, 10**6), st.floats(0, 10**6))
def test_a_control_plane_that_cannot_run_is_started_ever_more_slowly_and_never_given_up(
    starts: int, ago: float
) -> None:
    plan = decide(LostControlPlane(False, False, "", starts, ago))
    assert plan.look_after_s is not None and plan.look_after_s <= restart.PAUSES.longest_s
    later = decide(LostControlPlane(False, False, "", starts, ago + plan.look_after_s))
    assert later.look_after_s is not None
    assert plan.start or later.start or later.look_after_s < plan.look_after_s + restart.AGAIN_S


def test_in_an_hour_a_control_plane_that_dies_at_once_is_started_a_few_times() -> None:
    now, last, count, begun = 0.0, -math.inf, 0, 0
    while now < 3600:
        seen = LostControlPlane(False, False, "", count, now - last)
        plan = decide(seen)
        if plan.start:
            count, last, begun = restart.starts_in_a_row(seen) + 1, now, begun + 1
        now += plan.look_after_s or restart.AGAIN_S
    assert 10 < begun < 25
    assert isinstance(plan, RestartPlan)
