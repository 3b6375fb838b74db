"""A server that is not an etcd, or not a well one, is unavailable in time; nothing else comes out of it."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from muster import errors
from muster.daemon.options import etcd_address
from muster.mesh.etcd import EtcdKeys
from tests.mesh.hostile import BEHAVIOURS, STOP, Behaviour, hostile

TIMEOUT_S = 0.4


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_a_hostile_etcd_is_unavailable_in_time(behaviour: Behaviour) -> None:
    async def play(url: str) -> float:
        keys = EtcdKeys(url, timeout_s=TIMEOUT_S)
        begun = time.monotonic()
        for order in (lambda: keys.put("a", "b"), lambda: keys.delete("a"), lambda: keys.list("a")):
            with pytest.raises(errors.Unavailable, match="etcd at "):
                await order()
        await keys.close()
        return time.monotonic() - begun

    with hostile(behaviour) as server:
        assert asyncio.run(play(f"http://{server.address}")) < 3 * TIMEOUT_S + 1


@pytest.mark.parametrize("url", ["", "etcd:2379", "127.0.0.1:2379", "ftp://e", "http://", "http://e:x", "http://[::1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="is not the address of an etcd"):
        EtcdKeys(url)


def test_a_password_is_not_told() -> None:
    keys = EtcdKeys("http://user:secret@127.0.0.1:9")
    with pytest.raises(errors.Unavailable) as caught:
        asyncio.run(keys.put("a", "b"))
    assert "secret" not in str(caught.value)


def test_an_etcd_without_its_v2_api_is_told_apart() -> None:
    def v3(client: socket.socket, over: STOP) -> None:
        client.recv(4096)
        client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 19\r\n\r\n404 page not found\n")

    with hostile(v3) as server:
        keys = EtcdKeys(f"http://{server.address}")
        with pytest.raises(errors.Unavailable) as caught:
            asyncio.run(keys.list("a"))
    assert "--enable-v2=true" in caught.value.hint


@pytest.mark.parametrize(
    "body", [b"{}", b'{"node": 1}', b'{"node": {"nodes": {"a": 1}}}', b'{"node": {"nodes": [null, []]}}']
)
def test_a_listing_that_is_none_has_no_keys(body: bytes) -> None:
    def odd(client: socket.socket, over: STOP) -> None:
        client.recv(4096)
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    with hostile(odd) as server:
        assert asyncio.run(EtcdKeys(f"http://{server.address}").list("a")) == {}


@pytest.mark.parametrize(
    "url",
    [
        "https://h:1",
        "http://u:secret@h:1",
        "h:2379",
        "http://",
        "http://h:99999",
        "http://h:0",
        "http://h/x",
        "http://[h",
    ],
)
def test_a_control_plane_refuses_an_etcd_that_its_workers_could_not_ask(url: str) -> None:
    with pytest.raises(ValueError, match="is not http://HOST:PORT") as refused:
        etcd_address(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("url", "where"), [("http://h", "h:2379"), ("http://[::1]:7/", "[::1]:7")])
def test_workers_are_told_host_and_port_of_the_etcd(url: str, where: str) -> None:
    assert etcd_address(url) == where
