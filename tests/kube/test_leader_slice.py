"""The EndpointSlices that lead the control plane's Service to the leader, on a real API server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lightkube import KubeConfig

from muster import errors
from muster.kube import leader_slice
from muster.kube.client import KubeApi
from tests.kube.api import Json
from tests.kube.cluster import ADMIN, Cluster

PORTS = {"api": 8470, "coordinator": 8471}
SERVICE: Json = {"metadata": {"name": "muster"}, "spec": {"ports": [{"name": "api", "port": 8470}]}}


@pytest.fixture
def api(cluster: Cluster) -> Iterator[KubeApi]:
    config = KubeConfig.from_file(cluster.kubeconfig(ADMIN)).get()
    assert config is not None
    opened = KubeApi(config)
    yield opened
    cluster.background.call(opened.close())


def addresses(cluster: Cluster, namespace: str) -> dict[str, list[str]]:
    items = cluster.api("GET", cluster.slices(namespace))["items"]
    return {
        item["metadata"]["name"]: [address for place in item["endpoints"] or [] for address in place["addresses"]]
        for item in items
    }


def publish(cluster: Cluster, api: KubeApi, namespace: str, address: str) -> None:
    cluster.background.call(leader_slice.publish(api, namespace, "muster", address, PORTS))


def test_the_service_leads_to_the_last_leader_alone(cluster: Cluster, namespace: str, api: KubeApi) -> None:
    cluster.api("POST", f"/api/v1/namespaces/{namespace}/services", SERVICE)
    publish(cluster, api, namespace, "10.1.2.3")
    assert addresses(cluster, namespace) == {"muster-ipv4": ["10.1.2.3"]}
    publish(cluster, api, namespace, "10.1.2.4")
    assert addresses(cluster, namespace) == {"muster-ipv4": ["10.1.2.4"]}
    publish(cluster, api, namespace, "fd00::5")
    assert addresses(cluster, namespace) == {"muster-ipv4": [], "muster-ipv6": ["fd00::5"]}
    publish(cluster, api, namespace, "10.1.2.6")
    assert addresses(cluster, namespace) == {"muster-ipv4": ["10.1.2.6"], "muster-ipv6": []}
    (written,) = [
        item for item in cluster.api("GET", cluster.slices(namespace))["items"] if item["addressType"] == "IPv4"
    ]
    assert {port["name"]: port["port"] for port in written["ports"]} == PORTS
    assert written["metadata"]["ownerReferences"][0]["kind"] == "Service"


def test_without_the_service_nothing_is_written(cluster: Cluster, namespace: str, api: KubeApi) -> None:
    with pytest.raises(errors.NotFound):
        publish(cluster, api, namespace, "10.1.2.3")
    assert addresses(cluster, namespace) == {}
