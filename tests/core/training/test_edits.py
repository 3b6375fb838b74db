"""What requests make of trainings: tables for the rules, properties for what must hold of any request."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.training import edits
from muster.core.training.edits import Edit
from muster.errors import Conflict, InvalidRequest, MusterError, UDTerminalState, WorldSizeOutOfBounds
from muster.types.codec import camel
from muster.types.training import MASK, Phase, Training, Uid, WorldSize

NOW = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
LATER = NOW.replace(hour=13)
TERMINAL: list[Phase] = ["succeeded", "failed", "cancelled"]


def a_body(**spec: Any) -> dict[str, Any]:
    size = {"min": 1, "target": 2, "max": 4}
    return {"metadata": {"name": "demo"}, "spec": {"command": ["true"], "worldSize": size, **spec}}


def create(body: object, **more: Any) -> Edit:
    return edits.created(body, namespace="default", now=NOW, uid=Uid("u-1"), actor="ann", **more)


def a_training(phase: Phase = "ready", **spec: Any) -> Training:
    training = create(a_body(**spec)).training
    metadata = replace(training.metadata, resource_version="7")
    return replace(training, metadata=metadata, status=replace(training.status, phase=phase))


def patch(training: Training, document: object) -> Edit:
    return edits.patched(training, document, now=LATER, actor="bob")


def fields_of(error: pytest.ExceptionInfo[InvalidRequest]) -> set[str]:
    return {problem.field for problem in error.value.problems}


# Create ------------------------------------------------------------------------------------------


def test_a_new_training_is_of_the_first_generation_and_pending() -> None:
    made = create(a_body())
    assert made.training.generation == 1 and made.training.status.phase == "pending"
    assert made.training.metadata.creation_timestamp == NOW.replace(microsecond=123000)
    assert made.training.status.world_size.target == 2 and made.training.status.rank_exits is None
    assert made.event is not None and (made.event.reason, made.event.actor) == ("Created", "ann")


def test_what_only_the_server_sets_is_ignored() -> None:
    body = a_body()
    body["metadata"] |= {"uid": 3, "generation": "x", "resourceVersion": [], "creationTimestamp": "?"}
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    body["status"] = "nonsense"
    assert create(body).training == create(a_body()).training


def test_problems_between_good_fields_are_listed_beside_bad_ones() -> None:
    body = a_body(worldSize={"min": 3, "target": 2, "max": 4}, spares="two", secretEnv=["KEY"], script="x.py")
    with pytest.raises(InvalidRequest) as caught:
        create(body | {"extra": 1, "kind": "Pod"})
    expected = {"extra", "kind", "spec", "spec.worldSize", "spec.spares", "spec.secretEnv"}
    assert fields_of(caught) == expected
    assert all(field in caught.value.message for field in expected)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"command": [1]}, "spec.command[0]"),
        ({"env": {"KEY": 1}, "secretEnv": ["KEY"]}, "spec.env.KEY"),
        ({"worldSize": {"min": "one"}}, "spec.worldSize.min"),
    ],
)
def test_what_only_follows_from_a_bad_field_is_not_said(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        create(a_body(**spec))
    assert fields_of(caught) == {field}


@pytest.mark.parametrize("body", [None, [], 3, "text", {}, {"metadata": 3, "spec": []}, {"spec": None}])
def test_a_document_of_another_shape_is_refused(body: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        create(body)
    assert caught.value.problems


def test_a_backend_that_is_not_served_is_a_problem() -> None:
    with pytest.raises(InvalidRequest) as caught:
        create(a_body(backend="moon"), backends={"local"})
    assert fields_of(caught) == {"spec.backend"}
    assert create(a_body(), backends={"kube"}).training.spec.backend == "local", "the only one there is"


def test_a_refusal_does_not_repeat_the_value_of_a_variable() -> None:
    for env in ({"KEY": 123454321}, {"KEY": ["123454321"]}, "123454321"):
        with pytest.raises(InvalidRequest) as caught:
            create(a_body(env=env, secretEnv=["KEY"]))
        assert "123454321" not in caught.value.message + json.dumps(caught.value.details())


# Patch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        {"command": ["false"]},
        {"command": None, "script": "x.py"},
        {"args": ["x"]},
        {"workingDir": "/tmp"},
        {"env": {"NEW": "x"}},
        {"env": {"KEY": "other"}},
        {"env": {"KEY": None}, "secretEnv": None},
        {"secretEnv": None},
        {"procsPerWorker": 2},
        {"resources": {"gpus": 1}},
        {"image": "other"},
        {"mesh": {"required": True}},
    ],
)
def test_what_a_training_runs_cannot_change_after_submission(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        patch(a_training(env={"KEY": "secret"}, secretEnv=["KEY"]), {"spec": spec})
    assert fields_of(caught) == {f"spec.{name}" for name in spec}
    assert {problem.message for problem in caught.value.problems} == {"cannot change after submission"}


@pytest.mark.parametrize(
    "metadata",
    [
        {"name": "other"},
        {"namespace": "other"},
        {"uid": "x"},
        {"generation": 9},
        {"deletionTimestamp": "now"},
        {"x": 1},
    ],
)
def test_other_metadata_cannot_be_changed(metadata: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        patch(a_training(), {"metadata": metadata})
    assert fields_of(caught) == {f"metadata.{name}" for name in metadata}


def test_a_stale_version_inside_the_patch_is_a_conflict() -> None:
    with pytest.raises(Conflict):
        patch(a_training(), {"metadata": {"resourceVersion": "6", "labels": {"a": "b"}}})


def test_what_was_read_can_be_sent_back_and_changes_nothing() -> None:
    training = a_training(env={"KEY": "secret", "PLAIN": "x"}, secretEnv=["KEY"])
    assert training.masked().spec.env["KEY"] == MASK
    assert patch(training, training.masked().to_wire()) == Edit(training)


def test_a_cancel_by_patch_is_stamped_and_stands() -> None:
    training = a_training()
    cancelled = patch(training, {"spec": {"cancel": {"graceSeconds": 3}}}).training
    assert cancelled.spec.cancel is not None and cancelled.spec.cancel.grace_seconds == 3
    assert cancelled.spec.cancel.requested_at == LATER.replace(microsecond=123000)
    for change in (None, {"graceSeconds": 4}, {"requestedAt": "2026-01-01T00:00:00Z"}):
        with pytest.raises(InvalidRequest) as caught:
            patch(cancelled, {"spec": {"cancel": change}})
        assert fields_of(caught) == {"spec.cancel"}


@pytest.mark.parametrize("phase", TERMINAL)
def test_a_training_that_has_ended_keeps_its_spec_and_takes_labels(phase: Phase) -> None:
    training = a_training(phase)
    with pytest.raises(UDTerminalState) as caught:
        patch(training, {"spec": {"worldSize": {"target": 3}}})
    assert (caught.value.phase, caught.value.requested_target) == (phase, 3)
    with pytest.raises(UDTerminalState) as caught:
        patch(training, {"spec": {"priority": 3}})
    assert caught.value.requested_target is None
    labelled = patch(training, {"metadata": {"labels": {"a": "b"}}, "spec": {"priority": 0}}).training
    assert labelled.metadata.labels == {"a": "b"} and labelled.generation == training.generation


def test_bounds_can_be_moved_as_long_as_they_hold_the_target() -> None:
    assert patch(a_training(), {"spec": {"worldSize": {"max": 9}}}).training.spec.world_size.max == 9
    with pytest.raises(InvalidRequest) as caught:
        patch(a_training(), {"spec": {"worldSize": {"max": 1}}})
    assert fields_of(caught) == {"spec.worldSize"}


# Orders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", TERMINAL)
def test_orders_to_a_training_that_has_ended(phase: Phase) -> None:
    training = a_training(phase)
    with pytest.raises(UDTerminalState) as caught:
        edits.scaled(training, 3, actor="bob")
    assert (caught.value.phase, caught.value.requested_target) == (phase, 3)
    assert edits.cancelled(training, None, now=NOW, actor="bob") == Edit(training)


@given(st.integers(-5, 12))
def test_scaling_is_granted_within_the_bounds_only(target: int) -> None:
    training = a_training()
    try:
        edit = edits.scaled(training, target, actor="bob")
    except WorldSizeOutOfBounds as error:
        assert not 1 <= target <= 4 and error.details() == {"requested": target, "min": 1, "max": 4}
        return
    assert 1 <= target <= 4 and edit.training.spec.world_size.target == target
    assert edit.training.generation == training.generation + (target != 2)
    assert (edit.event is None) == (target == 2)


def test_a_segmented_training_is_scaled_by_whole_segments() -> None:
    training = a_training(worldSize={"min": 2, "target": 2, "max": 6}, segment=2)
    assert edits.scaled(training, 4, actor="bob").training.spec.world_size.target == 4
    with pytest.raises(InvalidRequest, match="3 is not a multiple of segment, which is 2"):
        edits.scaled(training, 3, actor="bob")


def test_cancel_and_delete_are_orders_that_are_given_once() -> None:
    first = edits.cancelled(a_training(), 5.0, now=NOW, actor="bob")
    assert first.training.generation == 2 and first.event is not None and first.event.actor == "bob"
    assert edits.cancelled(first.training, 1.0, now=LATER, actor="eve") == Edit(first.training)
    gone = edits.deleted(first.training, now=NOW, actor="bob")
    assert gone.training.metadata.deletion_timestamp == NOW.replace(microsecond=123000)
    assert gone.training.generation == 2
    assert edits.deleted(gone.training, now=LATER, actor="eve") == Edit(gone.training)


# Properties --------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_NAMES = st.sampled_from([*map(camel, edits.FIXED), "worldSize", "spares", "priority", "cancel", "maxRestarts", "x"])
_SPECS = st.dictionaries(
    _NAMES, _JSON | st.sampled_from([{"min": 2}, {"target": 3}, {"max": 1}, {"A": "b"}, 1, ["x"], {}]), max_size=4
)
_META = st.dictionaries(
    st.sampled_from(["labels", "annotations", "name", "uid", "x"]),
    _JSON | st.dictionaries(st.sampled_from("ab"), st.sampled_from(["v", None]), max_size=2),
    max_size=2,
)
_PATCHES = st.fixed_dictionaries({}, optional={"spec": _SPECS | _JSON, "metadata": _META, "status": _JSON})


@given(_PATCHES | _JSON)
def test_any_document_is_either_a_training_or_refused_with_its_fields(document: object) -> None:
    try:
        made = create(document).training
    except InvalidRequest as error:
        assert error.problems
    else:
        assert Training.from_wire(json.loads(json.dumps(made.to_wire())), strict=True) == made


@given(_PATCHES | _JSON, st.sampled_from(["pending", "ready", *TERMINAL]))
def test_any_patch_is_refused_or_moves_the_generation_exactly_when_it_moves_the_spec(
    document: object, phase: Phase
) -> None:
    training = a_training(phase, env={"KEY": "secret"}, secretEnv=["KEY"])
    try:
        edit = patch(training, document)
    except MusterError:
        return
    after = edit.training
    assert after.generation - training.generation == (after.spec != training.spec)
    assert after.spec == training.spec or phase not in TERMINAL
    assert (edit.event is None) == (after == training)
    assert after.status == training.status and after.uid == training.uid and after.key == training.key
    assert all(getattr(after.spec, name) == getattr(training.spec, name) for name in edits.FIXED)
    assert patch(after, document).training.spec == after.spec  # a merge patch applied twice is one applied once


@given(_JSON, _JSON)
def test_a_merge_patch_follows_its_standard(target: object, change: object) -> None:
    result = edits.merged(target, change)
    if not isinstance(change, dict):
        assert result is change
        return
    assert isinstance(result, dict)
    before = target if isinstance(target, dict) else {}
    for name, value in change.items():
        assert name not in result if value is None else name in result
    assert all(result[name] is before[name] for name in before if name not in change)


# Fields that cannot change -----------------------------------------------------------------------


def test_what_cannot_change_is_noticed_when_it_was_changed_around_us() -> None:
    training = a_training(args=["1"], env={"A": "b"}, worldSize={"min": 1, "target": 2, "max": 4})
    before = edits.marks(training.spec)
    assert edits.altered(training.spec, before) == ()
    scaled = replace(training.spec, world_size=WorldSize(1, 3, 4), spares=2)
    assert edits.altered(scaled, before) == ()
    changed = replace(training.spec, args=("2",), env={"A": "c"}, image="other")
    assert set(edits.altered(changed, before)) == {"args", "env", "image"}
