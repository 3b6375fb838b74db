"""The key API over HTTP: word for word what a real etcd says, and no harm from clients that behave badly."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from muster.mesh import serving
from muster.mesh.serving import KeyServerLimits
from tests.fleet import eventually
from tests.mesh import servers
from tests.mesh.servers import Embedded, Etcd, Server, ask

STORY: list[tuple[str, str, str, dict[str, str]]] = [
    ("GET", "", "", {}),
    ("GET", "/a/b", "", {}),
    ("PUT", "/a/b", "", {"value": "1"}),
    ("PUT", "/a/b", "", {"value": "2 & ü"}),
    ("GET", "/a/b", "", {}),
    ("GET", "/a", "", {}),
    ("PUT", "/a/c/d", "", {"value": ""}),
    ("GET", "", "sorted=true", {}),
    ("GET", "", "recursive=true&sorted=true", {}),
    ("GET", "/a/b", "quorum=true", {}),
    ("PUT", "/a", "", {"value": "1"}),
    ("PUT", "/a/b/c", "", {"value": "1"}),
    ("GET", "/a/b/c", "", {}),
    ("PUT", "/e", "value=query", {}),
    ("DELETE", "/a", "", {}),
    ("DELETE", "/a", "dir=true", {}),
    ("DELETE", "/a/b", "", {}),
    ("DELETE", "/a/b", "", {}),
    ("GET", "/a/b", "wait=true&waitIndex={first}", {}),
    ("GET", "/a", "wait=true&waitIndex={first}&recursive=true", {}),
    ("GET", "/a/c", "wait=true&waitIndex={first}&recursive=true", {}),
    ("GET", "/e", "wait=true&waitIndex={first}", {}),
    ("DELETE", "/a", "recursive=true", {}),
    ("GET", "/a/c/d", "wait=true&waitIndex={last}", {}),
    ("DELETE", "/e", "recursive=true", {}),
    ("GET", "", "recursive=true", {}),
    ("GET", "/a", "wait=maybe", {}),
    ("GET", "/a", "wait=true&waitIndex=soon", {}),
    ("GET", "/a", "recursive=2", {}),
]


def tell(place: Server) -> list[tuple[int, Any]]:
    """The answers to the story, with indices counted from where it began."""
    own = uuid.uuid4().hex
    first = ask(place.address, "PUT", f"{own}/zero", value="0").index
    told = []
    for method, path, query, form in STORY:
        last = ask(place.address, "GET", own).index
        asked = query.format(first=first + 1, last=last)
        answer = ask(place.address, method, own + path, asked, **form)
        body = json.loads(json.dumps(answer.body).replace(own, "own"))
        if answer.status < 400 and "wait" not in query:
            assert answer.index == ask(place.address, "GET", own).index
        told.append((answer.status, counted(body, first)))
    return told


def counted(value: Any, first: int) -> Any:
    if isinstance(value, dict):
        return {
            key: one - first if key.endswith("ndex") and one else counted(one, first)
            for key, one in value.items()
            if not (key == "index" and one in (0, first))
        }
    return [counted(one, first) for one in value] if isinstance(value, list) else value


def test_it_answers_as_a_real_etcd_does(real_etcd: Etcd, server: Embedded) -> None:
    for order, theirs, ours in zip(STORY, tell(real_etcd), tell(server), strict=True):
        if theirs[0] == 400:  # the index of a request that was not understood means nothing
            theirs[1].pop("index", None), ours[1].pop("index", None)
        assert ours == theirs, order


@pytest.fixture
def server() -> Iterator[Embedded]:
    with servers.embedded() as made:
        yield made


class Waiter:
    """A long poll that has been heard: the head is there, the body is to come."""

    def __init__(self, place: Server, path: str, query: str = "wait=true") -> None:
        self._connection = http.client.HTTPConnection(place.address, timeout=10)
        self._connection.request("GET", f"/v2/keys/{path}?{query}")
        self.answer = self._connection.getresponse()

    def body(self) -> Any:
        with contextlib.closing(self._connection):
            text = self.answer.read()
            return json.loads(text) if text else None


def test_a_wait_is_heard_before_anything_happens_and_told_when_it_does(place: Server) -> None:
    own = uuid.uuid4().hex
    index = ask(place.address, "PUT", f"{own}/x", value="0").index
    waiters = [Waiter(place, f"{own}/a"), Waiter(place, own, "wait=true&recursive=true")]
    assert [int(waiter.answer.headers["X-Etcd-Index"]) for waiter in waiters] == [index, index]
    ask(place.address, "PUT", f"{own}/a", value="1")
    assert [waiter.body()["node"]["value"] for waiter in waiters] == ["1", "1"]
    waiter = Waiter(place, f"{own}/a")
    ask(place.address, "DELETE", own, "recursive=true")
    assert waiter.body()["action"] == "delete"


def test_a_change_that_was_missed_is_told_at_once(place: Server) -> None:
    own = uuid.uuid4().hex
    first = ask(place.address, "PUT", f"{own}/a", value="1").index
    ask(place.address, "PUT", f"{own}/a", value="2")
    replayed = [ask(place.address, "GET", f"{own}/a", f"wait=true&waitIndex={first + more}").body for more in (0, 1)]
    assert [body["node"]["value"] for body in replayed] == ["1", "2"]


def test_a_history_that_is_gone_is_said_to_be(server: Embedded) -> None:
    for count in range(1200):
        server.server.keys.space.set("/a", str(count))
    answer = ask(server.address, "GET", "a", "wait=true&waitIndex=7")
    assert (answer.status, answer.body["errorCode"], answer.body["index"]) == (400, 401, 1200)


def test_a_wait_ends_empty_in_the_end() -> None:
    with servers.embedded(limits=KeyServerLimits(wait_s=0.2)) as server:
        assert Waiter(server, "a").body() is None


def test_what_it_cannot_do_it_refuses(server: Embedded) -> None:
    refused = [
        ask(server.address, "PUT", "a", value="1", ttl="5"),
        ask(server.address, "PUT", "a", "prevExist=false", value="1"),
        ask(server.address, "GET", "a", "wait=true&stream=true"),
        ask(server.address, "POST", "a", value="1"),
        ask(server.address, "PATCH", "a", value="1"),
    ]
    assert [answer.status for answer in refused] == [400, 400, 400, 405, 405]
    assert "'ttl' is not supported here" in refused[0].body["cause"]
    assert server.server.keys.space.files("/") == {}


def test_with_a_token_only_its_bearer_writes() -> None:
    with servers.embedded(token="secret") as server:
        assert ask(server.address, "PUT", "a", value="1").status == 401
        assert ask(server.address, "PUT", "a", value="1", token="wrong").status == 401
        assert ask(server.address, "PUT", "a", value="1", token="secret").status == 201
        assert ask(server.address, "GET", "a").status == 200
        assert ask(server.address, "DELETE", "a").status == 401
        assert ask(server.address, "DELETE", "a", token="secret").status == 200
        server.run(server.server.keys.put("b", "the control plane needs none"))
        assert ask(server.address, "GET", "b").status == 200


# Clients that behave badly -----------------------------------------------------------------------


def say(place: Server, *parts: bytes, end: bool = False) -> bytes:
    """What comes back until the other side closes."""
    with socket.create_connection(tuple_of(place), timeout=10) as sock:
        got = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                sock.sendall(part)
            if end:
                sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(65536):
                got += chunk
        return got


def tuple_of(place: Server) -> tuple[str, int]:
    host, _, port = place.address.rpartition(":")
    return host, int(port)


GET = b"GET /v2/keys/ HTTP/1.1\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /v2/keys/ HTTP/2.0\r\n\r\n", 400),
        (b"GET /v2/keys/ HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (GET + b"Content-Length: -1\r\n\r\n", 400),
        (GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (GET + b"Content-Length: 999999999999\r\n\r\n", 413),
        (GET + b"Transfer-Encoding: chunked\r\n\r\n", 411),
        (GET + b"X: " + b"x" * 20_000, 431),
        (b"GET /version HTTP/1.1\r\n\r\n", 404),
        (b"GET /v2/keysmith HTTP/1.1\r\n\r\n", 404),
        (b"GET /v2/keys/../../etc HTTP/1.1\r\n\r\n", 400),
        (b"GET /v2/keys/%00 HTTP/1.1\r\n\r\n", 400),
        (b"GET /v2/keys/" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET /v2/keys/?" + b"&".join(b"a%d=1" % n for n in range(99)) + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET /v2/keys/%FF%FE HTTP/1.1\r\nConnection: close\r\n\r\n", 404),
        (b"HEAD /v2/keys/ HTTP/1.0\r\n\r\n", 200),
        (
            b"PUT /v2/keys/big HTTP/1.1\r\nContent-Length: 50000\r\nConnection: close\r\n\r\n"
            + b"value="
            + b"x" * 49994,
            413,
        ),
    ],
)
def test_what_is_no_request_gets_an_answer_and_a_closed_door(server: Embedded, sent: bytes, status: int) -> None:
    answer = say(server, sent)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert ask(server.address, "GET", "").status == 200


def test_requests_one_after_the_other_are_answered_in_order(server: Embedded) -> None:
    put = b"PUT /v2/keys/a HTTP/1.1\r\nContent-Length: 7\r\n\r\nvalue=1"
    wait = b"GET /v2/keys/a?wait=true&waitIndex=1 HTTP/1.1\r\n\r\n"
    answer = say(server, put[:20], put[20:-2], put[-2:] + wait + b"GET /v2/keys/b HTTP/1.1\r\n\r\n" + GET + b"\r\n")
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"201", b"200", b"404", b"200"]


def test_random_bytes_do_no_harm(server: Embedded) -> None:
    chance = random.Random(7)
    seed = b"PUT /v2/keys/a?wait=true HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\nvalue=1"
    for _ in range(200):
        text = bytearray(seed)
        for _ in range(chance.randrange(1, 8)):
            text[chance.randrange(len(text))] = chance.randrange(256)
        say(server, bytes(text), end=True)
    assert ask(server.address, "GET", "").status == 200
    eventually(lambda: not server.server._connections, "all connections are gone", 5)


def test_slow_and_silent_clients_are_let_go() -> None:
    with servers.embedded(limits=KeyServerLimits(request_s=0.3)) as server:
        begun = time.monotonic()
        assert say(server) == b""
        assert say(server, b"GET /v2/keys/ HT") == b""
        assert say(server, b"GET /v2/keys/ HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        assert time.monotonic() - begun < 5


def deaf(place: Server, words: bytes) -> socket.socket:
    """A client that asks and does not read. Its small window leaves the answer with the server."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(10)
    sock.connect(tuple_of(place))
    sock.sendall(words)
    return sock


LIST = b"GET /v2/keys/?recursive=true HTTP/1.1\r\n\r\n"


def fill(server: Embedded, megabytes: int) -> None:
    for count in range(100 * megabytes):
        server.server.keys.space.set(f"/{count}", "x" * 10_000)


def test_a_client_that_does_not_read_is_let_go() -> None:
    with servers.embedded(limits=KeyServerLimits(read_s=0.3)) as server:
        fill(server, 10)  # more than a kernel buffers
        with deaf(server, LIST * 20):
            eventually(lambda: server.server.unread > 0, "it is seen not to read", 5)
            assert server.server.unread < 20_000_000  # one answer, not twenty
            eventually(lambda: not server.server._connections, "it is let go", 5)
        assert server.server.unread == 0


def test_what_slow_readers_leave_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_UNREAD", 25_000_000)
    arrived: list[serving.KeyClient] = []
    came = serving.KeyServer.came

    def count(server: serving.KeyServer, client: serving.KeyClient) -> None:
        arrived.append(client)
        came(server, client)

    monkeypatch.setattr(serving.KeyServer, "came", count)
    with servers.embedded() as server, contextlib.ExitStack() as stack:
        fill(server, 10)
        for _ in range(6):
            stack.enter_context(deaf(server, LIST))
        eventually(lambda: len(arrived) == 6, "all clients are connected", 10)
        eventually(lambda: 0 < len(server.server._connections) < 6, "those beyond the bound are let go", 10)


def test_who_talks_while_waiting_is_let_go(server: Embedded) -> None:
    wait = b"GET /v2/keys/a?wait=true HTTP/1.1\r\n\r\n"
    assert say(server, wait, b"x" * 200_000).count(b"HTTP/1.1") == 1


def test_a_waiter_that_left_is_forgotten(server: Embedded) -> None:
    with socket.create_connection(tuple_of(server), timeout=10) as sock:
        sock.sendall(b"GET /v2/keys/a?wait=true HTTP/1.1\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert server.server.keys._waiting
    eventually(lambda: not server.server.keys._waiting, "nobody waits", 5)


def test_what_may_be_written_over_http_has_a_bound(server: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_STORED", 2500)
    written = [ask(server.address, "PUT", f"k{count}", value="x" * 300).status for count in range(5)]
    assert written == [201, 201, 201, 507, 507]
    server.run(server.server.keys.put("ours", "always"))
    assert ask(server.address, "GET", "ours").status == 200


def test_the_oldest_connection_gives_way_when_there_are_too_many() -> None:
    with servers.embedded(limits=KeyServerLimits(connections=8)) as server:
        waiters = [Waiter(server, "a") for _ in range(8)]
        assert ask(server.address, "PUT", "b", value="1").status == 201
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            waiters[0].body()
        assert ask(server.address, "PUT", "a", value="1").status == 201
        assert waiters[-1].body()["node"]["value"] == "1"


def test_a_thousand_waiters_are_all_told(server: Embedded) -> None:
    count = min(1000, server.server._most // 2)
    waiters = [socket.create_connection(tuple_of(server), timeout=10) for _ in range(count)]
    for number, sock in enumerate(waiters):
        sock.sendall(b"GET /v2/keys/n/%d?wait=true HTTP/1.1\r\nConnection: close\r\n\r\n" % (number % 10))
    eventually(lambda: sum(map(len, server.server.keys._waiting.values())) == count, "all wait", 20)
    begun = time.monotonic()
    for number in range(10):
        server.run(server.server.keys.put(f"n/{number}", "now"))
    for sock in waiters:
        text = b""
        while chunk := sock.recv(4096):
            text += chunk
        assert text.endswith(b"\r\n0\r\n\r\n") and b'"now"' in text
        sock.close()
    assert time.monotonic() - begun < 10
    assert server.server.keys._waiting == {}


def test_it_starts_again_on_its_port_while_clients_wait(server: Embedded) -> None:
    waiter = Waiter(server, "a")
    address = server.address
    server.stop()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        waiter.body()
    server.start()
    assert server.address == address
    assert ask(address, "GET", "a").status == 404


def test_many_write_and_wait_at_once(server: Embedded) -> None:
    seen: list[str] = []

    def follow() -> None:
        index = 1
        while len(seen) < 200:
            node = ask(server.address, "GET", "a", f"wait=true&waitIndex={index}").body["node"]
            seen.append(node["value"])
            index = node["modifiedIndex"] + 1

    follower = threading.Thread(target=follow)
    follower.start()
    for number in range(200):
        server.run(server.server.keys.put("a", str(number)))
    follower.join(20)
    assert seen == [str(number) for number in range(200)]
