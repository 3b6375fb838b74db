"""Code that was sent to a cluster runs in Pods, also in those that another control plane starts later."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.store import kube_packages
from tests.control.test_sent_code import TRAIN
from tests.fleet import eventually
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane

pytestmark = pytest.mark.kube


def ran(plane: KubePlane) -> dict[str, list[str]]:
    return {path.name.removeprefix("ran-"): path.read_text().split() for path in plane.notes.glob("ran-*")}


def test_pods_fetch_what_was_sent_also_from_the_next_control_plane(
    kube_plane: KubePlane, cluster: Cluster, kubelet: TestKubelet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = kube_plane
    project = tmp_path / "project"
    (project / "local_package").mkdir(parents=True)
    (project / "train.py").write_text(TRAIN)
    (project / "local_package" / "__init__.py").write_text("WORD = 'as sent'\n")
    monkeypatch.chdir(project)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "mine"))
    training = plane.client.train(script="train.py", args=[str(plane.notes)], name="sent", world_size=2)
    assert training.training.spec.package is not None, "a cluster sees other files: nobody had to ask for it"
    eventually(lambda: len(ran(plane)) == 2, "both Pods run it")
    assert {words[1] for words in ran(plane).values()} == {"sent"}
    victim = sorted(ran(plane))[0]
    plane.crash("one")
    plane.serve("two")
    kubelet.kill(victim)
    eventually(lambda: len(ran(plane)) == 3, "another Pod takes its place, with the same code")
    assert all(words[:2] == ["as", "sent"] for words in ran(plane).values())
    plane.go()
    plane.phase("succeeded", "sent")
    path = f"/api/v1/namespaces/{plane.own}/secrets"
    assert cluster.api("GET", path, labelSelector=kube_packages.LABEL)["items"]
    training.delete(timeout=30)
    eventually(
        lambda: not cluster.api("GET", path, labelSelector=kube_packages.LABEL)["items"], "its code goes with it", 20
    )
