"""Waits as flows, on virtual time: random histories with outages, and what must hold in every one of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.training.waits import Goal, Receipt
from muster.errors import MusterError, Unavailable, WaitTimeout
from muster.sdk import flows
from muster.sdk.effects import Flow, HttpRequest, Locate, Lost, Now, Pause, Response
from muster.sdk.flows import Handle
from muster.types.training import Phase, Training
from tests.sdk.scripted import a_training, ended, scaled, settled

RunEvent = Callable[[Training], Training]

HAPPENINGS: dict[str, RunEvent] = {
    "nothing": lambda one: one,
    "settles": settled,
    "loses one": lambda one: settled(one, one.spec.world_size.target - 1),
    "is scaled by another": lambda one: scaled(one, 4),
}
ENDINGS: tuple[Phase, ...] = ("succeeded", "failed", "cancelled")
LATE_S = 1.0  # the last look, and one more attempt if its connection was lost


@dataclass
class World:
    """A server and a clock that obey a history: what happens before each look, and whether it is answered."""

    history: list[str]
    training: Training = field(default_factory=a_training)
    now: float = 0.0
    looks: list[tuple[float, str]] = field(default_factory=list)  # when each began, and the phase that it saw

    def drive(self, flow: Flow[Any]) -> Any:
        answer: Any = None
        while True:
            try:
                effect = flow.send(answer)
            except StopIteration as done:
                return done.value
            answer = self._answer(effect)

    def _answer(self, effect: object) -> Any:
        if isinstance(effect, Now):
            return self.now
        if isinstance(effect, Pause):
            self.now += effect.seconds
            return None
        if isinstance(effect, Locate):
            self.now += 0.01
            return None
        assert isinstance(effect, HttpRequest) and effect.method == "GET"
        return self._look(effect)

    def _look(self, request: HttpRequest) -> Response | Lost:
        began, happening = self.now, self.history.pop(0) if self.history else "nothing"
        held = float(request.params.get("timeoutSeconds", 0))
        if happening == "lost":
            self.now += 0.02
            return Lost("gone")
        if happening == "busy":
            self.now += 0.02
            return Response(503)
        if happening in ENDINGS and not self.training.is_terminal:
            self.training = ended(self.training, happening)
        elif not self.training.is_terminal:
            self.training = HAPPENINGS.get(happening, HAPPENINGS["nothing"])(self.training)
        self.now += 0.01 if happening != "nothing" else max(held, 0.01)
        self.looks.append((began, self.training.status.phase))
        return Response(200, json.dumps(self.training.to_wire()).encode())


histories = st.lists(st.sampled_from([*HAPPENINGS, *ENDINGS, "lost", "busy"]), max_size=8)
goals = st.sampled_from(get_args(Goal))
timeouts = st.sampled_from([0.0, 0.05, 1.0, 100.0])


def outcome_of(world: World, goal: Goal, timeout: float, receipt: Receipt | None = None) -> Any:
    handle = Handle(world.training, receipt)
    try:
        return world.drive(flows.wait(handle, goal, timeout))
    except MusterError as error:
        return error


@given(histories, goals, timeouts)
def test_time_runs_out_only_after_a_look_that_began_at_the_deadline(
    history: list[str], goal: Goal, timeout: float
) -> None:
    world = World(history)
    outcome = outcome_of(world, goal, timeout)
    if isinstance(outcome, WaitTimeout):
        assert world.now >= timeout
        assert not world.looks or world.looks[-1][1] in ("pending", "ready")
        away = "does not answer" in str(outcome) or "503" in str(outcome)
        assert away or world.looks[-1][0] >= timeout


@given(histories, goals, timeouts)
def test_an_end_that_was_seen_is_reported_and_nothing_is_asked_after_it(
    history: list[str], goal: Goal, timeout: float
) -> None:
    world = World(history)
    outcome = outcome_of(world, goal, timeout)
    assert [phase for _, phase in world.looks[:-1] if phase in ENDINGS] == []
    if world.looks and world.looks[-1][1] in ENDINGS:
        assert not isinstance(outcome, WaitTimeout)


@given(histories, goals, timeouts)
def test_a_wait_ends_when_its_time_is_over(history: list[str], goal: Goal, timeout: float) -> None:
    world = World(history)
    outcome_of(world, goal, timeout)
    assert world.now <= timeout + LATE_S


@given(st.sampled_from([*HAPPENINGS, *ENDINGS]), goals)
def test_a_timeout_of_zero_looks_exactly_once(happening: str, goal: Goal) -> None:
    world = World([happening])
    outcome_of(world, goal, 0.0)
    assert len(world.looks) == 1


@given(histories, timeouts, st.integers(2, 4))
def test_a_wait_for_a_scale_never_returns_on_what_was_there_before(
    history: list[str], timeout: float, target: int
) -> None:
    before = a_training(size=(2, 3, 4), ready=3)
    world = World(history, scaled(before, target))
    outcome = outcome_of(world, "target", timeout, Receipt(target, 2))
    if not isinstance(outcome, MusterError):
        final = world.training
        assert final.status.phase == "succeeded" or (
            final.status.observed_generation >= 2 and outcome.ready == final.spec.world_size.target == target
        )


def test_a_look_that_the_server_was_to_hold_is_repeated_as_a_plain_one() -> None:
    world = World(["nothing", "lost", "succeeded"])
    asked: list[HttpRequest] = []
    answer = world._look

    def noted(request: HttpRequest) -> Response | Lost:
        asked.append(request)
        return answer(request)

    world._look = noted  # type: ignore[method-assign]
    assert outcome_of(world, "result", 100.0).ready == 0
    assert ["resourceVersion" in one.params for one in asked] == [False, True, False]


def test_pauses_grow_while_the_control_plane_is_away_and_stay_short() -> None:
    world = World(["nothing", *["lost"] * 40, "succeeded"])
    pauses: list[float] = []
    answer = world._answer

    def noted(effect: object) -> Any:
        if isinstance(effect, Pause):
            pauses.append(effect.seconds)
        return answer(effect)

    world._answer = noted  # type: ignore[method-assign]
    outcome_of(world, "result", 1000.0)
    assert pauses[:3] == [0.05, 0.1, 0.2]
    assert max(pauses) == flows.RETRY.longest_s


def test_an_answer_that_is_not_a_training_is_an_error_and_not_a_crash() -> None:
    flow = flows.refresh(Handle(a_training()))
    next(flow)
    with pytest.raises(MusterError, match="cannot be understood"):
        flow.send(Response(200, b"<html>"))


def test_a_lost_answer_to_something_that_must_not_happen_twice_is_not_repeated() -> None:
    flow = flows.call(HttpRequest("POST", "/v1/namespaces/default/trainings", json={}))
    next(flow)
    with pytest.raises(Unavailable):
        flow.send(Lost("gone"))


def test_what_never_left_may_always_be_sent_again() -> None:
    flow = flows.call(HttpRequest("POST", "/v1/namespaces/default/trainings", json={}))
    next(flow)
    assert isinstance(flow.send(Lost("refused", sent=False)), Locate)
    assert isinstance(flow.send(None), HttpRequest)


def test_a_wait_gives_one_that_was_stopped_on_purpose_a_minute_to_come_back() -> None:
    now, pauses = 0.0, 0
    with pytest.raises(Unavailable, match="was stopped"):
        outage = flows.Outage()
        while True:
            flow = outage.wait(Unavailable("gone"))
            answer: Any = None
            try:
                while True:
                    effect = flow.send(answer)
                    answer = now if isinstance(effect, Now) else None
                    if isinstance(effect, Pause):
                        now, pauses = now + effect.seconds, pauses + 1
                    elif isinstance(effect, Locate):
                        answer = Lost("the control plane was stopped", hint="muster server start", stopped=True)
            except StopIteration as done:
                outage = done.value
    assert flows.STOPPED_S <= now < flows.STOPPED_S + 2 and pauses > flows.MOST_FAILED_STARTS


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"name": "me", "backends": ["kube"]}, ("kube",)),
        ({"name": "me"}, ()),
        ({"name": "me", "backends": "kube"}, ()),
        ([], ()),
    ],
)
def test_a_control_plane_that_does_not_say_with_what_it_runs_workers_is_an_old_one(told: object, found: object) -> None:
    flow = flows.backends()
    assert flow.send(None) == HttpRequest("GET", "/v1/whoami")
    with pytest.raises(StopIteration) as done:
        flow.send(Response(200, json.dumps(told).encode()))
    assert done.value.value == found
