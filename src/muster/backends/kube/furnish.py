"""What all workers of a training share, its Secret and its Service: is it there, and as it should be?

Nothing is read back: Secrets are not ours to read.
"""

from __future__ import annotations

import asyncio
import contextlib

from muster import errors
from muster.backends.kube import render
from muster.backends.kube.pods import time_of
from muster.backends.kube.render import Json
from muster.kube.client import KubeApi
from muster.types.training import Training, Uid

_DRY = {"dryRun": "All"}


async def create(api: KubeApi, kind: str, body: Json, *, dry: bool = False) -> Json:
    path = f"/api/v1/namespaces/{body['metadata']['namespace']}/{kind}"
    return await api.request("POST", path, body=body, params=_DRY if dry else None)


class Furniture:
    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._secrets: dict[Uid, Json] = {}  # as this process left them
        self._locks: dict[Uid, asyncio.Lock] = {}

    async def provide(self, training: Training, token: str) -> None:
        """Made once, and again when the secrets have changed. Workers that start together wait for one another."""
        async with self._locks.setdefault(training.uid, asyncio.Lock()):
            await self._provide(training, render.secret(training, token))

    def forget(self, uid: Uid) -> None:
        """It goes with the Training that owns it."""
        self._secrets.pop(uid, None)
        self._locks.pop(uid, None)

    async def _provide(self, training: Training, secret: Json) -> None:
        before = self._secrets.get(training.uid)
        if secret == before:
            return
        if before is not None:
            await self._replace(secret)
        else:
            with contextlib.suppress(errors.AlreadyExists):
                await create(self._api, "services", render.service(training))
            try:
                await create(self._api, "secrets", secret)
            except errors.AlreadyExists:
                await self._check_ours(training, secret)
                await self._replace(secret)
        self._secrets[training.uid] = secret

    async def _replace(self, secret: Json, *, dry: bool = False) -> Json:
        about = secret["metadata"]
        path = f"/api/v1/namespaces/{about['namespace']}/secrets/{about['name']}"
        return await self._api.request("PUT", path, body=secret, params=_DRY if dry else None)

    async def _check_ours(self, training: Training, secret: Json) -> None:
        """What a change would give tells when the Secret was made: ours was not made before its training."""
        made = time_of((await self._replace(secret, dry=True))["metadata"]["creationTimestamp"])
        born = training.metadata.creation_timestamp
        if born is not None and made < born.replace(microsecond=0):
            name = secret["metadata"]["name"]
            raise errors.AlreadyExists(
                f"there is a Secret {name} that is not this training's",
                hint="it goes by itself if it belonged to a training of the same name; else rename it or the training",
            )
