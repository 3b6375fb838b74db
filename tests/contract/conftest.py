"""Every adapter of a port tells the same stories; one joins by a line here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from pathlib import Path

import pytest
from lightkube import KubeConfig

from muster import errors
from muster.kube.client import MERGE_PATCH, KubeApi
from muster.kube.crd import custom_resource_definition
from muster.ports import Store
from muster.store.kube import KubeStore
from muster.store.sqlite import SqliteStore
from tests.clocks import HandClock
from tests.contract.stores import Run, Story
from tests.kube.cluster import Cluster
from tests.memory_store import MemoryStore
from tests.training_builders import BIRTH

BOUND_S = 20.0
NAMESPACES = ("another", "other", "n2")
TRAININGS = "/apis/muster.dev/v1alpha1/trainings"
NAMESPACED = "/apis/muster.dev/v1alpha1/namespaces/{}/trainings"


def _api_of(cluster: Cluster) -> KubeApi:
    config = KubeConfig.from_file(cluster.kubeconfig()).get()
    assert config is not None
    return KubeApi(config)


async def _kube(cluster: Cluster, keep_changes: int) -> Store:
    """All trainings are one collection, so each story begins with none; its log is in a namespace of its own."""
    api = _api_of(cluster)
    for namespace in NAMESPACES:
        with contextlib.suppress(errors.AlreadyExists):
            await api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
    await clear(api)
    log_space = f"log-{uuid.uuid4().hex[:8]}"
    await api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": log_space}})
    return await KubeStore.open(api, log_space, "contract", keep_changes=keep_changes, clock=HandClock(BIRTH))


async def clear(api: KubeApi) -> None:
    items, _ = await api.list(TRAININGS)
    for item in items:
        path = f"{NAMESPACED.format(item['metadata']['namespace'])}/{item['metadata']['name']}"
        with contextlib.suppress(errors.NotFound):
            await api.request("PATCH", path, body={"metadata": {"finalizers": None}}, content_type=MERGE_PATCH)
            await api.request("DELETE", path)


@pytest.fixture(params=["memory", "sqlite", pytest.param("kube", marks=pytest.mark.kube)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Tells a story to a fresh store."""
    cluster = request.getfixturevalue("cluster_with_trainings") if request.param == "kube" else None
    if cluster is not None and request.node.get_closest_marker("ledger"):
        pytest.skip("it is about versions that the store gives itself")

    async def opened(keep_changes: int) -> Store:
        if cluster is not None:
            return await _kube(cluster, keep_changes)
        if request.param == "memory":
            return MemoryStore(keep_changes=keep_changes, clock=HandClock(BIRTH))
        return SqliteStore.open(
            tmp_path / "store.db", synchronous="NORMAL", keep_changes=keep_changes, clock=HandClock(BIRTH)
        )

    def tell(story: Story, *, keep_changes: int = 5000) -> None:
        async def bounded() -> None:
            store = await opened(keep_changes)
            try:
                await asyncio.wait_for(story(store), BOUND_S)
            finally:
                await store.close()
                if cluster is not None:  # a control plane of a later test would take them for its own
                    await clear(_api_of(cluster))

        asyncio.run(bounded())

    return tell


@pytest.fixture(scope="session")
def cluster_with_trainings(cluster: Cluster) -> Cluster:
    cluster.kubectl("apply", "-f", "-", input=json.dumps(custom_resource_definition()))
    cluster.kubectl("wait", "--for=condition=Established", "crd/trainings.muster.dev", "--timeout=20s")
    return cluster
