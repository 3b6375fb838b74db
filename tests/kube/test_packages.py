"""Packages in a cluster: pieces that the next control plane finds, and nothing left of what was cut short."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from lightkube import KubeConfig

from muster import errors
from muster.kube.client import KubeApi
from muster.ports import Packages
from muster.store import kube_packages
from muster.store.kube_packages import KubePackages
from tests.contract.test_packages import BOUND_S, NOON, SCENARIOS, SIZE, Open, a_file
from tests.kube.cluster import Cluster

pytestmark = pytest.mark.kube


def play(cluster: Cluster, namespace: str, folder: Path, scenario: Callable[[Open, Path], Awaitable[None]]) -> None:
    config = KubeConfig.from_file(cluster.kubeconfig()).get()
    assert config is not None
    made: list[KubeApi] = []

    async def opened() -> Packages:
        made.append(KubeApi(config))
        packages = KubePackages(made[-1], namespace, folder / f"cache-{len(made)}", most=10_000_000)
        await packages.open()
        return packages

    async def bounded() -> None:
        try:
            await asyncio.wait_for(scenario(opened, folder), BOUND_S)
        finally:
            for api in made:
                await api.close()

    asyncio.run(bounded())


def secrets_of(cluster: Cluster, namespace: str) -> list[str]:
    path = f"/api/v1/namespaces/{namespace}/secrets"
    found = cluster.api("GET", path, labelSelector=kube_packages.LABEL)["items"]
    return sorted(one["metadata"]["name"] for one in found)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_a_place_for_packages(
    cluster: Cluster, namespace: str, tmp_path: Path, scenario: Callable[[Open, Path], Awaitable[None]]
) -> None:
    play(cluster, namespace, tmp_path, scenario)


def test_what_a_control_plane_had_not_finished_is_gone_with_the_next_one(
    cluster: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = -(-SIZE // kube_packages.PIECE)

    async def scenario(opened: Open, folder: Path) -> None:
        digest, path = a_file(folder, os.urandom(SIZE))
        dying = await opened()

        def dies(source: Path, number: int) -> bytes:
            if number == pieces - 1:
                raise errors.Unavailable("killed")
            return bytes(10)

        with monkeypatch.context() as patched:
            patched.setattr(kube_packages, "_piece_of", dies)
            with pytest.raises(errors.Unavailable):
                await dying.keep("team", digest, path, NOON, set)
        assert dying.find("team", digest) is None
        assert secrets_of(cluster, namespace)
        following = await opened()
        assert list(following.kept()) == [] and secrets_of(cluster, namespace) == []
        await following.keep("team", digest, path, NOON, set)
        assert len(secrets_of(cluster, namespace)) == pieces + 1
        await following.remove("team", digest)
        assert secrets_of(cluster, namespace) == []

    play(cluster, namespace, tmp_path, scenario)


def test_pieces_that_somebody_has_changed_are_not_given_to_anybody(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    async def scenario(opened: Open, folder: Path) -> None:
        digest, path = a_file(folder, os.urandom(SIZE))
        await (await opened()).keep("team", digest, path, NOON, set)
        name = next(one for one in secrets_of(cluster, namespace) if one.endswith("-1"))
        body = {"data": {"piece": base64.b64encode(bytes(kube_packages.PIECE)).decode()}}
        cluster.patch(f"/api/v1/namespaces/{namespace}/secrets/{name}", body)
        with pytest.raises(errors.InternalError, match="not what was sent"):
            await (await opened()).file("team", digest)

    play(cluster, namespace, tmp_path, scenario)
