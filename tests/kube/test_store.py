"""What the store does on Kubernetes beyond the contract: a control plane dies between an object and its journal.

What it leaves with the object is sealed: what others write there, or copy, is no part of the journal.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from lightkube import KubeConfig

from muster import errors
from muster.ports import Record, Write
from muster.store.kube import KubeStore
from muster.store.kube_key import NAME as KEY_SECRET
from muster.store.kube_key import read_key
from muster.types.event import Event
from muster.types.training import Key, WorldSize
from tests.kube.api import MERGE, Json
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

    def api(self) -> FaultyApi:
        config = KubeConfig.from_file(self.cluster.kubeconfig()).get()
        assert config is not None
        self._apis.append(FaultyApi(config))
        return self._apis[-1]

    async def open(self) -> tuple[KubeStore, FaultyApi]:
        api = self.api()
        store = await KubeStore.open(api, self.namespace, f"one/{len(self._open)}")
        self._open.append(store)
        return store, api

    async def dead(self, name: str, *events: Event) -> None:
        """A control plane creates a training and dies before the journal tells of it."""
        store, api = await self.open()
        dies_before_the_journal(api)
        with pytest.raises(errors.Unavailable):
            await store.write(Write(put=a_training(name, namespace=self.namespace), expect=0, events=events))

    async def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """As the cluster's administrator."""
        kind = MERGE if method == "PATCH" else "application/json"
        return await asyncio.to_thread(lambda: self.cluster.api(method, path, body, kind=kind))

    def training(self, name: str) -> str:
        return f"/apis/muster.dev/v1alpha1/namespaces/{self.namespace}/trainings/{name}"

    @property
    def key(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/secrets/{KEY_SECRET}"

    async def carried(self, name: str) -> str | None:
        found = await self.ask("GET", self.training(name))
        return (found["metadata"].get("annotations") or {}).get("muster.dev/journal")

    async def until_wiped(self, name: str) -> None:
        def wiped(item: Json | None) -> bool:
            notes = (item or {"metadata": {}})["metadata"].get("annotations") or {}
            return "muster.dev/journal" not in notes and "journal" not in ((item or {}).get("status") or {})

        await asyncio.to_thread(self.cluster.until, self.training(name), wiped, f"{name} carries nothing")

    async def close(self) -> None:
        for store in self._open:
            await store.close()
        for api in self._apis:
            await api.close()
        path = self.training("").rstrip("/")
        for item in (await self.ask("GET", path))["items"]:  # nobody is left to let them go
            await self.ask("PATCH", f"{path}/{item['metadata']['name']}", {"metadata": {"finalizers": None}})


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
        value = {"uid": training.uid, "name": "demo", "digest": "d", "at": "2026-01-31T12:00:00Z"}
        kept = Record("idempotency", f"{namespace}/k", value)
        with pytest.raises(errors.Unavailable):
            await store.write(Write(put=training, expect=0, events=[Event("Created")], records=[kept]))

        store, api = await house.open()
        assert await reasons(store, key) == ["Created"] and store.record("idempotency", f"{namespace}/k") == value
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


# What others write there -------------------------------------------------------------------------

ASIDE = "JournalSetAside"


def test_what_was_left_with_one_object_is_not_taken_from_another(cluster: Cluster, namespace: str) -> None:
    """Whoever is quick could copy it before the next control plane starts."""

    async def scenario(house: House) -> None:
        await house.dead("demo", Event("Created", "ann submitted it", actor="ann"))
        found = await house.ask("GET", house.training("demo"))
        text = found["metadata"]["annotations"]["muster.dev/journal"]
        copy = {"muster.dev/journal": text, "muster.dev/request": "something else"}
        about = {"name": "copy", "finalizers": ["muster.dev/training"], "annotations": copy}
        await house.ask("POST", house.training("copy").rpartition("/")[0], {**found, "metadata": about})
        status = {**found, "status": {"journal": text}}
        await house.ask("PUT", f"{house.training('demo')}/status", status)

        for _ in range(2):
            store, _ = await house.open()
            assert await reasons(store, Key(namespace, "demo")) == ["Created"], "once, though it stands there twice"
            assert await reasons(store, Key(namespace, "copy")) == [ASIDE]
            await house.until_wiped("copy")

    play(cluster, namespace, scenario)


def test_a_key_that_is_lost_costs_what_was_left_with_objects_and_says_so_once(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        store, _ = await house.open()
        await store.write(Write(put=a_training("old", namespace=namespace), expect=0, events=[Event("Created")]))
        await house.dead("demo", Event("Created"))
        await house.ask("DELETE", house.key)
        for _ in range(2):
            store, _ = await house.open()
            assert await reasons(store, Key(namespace, "demo")) == [ASIDE]
            assert await reasons(store, Key(namespace, "old")) == ["Created"], "what the journal has is no loss"
        await house.until_wiped("demo")
        await house.dead("next", Event("Created"))
        store, _ = await house.open()
        assert await reasons(store, Key(namespace, "next")) == ["Created"], "there is a new key"

    play(cluster, namespace, scenario)


def test_all_replicas_have_one_key_and_one_that_is_none_is_refused(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        apis = [house.api() for _ in range(4)]
        keys = await asyncio.gather(*(read_key(api, namespace) for api in apis))
        assert set(keys) == {base64.b64decode((await house.ask("GET", house.key))["data"]["key"])}
        assert len(keys[0]) == 32
        await house.open()
        assert await read_key(apis[0], namespace) == keys[0]
        for wrong in ({"key": base64.b64encode(b"short").decode()}, {}):
            await house.ask("DELETE", house.key)
            body = {"metadata": {"name": KEY_SECRET}, "data": wrong}
            await house.ask("POST", house.key.rpartition("/")[0], body)
            with pytest.raises(errors.InvalidRequest, match=KEY_SECRET) as raised:
                await house.open()
            assert "delete it" in raised.value.hint

    play(cluster, namespace, scenario)


def test_what_0_1_0_left_is_not_told_of_if_the_journal_has_it(cluster: Cluster, namespace: str) -> None:
    """It sealed nothing. Every object carries its last entries, long after the journal has them."""

    async def scenario(house: House) -> None:
        store, _ = await house.open()
        for name in ("known", "lost"):
            put = a_training(name, namespace=namespace)
            await store.write(Write(put=put, expect=0, events=[Event("Created")]))
            carried = await house.carried(name)
            assert carried is not None
            unsealed = json.loads(carried[65:])
            if name == "lost":
                unsealed |= {"mark": "0123456789abcdef"}
            notes = {"muster.dev/journal": json.dumps(unsealed)}
            await house.ask("PATCH", house.training(name), {"metadata": {"annotations": notes}})
        store, _ = await house.open()
        assert await reasons(store, Key(namespace, "known")) == ["Created"]
        assert await reasons(store, Key(namespace, "lost")) == ["Created", ASIDE]

    play(cluster, namespace, scenario)


def test_what_was_set_aside_goes_from_the_status_as_well(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        store, _ = await house.open()
        stored = await store.write(Write(put=a_training("demo", namespace=namespace), expect=0))
        assert stored is not None
        status = replace(a_status(), phase="succeeded", restarts=2)
        await store.write(Write(put=replace(stored.training, status=status), events=[Event("Succeeded")]))
        found = await house.ask("GET", house.training("demo"))
        forged = {"mark": "m", "events": [{"reason": "Failed"}], "records": []}
        found["status"]["journal"] = json.dumps(forged)
        await house.ask("PUT", f"{house.training('demo')}/status", found)
        store, _ = await house.open()
        assert await reasons(store, Key(namespace, "demo")) == ["Succeeded", ASIDE]
        await house.until_wiped("demo")
        kept = (await house.ask("GET", house.training("demo")))["status"]
        assert (kept["phase"], kept["restarts"]) == ("succeeded", 2)

    play(cluster, namespace, scenario)
