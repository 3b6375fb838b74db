"""In which domain is a worker? What the label of its node says that its training names, or its node alone.

A Pod cannot read its node's labels, so they are read here when it is known where the Pod is, and the worker's world is
told by the control plane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from muster import errors
from muster.background import Tasks
from muster.kube.client import KubeApi, passes
from muster.ports import Clock, until_answered
from muster.types.training import Spec
from muster.types.worker import Worker

KEEP_S = 60.0  # labels of nodes change seldom


class Topology:
    """`told` gets a worker once its domain is known."""

    def __init__(self, api: KubeApi, clock: Clock, tasks: Tasks, told: Callable[[Worker], None]) -> None:
        self._api = api
        self._clock = clock
        self._tasks = tasks
        self._told = told
        self._labels: dict[str, tuple[float, dict[str, str]]] = {}
        self._asking: dict[str, list[tuple[Worker, str]]] = {}  # by node: who waits for which label of it

    def placed(self, worker: Worker, spec: Spec | None) -> Worker:
        """The worker with its domain, if that can be said at once."""
        if spec is None or not worker.node or worker.domain is not None:
            return worker
        if spec.topology_key is None:
            return worker if spec.segment is None else replace(worker, domain=worker.node)
        known = self._labels.get(worker.node)
        if known is not None and self._clock.monotonic() - known[0] < KEEP_S:
            return replace(worker, domain=known[1].get(spec.topology_key, ""))
        first = worker.node not in self._asking
        self._asking.setdefault(worker.node, []).append((worker, spec.topology_key))
        if first:
            self._tasks.start(self._ask(worker.node))
        return worker

    async def _ask(self, node: str) -> None:
        waiting = self._asking[node]
        try:
            labels = await self._read(node)
        finally:
            del self._asking[node]
        self._labels[node] = (self._clock.monotonic(), labels)
        for worker, key in waiting:
            self._told(replace(worker, domain=labels.get(key, "")))

    async def _read(self, node: str) -> dict[str, str]:
        path = f"/api/v1/nodes/{node}"
        try:
            found = await until_answered(f"node {node}", lambda: self._api.request("GET", path), passes)
        except errors.NotFound:
            return {}
        return dict(found["metadata"].get("labels") or {})
