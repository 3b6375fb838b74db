"""What all workers of a training share, its Secret, its Service and its claims: is it there, and as it should be?

Nothing is read back but claims: Secrets are not ours to read.
"""

from __future__ import annotations

import asyncio

from muster import errors
from muster.backends.kube import claims, render
from muster.backends.kube.creating import TRY, US, WRITE, create
from muster.backends.kube.render import Json
from muster.kube.client import MERGE_PATCH, KubeApi, again
from muster.types.training import Training, Uid


class SharedObjects:
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
            await claims.provide(self._api, training)
            try:
                await create(self._api, "secrets", secret)
            except errors.AlreadyExists:
                await self._check_ours(secret)
                await self._replace(secret)
            try:
                await create(self._api, "services", render.service(training))
            except errors.AlreadyExists:
                await self._take_over(render.service(training))
        self._secrets[training.uid] = secret

    async def _take_over(self, service: Json) -> None:
        """One that a training of the same name left would go with that one. Somebody else's is left alone."""
        about = service["metadata"]
        path = f"/api/v1/namespaces/{about['namespace']}/services/{about['name']}"
        tried = await self._api.request("PATCH", path, body=service, params=TRY, content_type=MERGE_PATCH)
        if not _others(tried):
            await self._api.request("PATCH", path, body=service, params=WRITE, content_type=MERGE_PATCH)

    async def _replace(self, secret: Json, *, dry: bool = False) -> Json:
        about = secret["metadata"]
        path = f"/api/v1/namespaces/{about['namespace']}/secrets/{about['name']}"
        return await again(lambda: self._api.request("PUT", path, body=secret, params=TRY if dry else WRITE))

    async def _check_ours(self, secret: Json) -> None:
        """A change that is only tried tells who has written the Secret. One of a training before us is taken over."""
        if _others(await self._replace(secret, dry=True)):
            name = secret["metadata"]["name"]
            raise errors.AlreadyExists(
                f"there is a Secret {name} that is not muster's", hint="rename it, or the training"
            )


def _others(item: Json) -> set[str]:
    """Who else has written it."""
    return {one.get("manager", "") for one in item["metadata"].get("managedFields") or ()} - {US}
