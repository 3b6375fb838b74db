"""What the store does on Kubernetes beyond the contract: a control plane dies between an object and its journal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from muster import errors
from muster.ports import Record, Write
from muster.store.kube import KubeStore
from muster.types.event import Event
from muster.types.training import Key, WorldSize
from tests.kube.cluster import Cluster
from tests.kube.plane import install
from tests.kube.test_log import FaultyApi, once
from tests.training_builders import a_status, a_training

BOUND_S = 30.0


class House:
    """One control plane's store after the other, on the same objects."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._open: list[KubeStore] = []
        self._apis: list[FaultyApi] = []

    async def open(self) -> tuple[KubeStore, FaultyApi]:
        from lightkube import KubeConfig

        config = KubeConfig.from_file(self.cluster.kubeconfig()).get()
        assert config is not None
        api = FaultyApi(config)
        store = await KubeStore.open(api, self.namespace, f"one/{len(self._open)}")
        self._open.append(store)
        self._apis.append(api)
        return store, api

    async def close(self) -> None:
        for store in self._open:
            await store.close()
        for api in self._apis:
            await api.close()


Scenario = Callable[[House], Awaitable[None]]


def play(cluster: Cluster, namespace: str, scenario: Scenario) -> None:
    install(cluster, namespace)

    async def bounded() -> None:
        house = House(cluster, namespace)
        try:
            async with asyncio.timeout(BOUND_S):
                await scenario(house)
        finally:
            await house.close()

    asyncio.run(bounded())


def dies_before_the_journal(api: FaultyApi) -> None:
    """From now on nothing of the log arrives: as if the process were killed after its next write of an object."""
    api.before = lambda method, path: (
        errors.Unavailable("killed", retryable=False) if method == "POST" and path.endswith("/secrets") else None
    )


async def reasons(store: KubeStore, key: Key) -> list[str]:
    return [event.reason for event in await store.events(namespace=key.namespace, training=key.name)]


def test_what_the_journal_missed_is_written_by_the_next_control_plane_once(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        key = Key(namespace, "demo")
        store, api = await house.open()
        dies_before_the_journal(api)
        training = a_training("demo", namespace=namespace, world=(1, 1, 4))
        kept = Record("idempotency", "k", {"n": 1})
        with pytest.raises(errors.Unavailable):
            await store.write(Write(put=training, expect=0, events=[Event("Created")], records=[kept]))

        store, api = await house.open()
        assert await reasons(store, key) == ["Created"] and store.record("idempotency", "k") == {"n": 1}
        dies_before_the_journal(api)
        found = store.get(key)
        assert found is not None and "muster.dev/journal" not in found.training.metadata.annotations
        scaled = replace(found.training, spec=replace(found.training.spec, world_size=WorldSize(1, 2, 4)))
        with pytest.raises(errors.Unavailable):
            await store.write(Write(put=scaled, expect=found.version, events=[Event("ScaleRequested")]))

        store, api = await house.open()
        assert await reasons(store, key) == ["Created", "ScaleRequested"]
        dies_before_the_journal(api)
        found = store.get(key)
        assert found is not None and found.training.spec.world_size.target == 2
        ended = replace(found.training, status=replace(a_status(), phase="succeeded"))
        with pytest.raises(errors.Unavailable):
            await store.write(Write(put=ended, expect=found.version, events=[Event("Succeeded", data={"n": 1})]))

        for _ in range(2):
            store, _ = await house.open()
            assert await reasons(store, key) == ["Created", "ScaleRequested", "Succeeded"]
        (last,) = (event for event in await store.events(training="demo") if event.reason == "Succeeded")
        assert last.data == {"n": 1} and last.uid == found.uid

    play(cluster, namespace, scenario)


def test_a_removal_is_told_before_it_happens_and_only_once(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        key = Key(namespace, "demo")
        store, api = await house.open()
        await store.write(Write(put=a_training("demo", namespace=namespace), expect=0))
        api.before = once("DELETE", errors.Unavailable("killed", retryable=False))
        with pytest.raises(errors.Unavailable):
            await store.write(Write(delete=key, events=[Event("Deleted")]))

        store, _ = await house.open()
        assert store.get(key) is not None and await reasons(store, key) == ["Deleted"]
        await store.write(Write(delete=key, events=[Event("Deleted")]))
        assert store.get(key) is None and await reasons(store, key) == ["Deleted"]

    play(cluster, namespace, scenario)
