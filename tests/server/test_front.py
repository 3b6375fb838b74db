"""What a client hears when something is wrong: with its address, its body, its headers, or with the server."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from muster.errors import Unavailable
from muster.ports import Stored, Write
from muster.server import calls, protocol
from muster.server.routes import system
from muster.types.state import KeptState
from muster.types.training import Key
from tests.contract.stores import settle
from tests.server.house import BOUND_S, TRAININGS, House, a_body, error_of, in_house


async def _raw(house: House, request: str | bytes) -> tuple[int, bytes]:
    """Status and body of an answer to bytes that no well-behaved client would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(request if isinstance(request, bytes) else request.encode("latin-1"))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), BOUND_S)
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    body = await asyncio.wait_for(reader.readexactly(int(length[1])), BOUND_S)
    writer.close()
    return int(head.split()[1]), body


def _get(house: House, path: str) -> str:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {house.client.headers['Authorization']}\r\n\r\n"


def test_an_address_that_leads_nowhere_and_a_method_that_is_not_possible_are_errors_of_the_same_form(
    tmp_path: Path,
) -> None:
    async def test(house: House) -> None:
        for path in ("/assets/", "/v1", "/v1/nothing", f"{TRAININGS}/demo/", f"{TRAININGS}/demo/nothing", "/docs"):
            answer = await house.client.get(path)
            assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
        answer = await house.client.put(f"{TRAININGS}/demo", json={})
        assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
        allowed = set(answer.headers["allow"].split(", "))
        assert allowed == {"GET", "HEAD", "PATCH", "DELETE"}

    in_house(tmp_path, test)


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "..%2f..%2fetc",
        "demo%2Fscale",
        "demo%00",
        "%00",
        "d%C3%A9mo",
        "DEMO",
        "-demo",
        "demo%0a",
        "demo%20",
        "..%5c..",
        "%ff%fe",
        "a" * 53,
        "%F0%9F%92%A5",
    ],
)
def test_a_name_that_cannot_be_is_not_found_and_reaches_neither_store_nor_backend(tmp_path: Path, name: str) -> None:
    async def test(house: House) -> None:
        await house.submit()
        for tail in ("", "/logs", "/events"):
            status, body = await _raw(house, _get(house, f"{TRAININGS}/{name}{tail}"))
            assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
        status, body = await _raw(house, _get(house, f"/v1/namespaces/{name}x_/trainings"))
        assert status == 404
        assert house.backend.asked == [] and house.store.version == 1

    in_house(tmp_path, test)


def test_nothing_can_be_created_under_a_name_that_cannot_be(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        for name in ("../up", "a/b", "", "A", "a" * 53, "a\0", "é", "a\n", " a"):
            answer = await house.client.post(TRAININGS, json=a_body(name))
            assert answer.status_code == 422
            assert [one["field"] for one in error_of(answer)["details"]["fields"]] == ["metadata.name"]
        answer = await house.client.post("/v1/namespaces/Bad_/trainings", json=a_body())
        assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid")
        assert house.store.version == 0

    in_house(tmp_path, test)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "is missing"),
        (b'{"metadata": {', "line 1, column 15"),
        (b'{"a": NaN}', "not a JSON number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not a JSON number"),
        (b"\xff\xfe{}", "not UTF-8 at byte 0"),
        (b"[" * 5000, "nested deeper"),
        (b'{"a":' * 400 + b"1" + b"}" * 400, "nested deeper"),
        (b"null", "must be an object"),
        (b'"text"', "must be an object"),
    ],
)
def test_a_body_that_is_not_json_is_refused_with_the_place(tmp_path: Path, body: bytes, says: str) -> None:
    async def test(house: House) -> None:
        answer = await house.client.post(TRAININGS, content=body)
        assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid")
        assert says in error_of(answer)["message"]

    in_house(tmp_path, test)


def test_another_content_type_is_refused_by_name(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "é"):
            answer = await house.client.post(
                TRAININGS, content=json.dumps(a_body()), headers={b"Content-Type": kind.encode()}
            )
            assert answer.status_code == 422 and "Content-Type" in error_of(answer)["message"]
        zipped = {"Content-Encoding": "gzip"}
        assert (await house.client.post(TRAININGS, json=a_body(), headers=zipped)).status_code == 422
        spelled = {"Content-Type": "Application/JSON; charset=utf-8"}
        fine = await house.client.post(TRAININGS, content=json.dumps(a_body()), headers=spelled)
        assert fine.status_code == 201

    in_house(tmp_path, test)


def test_a_body_beyond_the_limit_is_refused_with_and_without_a_length(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        big = json.dumps(a_body(args=["x" * calls.MOST_BYTES])).encode()

        async def chunks() -> Any:
            for start in range(0, len(big), 65_536):
                yield big[start : start + 65_536]

        for content in (big, chunks()):
            answer = await house.client.post(TRAININGS, content=content, headers={"Content-Type": "application/json"})
            assert (answer.status_code, error_of(answer)["code"]) == (413, "too_large")
        # A length alone is enough: nothing of that body is waited for.
        token = house.client.headers["Authorization"]
        status, _ = await _raw(
            house,
            f"POST {TRAININGS} HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\nContent-Length: 99999999999\r\n\r\n",
        )
        assert status == 413
        fits = json.dumps(a_body(args=["x" * 100_000] * 9))
        assert (await house.client.post(TRAININGS, content=fits)).status_code == 201

    in_house(tmp_path, test)


def test_a_body_full_of_nonsense_is_refused_quickly_and_briefly(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        body = {"metadata": {f"k{number}": 1 for number in range(20_000)}, "spec": {"command": ["x"]}}
        answer = await asyncio.wait_for(house.client.post(TRAININGS, json=body), 3)
        assert answer.status_code == 422 and len(answer.content) < 200_000
        assert "more" in error_of(answer)["message"]

    in_house(tmp_path, test)


def test_a_body_that_does_not_come_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BODY_TIMEOUT_S", 0.05)

    async def test(house: House) -> None:
        token = house.client.headers["Authorization"]
        head = f"POST {TRAININGS} HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\nContent-Length: 10\r\n\r\n{{"
        status, body = await _raw(house, head)
        assert status == 422 and b"did not arrive" in body

    in_house(tmp_path, test)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nBad\x00Header: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 5_000,
    ],
)
def test_what_is_not_http_is_refused_in_the_one_form_and_ends_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: bytes
) -> None:
    monkeypatch.setattr(protocol, "MOST_HEAD_BYTES", 1_000)

    async def test(house: House) -> None:
        status, body = await _raw(house, request_)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (400, "invalid") and error["requestId"]
        assert (await house.client.get("/healthz")).status_code == 200

    in_house(tmp_path, test)


def test_answers_are_not_held_back_to_be_sent_together(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        [connection, *_] = house.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    in_house(tmp_path, test)


def test_a_request_id_is_taken_over_if_it_is_harmless_and_made_otherwise(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        answer = await house.client.get("/v1/nothing", headers={"X-Request-Id": "trace-1.2"})
        assert error_of(answer)["requestId"] == "trace-1.2"
        for odd in ("a b", "x" * 65, "<script>"):
            answer = await house.client.get("/healthz", headers={"X-Request-Id": odd})
            assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])

    in_house(tmp_path, test)


def test_a_fault_of_the_server_is_logged_under_the_id_and_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(house: House) -> None:
        def broken(key: Key) -> Stored | None:
            raise KeyError("internals")

        monkeypatch.setattr(house.store, "get", broken)
        with caplog.at_level(logging.ERROR, "muster.server"):
            answer = await house.client.get(f"{TRAININGS}/demo")
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal")
        assert "internals" not in answer.text
        assert error_of(answer)["requestId"] in caplog.text and "internals" in caplog.text

    in_house(tmp_path, test)


def test_a_store_that_cannot_write_makes_the_server_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(house: House) -> None:
        async def full(write: Write) -> Stored | None:
            raise Unavailable("the disk is full")

        monkeypatch.setattr(house.store, "write", full)
        answer = await house.client.post(TRAININGS, json=a_body())
        assert (answer.status_code, error_of(answer)["code"]) == (503, "unavailable")

    in_house(tmp_path, test)


def test_health_readiness_metrics_and_the_document_are_served(tmp_path: Path) -> None:
    ready = [False]

    async def test(house: House) -> None:
        nobody = house.with_token(None)
        assert (await nobody.get("/healthz")).json()["version"] == "0.0-test"
        answer = await nobody.get("/readyz")
        assert (answer.status_code, error_of(answer)["code"]) == (503, "unavailable")
        ready[0] = True
        assert (await nobody.get("/readyz")).json() == {"status": "ready"}
        assert (await nobody.head("/healthz")).status_code == 200
        document = (await nobody.get("/openapi.json")).json()
        assert f"{TRAININGS.replace('default', '{namespace}')}/{{name}}/scale" in document["paths"]
        await house.submit()
        await house.client.get(f"{TRAININGS}/demo")
        assert (await nobody.get("/metrics")).status_code == 401
        text = (await house.client.get("/metrics")).text
        route = 'route="/v1/namespaces/{namespace}/trainings/{name}"'
        assert f'muster_http_requests_total{{method="GET",{route},status="200"}} 1\n' in text
        assert f'muster_http_request_seconds_bucket{{{route},le="+Inf"}} 1\n' in text
        assert 'muster_trainings{phase="pending"} 1\n' in text and "muster_store_version 1\n" in text
        assert 'muster_workers{backend="local"} 1\n' in text and "muster_queue 7\n" in text

    in_house(tmp_path, test, ready=lambda: ready[0], gauges=lambda: {"muster_queue": 7.0})


def test_metrics_tell_what_of_each_trainings_state_is_safe_to_those_who_may_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(house: House) -> None:
        await house.submit()
        await house.submit("plain")
        assert "muster_training_state" not in (await house.client.get("/metrics")).text
        kept = KeptState(
            step=8,
            survives="worker",
            safe_at=house.services.clock.now() - timedelta(seconds=3),
            bytes=100,
            memory_bytes=300,
            commit_seconds=0.02,
            loss_steps=1,
        )
        await house.settle("demo", "ready", kept_state=kept)
        text = (await house.client.get("/metrics")).text
        of = '{namespace="default",training="demo"}'
        for name, value in {
            "step": "8",
            "survives_worker": "1",
            "age_seconds": "3",
            "bytes": "100",
            "memory_bytes": "300",
            "commit_seconds": "0.02",
            "loss_steps": "1",
        }.items():
            assert f"muster_training_state_{name}{of} {value}\n" in text
        assert "durable_step" not in text, "what is not known is not there"
        assert not re.search('muster_training_state.*training="plain"', text)
        assert "demo" not in (await house.as_role("viewer", "elsewhere").get("/metrics")).text
        monkeypatch.setattr(system, "MOST_TRAININGS", 1)
        await house.settle("plain", "ready", kept_state=kept, started_at=house.services.clock.now())
        text = (await house.client.get("/metrics")).text
        assert 'training="plain"' in text and 'training="demo"' not in text, "the newest have series of their own"

    in_house(tmp_path, test)


def test_whoever_waits_when_the_server_stops_is_told_to_ask_again(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        version = (await house.submit())["metadata"]["resourceVersion"]
        waiting = asyncio.create_task(
            house.client.get(f"{TRAININGS}/demo", params={"resourceVersion": version, "timeoutSeconds": "9"})
        )
        tasks: list[asyncio.Task[None]] = []
        async with asyncio.timeout(BOUND_S):
            while not tasks:
                await asyncio.sleep(0)
                tasks = [task for connection in house.connections for task in connection.tasks]
        await settle()
        for task in tasks:  # as uvicorn does when its patience ends
            task.cancel()
        answer = await waiting
        assert (answer.status_code, error_of(answer)["code"]) == (503, "unavailable")

    in_house(tmp_path, test)
