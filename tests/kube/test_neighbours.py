"""A user does to objects of their own namespace whatever the documented role allows: does anybody else notice?"""

from __future__ import annotations

import asyncio
import contextlib
import json

from muster.backends.kube import render
from muster.types import pod_template
from tests.fleet import eventually
from tests.kube.api import MERGE, Json, Refused
from tests.kube.cluster import Cluster
from tests.kube.house import House, play
from tests.kube.kubelet import TestKubelet
from tests.kube.mallory import NOTE, Mallory
from tests.kube.plane import KubePlane
from tests.kube.test_forged import ASIDE, journal, told
from tests.plane import reasons

HOLD = "mallory.example/hold"
DENSE = '{"mark":"x","events":[' + ",".join(["{}"] * 20_000) + '],"records":[]}'  # slow to read, quick to send


def test_very_many_forged_annotations_neither_end_it_nor_flood_its_journal(
    kube_plane: KubePlane, mallory: Mallory
) -> None:
    """To read them took longer than a lease lasts, at every start."""
    plane = kube_plane
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=30)
    plane.crash()
    names = [f"m{at}" for at in range(120)]
    mallory.create_many(names, DENSE)
    plane.serve()
    assert plane.running() == ["demo-0", "demo-1"]
    assert len(told(plane, mallory.namespace)) == 100, "one by one up to here"
    (rest,) = [event for event in journal(plane)[0] if (event["reason"], event["namespace"]) == (ASIDE, plane.own)]
    assert f"20 more in {mallory.namespace}" in rest["message"]

    def noted() -> list[str]:
        items = plane.cluster.api("GET", mallory.path())["items"]
        return [one["metadata"]["name"] for one in items if NOTE in (one["metadata"].get("annotations") or {})]

    eventually(lambda: not noted(), "they are gone", 60)
    plane.train("another", "exit=0", world=(1, 1, 1))
    plane.phase("succeeded", "another")
    plane.go()
    plane.phase("succeeded")
    assert reasons(training).count("WorkerLost") == 0


def test_sealed_entries_are_told_once_wherever_and_whenever_they_are_put_back(
    kube_plane: KubePlane, mallory: Mallory
) -> None:
    """Mallory copies what muster has written: into another object, into a new one of that name, and back, later."""
    plane = kube_plane
    body = json.loads(plane.manifest("first", backend="nosuch")) | {"metadata": {"name": "first"}}
    mallory.kubectl("create", "-f", "-", input=json.dumps(body))
    claimed = plane.cluster.until(
        mallory.path("first"), lambda one: one and NOTE in (one["metadata"].get("annotations") or {}), "claimed"
    )
    assert claimed is not None
    notes: Json = claimed["metadata"]["annotations"]

    def made() -> list[Json]:
        """What the journal tells of it; an object carries that until it is there."""
        return [
            one for one in journal(plane)[0] if one["reason"] == "Created" and one["namespace"] == mallory.namespace
        ]

    eventually(lambda: len(made()) == 1, "it is told", 20)
    before = made()
    mallory.kubectl("annotate", "training", "first", f"{NOTE}-")
    plane.crash()
    mallory.kubectl("annotate", "training", "first", f"{NOTE}={notes[NOTE]}")
    copied = body | {"metadata": {"name": "second", "annotations": notes, "finalizers": ["muster.dev/training"]}}
    mallory.kubectl("create", "-f", "-", input=json.dumps(copied))
    plane.serve()
    assert told(plane, mallory.namespace) in ({}, {"second": 1}), "its own is known, the copy is nobody's"
    assert made() == before
    plane.crash()
    mallory.kubectl("patch", "training", "first", "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
    mallory.kubectl("delete", "training", "first")
    again = body | {"metadata": {"name": "first", "annotations": notes, "finalizers": ["muster.dev/training"]}}
    mallory.kubectl("create", "-f", "-", input=json.dumps(again))
    plane.serve()
    uid = (mallory.object("first") or {})["metadata"]["uid"]
    assert uid != claimed["metadata"]["uid"]
    assert not [event for event in journal(plane)[0] if event["uid"] == uid and event["reason"] == "Created"]


def test_an_object_that_its_user_holds_up_is_let_go_and_waited_for_by_nobody(
    kube_plane: KubePlane, mallory: Mallory
) -> None:
    """A finalizer of their own, an owner that is elsewhere, and a deletion that leaves the Pods behind."""
    plane = kube_plane
    plane.train(world=(1, 1, 1)).wait_until_target_world(timeout=30)
    victim = plane.object()
    assert victim is not None
    owner = {"apiVersion": "muster.dev/v1alpha1", "kind": "Training", "name": "demo", "uid": victim["metadata"]["uid"]}
    body = json.loads(plane.manifest("held", world=(1, 1, 1)))
    body["metadata"] = {"name": "held", "finalizers": [HOLD]}
    mallory.kubectl("create", "-f", "-", input=json.dumps(body))
    body["metadata"] = {"name": "owned", "ownerReferences": [owner]}
    mallory.kubectl("create", "-f", "-", input=json.dumps(body))
    pods = f"/api/v1/namespaces/{mallory.namespace}/pods"
    eventually(lambda: plane.cluster.get(f"{pods}/held-0") is not None, "its worker is there", 30)
    mallory.kubectl("delete", "training", "held", "--wait=false", "--cascade=orphan", check=False)
    plane.cluster.until(
        mallory.path("held"), lambda one: one and one["metadata"]["finalizers"] == [HOLD], "only theirs is left", 40
    )
    eventually(lambda: plane.cluster.get(f"{pods}/held-0") is None, "nothing runs for it", 30)
    plane.train("another", "exit=0", world=(1, 1, 1))
    plane.phase("succeeded", "another")
    ours = (plane.namespace, mallory.namespace)  # others in this cluster have namespaces that are just being removed
    failed = [one for one in journal(plane)[0] if one["reason"] == "ReconcileFailed" and one["namespace"] in ours]
    assert not failed, "nobody waits for what others hold"
    mallory.kubectl("patch", "training", "held", "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
    eventually(lambda: mallory.object("held") is None, "and goes")
    now = plane.object()
    assert now is not None and now["metadata"]["uid"] == victim["metadata"]["uid"], "what they named is untouched"
    assert plane.running() == ["demo-0"]


# Somebody who may also write Pods there ----------------------------------------------------------


def an_impostor(namespace: str, victim: Json) -> Json:
    """A Pod that looks, in another namespace, like the worker of somebody else's training."""
    about = victim["metadata"]
    labels = {"labels": about["labels"], "ownerReferences": about["ownerReferences"]}
    metadata = {"name": about["name"], "namespace": namespace, **labels, "finalizers": [render.FINALIZER]}
    sleeps = {"name": pod_template.CONTAINER, "image": "x", "command": ["sleep", "600"]}
    spec = {"containers": [sleeps], "nodeName": "nowhere", "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_a_pod_that_looks_like_somebody_elses_worker_changes_nothing_about_it(
    cluster: Cluster, namespace: str, kubelet: TestKubelet
) -> None:
    """It fails and is deleted. What muster does about it, it does to that one."""
    elsewhere = cluster.new_namespace("mallory")
    path = f"/api/v1/namespaces/{elsewhere}/pods"

    async def scenario(house: House) -> None:
        training = await house.training()
        await house.backend.start(training, "demo-0", (), "t" * 32)
        await house.running(training)
        real = await house.ask("GET", house.path("demo-0"))
        assert real is not None
        await house.ask("POST", path, an_impostor(elsewhere, real))
        await house.ask("PATCH", f"{path}/demo-0/status", {"status": {"phase": "Failed"}}, kind=MERGE)
        await asyncio.to_thread(
            cluster.until, f"{path}/demo-0", lambda pod: pod is None or not pod["metadata"].get("finalizers"), "let go"
        )
        with contextlib.suppress(Refused):  # its node is nowhere: the cluster may have been quicker
            await house.ask("DELETE", f"{path}/demo-0")
        another = house.another()
        await another.start_watching()
        assert await another.adopt(None) == 1, "nor is it taken for one after a restart"
        await another.close()
        assert house.worker(training).alive and not house.worker(training).stopping
        found = await house.ask("GET", house.path("demo-0"))
        assert found is not None and found["metadata"]["uid"] == real["metadata"]["uid"]
        assert found["status"]["phase"] == "Running" and found["metadata"]["finalizers"] == [render.FINALIZER]

    play(cluster, namespace, scenario)
    cluster.drop_namespace(elsewhere)
