"""A machine goes, with everything on it, and says nothing: who goes on, and where?"""

from __future__ import annotations

from tests.containers.installation import Installation, Trained, furthest
from tests.kube.api import Json

NODES = {"node-1", "node-2"}


def spread(installed: Installation, trained: Trained, victim: str) -> Json:
    """One rank on the node that will go, another and a spare on the other one; the status then."""
    (other,) = NODES - {victim}
    lab = installed.lab
    lab.kubectl("cordon", other)
    trained.counting(world=(1, 1, 4))
    trained.until_step(1)
    lab.kubectl("cordon", victim)
    lab.kubectl("uncordon", other)
    trained.kubectl("patch", "mt/demo", "--type=merge", "-p", '{"spec": {"spares": 1, "worldSize": {"target": 2}}}')
    trained.until_step(20, after_round=0)
    status = trained.until(lambda it: it["spares"]["ready"] == 1, "the spare is ready")
    lab.kubectl("uncordon", victim)
    assert sorted(pod["spec"]["nodeName"] for pod in trained.pods().values()) == sorted([victim, other, other])
    return status


def goes_on(trained: Trained, before: Json, victim: str) -> set[str]:
    """On the other node, from the step that the rank there remembers; the workers that do."""
    after = trained.until_step(furthest(before) + 1, after_round=before["round"])
    assert {one["node"] for one in after["ranks"]} == NODES - {victim} and after["restarts"] == 0
    return {one["worker"] for one in after["ranks"]}


def test_a_node_is_killed_whole_and_the_spare_on_the_other_goes_on(installed: Installation, trained: Trained) -> None:
    (victim,) = NODES - {installed.replicas()[installed.leader()]["spec"]["nodeName"]}
    before = spread(installed, trained, victim)
    installed.lab.nodes[victim].kill()
    assert goes_on(trained, before, victim) == {"demo-1", "demo-2"}, "with the spare that was there"
    trained.until_event("WorkerLost", "demo-0", "silent for a lease")
    installed.lab.until_lost(victim)


def test_the_leaders_node_is_killed_and_the_other_replica_and_node_go_on(
    installed: Installation, trained: Trained
) -> None:
    """With the spare, or with another Pod, if that was there before the new leader formed a round."""
    leader, where = installed.leader(), installed.address()
    victim = installed.replicas()[leader]["spec"]["nodeName"]
    before = spread(installed, trained, victim)
    installed.lab.nodes[victim].kill()
    assert installed.until_led(by_other_than=where) != leader
    assert "demo-0" not in goes_on(trained, before, victim)


def test_a_drained_node_is_left_and_told(installed: Installation, trained: Trained) -> None:
    (victim,) = NODES - {installed.replicas()[installed.leader()]["spec"]["nodeName"]}
    before = spread(installed, trained, victim)
    drain = (
        "drain",
        victim,
        "--force",
        "--delete-emptydir-data",
        "--pod-selector=muster.dev/training",
        "--timeout=60s",
    )
    assert "pod/demo-0 evicted" in installed.lab.kubectl(*drain, timeout_s=90.0).stdout
    assert goes_on(trained, before, victim) == {"demo-1", "demo-2"}, "with the spare that was there"
    trained.until_event("WorkerExited", "demo-0")
