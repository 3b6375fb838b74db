"""Somebody with the rights that the documentation gives users, in a namespace of their own. What do they try?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.fleet import eventually
from tests.kube.api import MERGE, Json, Refused
from tests.kube.plane import KubePlane

NOTE = "muster.dev/journal"
_AT_ONCE = 16


@dataclass(frozen=True)
class Mallory:
    plane: KubePlane
    namespace: str
    user: str

    def kubectl(self, *words: str, input: str | None = None, check: bool = True) -> str:
        words = ("-n", self.namespace, *words)
        done = self.plane.cluster.kubectl(*words, input=input, user=self.user, check=check)
        return done.stdout + done.stderr

    def create(self, name: str, note: str, **about: Any) -> None:
        """One that nobody here runs, as if the control plane had claimed it."""
        body = json.loads(self.plane.manifest(name, backend="nosuch"))
        notes = {"metadata": {"namespace": self.namespace, "name": name, "annotations": {NOTE: note}, **about}}
        self.kubectl("create", "-f", "-", input=json.dumps({**body, **notes, "status": {"journal": note}}))

    def create_many(self, names: Iterable[str], note: str = "") -> None:
        """The same, through the API: kubectl would take minutes."""
        body = json.loads(self.plane.manifest("x", backend="nosuch"))
        about: Json = {"annotations": {NOTE: note} if note else {}, "finalizers": ["muster.dev/training"]}
        bodies = [body | {"metadata": {"name": name, **about}} for name in names]
        self._side_by_side([("POST", self.path(), one) for one in bodies])

    def path(self, name: str = "") -> str:
        place = f"/apis/muster.dev/v1alpha1/namespaces/{self.namespace}/trainings"
        return f"{place}/{name}" if name else place

    def object(self, name: str) -> Json | None:
        return self.plane.cluster.get(self.path(name))

    def clear(self) -> None:
        """Whatever holds them up."""
        found = [item["metadata"]["name"] for item in self.plane.cluster.api("GET", self.path())["items"]]
        self._side_by_side([("PATCH", self.path(name), {"metadata": {"finalizers": None}}) for name in found])
        self.plane.cluster.api("DELETE", self.path())

    def _side_by_side(self, requests: list[tuple[str, str, Json]]) -> None:
        room = asyncio.Semaphore(_AT_ONCE)

        async def ask(method: str, path: str, body: Json) -> None:
            kind = MERGE if method == "PATCH" else "application/json"
            async with room:
                try:
                    await self.plane.cluster.aio.request(method, path, body, kind=kind)
                except Refused as refused:
                    if refused.code not in (404, 409):
                        raise

        async def all_of_them() -> None:
            await asyncio.gather(*(ask(*one) for one in requests))

        self.plane.cluster.background.call(all_of_them(), 120.0)


@pytest.fixture
def mallory(kube_plane: KubePlane) -> Iterator[Mallory]:
    plane, cluster = kube_plane, kube_plane.cluster
    namespace = cluster.new_namespace("mallory")
    verbs = "--verb=get,list,watch,create,update,patch,delete"
    kinds = "--resource=trainings.muster.dev,trainings.muster.dev/scale"
    cluster.kubectl("-n", namespace, "create", "serviceaccount", "mallory")
    cluster.kubectl("-n", namespace, "create", "role", "trainings", verbs, kinds)
    account = f"--serviceaccount={namespace}:mallory"
    cluster.kubectl("-n", namespace, "create", "rolebinding", "trainings", "--role=trainings", account)
    user = Mallory(plane, namespace, f"system:serviceaccount:{namespace}:mallory")
    eventually(lambda: "No resources" in user.kubectl("get", "trainings", check=False), "the rights count")
    yield user
    user.clear()
    cluster.drop_namespace(namespace)
