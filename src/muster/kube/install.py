"""How do rendered manifests get into a cluster? By server-side apply, one after the other, the CRD before the rest.

An object that is there already keeps what others wrote into it: only fields that the manifests name are set.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from muster import errors
from muster.kube.client import APPLY_PATCH, Json, KubeApi
from muster.kube.manifests import Manifest

ESTABLISHED_S = 30.0
MANAGER = "muster-install"
_OWNER = {"fieldManager": MANAGER, "force": "true"}
_CRD = "CustomResourceDefinition"
_PLURALS = {"NetworkPolicy": "networkpolicies"}

Change = Literal["created", "configured", "unchanged"]


@dataclass(frozen=True)
class Applied:
    """What became of one object."""

    kind: str
    name: str
    namespace: str
    change: Change


async def apply(api: KubeApi, manifests: Sequence[Manifest]) -> AsyncIterator[Applied]:
    """Each object as soon as it is there; the CRD once its trainings can be written."""
    for manifest in manifests:
        yield await _apply(api, manifest)
        if manifest["kind"] == _CRD:
            await _established(api, manifest)


def path_of(manifest: Manifest) -> str:
    """Where the API has an object of that name."""
    version, kind, metadata = manifest["apiVersion"], manifest["kind"], manifest["metadata"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    return f"{root}{place}/{_PLURALS.get(kind, f'{kind.lower()}s')}/{metadata['name']}"


async def _apply(api: KubeApi, manifest: Manifest) -> Applied:
    path = path_of(manifest)
    before = await _version(api, path)
    found = await api.request("PATCH", path, body=manifest, params=_OWNER, content_type=APPLY_PATCH)
    after = found["metadata"]["resourceVersion"]
    change: Change = "created" if before is None else "unchanged" if before == after else "configured"
    metadata = manifest["metadata"]
    return Applied(manifest["kind"], metadata["name"], metadata.get("namespace", ""), change)


async def _version(api: KubeApi, path: str) -> str | None:
    try:
        return str((await api.request("GET", path))["metadata"]["resourceVersion"])
    except errors.NotFound:
        return None


async def _established(api: KubeApi, manifest: Manifest) -> None:
    path = path_of(manifest)
    parent, _, name = path.rpartition("/")
    try:
        async with asyncio.timeout(ESTABLISHED_S):
            found = await api.request("GET", path)
            if _is_established(found):
                return
            one = {"fieldSelector": f"metadata.name={name}"}
            async for _, changed in api.watch(parent, found["metadata"]["resourceVersion"], one):
                if _is_established(changed):
                    return
    except TimeoutError:
        pass
    hint = f"kubectl describe crd {name} says why"
    raise errors.Unavailable(f"the cluster does not serve {name} after {ESTABLISHED_S:.0f} s", hint=hint)


def _is_established(found: Json) -> bool:
    conditions = found.get("status", {}).get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)
