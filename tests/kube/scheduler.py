"""Plays kube-scheduler: which Node has room for a Pod that names none?"""

from __future__ import annotations

import asyncio
import traceback
from typing import TYPE_CHECKING

from tests.kube import pods
from tests.kube.api import STRATEGIC, Json, Refused

if TYPE_CHECKING:
    from tests.kube.cluster import Cluster


class Scheduler:
    """One for a cluster. Pods are placed as they come; what fits nowhere says why and is tried again on any change."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._api = cluster.aio
        self._nodes: dict[str, Json] = {}
        self._pods: dict[str, Json] = {}
        self._changed = asyncio.Event()
        self._turns = asyncio.Semaphore(16)
        self._tasks: list[asyncio.Task[None]] = []
        self._problems: list[BaseException] = []
        cluster.background.call(self._start())

    def close(self) -> None:
        self._cluster.background.call(self._end())
        assert not self._problems, f"the scheduler stumbled: {self._problems}"

    async def _start(self) -> None:
        for work in (self._follow("/api/v1/nodes", self._nodes), self._follow("/api/v1/pods", self._pods), self._run()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """It should go on for ever: without it every test after this one would wait in vain."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._problems.append(error)
            traceback.print_exception(error)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, path: str, known: dict[str, Json]) -> None:
        async for kind, item in self._api.follow(path):
            if kind == "LISTED":
                known.clear()
                known.update({one["metadata"]["uid"]: one for one in item["items"]})
            elif kind == "DELETED":
                known.pop(item["metadata"]["uid"], None)
            else:
                known[item["metadata"]["uid"]] = item
            self._changed.set()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            nodes = list(self._nodes.values())  # as they are now: others may come while Pods are being placed
            free = {node["metadata"]["name"]: room(node) for node in nodes}
            for pod in self._pods.values():
                if (node := pod["spec"].get("nodeName")) in free and pod["status"].get("phase") not in pods.ENDED:
                    take(free[node], pods.requested(pod))
            pending = [pod for pod in self._pods.values() if _pending(pod)]
            pending.sort(key=lambda pod: pod["metadata"]["creationTimestamp"])
            await asyncio.gather(*[self._place(pod, nodes, free) for pod in pending])

    async def _place(self, pod: Json, nodes: list[Json], free: dict[str, dict[str, float]]) -> None:
        """Decides before it first waits, so that many decide in their order."""
        wanted = pods.requested(pod)
        refusals = {}
        for node in nodes:
            name = node["metadata"]["name"]
            refusals[name] = refusal(pod, node, wanted, free[name])
        fitting = [name for name, problem in refusals.items() if not problem]
        if not fitting:
            said = [problem for problem in refusals.values() if problem]
            await self._say(pod, pods.unschedulable(len(refusals), said))
            return
        best = max(fitting, key=lambda name: (free[name]["nvidia.com/gpu"], free[name]["cpu"], free[name]["pods"]))
        take(free[best], wanted)
        # Until the watch says so: the next round must not place it again.
        self._pods[pod["metadata"]["uid"]] = {**pod, "spec": {**pod["spec"], "nodeName": best}}
        binding = {"metadata": {"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}}
        await self._write("POST", f"{pods.path_of(pod)}/binding", {**binding, "target": {"kind": "Node", "name": best}})

    async def _say(self, pod: Json, message: str) -> None:
        said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        for condition in pod["status"].get("conditions", []):
            if said.items() <= condition.items():
                return
        body = {"status": {"conditions": [{**said, "lastTransitionTime": pods.stamp()}]}}
        await self._write("PATCH", f"{pods.path_of(pod)}/status", body)

    async def _write(self, method: str, path: str, body: Json) -> None:
        try:
            async with self._turns:
                await self._api.insist(method, path, body, kind=STRATEGIC if method == "PATCH" else "application/json")
        except Refused as refused:
            # The Pod changed or went under us, or its namespace is on the way out; the watch tells.
            if refused.code not in (403, 409, 422):
                raise


def _pending(pod: Json) -> bool:
    return not (
        pod["spec"].get("nodeName")
        or pod["metadata"].get("deletionTimestamp")
        or pod["status"].get("phase") in pods.ENDED
        or pod["spec"].get("schedulerName", "default-scheduler") != "default-scheduler"
    )


def room(node: Json) -> dict[str, float]:
    offered = node["status"].get("allocatable", {})
    return {name: pods.quantity(offered.get(name, 0)) for name in (*pods.RESOURCES, "pods")}


def take(free: dict[str, float], wanted: dict[str, float]) -> None:
    for name, amount in {**wanted, "pods": 1.0}.items():
        free[name] -= amount


def refusal(pod: Json, node: Json, wanted: dict[str, float], free: dict[str, float]) -> str:
    """Why this Pod cannot go there; empty when it can."""
    labels = node["metadata"].get("labels", {})
    ready = any(
        one["type"] == "Ready" and one["status"] == "True" for one in node.get("status", {}).get("conditions", [])
    )
    if not ready or node["metadata"].get("deletionTimestamp"):
        return "node(s) had taint {node.kubernetes.io/not-ready: }, that the pod didn't tolerate"
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    if not pod["spec"].get("nodeSelector", {}).items() <= labels.items():
        return "node(s) didn't match node selector"
    for name, amount in {**wanted, "pods": 1.0}.items():
        if amount > free[name]:
            return "Too many pods" if name == "pods" else f"Insufficient {name}"
    return ""
