"""What a Pod says about its worker, for each way in which a Pod can be."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from muster.backends.kube import pods
from muster.backends.kube.pod_cache import PodCache
from muster.backends.kube.pod_lines import RankLine, Reader
from muster.backends.kube.pod_times import PodTimes
from muster.types.training import Uid
from muster.types.worker import Worker
from tests.clocks import HandClock
from tests.training_builders import BIRTH

Json = dict[str, Any]

BORN, RAN, DIED = "2026-01-31T12:00:00Z", "2026-01-31T12:01:00Z", "2026-01-31T12:02:00Z"
RUNNING = {"running": {"startedAt": RAN}}
AT = BIRTH + timedelta(minutes=5)


def terminated(code: int, reason: str = "Error", message: str = "") -> Json:
    return {
        "terminated": {"exitCode": code, "reason": reason, "message": message, "startedAt": RAN, "finishedAt": DIED}
    }


def a_pod(
    state: Json | None = None, *, node: str = "node-1", grace: int | None = None, name: str = "demo-0", **known: Any
) -> Json:
    """`known` is its status, but for `version` and `uid`."""
    about: Json = {
        "namespace": "default",
        "name": name,
        "uid": known.pop("uid", f"pod-{name}"),
        "resourceVersion": str(known.pop("version", 1)),
        "creationTimestamp": BORN,
        "labels": {"muster.dev/training-uid": "u1", "muster.dev/training": "demo"},
        "ownerReferences": [{"kind": "Training", "uid": "u1"}],
        "finalizers": ["muster.dev/exit"],
        "managedFields": [{"manager": "x" * 1000}],
    }
    if grace is not None:
        about |= {"deletionTimestamp": DIED, "deletionGracePeriodSeconds": grace}
    status = {"phase": "Running" if state is RUNNING else "Pending", **known}
    if state is not None:
        status["containerStatuses"] = [{"name": "sidecar", "state": RUNNING}, {"name": "worker", "state": state}]
    return {"metadata": about, "spec": {"nodeName": node or None, "containers": [{}]}, "status": status}


def a_worker(**known: Any) -> Worker:
    return Worker("demo-0", Uid("u1"), "", BIRTH, **known)


def condition(kind: str, status: str, **more: str) -> Json:
    return {"type": kind, "status": status, **more}


UNPLACED = condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes are available")
PREEMPTED = condition("DisruptionTarget", "True", reason="PreemptionByScheduler")
NO_PROGRAM = 'exec: "muster-node": executable file not found in $PATH: unknown'

ENDS = [
    ("it runs", a_pod(RUNNING), None),
    ("it was told to leave", a_pod(RUNNING, grace=30), None),
    ("nobody knows it yet", a_pod(node=""), None),
    ("its node is not heard", a_pod(RUNNING, phase="Unknown"), None),
    ("done", a_pod(terminated(0, "Completed"), phase="Succeeded"), (0, "", "exit code 0")),
    ("failed", a_pod(terminated(3), phase="Failed"), (3, "Error", "exit code 3")),
    ("told before its phase", a_pod(terminated(3)), (3, "Error", "exit code 3")),
    ("told only by its phase", a_pod(phase="Succeeded"), (0, "", "exit code 0")),
    ("out of memory", a_pod(terminated(137, "OOMKilled")), (137, "OOMKilled", "exit code 137 (OOMKilled)")),
    (
        "evicted",
        a_pod(terminated(137), phase="Failed", reason="Evicted", message="low on memory"),
        (137, "Evicted", "exit code 137 (Evicted): low on memory"),
    ),
    (
        "evicted before it ran",
        a_pod(phase="Failed", reason="Evicted", message="low on disk"),
        (None, "Evicted", "Evicted: low on disk"),
    ),
    (
        "refused by its node",
        a_pod(phase="Failed", reason="OutOfcpu", message="Pod Node didn't have enough resource: cpu"),
        (None, "Error", "Error: Pod Node didn't have enough resource: cpu"),
    ),
    ("preempted", a_pod(terminated(143), conditions=[PREEMPTED]), (143, "Preempted", "exit code 143 (Preempted)")),
    (
        "preempted by the kubelet",
        a_pod(phase="Failed", reason="Preempting", message="for a critical Pod"),
        (None, "Preempted", "Preempted: for a critical Pod"),
    ),
    ("its node was lost", a_pod(RUNNING, reason="NodeLost"), (None, "NodeLost", "its node node-1 was lost")),
    ("deleted before it had a node", a_pod(node="", grace=0), (None, "", "its Pod was deleted before it ran")),
    (
        "removed by force",
        a_pod(RUNNING, grace=0),
        (None, "NodeLost", "its Pod was removed, and its node node-1 did not say how it ended"),
    ),
    ("removed after it ended", a_pod(terminated(0), grace=0), (0, "", "its Pod was deleted: exit code 0")),
    ("an image without us", a_pod(terminated(128, "StartError", NO_PROGRAM)), (2, "Error", "exit code 2")),
]


@pytest.mark.parametrize(("pod", "expected"), [case[1:] for case in ENDS], ids=[case[0] for case in ENDS])
def test_how_it_ended(pod: Json, expected: tuple[int | None, str, str] | None) -> None:
    found = pods.end(pods.read(pod))
    assert (found and (found.exit_code, found.reason, found.why)) == expected
    last = pods.gone(pods.read(pod))
    if expected is None:
        assert last.exit_code is None and last.reason in ("NodeLost", "")
    else:
        assert last == found


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (a_pod(node="", conditions=[UNPLACED]), "0/3 nodes are available"),
        (a_pod(node=""), "no node has been chosen for it yet"),
        (a_pod(), "ContainerCreating (node node-1)"),
        (
            a_pod({"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}}),
            'ImagePullBackOff: Back-off pulling image "x" (node node-1)',
        ),
        (a_pod(RUNNING), ""),
    ],
)
def test_why_it_does_not_run_yet(pod: Json, expected: str) -> None:
    assert pods.observed(a_worker(waiting=pods.ORDERED), pods.read(pod)).waiting == expected


def test_it_counts_as_started_when_its_container_runs() -> None:
    ordered = pods.observed(a_worker(), pods.read(a_pod()))
    running = pods.observed(ordered, pods.read(a_pod(RUNNING)))
    assert ordered.started_at == BIRTH and running.started_at == BIRTH + timedelta(minutes=1)
    assert running.node == running.mesh_name == "node-1" and not running.stopping
    assert pods.observed(running, pods.read(a_pod(RUNNING, grace=30))).stopping, "somebody else deleted it"


def over(worker: Worker, state: Json, **known: Any) -> Worker:
    pod = pods.read(a_pod(state, **known))
    how = pods.end(pod)
    assert how is not None
    return pods.ended(worker, pod, how, AT)


def test_an_ended_worker_says_what_is_known_of_its_end() -> None:
    words = "muster-node: no such script: x\nmuster-node: see muster-node --help\n"
    ended = over(a_worker(), terminated(2, "Error", words))
    assert (ended.exit_code, ended.reason, ended.why_ended) == (2, "Error", "exit code 2")
    assert ended.last_words == "no such script: x" and ended.ended_at == BIRTH + timedelta(minutes=2)
    asked = over(a_worker(stopping=True, why_ended="enough"), terminated(143))
    assert (asked.reason, asked.why_ended, asked.last_words) == ("", "enough", "")
    assert over(a_worker(stopping=True, why_ended="enough"), terminated(137, "OOMKilled")).reason == "OOMKilled"
    assert over(a_worker(), RUNNING, grace=0).ended_at == AT, "when nobody saw it, it is when it was noticed"


# Which Pods are there


class Heard(list[tuple[str, bool]]):
    def __call__(self, pod: pods.Pod, gone: bool) -> None:
        self.append((f"{pod.name}@{pod.version}", gone))


def test_a_list_drops_what_it_lacks_but_not_what_is_newer() -> None:
    heard = Heard()
    picture = PodCache(heard)
    picture.listed([picture.digest(a_pod(name=name)) for name in "ab"], "10")
    picture.put(pods.read(a_pod(name="c", version=30)))
    heard.clear()
    picture.listed([picture.digest(a_pod(name="b", version=2))], "20")
    assert heard == [("a@1", True), ("b@2", False)]
    assert {pod.name for pod in picture} == {"b", "c"}


def test_an_old_answer_does_not_undo_what_the_watch_told() -> None:
    heard = Heard()
    picture = PodCache(heard)
    picture.changed("MODIFIED", a_pod(version=7))
    picture.put(pods.read(a_pod(version=5)))
    assert heard == [("demo-0@7", False)]
    picture.changed("ADDED", a_pod(version=9, uid="another"))
    assert heard[1:] == [("demo-0@7", True), ("demo-0@9", False)], "one of the same name is another one"
    picture.changed("DELETED", a_pod(version=8))
    assert picture.get("default", "demo-0") is not None


def test_what_is_kept_of_a_pod_is_small() -> None:
    def size(thing: object) -> int:
        return sys.getsizeof(thing) + sum(sys.getsizeof(getattr(thing, name)) for name in pods.Pod.__slots__)

    busy = a_pod(terminated(1, "Error", "x" * 4000), message="y" * 4000)
    assert 8000 * size(pods.read(busy)) < 60e6


# What ranks wrote


def test_lines_belong_to_the_round_that_the_agent_named_and_come_once() -> None:
    reader = Reader()
    text = b"muster-node[demo-0] joined run u1\nmuster-node[demo-0] round 3: rank 1 of 2; why\n[1] a\n[1] \n[12] [x] y"
    assert list(reader.take(text)) == [RankLine(3, 1, b"a"), RankLine(3, 1, b"")]
    assert list(reader.finish()) == [RankLine(3, 12, b"[x] y")]
    reader.begin()
    more = text + b"\nmuster-node[demo-0] round 4: rank 0 of 2; why\nTraceback of the agent\n[0] b\n"
    pieces = [more[at : at + 7] for at in range(0, len(more), 7)]
    assert [line for piece in pieces for line in reader.take(piece)] == [RankLine(4, 0, b"b")]


@pytest.mark.parametrize(
    ("shown", "gpus"),
    [
        ("8", 8),
        ("0", 0),
        ("1k", 1000),
        ("1e2", 100),
        ("1Ki", 1024),
        ("0.5k", 500),
        ("1E", 1024),
        ("9e99", 1024),
        ("9223372036854775807", 1024),
        ("-1", 0),
        ("lots", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_a_pods_gpus_are_counted_however_the_cluster_writes_their_number(shown: str | None, gpus: int) -> None:
    pod = a_pod()
    pod["spec"]["containers"] = [{"resources": {"limits": {"nvidia.com/gpu": shown}}}]
    assert pods.read(pod).gpus == gpus


@pytest.mark.parametrize("days", [2, -2, 0])
def test_what_is_measured_of_a_pod_does_not_follow_clocks_that_are_set(days: int) -> None:
    """Our own time of day is two days off, the cluster's is right: an end that was seen at once was just now."""
    clock = HandClock(AT)
    clock.set_by = timedelta(days=days)
    times = PodTimes(clock)
    ran = replace(pods.read(a_pod(RUNNING)), started_at=AT - timedelta(seconds=3))
    began = times.of(ran, watched=True).started_at
    assert began is not None and began <= AT
    clock.at += timedelta(hours=1)
    clock.set_by = timedelta(days=-days)
    assert times.of(ran, watched=True).started_at == began, "it is found once"
    over = times.of(replace(ran, ended_at=AT + timedelta(minutes=59, seconds=59)), watched=True)
    assert over.ended_at is not None and timedelta() <= clock.at - over.ended_at <= timedelta(seconds=10)


# Containers beside the worker


def a_status_of(name: str, state: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "state": state}


def test_an_init_container_that_fails_is_why_the_worker_ended() -> None:
    pod = a_pod()
    failed = {"terminated": {"exitCode": 2, "message": "no such host\n"}}
    pod["status"] = {
        "phase": "Failed",
        "initContainerStatuses": [a_status_of("first", {"terminated": {"exitCode": 0}}), a_status_of("fetch", failed)],
        "containerStatuses": [a_status_of("worker", {"waiting": {"reason": "PodInitializing"}})],
    }
    how = pods.end(pods.read(pod))
    assert how is not None and how.exit_code == pods.INIT_FAILED != 2, "2 would mean that no worker can ever start"
    assert how.why == "its init container fetch ended with exit code 2: no such host"


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"running": {}}, "init container fetch: runs (node n1)"),
        (
            {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            "init container fetch: ImagePullBackOff: no such image (node n1)",
        ),
        ({"terminated": {"exitCode": 0}}, "PodInitializing (node n1)"),
    ],
)
def test_what_a_pod_waits_for_in_its_init_containers_is_told(state: dict[str, Any], told: str) -> None:
    pod = a_pod()
    pod["spec"]["nodeName"] = "n1"
    pod["status"] = {
        "phase": "Pending",
        "initContainerStatuses": [a_status_of("fetch", state)],
        "containerStatuses": [a_status_of("worker", {"waiting": {"reason": "PodInitializing"}})],
    }
    assert pods.read(pod).waiting == told


@pytest.mark.parametrize(
    ("worker", "beside", "leaving", "lingers"),
    [
        ({"terminated": {"exitCode": 0}}, {"running": {}}, False, True),
        ({"terminated": {"exitCode": 0}}, {"running": {}}, True, False),
        ({"terminated": {"exitCode": 0}}, {"terminated": {"exitCode": 0}}, False, False),
        ({"running": {}}, {"running": {}}, False, False),
    ],
)
def test_a_pod_lingers_when_something_runs_beside_an_ended_worker(
    worker: dict[str, Any], beside: dict[str, Any], leaving: bool, lingers: bool
) -> None:
    pod = a_pod()
    if leaving:
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    statuses = [a_status_of("worker", worker), a_status_of("side", beside)]
    pod["status"] = {"phase": "Running", "containerStatuses": statuses}
    assert pods.read(pod).lingers is lingers
