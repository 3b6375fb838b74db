"""How does an installation leave a cluster? Trainings first, while someone is there to end them; the definition last.

What carries another's label, or belongs to another installation, stays. The namespace goes, with journal and tokens,
if the installation made it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from muster import errors
from muster.kube import manifests
from muster.kube.client import Json, KubeApi
from muster.kube.install import MANAGER, path_of
from muster.kube.manifests import InstallOptions, Manifest
from muster.types.training import API_VERSION

GONE_S = 120.0
_LOOK_S = 0.2
_TRAININGS = f"/apis/{API_VERSION}/trainings"
_SHARED = ("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition")  # one of each in a cluster

Change = Literal["deleted", "absent", "left"]


@dataclass(frozen=True)
class Removed:
    """What became of one object, and why if it is still there."""

    kind: str
    name: str
    namespace: str
    change: Change
    reason: str = ""


async def trainings(api: KubeApi) -> list[str]:
    """All that there are, as NAMESPACE/NAME."""
    try:
        found, _ = await api.list(_TRAININGS)
    except errors.NotFound:  # no definition
        return []
    return [f"{one['metadata']['namespace']}/{one['metadata']['name']}" for one in found]


async def delete_trainings(api: KubeApi, timeout_s: float = GONE_S) -> list[str]:
    """Until the control plane has ended and released them; their names."""
    found = await trainings(api)
    for one in found:
        namespace, _, name = one.partition("/")
        await _delete(api, f"/apis/{API_VERSION}/namespaces/{namespace}/trainings/{name}")
    try:
        async with asyncio.timeout(timeout_s):
            while await trainings(api):
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        left = await trainings(api)
        hint = "only a control plane that runs can end them: muster kube install, then try again"
        raise errors.Unavailable(f"{some(left)} not gone after {timeout_s:.0f} s", hint=hint) from None
    return found


async def remove(
    api: KubeApi, options: InstallOptions, *, keep_crd: bool = False, dry: bool = False
) -> AsyncIterator[Removed]:
    """Each object when it is gone: the program first, then what it needed. `dry`: what would become of them."""
    rendered = manifests.render(options)
    other = await _other_installation(api, rendered, options.namespace)
    first = [one for one in rendered if one["kind"] not in ("Namespace", "CustomResourceDefinition")]
    last = [one for one in rendered if one["kind"] in ("Namespace", "CustomResourceDefinition")]
    for manifest in [*reversed(first), *reversed(last)]:
        kind, found = manifest["kind"], await _get(api, path_of(manifest))
        metadata = manifest["metadata"]
        about = (kind, metadata["name"], metadata.get("namespace", ""))
        if found is None:
            yield Removed(*about, "absent")
        elif reason := _why_left(kind, found, other, keep_crd):
            yield Removed(*about, "left", reason)
        else:
            if not dry:
                await _delete(api, path_of(manifest))
                await _gone(api, path_of(manifest))
            yield Removed(*about, "deleted")


def _why_left(kind: str, found: Json, other: str, keep_crd: bool) -> str:
    if kind == "CustomResourceDefinition" and keep_crd:
        return "asked for, and trainings with it"
    if kind in _SHARED and other:
        return f"it belongs to the installation in {other}"
    if not manifests.is_ours(found):
        return "it has not muster's label"
    if kind == "Namespace" and not _made_by_us(found):
        return "it was there before; its Secrets keep the journal and the tokens"
    return ""


def _made_by_us(found: Json) -> bool:
    """Whoever else writes an object's metadata or spec is in this list."""
    writers = [
        one["manager"] for one in found["metadata"].get("managedFields") or [] if "f:metadata" in one["fieldsV1"]
    ]
    return bool(writers) and set(writers) == {MANAGER}


async def _other_installation(api: KubeApi, rendered: Sequence[Manifest], namespace: str) -> str:
    """Where the control plane is that has the rights now, if that is another one."""
    (binding,) = (one for one in rendered if one["kind"] == "ClusterRoleBinding")
    found = await _get(api, path_of(binding)) or {}
    places = [one.get("namespace", "") for one in found.get("subjects") or []]
    return "" if not places or namespace in places else str(places[0])


async def _get(api: KubeApi, path: str) -> Json | None:
    try:
        return await api.request("GET", path)
    except errors.NotFound:
        return None


async def _delete(api: KubeApi, path: str) -> None:
    with contextlib.suppress(errors.NotFound):
        await api.request("DELETE", path, params={"propagationPolicy": "Foreground"})


async def _gone(api: KubeApi, path: str) -> None:
    try:
        async with asyncio.timeout(GONE_S):
            while await _get(api, path) is not None:
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise errors.Unavailable(
            f"{path} is not gone after {GONE_S:.0f} s", hint="kubectl get it, with -o yaml"
        ) from None


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"trainings {', '.join(names[:5])}{more}"
