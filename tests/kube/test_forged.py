"""A user who may write trainings writes what only the control plane should: nothing of it is believed, nothing ends."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

from muster import DistributedTraining
from muster.store.kube_batches import LABEL, Batch
from muster.types.event import WORKER_STARTED
from tests.fleet import eventually
from tests.kube.api import Json
from tests.kube.mallory import NOTE, Mallory
from tests.kube.plane import KubePlane
from tests.plane import reasons

ASIDE = "JournalSetAside"


def box(*records: Any, events: Any = (), mark: Any = "made-up") -> str:
    return json.dumps({"mark": mark, "events": list(events), "records": list(records)})


def forgeries(namespace: str, uid: str) -> dict[str, str]:
    """Name → annotation, against a training of another namespace."""
    about = {"namespace": namespace, "training": "demo", "uid": uid, "message": "forged"}
    started = {"reason": "WorkerStarted", "data": {"worker": "demo-9", "gpus": 10**15}, **about}
    worker = {"name": "x", "uid": uid, "namespace": namespace, "training": "demo", "node": "n", "gpus": []}
    return {
        "boom": box(["worker", "boom", {}]),
        "worker": box(["worker", f"{uid}/x", {**worker, "startedAt": "2026-01-31T12:00:00"}]),
        "token": box(["token", uid, {"token": "t" * 32, "marks": {}}]),
        "no-token": box(["token", uid, None]),
        "run": box(["run", uid, "x"], ["mesh", "x", []], ["control", "alive", {}]),
        "key": box(["idempotency", f"{namespace}/k", {}]),
        "kinds": box([["a"], 1, 2], [None, None, None], 5),
        "usage": box(events=[started]),
        "actor": box(events=[{"reason": "Edited", "actor": "admin", **about}]),
        "end": box(events=[{"reason": "Succeeded", **about}]),
        "own-end": box(events=[{"reason": "Succeeded", "message": "forged"}]),
        "gone": box(events=[{"reason": "Deleted", "message": "forged"}], mark=f"gone-{uid}"),
        "no-json": "}{",
        "types": '{"mark": {}, "events": 5, "records": "x"}',
        "text": box(events=[{"reason": "\ud800", "message": "forged"}], mark="\ud800"),
        "deep": "[" * 60_000,
        "deep-data": box(events=[{"reason": "x", "data": {}}]).replace("{}", '{"a": ' + "[" * 900 + "]" * 900 + "}"),
        "number": box(events=[{"reason": "x", "data": {}}]).replace("{}", '{"a": 1' + "0" * 400 + "}"),
        "huge": box(["worker", "boom", {"x": "x" * 200_000}]),
        "many": box(*[["worker", str(at), {}] for at in range(3_000)]),
        "sealed": "0" * 64 + "." + box(["worker", "boom", {}]),
    }


def journal(plane: KubePlane) -> tuple[list[Json], dict[tuple[str, str], Any]]:
    """Its entries, and what is kept."""
    path = f"/api/v1/namespaces/{plane.own}/secrets"
    found = plane.cluster.api("GET", path, labelSelector=LABEL)["items"]
    batches = sorted((Batch.from_secret(one) for one in found), key=lambda batch: batch.number)
    records = {which: value for batch in batches for which, value in batch.records.items()}
    return [event for batch in batches for event in batch.events], records


def kept(plane: KubePlane) -> dict[tuple[str, str], Any]:
    return {which: value for which, value in journal(plane)[1].items() if value is not None}


def came_back(training: DistributedTraining, times: int) -> None:
    eventually(lambda: reasons(training).count("RoundRecovered") == times, "its workers came back", 30)


def told(plane: KubePlane, namespace: str) -> dict[str, int]:
    """Training → how often it was told that something was set aside."""
    found = [
        event["training"] for event in journal(plane)[0] if (event["reason"], event["namespace"]) == (ASIDE, namespace)
    ]
    return {name: found.count(name) for name in found}


def test_what_users_write_into_a_training_is_never_state(kube_plane: KubePlane, mallory: Mallory) -> None:
    plane = kube_plane
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=30)
    shown = plane.object()
    assert shown is not None
    uid = shown["metadata"]["uid"]
    before = kept(plane)
    plane.crash()
    forged = forgeries(plane.namespace, uid)
    for name, note in forged.items():
        mallory.create(name, note, finalizers=["muster.dev/training"])
    mallory.create("unclaimed", forged["boom"])
    mallory.create("leaving", forged["token"], finalizers=["muster.dev/training"])
    mallory.kubectl("delete", "training", "leaving", "--wait=false")
    assert all("journal" not in (one.get("status") or {}) for one in [mallory.object("boom") or {}]), "it is not theirs"
    for life in (1, 2):
        plane.serve()
        came_back(training, life)
        assert told(plane, mallory.namespace) == dict.fromkeys([*forged, "unclaimed", "leaving"], 1)
        for name in forged:
            path = f"/apis/muster.dev/v1alpha1/namespaces/{mallory.namespace}/trainings/{name}"
            plane.cluster.until(path, lambda one: one and NOTE not in (one["metadata"].get("annotations") or {}), name)
        eventually(lambda: mallory.object("leaving") is None, "what was deleted goes")
        events, _ = journal(plane)
        assert not [event for event in events if event.get("message") == "forged"]
        assert [event["data"]["worker"] for event in events if event["reason"] == WORKER_STARTED] == [
            "demo-0",
            "demo-1",
        ]
        # Trainings that another test in this cluster has left may have got records of their own meanwhile.
        extra = {which for which in kept(plane).keys() ^ before.keys() if which[1] in str(forged) or uid in which[1]}
        assert not extra and kept(plane)["token", uid] == before["token", uid]
        plane.crash()
    plane.serve()
    seen = plane.kubectl("-n", mallory.namespace, "get", "events", "--field-selector=involvedObject.name=boom")
    assert ASIDE in seen, "its writer is told"
    plane.go()
    plane.phase("succeeded")


def test_while_it_runs_it_reads_nothing_there_and_two_at_once_are_no_trouble(
    kube_plane: KubePlane, mallory: Mallory
) -> None:
    """An annotation that is put back with each edit is gone with the next start, and told of once for each text."""
    plane = kube_plane
    mallory.create("first", box(["worker", "boom", {}]), finalizers=["muster.dev/training"])
    mallory.create("second", box(["worker", "boom", {}]))
    for name in ("first", "second"):
        path = f"/apis/muster.dev/v1alpha1/namespaces/{mallory.namespace}/trainings/{name}"
        plane.cluster.until(path, lambda one: one and (one.get("status") or {}).get("conditions"), f"{name}: looked at")
    mallory.kubectl("annotate", "training", "first", "second", "--overwrite", f"{NOTE}={box(['token', 'x', {}])}")
    plane.crash()
    plane.serve()
    assert told(plane, mallory.namespace) == {"first": 1, "second": 1}
    assert not [which for which in kept(plane) if which[1] in ("boom", "x")]


def test_a_journal_that_0_1_0_has_spoiled_is_put_right_and_told_once(kube_plane: KubePlane) -> None:
    """What it had taken over from an annotation lies in a Secret like everything else."""
    plane = kube_plane
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=30)
    shown = plane.object()
    assert shown is not None
    uid = shown["metadata"]["uid"]
    before = kept(plane)
    plane.crash()
    about = {"namespace": plane.namespace, "training": "demo", "uid": uid, "actor": "muster", "type": "Normal"}
    about |= {"reason": WORKER_STARTED, "message": "forged", "mark": "made-up", "at": "2026-01-31T12:00:00.000Z"}
    records = [
        ["worker", "boom", {}],
        ["worker", "x", ""],
        ["worker", f"{uid}/demo-0", {}],
        ["token", uid, {"token": "t" * 32, "marks": {}}],
        ["run", "y", [["a", 1]]],
        ["mesh", "z", []],
        ["idempotency", f"{plane.namespace}/k", ""],
        *[["worker", f"many-{at}", {}] for at in range(1_200)],
    ]
    events = [{**about, "id": 5_000, "data": {"worker": "demo-9", "gpus": 10**15}}]
    write_as_0_1_0(plane, {"by": "one/00000000", "events": events, "records": records})
    for life in (1, 2):
        plane.serve()
        came_back(training, life)
        assert told(plane, plane.own) == {"muster": 1}
        assert kept(plane)["token", uid] == before["token", uid], "the one that its workers have"
        assert kept(plane)["worker", f"{uid}/demo-0"] == before["worker", f"{uid}/demo-0"]
        assert kept(plane).keys() == before.keys()
        (used,) = json.loads(plane.said("usage", "-o", "json"))["items"]
        assert (used["workers"], used["gpuSeconds"]) == (2, 0), used
        assert plane.running() == ["demo-0", "demo-1"]
        plane.crash()
    plane.serve()
    message = plane.said("events", "muster", "-n", plane.own)
    assert "worker 'boom'" in message and "1 entries about usage" in message and "more" in message
    plane.go()
    plane.phase("succeeded")


def write_as_0_1_0(plane: KubePlane, held: Json) -> None:
    """As a batch of its journal, after all that there is."""
    path = f"/api/v1/namespaces/{plane.own}/secrets"
    names = [one["metadata"]["name"] for one in plane.cluster.api("GET", path, labelSelector=LABEL)["items"]]
    number = max(int(name.rpartition("-")[2]) for name in names) + 1
    metadata = {
        "name": f"muster-log-{number:012d}",
        "labels": {LABEL: "true", "app.kubernetes.io/managed-by": "muster"},
    }
    data = {"batch": base64.b64encode(gzip.compress(json.dumps(held).encode(), 1)).decode()}
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": LABEL, "data": data}
    plane.cluster.api("POST", path, body)
