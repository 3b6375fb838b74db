"""Trainings that somebody else queues, on a real API server: what Kueue's convention writes is what counts here.

Kueue itself does not run: the tests write what an integration of it would.
"""

from __future__ import annotations

import json
from typing import Any

from muster.types.training import QUEUE
from tests.fleet import eventually
from tests.kube.api import MERGE, Json
from tests.kube.plane import KubePlane


def queued(plane: KubePlane, **spec: Any) -> None:
    """Applied by kubectl, with a queue's label, and without a word about suspend."""
    made = json.loads(plane.manifest(world=(1, 3, 4), **spec))
    made["metadata"]["labels"] = {QUEUE: "team"}
    plane.kubectl("apply", "-f", "-", input=json.dumps(made))


def path(plane: KubePlane) -> str:
    return f"/apis/muster.dev/v1alpha1/namespaces/{plane.namespace}/trainings/demo"


def write(plane: KubePlane, **spec: Any) -> None:
    plane.cluster.api("PATCH", path(plane), {"spec": spec}, kind=MERGE)


def until_admitted(plane: KubePlane, status: str, reason: str, phase: str) -> Json:
    def is_so(item: Json | None) -> bool:
        told = (item or {}).get("status") or {}
        found = [one for one in told.get("conditions") or () if one["type"] == "Admitted"]
        return bool(found) and (found[0]["status"], found[0]["reason"], told["phase"]) == (status, reason, phase)

    found = plane.cluster.until(path(plane), is_so, f"Admitted is {status} ({reason}), and it is {phase}", 30)
    assert found is not None
    return found


def test_a_queued_training_is_admitted_in_part_preempted_and_admitted_again(kube_plane: KubePlane) -> None:
    plane = kube_plane
    queued(plane)
    shown = until_admitted(plane, "False", "Suspended", "pending")
    assert shown["spec"]["suspend"] is True and not plane.pods()
    assert shown["status"]["observedGeneration"] == shown["metadata"]["generation"]

    write(plane, suspend=False, worldSize={"target": 2})
    until_admitted(plane, "True", "Admitted", "ready")
    plane.kubectl("wait", "--for=condition=TargetReached", "training/demo", "--timeout=20s")
    assert plane.running() == ["demo-0", "demo-1"]

    write(plane, suspend=True, worldSize={"target": 3})
    shown = until_admitted(plane, "False", "Suspended", "pending")
    eventually(lambda: not plane.running(), "its Pods have gone", 30)

    write(plane, suspend=False)
    until_admitted(plane, "True", "Admitted", "ready")
    plane.kubectl("wait", "--for=condition=TargetReached", "training/demo", "--timeout=20s")
    shown = plane.cluster.get(path(plane)) or {}
    assert shown["status"]["worldSize"]["ready"] == 3 and shown["status"]["round"] >= 1
    assert shown["status"]["restarts"] == 0 and "outcome" not in shown["status"]
    plane.go()
    plane.phase("succeeded")


def test_what_is_admitted_below_min_is_told_and_starts_nobody(kube_plane: KubePlane) -> None:
    plane = kube_plane
    queued(plane)
    until_admitted(plane, "False", "Suspended", "pending")
    write(plane, suspend=False, worldSize={"min": 2, "target": 1})
    found = plane.cluster.until(
        path(plane),
        lambda item: any(one["type"] == "Valid" for one in (item or {}).get("status", {}).get("conditions", ())),
        "it is told",
    )
    assert found is not None and "the target (1) is below the minimum (2)" in str(found["status"]["conditions"])
    assert not plane.pods()


def test_a_suspended_training_survives_its_control_plane(kube_plane: KubePlane) -> None:
    plane = kube_plane
    handle = plane.train(world=(2, 2, 2), labels={QUEUE: "team"}, below_minimum_timeout_seconds=3)
    until_admitted(plane, "False", "Suspended", "pending")
    handle.resume()
    handle.wait_until_target_world(timeout=30)
    plane.crash()
    write(plane, suspend=True)
    plane.serve()
    until_admitted(plane, "False", "Suspended", "pending")
    eventually(lambda: not plane.running(), "its Pods have gone", 30)
    plane.crash()
    plane.serve()
    handle.resume()
    handle.wait_until_target_world(timeout=30)
    plane.go()
    plane.phase("succeeded")
