"""No status lies, whoever asks: kubectl or the SDK, up or down, after the end, after a restart, with no exit at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster import DistributedTraining, ScaleSuperseded, TrainingCancelled, TrainingFailed, UDTerminalState
from tests.fleet import Process, eventually
from tests.kube.api import Json
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane

DELAY_S = 0.4


@pytest.fixture
def slow_plane(tmp_path: Path, cluster: Cluster, namespace: str, kubelet: TestKubelet) -> Iterator[KubePlane]:
    """A control plane that looks at everything late, so that an old status is there to be believed."""
    made = KubePlane(tmp_path, cluster, namespace)
    made.serve("one", "--reconcile-delay-s", str(DELAY_S))
    yield made
    made.close()
    kubelet.no_process_left()


def running_workers(training: DistributedTraining) -> int:
    training.refresh()
    return len({rank.worker for rank in training.ranks if rank.phase == "running"})


def other_process(plane: KubePlane, *lines: str) -> Process:
    """A program with a handle `t` of its own."""
    where = {"url": f"http://{plane.proxy.address('api')}", "token": plane.token, "namespace": plane.namespace}
    return plane.start(
        sys.executable, "-c", "\n".join(["import muster", f"t = muster.Client(**{where}).get('demo')", *lines])
    )


def status(plane: KubePlane) -> Json:
    """As `kubectl get -o json` shows it."""
    found: Json = json.loads(plane.kubectl("get", "training", "demo", "-o", "json"))["status"]
    return found


def warnings(plane: KubePlane) -> list[Json]:
    """Kubernetes Events that answer edits after the end."""
    path = f"/api/v1/namespaces/{plane.namespace}/events"
    return list(plane.cluster.api("GET", path, fieldSelector="reason=UDTerminalState")["items"])


def test_a_wait_for_the_target_never_believes_an_old_status(slow_plane: KubePlane) -> None:
    plane = slow_plane
    training = plane.train(stop_grace_seconds=1)
    assert training.wait_until_target_world(timeout=30).ready == 2
    for target, by_kubectl in ((3, False), (2, False), (3, True), (2, True)):
        before = training.training.status.round
        if by_kubectl:
            plane.kubectl("scale", "training/demo", f"--replicas={target}")
            training = plane.client.get("demo")
        else:
            assert training.scale(target=target).target == target, "scale answers with what was asked for"
        other = other_process(
            plane,
            "world = t.wait_until_target_world(timeout=30)",
            "print(world.ready, world.target, len(t.ranks), t.training.status.round)",
        )
        world = training.wait_until_target_world(timeout=30)
        assert (world.ready, world.target) == (target, target)
        assert training.training.status.round != before
        assert running_workers(training) == target
        shown = status(plane)
        reached = next(one for one in shown["conditions"] if one["type"] == "TargetReached")
        assert reached["status"] == "True" and reached["observedGeneration"] == training.generation
        assert other.wait() == 0, other.text
        assert other.text.split() == [str(target), str(target), str(target), str(training.training.status.round)]


def test_kubectl_waits_for_a_target_that_is_really_reached(slow_plane: KubePlane) -> None:
    plane = slow_plane
    if (minor := plane.cluster.kubectl_minor()) < 24:
        pytest.skip(f"kubectl 1.{minor} does not look at a condition's observedGeneration")
    plane.kubectl("apply", "-f", "-", input=plane.manifest(stopGraceSeconds=1))
    plane.kubectl("wait", "--for=condition=TargetReached", "training/demo", "--timeout=20s")
    for target in (3, 2):
        plane.kubectl("scale", "training/demo", f"--replicas={target}")
        plane.kubectl("wait", "--for=condition=TargetReached", "training/demo", "--timeout=20s")
        shown = status(plane)
        assert shown["worldSize"]["ready"] == shown["worldSize"]["target"] == target
        assert len(shown["ranks"]) == target


def test_another_writer_of_the_target_is_noticed(slow_plane: KubePlane) -> None:
    plane = slow_plane
    mine = plane.train(world=(1, 1, 4), stop_grace_seconds=1)
    mine.wait_until_target_world(timeout=30)
    mine.scale(target=3)
    plane.kubectl("scale", "training/demo", "--replicas=2")
    with pytest.raises(ScaleSuperseded) as caught:
        mine.wait_until_target_world(timeout=30)
    assert (caught.value.requested, caught.value.target) == (3, 2)
    assert plane.client.get("demo").wait_until_target_world(timeout=30).ready == 2


def test_an_edit_after_the_end_moves_nothing_and_is_answered_once(kube_plane: KubePlane) -> None:
    plane = kube_plane
    training = plane.train("demo", "exit=0", world=(1, 1, 3))
    training.result(timeout=30)
    before = status(plane)
    with pytest.raises(UDTerminalState) as caught:
        training.scale(target=2)
    assert (caught.value.phase, caught.value.requested_target) == ("succeeded", 2)
    assert status(plane) == before
    pods = set(plane.pods())

    plane.kubectl("scale", "training/demo", "--replicas=3")
    eventually(lambda: warnings(plane), "a Warning")
    plane.crash()
    plane.serve()
    plane.kubectl("label", "training", "demo", "touched=yes")
    plane.kubectl("patch", "training", "demo", "--type=merge", "-p", '{"spec":{"spares":2}}')
    eventually(lambda: len(warnings(plane)) == 2, "one for each generation")
    told = [event for event in plane.client.events("demo") if event.reason == "UDTerminalState"]
    assert [event.type for event in told] == ["Warning", "Warning"]
    assert "1:3:3" in told[0].message, told[0].message
    assert [one["type"] for one in warnings(plane)] == ["Warning", "Warning"]
    after = status(plane)
    for name in ("phase", "rankExits", "outcome", "worldSize", "round", "finishedAt"):
        assert after[name] == before[name], name
    assert set(plane.pods()) == pods, "nobody was started for it"
    assert plane.said("ps").count("succeeded") == 1


def test_a_failure_names_each_failed_rank_and_its_exits_are_kept(kube_plane: KubePlane) -> None:
    plane = kube_plane
    plane.kubectl(
        "apply", "-f", "-", input=plane.manifest("demo", "exit=3@1.*", "sleep", maxRestarts=0, stopGraceSeconds=1)
    )
    training = plane.client.get("demo")
    with pytest.raises(TrainingFailed, match="rank 1: exit_code=3 reason=Exit 3") as caught:
        training.result(timeout=30)
    assert "rank 0:" not in str(caught.value), "it was stopped, it did not fail"
    shown = plane.phase("failed")["status"]
    assert [exit["rank"] for exit in shown["rankExits"]] == [0, 1]
    assert shown["rankExits"][0]["terminationReason"] == "Stopped"
    assert shown["rankExits"][1]["stderrTail"] == ["rank 1 gives up"]
    assert shown["outcome"]["firstFailure"]["rank"] == 1
    assert {exit["node"] for exit in shown["rankExits"]} == {"node-1"}
    failed = plane.muster("wait", "demo")
    assert failed.wait() == 100 and "rank 1: exit_code=3 reason=Exit 3" in failed.text

    plane.kubectl("delete", "pods", "-l", "muster.dev/training=demo")
    eventually(lambda: not plane.pods(), "its Pods are gone", 20)
    assert status(plane) == shown
    plane.crash()
    plane.serve()
    assert status(plane) == shown
    assert [exit.exit_code for exit in plane.client.get("demo").rank_exits] == [143, 3]
    assert not plane.pods(), "nobody is started for a training that has ended"


def test_a_worker_killed_for_memory_is_told_as_such(kube_plane: KubePlane, kubelet: TestKubelet) -> None:
    plane = kube_plane
    training = plane.train("demo", "sleep", max_restarts=0, stop_grace_seconds=1)
    training.wait_until_target_world(timeout=30)
    victim = next(rank.worker for rank in training.ranks if rank.rank == 1)
    kubelet.oom(victim)
    with pytest.raises(TrainingFailed, match="rank 1: exit_code=137 reason=OOMKilled"):
        training.result(timeout=40)


def test_cancelled_before_any_rank_ran_it_has_an_empty_list_of_exits(kube_plane: KubePlane) -> None:
    plane = kube_plane
    training = plane.train(resources={"gpus": 1})
    eventually(lambda: plane.pods(), "Pods that wait for GPUs")
    assert "rankExits" not in status(plane) and training.rank_exits == []
    training.cancel()
    with pytest.raises(TrainingCancelled):
        training.result(timeout=20)
    for _ in ("before a restart", "after it"):
        assert status(plane)["rankExits"] == []
        shown = json.loads(plane.said("get", "demo", "-o", "json"))
        assert shown["status"]["rankExits"] == [] and shown["status"]["phase"] == "cancelled"
        assert plane.client.get("demo").training.status.rank_exits == ()
        plane.crash()
        plane.serve()
    eventually(lambda: not plane.running(), "no Pod is left waiting", 20)


def test_a_cancel_by_kubectl_stops_the_ranks_and_stands(kube_plane: KubePlane) -> None:
    plane = kube_plane
    training = plane.train("demo", "sleep", spares=1)
    training.wait_until_target_world(timeout=30)
    assert "rankExits" not in status(plane), "absent while it runs"
    order = '{"spec":{"cancel":{"requestedAt":"2026-01-31T12:00:00Z","graceSeconds":1}}}'
    plane.kubectl("patch", "training", "demo", "--type=merge", "-p", order)
    with pytest.raises(TrainingCancelled):
        training.result(timeout=20)
    assert {exit["terminationReason"] for exit in status(plane)["rankExits"]} == {"Cancelled"}
    assert len(training.rank_exits) == 2
    eventually(lambda: not plane.running(), "all have left", 20)
