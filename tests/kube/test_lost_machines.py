"""The machine of a worker is lost under a control plane: its nodes are machines of their own, with cables and power.

The kubelet of a lost machine tells nobody anything, so that there is the lease alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import PROGRAMS, eventually
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane
from tests.netns import fenced_log
from tests.netns.faults import EACH, LOSSES
from tests.netns.machines import Machines, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

NODES = 3
PATIENCE_S = 90.0
GIVEN_UP_S = 20.0


class MachinePlane(KubePlane):
    """Its nodes are machines, each with room for one worker."""

    machines: Machines
    nodes: list[TestKubelet]

    def at_work(self, after: int = -1, without: str = "") -> tuple[int, dict[int, str]]:
        """Wait until all ranks of a later round are at work, and that worker has none of them."""

        def look() -> tuple[int, dict[int, str]] | None:
            found = fenced_log.at_work(self.marks(), time.monotonic())
            return found if found and found[0] > after and without not in found[1].values() else None

        return eventually(look, f"all ranks are at work in a round after {after}", PATIENCE_S)

    def marks(self) -> list[fenced_log.Mark]:
        return fenced_log.read_file(self.notes / "fenced.log")

    def machine_of(self, worker: str) -> int:
        node = self.pods()[worker]["spec"]["nodeName"]
        return next(machine for machine, one in enumerate(self.nodes) if one.node == node)


@contextmanager
def a_machine_plane(folder: Path, cluster: Cluster, namespace: str) -> Iterator[MachinePlane]:
    with ExitStack() as held:
        machines = held.enter_context(Machines(NODES))
        nodes = []
        for machine in range(NODES):
            inside, ip = machines.inside(machine), machines.address(machine)
            node = TestKubelet(cluster, f"machine-{machine}", pods=1, inside=inside, ip=ip)
            held.callback(node.close)
            nodes.append(node)
        plane = MachinePlane(folder, cluster, namespace)
        held.callback(plane.close)
        plane.machines, plane.nodes = machines, nodes
        plane.serve(direct=True)
        yield plane


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("name", EACH)
def test_a_lost_machine_costs_a_round(tmp_path: Path, cluster: Cluster, namespace: str, name: str, spares: int) -> None:
    loss = LOSSES[name]
    with a_machine_plane(tmp_path, cluster, namespace) as plane:
        train(plane, spares)
        before, seats = plane.at_work()
        victim = seats[1]
        machine = plane.machine_of(victim)
        if loss.silent:
            plane.nodes[machine].vanish("keep")
        struck = time.monotonic()
        loss.strike(plane.machines, machine)
        if loss.is_longer_than(GIVEN_UP_S):
            number, _ = plane.at_work(before, without=victim)
            began = fenced_log.beginning(plane.marks(), number)
            assert began is not None
            print(f"{name}: another is at work after {began - struck:.2f} s")
        time.sleep(max(0.0, struck + (loss.lasts_s or 0.0) - time.monotonic()))
        back = time.monotonic()
        thawed = {victim: back} if loss.stands_still else {}
        loss.mend(plane.machines, machine)
        if loss.silent:
            plane.nodes[machine].come_back()
        number = whole(plane, spares)
        print(f"{name}: whole {time.monotonic() - back:.2f} s after its return")
        assert number <= before + 2, "it costs a round, and another one for its return at most"
        plane.go()
        done = plane.phase("succeeded", timeout_s=PATIENCE_S)["status"]
        assert [one["exitCode"] for one in done["rankExits"]] == [0, 0]
        assert not fenced_log.problems(plane.marks(), thawed)
        for node in plane.nodes:
            node.no_process_left(PATIENCE_S)


def train(plane: MachinePlane, spares: int) -> None:
    """Two train, each on a machine of its own; the third has the spare, or nothing."""
    script = str(PROGRAMS / "fenced.py")
    plane.train(world=(2, 2, 2), script=script, args=[str(plane.notes)], spares=spares, max_restarts=0)
    whole(plane, spares)


def whole(plane: MachinePlane, spares: int) -> int:
    """The round in which two train, once the spare stands by."""

    def complete(item: dict[str, Any] | None) -> bool:
        status = (item or {}).get("status") or {}
        ready = (status.get("worldSize") or {}).get("ready") == 2
        return ready and (status.get("spares") or {}).get("ready", 0) == spares

    path = f"/apis/muster.dev/v1alpha1/namespaces/{plane.namespace}/trainings/demo"
    plane.cluster.until(path, complete, f"two train, and {spares} stand by", PATIENCE_S)
    return plane.at_work()[0]
