"""The leader's address behind the control plane's Service, in an EndpointSlice.

The Service has no selector, so the cluster writes no slice for it: the leader does. The family of a slice's addresses
cannot change, so there is one slice for IPv4 and one for IPv6. The leader writes one of them and empties the other.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from muster import errors
from muster.kube.client import Json, KubeApi

GROUP = "discovery.k8s.io"
VERSIONS = ("v1", "v1beta1")  # the best first; Kubernetes before 1.21 has only the second
FAMILIES = {4: "IPv4", 6: "IPv6"}


def slice_name(service: str, family: str) -> str:
    return f"{service}-{family.lower()}"


def rendered(version: str, service: Json, family: str, address: str, ports: Mapping[str, int]) -> Json:
    """Return the slice that leads the Service to one address. The cluster removes it with the Service."""
    about = service["metadata"]
    owner = {"apiVersion": "v1", "kind": "Service", "name": about["name"], "uid": about["uid"]}
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": "EndpointSlice",
        "metadata": {
            "name": slice_name(about["name"], family),
            "labels": {
                "kubernetes.io/service-name": about["name"],
                "endpointslice.kubernetes.io/managed-by": "muster",
            },
            "ownerReferences": [owner],
        },
        "addressType": family,
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in ports.items()],
    }


async def publish(api: KubeApi, namespace: str, service: str, address: str, ports: Mapping[str, int]) -> None:
    """Lead the Service to this address, and to no other."""
    version = await served_version(api)
    slices = f"/apis/{GROUP}/{version}/namespaces/{namespace}/endpointslices"
    owner = await api.request("GET", f"/api/v1/namespaces/{namespace}/services/{service}")
    for family in FAMILIES.values():
        path = f"{slices}/{slice_name(service, family)}"
        existing = await _get(api, path)
        if family == FAMILIES[ipaddress.ip_address(address).version]:
            body = rendered(version, owner, family, address, ports)
            if existing is None:
                await api.request("POST", slices, body=body)
            else:
                body["metadata"] = existing["metadata"] | body["metadata"]
                await api.request("PUT", path, body=existing | body)
        elif existing is not None and existing.get("endpoints"):
            await api.request("PUT", path, body=existing | {"endpoints": []})


async def served_version(api: KubeApi) -> str:
    """Return the best version of EndpointSlices that the server has."""
    group = await api.request("GET", f"/apis/{GROUP}")
    served = {version.get("version") for version in group.get("versions") or []}
    for version in VERSIONS:
        if version in served:
            return version
    raise errors.InvalidRequest(
        f"the Kubernetes API at {api.server} has no EndpointSlices of version {' or '.join(VERSIONS)}",
        hint="muster needs Kubernetes 1.20 or newer",
    )


async def _get(api: KubeApi, path: str) -> Json | None:
    try:
        return await api.request("GET", path)
    except errors.NotFound:
        return None
