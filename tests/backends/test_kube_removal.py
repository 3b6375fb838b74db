"""A Pod that nobody may hold up: who is forced when its node does not answer?"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from muster.backends.kube import pod_removal
from muster.backends.kube.pod_cache import PodCache
from muster.backends.kube.pod_removal import PodRemoval
from muster.backends.kube.pods import Pod, time_of
from muster.background import Tasks
from muster.kube.client import Json, KubeApi
from muster.types.training import Uid

REAL = Pod("research", "demo-0", "p1", 1, Uid("u1"), "demo", "u1", time_of("2026-01-31T12:00:00Z"), grace_s=0)


class Asked:
    """An API that carries everything out."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def request(self, method: str, path: str, **more: object) -> Json:
        self.paths.append(path)
        return {}


def test_an_impostor_in_another_namespace_takes_nobodys_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the labels, the owner and the name of somebody else's worker, and was told to leave before it."""
    monkeypatch.setattr(pod_removal, "OVERDUE_S", 0.05)

    async def scenario() -> None:
        api, tasks = Asked(), Tasks()
        removal = PodRemoval(cast(KubeApi, api), PodCache(lambda pod, gone: None), tasks)
        removal.watch(replace(REAL, namespace="mallory", uid="p2"))
        removal.watch(REAL)
        removal.forget("mallory", "demo-0")
        async with asyncio.timeout(10):
            while not api.paths:
                await asyncio.sleep(0.01)
        assert api.paths == ["/api/v1/namespaces/research/pods/demo-0"]
        removal.close()
        await tasks.finish()

    asyncio.run(scenario())
