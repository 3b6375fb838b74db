"""GPUs that change hands between Pods: the lender's ends, the borrower's starts, and the other way round."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control.test_lending import lines
from tests.fleet import PROGRAMS, eventually
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane

pytestmark = pytest.mark.kube

GPUS = 3
BOUND_S = 60.0


@pytest.fixture
def pooled(kube_plane: KubePlane, cluster: Cluster) -> Iterator[KubePlane]:
    """A control plane to which three of the cluster's GPUs were given, and a node that has just these."""
    kube_plane.env["MUSTER_GPUS"] = str(GPUS)
    kube_plane.crash()
    with contextlib.closing(TestKubelet(cluster, "node-gpu", gpus=GPUS)):
        kube_plane.serve()
        yield kube_plane


def sizes(plane: KubePlane, name: str) -> tuple[int, int]:
    """Workers that are ready, and Pods that there are."""
    status = (plane.object(name) or {}).get("status") or {}
    return status.get("worldSize", {}).get("ready", 0), len(plane.running(name))


def until(plane: KubePlane, name: str, ready: int) -> None:
    eventually(lambda: sizes(plane, name) == (ready, ready), f"{name} has {ready} workers", BOUND_S)


def fills(plane: KubePlane, folder: Path) -> None:
    plane.train(
        "fill",
        world=(1, 1, GPUS),
        script=str(PROGRAMS / "filler.py"),
        args=[str(folder), "0.02"],
        resources={"gpus": 1},
        elasticity="fill",
    )


def test_a_filling_training_gives_its_pods_gpus_to_another_and_has_them_again(
    pooled: KubePlane, tmp_path: Path
) -> None:
    fills(pooled, tmp_path)
    until(pooled, "fill", GPUS)
    rival = pooled.train("rival", world=(2, 2, 2), resources={"gpus": 1})
    until(pooled, "rival", 2)
    until(pooled, "fill", 1)
    assert "rival" in pooled.said("pool")
    pooled.go()
    rival.wait(BOUND_S)
    until(pooled, "fill", GPUS)
    (tmp_path / "stop").touch()
    pooled.phase("succeeded", "fill")
    done = again = 0
    for line in lines(tmp_path):
        if line.what == "safe":
            done = max(done, line.step)
        elif line.what == "begin" and line.rank == 0:
            again += max(0, done - line.step)
    assert done and not again, "a step that was safe was done again"


def test_another_replica_knows_who_has_how_many(pooled: KubePlane, tmp_path: Path) -> None:
    fills(pooled, tmp_path)
    until(pooled, "fill", GPUS)
    before = pooled.running("fill")
    pooled.crash()
    pooled.serve("two")
    waits = pooled.train("waits", world=(GPUS, GPUS, GPUS), resources={"gpus": 1})
    eventually(lambda: "waits" in pooled.said("pool"), "it is told of", BOUND_S)
    assert pooled.running("fill") == before, "nobody's minimum is taken, and nothing is moved in vain"
    assert waits.phase == "pending"
    waits.cancel()
    (tmp_path / "stop").touch()
    pooled.phase("succeeded", "fill")
