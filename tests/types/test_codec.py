"""How records travel: what is written is what is read, and every mistake is named at once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from enum import StrEnum
from typing import Any, NewType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.types.codec import Invalid, Problem, as_list, from_wire, plain, schema_of, show_time, to_wire
from muster.types.event import Event
from muster.types.training import Spec, Training
from tests.training_builders import a_rank_exit, a_status, a_training
from tests.types.strategies import maybe_time, texts, trainings


def travelled(training: Training) -> Training:
    return Training.from_wire(json.loads(json.dumps(training.to_wire())), strict=True)


def fields_of(raised: pytest.ExceptionInfo[Invalid]) -> list[str]:
    return [problem.field for problem in raised.value.problems]


@settings(max_examples=150, deadline=None)
@given(trainings)
def test_any_training_survives_the_wire(training: Training) -> None:
    assert travelled(training) == training


@settings(max_examples=50, deadline=None)
@given(trainings)
def test_a_second_trip_changes_nothing(training: Training) -> None:
    once = training.to_wire()
    assert travelled(training).to_wire() == once


@settings(max_examples=50, deadline=None)
@given(st.builds(Event, reason=texts, message=texts, round=st.none() | st.integers(0, 9), at=maybe_time, uid=texts))
def test_any_event_survives_the_wire(event: Event) -> None:
    assert from_wire(Event, json.loads(json.dumps(to_wire(event)))) == event


def test_absent_and_empty_rank_exits_are_different_on_the_wire() -> None:
    running, never_began = (a_training(status=a_status(rank_exits=exits)) for exits in (None, ()))
    assert "rankExits" not in running.to_wire()["status"]
    assert never_began.to_wire()["status"]["rankExits"] == []
    assert travelled(running).status.rank_exits is None
    assert travelled(never_began).status.rank_exits == ()


def test_names_are_camel_case_on_the_wire() -> None:
    wire = a_training(world=(1, 2, 3), status=a_status(rank_exits=(a_rank_exit(1, 137, restart_count=2),))).to_wire()
    assert (wire["apiVersion"], wire["kind"]) == ("muster.dev/v1alpha1", "Training")
    assert wire["spec"]["worldSize"] == {"min": 1, "target": 2, "max": 3}
    assert wire["status"]["rankExits"][0]["restartCount"] == 2
    assert wire["metadata"]["creationTimestamp"] == "2026-01-31T12:00:00.000Z"


MISTAKES: dict[str, Any] = {
    "spec.spares": -1,
    "spec.maxRestarts": "3",
    "spec.args": "one two",
    "spec.env": {"A": 1},
    "spec.backend": "NOT A NAME",
    "spec.resources": {"memory": "lots"},
    "spec.cancel": {},
    "spec.sparse": 1,
    "spec.priority": None,
    "spec.stopGraceSeconds": math.inf,
    "metadata.name": "-x-",
    "metadata.generation": True,
    "metadata.creationTimestamp": "yesterday",
    "status.phase": "sleeping",
    "status.conditions": [{"type": "Admitted"}, 5],
}
WHERE = {
    "spec.env": ["spec.env.A"],
    "spec.resources": ["spec.resources.memory"],
    "spec.cancel": ["spec.cancel.requestedAt"],
    "status.conditions": ["status.conditions[0].status", "status.conditions[1]"],
}


@settings(max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(sorted(MISTAKES)), min_size=1))
def test_every_mistake_is_named_at_once_and_nothing_else(mistakes: set[str]) -> None:
    wire = a_training().to_wire()
    for mistake in mistakes:
        part, name = mistake.split(".")
        wire[part][name] = MISTAKES[mistake]
    with pytest.raises(Invalid) as raised:
        Training.from_wire(wire, strict=True)
    expected = [field for mistake in mistakes for field in WHERE.get(mistake, [mistake])]
    assert sorted(fields_of(raised)) == sorted(expected)
    assert all(problem.message for problem in raised.value.problems)
    assert all(field in str(raised.value) for field in expected)


def test_an_unknown_field_is_refused_with_the_nearest_name_and_dropped_when_reading_what_is_stored() -> None:
    wire = a_training().to_wire()
    wire["spec"]["sparse"] = 2
    with pytest.raises(Invalid, match="did you mean 'spares'"):
        Training.from_wire(wire, strict=True)
    assert Training.from_wire(wire).spec.spares == 0


@pytest.mark.parametrize("document", [None, [], "text", 3, True])
def test_what_is_not_an_object_is_refused(document: object) -> None:
    with pytest.raises(Invalid, match="must be an object") as raised:
        from_wire(Spec, document, at="spec")
    assert fields_of(raised) == ["spec"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1 << 60, "too large"),
        (1.5, "must be a whole number"),
        (True, "must be a whole number, not true"),
        ("1", "must be a whole number"),
        ([], "must be a whole number, not a list"),
    ],
)
def test_numbers_are_read_strictly(value: object, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        from_wire(Spec, {"spares": value})


def test_a_whole_number_does_where_any_number_does() -> None:
    read = from_wire(Spec, {"stopGraceSeconds": 5})
    assert read.stop_grace_seconds == 5.0 and isinstance(read.stop_grace_seconds, float)


@pytest.mark.parametrize("bad", ["bad \ud800 text", "nul \0 text"])
def test_text_that_could_not_be_passed_on_is_refused(bad: str) -> None:
    with pytest.raises(Invalid) as raised:
        from_wire(Spec, {"script": bad})
    assert fields_of(raised) == ["script"]


@dataclass(frozen=True)
class Moment:
    at: datetime


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00:00.250Z", datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)),
        ("2026-01-31T14:00:00+02:00", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00:00", datetime(2026, 1, 31, 12, tzinfo=UTC)),
    ],
)
def test_times_are_read_in_every_usual_form_and_held_in_utc(text: str, expected: datetime) -> None:
    read = from_wire(Moment, {"at": text}).at
    assert read == expected and read.utcoffset() == timedelta(0)


def test_times_are_written_in_utc() -> None:
    assert show_time(datetime(2026, 1, 31, 14, tzinfo=timezone(timedelta(hours=2)))) == "2026-01-31T12:00:00.000Z"


def test_the_published_schema_follows_from_the_records() -> None:
    shown = schema_of(Training)
    spec = shown["properties"]["spec"]["properties"]
    assert shown["required"] == ["metadata", "spec"]
    assert spec["spares"] == {"type": "integer", "minimum": 0, "maximum": 10_000}
    assert spec["env"] == {"type": "object", "additionalProperties": {"type": "string"}}
    assert shown["properties"]["status"]["properties"]["phase"]["enum"][0] == "pending"
    assert json.loads(json.dumps(shown)) == shown


def test_a_problem_is_a_place_and_a_sentence() -> None:
    with pytest.raises(Invalid) as raised:
        from_wire(Spec, {"worldSize": {"min": 0}}, at="spec")
    assert raised.value.problems == (Problem("spec.worldSize.min", "must be at least 1, not 0"),)


class Colour(StrEnum):
    RED = "red"


Name = NewType("Name", str)


@as_list
@dataclass(frozen=True)
class Point:
    across: int
    down: int
    label: str | None = None


@dataclass(frozen=True)
class Drawing:
    """One field for each form that a value can have."""

    first_point: Point
    points: Mapping[Name, Point | None]
    by_number: Mapping[int, Colour]
    pair: tuple[str, int]
    colours: frozenset[Colour] = frozenset()


DRAWING = Drawing(
    Point(1, 2), {Name("a"): Point(3, 4, "b"), Name("c"): None}, {7: Colour.RED}, ("x", 1), frozenset({Colour.RED})
)


def test_every_form_of_value_travels_under_either_spelling() -> None:
    shown = to_wire(DRAWING, names=plain)
    assert shown == {
        "first_point": [1, 2, None],
        "points": {"a": [3, 4, "b"], "c": None},
        "by_number": {"7": "red"},
        "pair": ["x", 1],
        "colours": ["red"],
    }
    assert from_wire(Drawing, json.loads(json.dumps(shown)), names=plain) == DRAWING
    assert from_wire(Drawing, to_wire(DRAWING)) == DRAWING
    assert to_wire(DRAWING)["firstPoint"] == [1, 2, None]


def test_a_list_of_values_may_be_shorter_or_come_from_a_newer_version() -> None:
    assert from_wire(Point, [1, 2]) == Point(1, 2)
    assert from_wire(Point, [1, 2, "x", True], strict=False) == Point(1, 2, "x")
    with pytest.raises(Invalid):
        from_wire(Point, [1, 2, "x", True])


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("first_point", {"across": 1}),
        ("first_point", [1]),
        ("points", {"a": [1, "x"]}),
        ("by_number", {"seven": "red"}),
        ("by_number", {"7": "blue"}),
        ("pair", ["x"]),
        ("colours", "red"),
    ],
)
def test_what_is_wrong_inside_a_value_is_named(field: str, wrong: object) -> None:
    with pytest.raises(Invalid) as raised:
        from_wire(Drawing, {**to_wire(DRAWING, names=plain), field: wrong}, names=plain)
    assert all(name.startswith(field) for name in fields_of(raised))
