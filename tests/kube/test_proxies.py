"""Do the stand-ins for the network fail as they are told to, and only then?"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import httpx2
import pytest

from tests.fleet import eventually
from tests.kube.api import Json
from tests.kube.api_proxy import ApiProxy
from tests.kube.cluster import Cluster
from tests.kube.network import new_address
from tests.kube.service_proxy import ServiceProxy


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[ApiProxy]:
    made = ApiProxy(cluster)
    yield made
    made.close()


@pytest.fixture
def client(cluster: Cluster, proxy: ApiProxy) -> Iterator[httpx2.Client]:
    headers = {"Authorization": f"Bearer {cluster.token}"}
    with httpx2.Client(base_url=proxy.url, headers=headers, verify=cluster.tls, timeout=10) as made:
        yield made


def test_requests_pass_and_are_noted(client: httpx2.Client, cluster: Cluster, proxy: ApiProxy, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    assert client.post(path, json={"metadata": {"name": "a"}}).status_code == 201
    assert client.get(f"{path}/b").json()["reason"] == "NotFound"
    assert [(call.method, call.path, call.status) for call in proxy.calls] == [
        ("POST", path, 201),
        ("GET", f"{path}/b", 404),
    ]
    config = cluster.kubeconfig(url=proxy.url, namespace=namespace)
    said = cluster.kubectl("get", "configmap", "a", "-o", "name", f"--kubeconfig={config}").stdout
    assert said == "configmap/a\n"
    assert proxy.count("GET", f"{path}/a") == 1


def test_faults_come_as_ordered(client: httpx2.Client, proxy: ApiProxy, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    proxy.conflict_every = 2
    statuses = [client.post(path, json={"metadata": {"generateName": "a-"}}).status_code for _ in range(4)]
    assert statuses == [201, 409, 201, 409]
    assert client.get(path).status_code == 200
    proxy.conflict_every = 0
    proxy.answer(429, times=2, when=lambda call: call.method == "GET")
    assert [client.get(path).status_code for _ in range(3)] == [429, 429, 200]
    proxy.refuse()
    with pytest.raises(httpx2.TransportError):
        client.get(path)
    proxy.refuse(False)
    assert client.get(path).status_code == 200
    proxy.delay_s = 0.2
    assert client.get(path).elapsed.total_seconds() >= 0.2


def test_an_answer_is_lost_after_the_request_was_carried_out(
    client: httpx2.Client, proxy: ApiProxy, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    proxy.lose(when=lambda call: call.method == "POST")
    with pytest.raises(httpx2.TransportError):
        client.post(path, json={"metadata": {"name": "a"}})
    assert client.get(f"{path}/a").status_code == 200
    assert client.post(path, json={"metadata": {"name": "a"}}).status_code == 409


def test_watches_stream_until_they_expire_or_are_cut(client: httpx2.Client, proxy: ApiProxy, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    watch = {"watch": "1", "fieldSelector": "metadata.name=a"}
    with client.stream("GET", path, params=watch) as answer:
        lines = answer.iter_lines()
        client.post(path, json={"metadata": {"name": "a"}})
        assert json.loads(next(lines))["type"] == "ADDED"
        proxy.expire_watches(coming=1)
        error = json.loads(next(lines))
        assert (error["type"], error["object"]["code"]) == ("ERROR", 410)
        assert list(lines) == []
    with client.stream("GET", path, params=watch) as answer:
        assert [json.loads(line)["type"] for line in answer.iter_lines()][-1] == "ERROR"
    with client.stream("GET", path, params=watch) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["type"] == "ADDED"
        proxy.cut()
        with pytest.raises(httpx2.TransportError):
            next(lines)


@contextlib.contextmanager
def greeter(word: bytes) -> Iterator[tuple[str, int]]:
    """Says its word to whoever connects."""
    with socket.create_server((new_address(), 0)) as server:

        def greet() -> None:
            with contextlib.suppress(OSError):  # the server was closed
                while True:
                    near, _ = server.accept()
                    with near, contextlib.suppress(OSError):  # whoever only looked whether somebody listens is gone
                        near.sendall(word)

        threading.Thread(target=greet, daemon=True).start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)


def heard(proxy: ServiceProxy) -> bytes:
    with contextlib.suppress(OSError), socket.create_connection((proxy.host, proxy.ports["api"]), timeout=5) as near:
        return near.recv(100)
    return b""


def test_a_service_leads_to_its_endpoint_of_the_moment(cluster: Cluster, namespace: str) -> None:
    path = cluster.slices(namespace)
    with (
        contextlib.closing(ServiceProxy(cluster, namespace, "muster", {"api": 0})) as proxy,
        greeter(b"one") as one,
        greeter(b"two") as two,
    ):
        assert heard(proxy) == b""

        def lead(target: tuple[str, int]) -> Json:
            endpoints = [{"addresses": [target[0]], "conditions": {"ready": True}}]
            return {"endpoints": endpoints, "ports": [{"name": "api", "port": target[1], "protocol": "TCP"}]}

        about = {"name": "muster", "labels": {"kubernetes.io/service-name": "muster"}}
        cluster.api("POST", path, {"metadata": about, "addressType": "IPv4", **lead(one)})
        proxy.until_ready("api")
        assert heard(proxy) == b"one"
        cluster.patch(f"{path}/muster", lead(two))
        eventually(lambda: heard(proxy) == b"two", "the new leader is reached")
        cluster.patch(f"{path}/muster", {"endpoints": []})
        eventually(lambda: heard(proxy) == b"", "nobody is there")
