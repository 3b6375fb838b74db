"""Calls of the client and the handle, each both ways."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from muster.compat import handle as compat
from muster.errors import Forbidden, InvalidRequest, NotFound, WaitTimeout
from muster.sdk import flows
from muster.sdk.client import Client
from muster.sdk.effects import Flow
from muster.sdk.training import DistributedTraining
from muster.types.event import Event
from muster.types.training import Outcome, RankExit, RankStatus
from tests.sdk.scripted import Caller, Plane, a_training, ended


@pytest.mark.parametrize("kind", [Client, DistributedTraining, compat.DistributedTraining])
def test_every_method_has_a_twin_with_the_same_signature(kind: type) -> None:
    methods = {name: value for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_"}
    plain = [name for name in methods if not name.endswith("_async")]
    assert {f"{name}_async" for name in plain} == {name for name in methods if name.endswith("_async")}
    for name in plain:
        twin = inspect.signature(methods[f"{name}_async"])
        assert twin.parameters == inspect.signature(methods[name]).parameters, name


# Reading -----------------------------------------------------------------------------------------


def test_a_handle_shows_the_training_as_last_read(caller: Caller, plane: Plane, client: Client) -> None:
    handle = caller.call(client, "get", "demo")
    assert (handle.name, handle.namespace, handle.phase, handle.is_terminal) == ("demo", "default", "ready", False)
    assert (handle.world.ready, handle.generation, handle.outcome) == (2, 1, None)
    assert handle.ranks == [] and handle.rank_exits == []
    assert [one.type for one in handle.conditions] == ["TargetReached"]
    end = ended(a_training(), "failed", RankExit(0, 1, "Exit 1"))
    outcome = Outcome("failed", message="rank 0 failed")
    plane.put(replace(end, status=replace(end.status, outcome=outcome, ranks=(RankStatus(0, "w-0"),))))
    assert handle.phase == "ready"
    caller.call(handle, "refresh")
    assert (handle.phase, handle.is_terminal, handle.outcome) == ("failed", True, outcome)
    assert handle.ranks == [RankStatus(0, "w-0")] and handle.rank_exits == [RankExit(0, 1, "Exit 1")]


def test_what_is_not_there_is_not_found(caller: Caller, client: Client) -> None:
    with pytest.raises(NotFound, match="there is no training 'nobody'"):
        caller.call(client, "get", "nobody")


@pytest.mark.parametrize("name", ["", "..", "a/b", "a?b", "a%2Fb"])
def test_a_name_cannot_lead_to_another_path(caller: Caller, plane: Plane, client: Client, name: str) -> None:
    with pytest.raises(InvalidRequest):
        caller.call(client, "get", name)
    assert plane.asked == []


def test_a_list_follows_all_pages(caller: Caller, plane: Plane, client: Client) -> None:
    for index in range(4):
        plane.put(a_training(f"more-{index}"))
    plane.pages = 2
    found = caller.call(client, "list")
    assert [one.name for one in found] == ["demo", "more-0", "more-1", "more-2", "more-3"]
    assert len(plane.asked) == 3


def test_a_list_can_be_narrowed(caller: Caller, plane: Plane, client: Client) -> None:
    plane.put(ended(a_training("old"), "succeeded"))
    found = caller.call(client, "list", "team=vision", "succeeded")
    assert [one.name for one in found] == ["old"]
    assert plane.asked[-1].params["labelSelector"] == "team=vision"


def test_metrics_are_records_and_can_be_narrowed(caller: Caller, plane: Plane, client: Client) -> None:
    handle = client.get("demo")
    metrics = caller.call(handle, "metrics")
    assert plane.asked[-1].params == {}
    assert metrics["loss"].points == ((1, 100.0, 0.5), (None, 101.0, 0.25)) and metrics["loss"].last == 0.25
    [worker] = metrics.workers
    assert (worker.name, worker.cpu_percent, worker.gpu_percent) == ("demo-0", 93.1, None)
    with pytest.raises(KeyError, match="there are loss"):
        metrics["accuracy"]
    caller.call(handle, "metrics", "loss", "lr")
    assert plane.asked[-1].params == {"names": "loss,lr"}


def test_events_usage_and_explanations_are_records(caller: Caller, plane: Plane, client: Client) -> None:
    handle = client.get("demo")
    assert [one.reason for one in caller.call(handle, "events")] == ["Created"]
    assert caller.call(handle, "usage").worker_seconds == 1.5
    assert caller.call(client, "usage", datetime(2026, 1, 1, tzinfo=UTC), "namespace")[0].gpu_seconds == 2.0
    assert plane.asked[-1].params == {"since": "2026-01-01T00:00:00.000Z", "by": "namespace"}
    assert str(caller.call(client, "explain", "demo")) == "it is ready\n  2 of 2 workers are ready"


SINCE = [
    (7, {"after": "7"}),
    (Event("Created", id=9), {"after": "9"}),
    (datetime(2026, 1, 1, tzinfo=UTC), {"since": "2026-01-01T00:00:00.000Z"}),
    ("2026-01-01T02:00:00+02:00", {"since": "2026-01-01T00:00:00.000Z"}),
]


@pytest.mark.parametrize(("since", "params"), SINCE)
def test_events_can_be_read_from_an_entry_or_a_time_on(
    caller: Caller, plane: Plane, client: Client, since: Any, params: dict[str, str]
) -> None:
    caller.call(client.get("demo"), "events", since)
    assert plane.asked[-1].params == params
    caller.call(client, "events", "demo", since=since)
    assert plane.asked[-1].params == params


@pytest.mark.parametrize("since", ["yesterday", True, 1.5])
def test_events_since_what_is_neither_are_refused(caller: Caller, plane: Plane, client: Client, since: Any) -> None:
    handle = client.get("demo")
    with pytest.raises(InvalidRequest, match="since must be an event, its id, or a time"):
        caller.call(handle, "events", since)
    assert len(plane.asked) == 1


# Held for the length of a block -------------------------------------------------------------------


def in_block(caller: Caller, handle: DistributedTraining, body: Callable[[], object] = lambda: None) -> None:
    async def asynchronously() -> None:
        async with handle:
            body()

    if caller.kind == "async":
        return asyncio.run(asynchronously())
    with handle:
        body()


def test_the_end_of_a_block_cancels_what_still_runs(caller: Caller, plane: Plane, client: Client) -> None:
    in_block(caller, client.get("demo"))
    assert [one.path.rpartition("/")[2] for one in plane.writes()] == ["cancel"]


def test_the_end_of_a_block_leaves_what_has_ended_as_it_is(caller: Caller, plane: Plane, client: Client) -> None:
    plane.put(ended(a_training(), "succeeded"))
    in_block(caller, client.get("demo"))
    assert plane.writes() == []


def test_a_training_that_was_deleted_in_the_block_is_nobody_s_error(
    caller: Caller, plane: Plane, client: Client
) -> None:
    in_block(caller, client.get("demo"), plane.remove)
    assert [one.path.rpartition("/")[2] for one in plane.writes()] == ["cancel"] and not plane.trainings


def test_what_goes_wrong_in_a_block_comes_before_what_goes_wrong_at_its_end(
    caller: Caller, plane: Plane, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(handle: object, grace: object) -> Flow[None]:
        raise Forbidden("this token may not")
        yield

    def fail() -> None:
        raise KeyError("its own")

    monkeypatch.setattr(flows, "cancel", refused)
    handle = client.get("demo")
    with pytest.raises(Forbidden):
        in_block(caller, handle)
    with pytest.raises(KeyError) as caught:
        in_block(caller, handle, fail)
    assert caught.value.__notes__ == ["training demo could not be cancelled: this token may not"]


# Writing -----------------------------------------------------------------------------------------


def test_a_training_is_submitted_as_the_spec_has_it(caller: Caller, plane: Plane, client: Client) -> None:
    made = caller.call(client, "train", module="pkg.train", args=["--lr", "0.1"], world_size=(1, 2, 4), name="mine")
    sent = plane.writes()[-1].body
    assert (made.name, made.namespace) == ("mine", "default")
    assert sent["spec"]["worldSize"] == {"min": 1, "target": 2, "max": 4}
    assert sent["spec"]["args"] == ["--lr", "0.1"]
    assert "status" not in sent and set(sent["metadata"]) == {"name", "namespace", "labels", "annotations"}


def test_a_cancel_passes_its_grace_on(caller: Caller, plane: Plane, client: Client) -> None:
    handle = client.get("demo")
    caller.call(handle, "cancel")
    caller.call(handle, "cancel", 2.5)
    assert [one.body for one in plane.writes()] == [{}, {"graceSeconds": 2.5}]


def test_a_delete_comes_back_when_the_training_is_gone(caller: Caller, plane: Plane, client: Client) -> None:
    handle = client.get("demo")
    plane.on_poll.extend([lambda: None, plane.remove])
    caller.call(handle, "delete")
    assert [one.method for one in plane.writes()] == ["DELETE"]
    assert not plane.on_poll


def test_a_delete_that_takes_too_long_is_a_timeout(caller: Caller, client: Client) -> None:
    with pytest.raises(WaitTimeout, match="not been removed"):
        caller.call(client.get("demo"), "delete", 0)


def test_a_manifest_is_created_if_there_is_none_of_its_name(caller: Caller, plane: Plane, client: Client) -> None:
    manifest = {"kind": "Training", "metadata": {"name": "new"}, "spec": {"script": "/a.py"}}
    assert caller.call(client, "apply", manifest).name == "new"
    assert plane.writes()[-1].body["metadata"] == {"name": "new", "namespace": "default"}


def test_a_manifest_changes_the_training_of_its_name(caller: Caller, plane: Plane, client: Client) -> None:
    manifest = {"metadata": {"name": "demo", "labels": {"a": "b"}}, "spec": {"command": ["true"]}}
    assert caller.call(client, "apply", manifest).training.spec.command == ("true",)
    sent = plane.writes()[-1]
    assert sent.method == "PATCH" and sent.headers["content-type"] == "application/merge-patch+json"
    assert sent.body == {
        "metadata": {"labels": {"a": "b"}},
        "spec": {"command": ["true"], "script": None, "module": None},
    }


def test_a_manifest_without_a_name_is_refused(caller: Caller, plane: Plane, client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"metadata\.name"):
        caller.call(client, "apply", {"spec": {}})
    assert plane.asked == []
