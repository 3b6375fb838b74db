"""Whose tokens are good where the control plane runs in a cluster? Those of one Secret, as it is now.

`token` there is that of the API's first user, `tokens.json` those of others, as `muster token create` writes them. A
change counts as soon as the server tells of it, for requests that last as well. One that cannot be read changes
nothing: it is said in the log, and what was good stays so.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

from muster import errors
from muster.files import write_private
from muster.kube.client import Informer, Json, KubeApi
from muster.server.auth import TOKENS_FILE, ensure_embedded, read_tokens

log = logging.getLogger("muster.daemon")

TOKEN_SECRET = "muster-token"
AGAIN_S = 1.0


class TokenSecret:
    def __init__(self, api: KubeApi, namespace: str, home: Path) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._home = home
        self._seen: tuple[str, str] | None = None  # the first user's token, those of others
        self.token = ""

    async def read(self) -> None:
        """What it says; it is made, the same for all replicas, when there is none."""
        try:
            found = await self._api.request("GET", f"{self._path}/{TOKEN_SECRET}")
            token, others = _told(found)
        except errors.NotFound:
            token, others = f"mst_{secrets.token_urlsafe(32)}", "[]"
            body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": TOKEN_SECRET}, "type": "Opaque"}
            await self._api.request("POST", self._path, body={**body, "stringData": {"token": token}})
        self._take(token, others)

    async def follow(self) -> None:
        """For ever. What could not be kept here is read again: a revocation must not be lost."""
        chosen = {"fieldSelector": f"metadata.name={TOKEN_SECRET}"}
        while True:
            try:
                await Informer(self._api, self._path, self, chosen).run()
            except OSError as error:
                log.error("tokens of the Secret %s cannot be kept: %s", TOKEN_SECRET, error)
                await asyncio.sleep(AGAIN_S)

    # What the server tells

    def listed(self, items: Sequence[Json], version: str) -> None:
        for item in items:
            self.changed("MODIFIED", item)

    def changed(self, kind: str, item: Json) -> None:
        if kind == "DELETED":
            log.warning("the Secret %s is gone: what it said holds until the next start", TOKEN_SECRET)
            return
        try:
            self._take(*_told(item))
        except errors.InvalidRequest as error:
            log.error("%s; its tokens stay as they were", error)

    def reached(self, version: str) -> None:
        pass

    def _take(self, token: str, others: str) -> None:
        """In one step as others on this loop see it."""
        if (token, others) == self._seen:
            return
        write_private(self._home / TOKENS_FILE, others)
        try:
            ensure_embedded(self._home, token)
        except errors.Unavailable as error:
            raise OSError(str(error)) from error
        if self._seen is not None:
            log.info("the Secret %s has changed: its tokens hold now", TOKEN_SECRET)
        self.token, self._seen = token, (token, others)


def _told(secret: Json) -> tuple[str, str]:
    """Raises InvalidRequest."""
    data = secret.get("data") or {}
    try:
        token = base64.b64decode(data.get("token", ""), validate=True).decode().strip()
        others = base64.b64decode(data.get(TOKENS_FILE, ""), validate=True).decode().strip() or "[]"
        read_tokens(others)
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise errors.InvalidRequest(f"the Secret {TOKEN_SECRET} cannot be read: {error}") from error
    if not token:
        raise errors.InvalidRequest(f"the Secret {TOKEN_SECRET} has no token", hint="delete it: one is made")
    return token, others
