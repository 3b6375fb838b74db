"""How is something new asked of the cluster? Under our name, and so that what is not known is not dropped."""

from __future__ import annotations

from muster import errors
from muster.backends.kube.render import Json
from muster.kube.client import KubeApi, again

US = "muster"  # as the cluster notes who wrote what
WRITE = {"fieldManager": US}
TRY = WRITE | {"dryRun": "All"}
STRICT = {"fieldValidation": "Strict"}  # servers before 1.25 do not know it, and drop what they do not know


class NameTaken(errors.AlreadyExists):
    """By something that is not ours: it may be free again some day."""


async def create(api: KubeApi, kind: str, body: Json, *, dry: bool = False) -> Json:
    path = f"/api/v1/namespaces/{body['metadata']['namespace']}/{kind}"
    asked = (TRY if dry else WRITE) | STRICT
    return await again(lambda: api.request("POST", path, body=body, params=asked))
