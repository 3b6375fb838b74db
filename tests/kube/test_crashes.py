"""Losing the control plane loses nothing, and disturbs no Pod."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from muster.daemon.plane import REPLACED
from tests.control.lives import live
from tests.fleet import Process, eventually, gone
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane
from tests.plane import fresh, reasons


class Replicas(KubePlane):
    """When the leader goes, another stands by already; each second one is not killed, but stands still for too long."""

    leads, turns = "", 0

    def serve(self, *words: Any, **more: Any) -> Process:
        """Until the one that stood by serves; whom it replaced must end by itself."""
        before, self.leads = self.leads, f"replica-{self.turns}"
        if not before:
            return super().serve(self.leads)
        self.replicas[self.leads].expect("muster serves on")
        if self.turns % 2 == 0:
            self.replicas[before].kill(signal.SIGCONT)
            assert self.replicas[before].wait(10) == REPLACED
        return self.replicas[self.leads]

    def crash(self, *words: Any) -> None:
        self.turns += 1
        super().serve(f"replica-{self.turns}", wait=False).expect("standing by")
        self.replicas[self.leads].kill(signal.SIGKILL if self.turns % 2 else signal.SIGSTOP)


@pytest.fixture
def mortal_plane(
    tmp_path: Path, cluster: Cluster, namespace: str, kubelet: TestKubelet, request: pytest.FixtureRequest
) -> Iterator[KubePlane]:
    """Nobody serves yet."""
    made: KubePlane = getattr(request, "param", KubePlane)(tmp_path, cluster, namespace)
    yield made
    made.close()
    kubelet.no_process_left()


def lives(plane: KubePlane, seed: int, kills: int) -> None:
    try:
        live(plane, Random(seed), kills)
    except BaseException:
        print(f"seed {seed}")
        raise
    for name in ("good", "bad"):
        pods = plane.pods(name)
        told = [event.data["worker"] for event in plane.client.get(name).events() if event.reason == "WorkerStarted"]
        assert pods.keys() <= set(told), "each Pod is in the journal"
        assert not any(pod["metadata"].get("finalizers") for pod in pods.values()), "nothing holds a Pod"
        plane.kubectl("delete", "training", name, "--wait=false")
        plane.gone(name)


def test_a_control_plane_that_dies_at_random_moments_loses_nothing(mortal_plane: KubePlane) -> None:
    lives(mortal_plane, seed=1, kills=5)


@pytest.mark.parametrize("mortal_plane", [Replicas], indirect=True)
def test_leaders_that_die_or_stand_still_while_there_is_much_to_do_lose_nothing(mortal_plane: KubePlane) -> None:
    lives(mortal_plane, seed=2, kills=2)


@pytest.mark.soak
@pytest.mark.parametrize("mortal_plane", [Replicas], indirect=True)
@pytest.mark.parametrize("seed", range(20, 25))
def test_twenty_deaths_of_leaders_lose_nothing(mortal_plane: KubePlane, seed: int) -> None:
    lives(mortal_plane, seed, kills=4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 20))
def test_fifty_deaths_of_the_control_plane_lose_nothing(mortal_plane: KubePlane, seed: int) -> None:
    lives(mortal_plane, seed, kills=5)


def test_a_restart_disturbs_no_pod_and_what_happened_meanwhile_is_known(
    kube_plane: KubePlane, kubelet: TestKubelet
) -> None:
    """One is killed for memory and its Pod deleted while nobody looks; all else goes on."""
    plane = kube_plane
    training = plane.train(world=(2, 2, 2), spares=1)
    training.wait_until_target_world(timeout=30)
    eventually(lambda: fresh(training).training.status.spares.ready == 1, "a spare stands by")
    before, ranks = plane.pods(), plane.started(0, 2)
    plane.crash()
    assert not any(gone(note["pid"]) for note in ranks), "ranks do not notice"
    plane.serve()
    eventually(lambda: "RoundRecovered" in reasons(training), "the round goes on")
    status = fresh(training).training.status
    assert (status.round, status.restarts) == (0, 0)
    assert {name: pod["metadata"]["uid"] for name, pod in plane.pods().items()} == {
        name: pod["metadata"]["uid"] for name, pod in before.items()
    }
    plane.crash()
    victim = status.ranks[1].worker
    kubelet.oom(victim)
    path = f"/api/v1/namespaces/{plane.namespace}/pods/{victim}"
    plane.cluster.until(path, lambda pod: pod and pod["status"]["phase"] == "Failed", "it ended")
    plane.kubectl("delete", "pod", victim, "--wait=false")
    assert plane.cluster.get(path) is not None, "it is kept until its end is known"
    plane.serve()
    plane.cluster.until(path, lambda pod: pod is None, "it may go now")
    training.wait_until_target_world(timeout=30)
    (end,) = [event for event in training.events() if event.reason == "WorkerExited"]
    assert (end.data["worker"], end.data["exitCode"], end.data["reason"]) == (victim, 137, "OOMKilled")
    plane.go()
    training.result(timeout=30)
    assert victim not in {one.worker for one in training.rank_exits}


def test_exits_are_collected_when_all_ranks_ended_while_nobody_looked(kube_plane: KubePlane) -> None:
    plane = kube_plane
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=30)
    ranks = plane.started(0, 2)
    plane.crash()
    plane.go()
    eventually(lambda: all(gone(note["pid"]) for note in ranks), "the ranks are done")
    plane.serve()
    training.result(timeout=30)
    assert [one.exit_code for one in training.rank_exits] == [0, 0]
    assert fresh(training).training.status.round == 0
    assert len(plane.pods()) == 2, "nobody was started in their place"
