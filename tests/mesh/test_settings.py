"""Who waits, for what, where and how long."""

from __future__ import annotations

import math
from datetime import timedelta
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.mesh.settings import Unusable, read

NODE = {"NODE_NAME": "node-1"}
MUSTER = {**NODE, "MUSTER_MESH_ENDPOINT": "etcd:1"}


@pytest.mark.parametrize(
    ("env", "endpoint", "path"),
    [
        (MUSTER, "etcd:1", "/v2/keys/muster/k/node-1"),
        ({**NODE, "MUSTER_RDZV_ENDPOINT": "etcd"}, "etcd:2379", "/v2/keys/muster/k/node-1"),
        ({**NODE, "BASILICA_RDZV_ENDPOINT": "etcd:5"}, "etcd:5", "/v2/keys/basilica/k/node-1"),
        ({**MUSTER, "BASILICA_RDZV_ENDPOINT": "b", "MUSTER_RDZV_ENDPOINT": "c"}, "etcd:1", "/v2/keys/muster/k/node-1"),
        (
            {**NODE, "BASILICA_RDZV_ENDPOINT": "b:5", "MUSTER_RDZV_ENDPOINT": "c", "MUSTER_MESH_ENDPOINT": ""},
            "c:2379",
            "/v2/keys/muster/k/node-1",
        ),
        ({"KUBERNETES_NODE_NAME": "k8s", "MUSTER_MESH_ENDPOINT": "e"}, "e:2379", "/v2/keys/muster/k/k8s"),
        ({**MUSTER, "KUBERNETES_NODE_NAME": "k8s"}, "etcd:1", "/v2/keys/muster/k/node-1"),
        ({**MUSTER, "NODE_NAME": "", "KUBERNETES_NODE_NAME": "k8s"}, "etcd:1", "/v2/keys/muster/k/k8s"),
        ({**MUSTER, "NODE_NAME": "a b/ü%~"}, "etcd:1", "/v2/keys/muster/k/a%20b%2F%C3%BC%25~"),
        ({**MUSTER, "NODE_NAME": "\udcff"}, "etcd:1", "/v2/keys/muster/k/%FF"),
        ({**MUSTER, "MUSTER_MESH_PREFIX": "muster/ns/a b"}, "etcd:1", "/v2/keys/muster/ns/a%20b/k/node-1"),
        ({**MUSTER, "MUSTER_MESH_PREFIX": "/a//b/"}, "etcd:1", "/v2/keys/a/b/k/node-1"),
        ({**MUSTER, "MUSTER_MESH_PREFIX": ""}, "etcd:1", "/v2/keys/muster/k/node-1"),
        (
            {**NODE, "BASILICA_RDZV_ENDPOINT": "b", "MUSTER_MESH_PREFIX": "other"},
            "b:2379",
            "/v2/keys/basilica/k/node-1",
        ),
        ({**NODE, "MUSTER_MESH_ENDPOINT": "[::1]:7"}, "[::1]:7", "/v2/keys/muster/k/node-1"),
        ({**NODE, "MUSTER_MESH_ENDPOINT": "[::1]"}, "[::1]:2379", "/v2/keys/muster/k/node-1"),
        ({**NODE, "MUSTER_MESH_ENDPOINT": "fe80::1%eth0"}, "[fe80::1%eth0]:2379", "/v2/keys/muster/k/node-1"),
        ({**NODE, "MUSTER_MESH_ENDPOINT": " 10.0.0.1:80 "}, "10.0.0.1:80", "/v2/keys/muster/k/node-1"),
        ({**NODE, "MUSTER_MESH_ENDPOINT": "bücher.example:80"}, "xn--bcher-kva.example:80", "/v2/keys/muster/k/node-1"),
    ],
)
def test_the_environment_says_where_and_for_what(env: dict[str, str], endpoint: str, path: str) -> None:
    target = read(env)
    assert target is not None
    assert (target.endpoint, target.path("k")) == (endpoint, path)


@pytest.mark.parametrize("source", ["MUSTER_MESH_ENDPOINT", "MUSTER_RDZV_ENDPOINT", "BASILICA_RDZV_ENDPOINT"])
@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://etcd:5/", "etcd:5"),
        ("http://etcd:5", "etcd:5"),
        ("HTTP://etcd", "etcd:2379"),
        ("http://etcd/", "etcd:2379"),
        ("etcd:5/", "etcd:5"),
        ("etcd/", "etcd:2379"),
        ("http://[::1]:5/", "[::1]:5"),
        ("http://[::1]", "[::1]:2379"),
        ("[::1]:5/", "[::1]:5"),
        ("http://user:word@etcd:5/v2/keys?x=1#y", "etcd:5"),
        (" http://10.0.0.1:80/ ", "10.0.0.1:80"),
    ],
)
def test_of_a_url_host_and_port_count(source: str, url: str, endpoint: str) -> None:
    target = read({**NODE, source: url})
    assert target is not None and target.endpoint == endpoint


def test_an_endpoint_that_asks_for_tls_says_that_there_is_none() -> None:
    with pytest.raises(Unusable, match=r"asks for TLS.*give http://HOST:PORT"):
        read({**NODE, "MUSTER_MESH_ENDPOINT": "https://e:1/"})


@pytest.mark.parametrize("env", [{}, NODE, {"MUSTER_MESH_ENDPOINT": "e"}, {**MUSTER, "NODE_NAME": ""}])
def test_without_a_node_or_an_endpoint_there_is_nothing_to_wait_for(env: dict[str, str]) -> None:
    assert read({**env, "MUSTER_MESH_POLL_S": "nonsense"}) is None


@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "e:x",
            "e:",
            "e:0",
            "e:65536",
            "e:-1",
            ":2379",
            "ftp://e:1",
            "http://",
            "http://:1",
            "e:1/v2",
            "u@e:1",
            "[::1",
            "[e]:1",
        ),
        *("[::1]x:1", ":::", "a:b:c", "e:99999999999", "a b:1", "e:１", "ü" * 80, "e\n:1"),
    ],
)
def test_an_endpoint_that_is_none_is_named(endpoint: str) -> None:
    with pytest.raises(Unusable, match=r"MUSTER_MESH_ENDPOINT=.* is not HOST:PORT"):
        read({**NODE, "MUSTER_MESH_ENDPOINT": endpoint})


@pytest.mark.parametrize("name", ["MUSTER_MESH_TIMEOUT_S", "MUSTER_MESH_POLL_S"])
@pytest.mark.parametrize("value", ["soon", "-1", "nan", "1,5", "0x10"])
def test_a_time_that_is_none_is_named(name: str, value: str) -> None:
    with pytest.raises(Unusable, match=f"{name}='{value}' is not a number of seconds"):
        read({**MUSTER, name: value})


def test_the_timeout_is_the_argument_else_the_variable_else_a_minute() -> None:
    given = {**MUSTER, "MUSTER_MESH_TIMEOUT_S": "70"}
    asked: list[tuple[dict[str, str], object]] = [
        (MUSTER, None),
        (given, None),
        (given, 5),
        (given, timedelta(minutes=2)),
    ]
    found = [read(env, timeout) for env, timeout in asked]
    assert [target.timeout_s for target in found if target] == [60, 70, 5, 120]


def test_for_ever_is_long_but_no_more_than_clocks_can_count() -> None:
    target = read(MUSTER, math.inf)
    assert target is not None and target.timeout_s == 1e8


@given(st.dictionaries(st.sampled_from([*MUSTER, "MUSTER_MESH_PREFIX", "MUSTER_MESH_POLL_S"]), st.text()), st.text())
def test_whatever_is_set_gives_a_target_nothing_or_a_clear_refusal(env: dict[str, str], node: str) -> None:
    try:
        target = read({**MUSTER, **env, "NODE_NAME": node.encode(errors="ignore").decode()})
    except Unusable as why:
        assert str(why)
        return
    if target is not None:
        path = target.path("k")
        assert path.isascii() and not set(path) & set(" \r\n\t") and 0 < target.port < 65536 and target.host
        assert unquote(target.node) == node.encode(errors="ignore").decode()
