"""A backend of Pods on a real cluster, with a store in memory: what do its tests need of it?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightkube import KubeConfig

from muster.backends.kube.backend import KubeBackend
from muster.clock import SystemClock
from muster.kube.client import Json, KubeApi
from muster.kube.crd import custom_resource_definition
from muster.ports import Write
from muster.types.training import Training, Uid
from muster.types.worker import Worker
from tests.kube.cluster import ADMIN, Cluster
from tests.memory_store import MemoryStore
from tests.training_builders import a_training

BOUND_S = 40.0
# An agent that runs what its ranks would run, and nothing else: a test says what it prints and how it ends.
PLAIN_NODE = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'


def plain_node(folder: Path) -> str:
    """A PATH on which `muster-node` is that."""
    place = folder / "muster-node"
    place.write_text(PLAIN_NODE)
    place.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


class CountingApi(KubeApi):
    """Notes what it is asked for; `lose` says after which requests the answer gets lost."""

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self.calls: list[str] = []
        self.lose: Callable[[str, str], Exception | None] = lambda method, path: None

    async def request(self, method: str, path: str, **more: Any) -> Json:
        dry = " dry" if "dryRun" in (more.get("params") or {}) else ""
        self.calls.append(f"{method} {path.split('/')[5] if path.count('/') > 4 else path.split('/')[3]}{dry}")
        answer = await super().request(method, path, **more)
        if (lost := self.lose(method, path)) is not None:
            raise lost
        return answer


def api_of(cluster: Cluster, user: str = ADMIN) -> CountingApi:
    config = KubeConfig.from_file(cluster.kubeconfig(user)).get()
    assert config is not None
    return CountingApi(config)


class House:
    def __init__(self, cluster: Cluster, namespace: str, api: CountingApi, store: MemoryStore) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.api, self.store = api, store
        self._stir = asyncio.Event()
        self.backend = self.another()

    def another(self) -> KubeBackend:
        """One that knows nothing of the others."""
        return KubeBackend(
            self.api,
            self.store,
            SystemClock(),
            coordinator="127.0.0.1:9",
            image="base",
            changed=lambda uid: self._stir.set(),
        )

    async def training(self, name: str = "demo", script: str = "sleep 600", **spec: Any) -> Training:
        """One that the cluster has too: what belongs to nobody would be collected."""
        return await self.submit(a_training(name, command=("sh", "-c", script), **spec))

    async def submit(self, made: Training) -> Training:
        name = made.metadata.name
        path = f"/apis/muster.dev/v1alpha1/namespaces/{self.namespace}/trainings"
        body = {"apiVersion": "muster.dev/v1alpha1", "kind": "Training", "metadata": {"name": name}}
        found = await self.ask("POST", path, body | {"spec": {"command": ["true"]}})
        assert found is not None
        about = replace(made.metadata, uid=found["metadata"]["uid"], namespace=self.namespace)
        known = replace(made, metadata=about)
        await self.store.write(Write(put=known, expect=0))
        return known

    async def ask(self, method: str, path: str, body: Json | None = None, **more: Any) -> Json | None:
        """As admin, beside the backend."""
        if method == "GET":
            return await asyncio.to_thread(self.cluster.get, path)
        return await asyncio.to_thread(lambda: self.cluster.api(method, path, body, **more))

    def path(self, name: str, kind: str = "pods") -> str:
        return f"/api/v1/namespaces/{self.namespace}/{kind}/{name}"

    async def until_pod(self, name: str, look: Callable[[Json | None], Any], what: str = "") -> Json | None:
        return await asyncio.to_thread(self.cluster.until, self.path(name), look, what)

    async def until(self, look: Callable[[], Any]) -> None:
        """Looks whenever the backend says that something has changed."""
        while not look():
            self._stir.clear()
            await self._stir.wait()

    def worker(self, training: Training, name: str = "demo-0") -> Worker:
        return next(one for one in self.backend.workers(training.uid) if one.name == name)

    async def running(self, training: Training, name: str = "demo-0") -> Worker:
        await self.until(lambda: not self.worker(training, name).waiting)
        return self.worker(training, name)

    async def ended(self, training: Training, name: str = "demo-0") -> Worker:
        await self.until(lambda: not self.worker(training, name).alive)
        return self.worker(training, name)

    async def records(self, uid: Uid) -> Mapping[str, Mapping[str, Any]]:
        return {key: kept for key, kept in self.store.records("worker").items() if key.startswith(uid)}


@asynccontextmanager
async def opened(cluster: Cluster, namespace: str, user: str = ADMIN) -> AsyncIterator[House]:
    await asyncio.to_thread(define_trainings, cluster)
    api = api_of(cluster, user)
    house = House(cluster, namespace, api, MemoryStore())
    try:
        if user == ADMIN:
            await house.backend.start_watching()
        await house.backend.adopt(None)
        yield house
    finally:
        await house.backend.close()
        await api.close()


def define_trainings(cluster: Cluster) -> None:
    cluster.kubectl("apply", "-f", "-", input=json.dumps(custom_resource_definition()))
    cluster.kubectl("wait", "--for=condition=Established", "crd/trainings.muster.dev", "--timeout=20s")


def play(cluster: Cluster, namespace: str, scenario: Callable[[House], Awaitable[None]], *, user: str = ADMIN) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S), opened(cluster, namespace, user) as house:
            await scenario(house)

    asyncio.run(bounded())
