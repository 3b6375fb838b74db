"""The Deployment that `muster kube install` renders, in Pods: does it serve, and what if one of them goes?"""

from __future__ import annotations

import os
import signal

from tests.containers import images
from tests.containers.installation import COUNT, HOME, Installation, Trained, furthest


def test_two_replicas_run_on_two_nodes_and_one_leads(installed: Installation) -> None:
    replicas = installed.replicas()
    assert {pod["spec"]["nodeName"] for pod in replicas.values()} == {"node-1", "node-2"}
    assert len({pod["status"]["podIP"] for pod in replicas.values()}) == 2
    lease = installed.lab.api("GET", f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases/muster")
    assert lease["spec"]["holderIdentity"] == installed.leader()
    (name,) = {pod["spec"]["containers"][0]["image"] for pod in replicas.values()}
    assert name == images.MUSTER
    said = installed.lab.kubectl("-n", HOME, "exec", installed.leader(), "--", "id", "-u").stdout
    assert said.strip() == "65532"


def test_a_leader_whose_process_dies_costs_no_round(installed: Installation, trained: Trained) -> None:
    """The Pod keeps its address, so its port refuses: ranks know that nobody has given their places away.

    Who leads then is open: the other replica, or the same, which the kubelet starts again.
    """
    trained.counting()
    before = trained.until_step(20)
    leader = installed.leader()
    for pid in installed.lab.processes(installed.replicas()[leader]):
        os.kill(pid, signal.SIGKILL)
    pod = f"/api/v1/namespaces/{HOME}/pods/{leader}"
    installed.lab.until(
        pod, lambda it: it and it["status"]["containerStatuses"][0]["restartCount"] > 0, "it died", 60.0
    )
    after = trained.until(lambda it: furthest(it) > furthest(before) + 100, "it goes on")
    assert (after["round"], after["restarts"]) == (before["round"], 0), "the ranks were not touched"


def test_a_training_goes_on_when_the_leaders_pod_is_deleted(installed: Installation, trained: Trained) -> None:
    """Its address is gone with it: that may be silence for a lease, and so one more round, charged to nobody."""
    trained.counting()
    before, pods = trained.until_step(20), trained.pods()
    where, leader = installed.address(), installed.leader()
    installed.lab.kubectl("-n", HOME, "delete", "pod", leader, "--force", "--grace-period=0")
    assert installed.until_led(by_other_than=where) != leader
    after = trained.until(lambda it: furthest(it) > furthest(before) + 100, "it goes on")
    assert after["round"] <= before["round"] + 1 and after["restarts"] == 0
    assert {pod["metadata"]["uid"] for pod in trained.pods().values()} == {
        pod["metadata"]["uid"] for pod in pods.values()
    }


def test_a_training_of_containers_succeeds(trained: Trained) -> None:
    """torch and gloo between Pods with addresses of their own, on both nodes."""
    trained.submit("python", COUNT, "60", world=(2, 4, 4))
    trained.until_step(5)
    pods = trained.pods()
    assert {pod["spec"]["nodeName"] for pod in pods.values()} == {"node-1", "node-2"}
    assert len({pod["status"]["podIP"] for pod in pods.values()}) == 4
    ended = trained.until_phase("succeeded")
    assert [one["exitCode"] for one in ended["rankExits"]] == [0, 0, 0, 0]
