"""A machine goes, with everything on it, and says nothing: who goes on, and where?"""

from __future__ import annotations

from tests.containers.installation import Installation, Trained, furthest
from tests.kube.api import Json


def nodes_of(status: Json) -> set[str]:
    return {one["node"] for one in status["ranks"]}


def lose(installed: Installation, trained: Trained, victim: str) -> None:
    """Two ranks and two spares, two on each node: what is left is enough."""
    trained.counting(spares=2)
    before = trained.until_step(20)
    trained.until(lambda it: it["spares"]["ready"] == 2, "spares are ready")
    assert sorted(pod["spec"]["nodeName"] for pod in trained.pods().values()) == [
        "node-1",
        "node-1",
        "node-2",
        "node-2",
    ]
    installed.lab.nodes[victim].kill()
    after = trained.until_step(furthest(before) + 1, after_round=before["round"])
    assert nodes_of(after) == {"node-1", "node-2"} - {victim} and after["restarts"] == 0
    installed.lab.until_lost(victim)
    trained.until_event("WorkerLost", "demo-")


def test_a_node_is_killed_whole_and_spares_on_the_other_go_on(installed: Installation, trained: Trained) -> None:
    where = installed.replicas()[installed.leader()]["spec"]["nodeName"]
    (victim,) = {"node-1", "node-2"} - {where}
    lose(installed, trained, victim)


def test_the_leaders_node_is_killed_and_the_other_replica_and_its_spares_go_on(
    installed: Installation, trained: Trained
) -> None:
    leader = installed.leader()
    lose(installed, trained, installed.replicas()[leader]["spec"]["nodeName"])
    assert installed.leader() != leader


def test_a_drained_node_is_left_and_told(installed: Installation, trained: Trained) -> None:
    trained.counting(world=(1, 2, 2))
    before = trained.until_step(20)
    (victim, *_) = nodes_of(before)
    drain = (
        "drain",
        victim,
        "--force",
        "--delete-emptydir-data",
        "--pod-selector=muster.dev/training",
        "--timeout=60s",
    )
    assert f"node/{victim} evicted" in installed.lab.kubectl(*drain, timeout_s=90.0).stdout
    after = trained.until_step(furthest(before) + 1, after_round=before["round"])
    assert victim not in nodes_of(after) and after["restarts"] == 0
    (gone,) = {one["worker"] for one in before["ranks"] if one["node"] == victim}
    trained.until_event("WorkerExited", gone)
