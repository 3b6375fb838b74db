"""A token that ends while requests of it are under way: every stream and every wait ends with it, within a second."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import httpx2
import pytest

from muster.server.app import OPERATIONS
from muster.server.auth import Tokens
from muster.server.describe import Operation
from muster.server.routes.watch import EVENT_STREAM
from muster.sharing.service import PoolService
from tests.server.house import BOUND_S, TRAININGS, House, a_body, error_of, in_house
from tests.server.test_guests import Line, asking
from tests.server.test_pools import CLUSTERS, P1, Going, in_pool, put, train

A_SECOND = 1.0
BUSY_S = 1.0  # both cores may be busy with other tests
_LASTING_FIELDS = {"wait", "timeout_seconds", "follow"}


def lasts(operation: Operation) -> bool:
    """Whether its answer may take long by design."""
    asked = {one.name for one in fields(operation.query)} if operation.query is not None else set()
    return bool(asked & _LASTING_FIELDS) or any(one.media_type == EVENT_STREAM for one in operation.answers.values())


# How each is made to last.
ASKED: dict[str, tuple[str, str, dict[str, str], object]] = {
    "getTraining": ("GET", f"{TRAININGS}/demo?resourceVersion=1&timeoutSeconds=60", {}, None),
    "getLogs": ("GET", f"{TRAININGS}/demo/logs?follow=true", {}, None),
    "watchTrainings": ("GET", "/v1/watch?namespace=default&events=true", {}, None),
    "putPipeline": (
        "PUT",
        f"{P1}?wait=20",
        {"Pipeline-Session": "s2", "Pipeline-Process": "another"},
        {"clusters": CLUSTERS},
    ),
    "requestGpus": (
        "POST",
        f"{P1.replace('p1', 'p2')}/requests?wait=20",
        {"Idempotency-Key": "t2", "Pipeline-Session": "p2"},
        {"cluster": "actor_train", "priority": "ACTOR_TRAINING"},
    ),
    "releaseGpus": ("POST", f"{P1}/release?wait=20", {"Pipeline-Session": "s1"}, {"cluster": "actor_train"}),
    "killPipeline": ("POST", f"{P1}/kill?wait=20", {"Idempotency-Key": "k1"}, {"why": "it is in the way"}),
    "getAction": ("GET", f"{P1}/actions?wait=20&after=99", {"Pipeline-Session": "s1"}, None),
}


def test_nothing_that_lasts_is_forgotten_here() -> None:
    assert {one.name for one in OPERATIONS if lasts(one)} == set(ASKED)


async def _prepare(house: House) -> None:
    uid = (await house.submit())["metadata"]["uid"]  # of the namespace in which the token may write
    for path, session in ((P1, "s1"), (P1.replace("p1", "p2"), "p2")):
        headers = {"Pipeline-Session": session, "Pipeline-Training": uid, "Pipeline-Round": "0"}
        answer = await house.client.put(path, json={"clusters": CLUSTERS}, headers=headers)
        assert answer.status_code == 200, answer.text


async def _revoke(house: House) -> None:
    Tokens(house.home).revoke("eve")  # as another process would


async def _cut_down(house: House) -> None:
    """Somebody edits the file: another role, other namespaces."""
    path = house.home / "tokens.json"
    kept = json.loads(path.read_text())
    for one in kept:
        if one["name"] == "eve":
            one["role"], one["namespaces"] = "viewer", ["elsewhere"]
    path.write_text(json.dumps(kept))


async def _rotate(house: House) -> None:
    Tokens(house.home).rotate("eve", grace=timedelta(0))


async def _spoil(house: House) -> None:
    (house.home / "tokens.json").write_text("{")


ENDS: list[Callable[[House], Awaitable[None]]] = [_revoke, _cut_down, _rotate, _spoil]


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("end", ENDS, ids=["revoked", "cut down", "rotated", "spoiled"])
def test_a_wait_or_stream_ends_with_its_token(
    tmp_path: Path, name: str, end: Callable[[House], Awaitable[None]]
) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await _prepare(house)
        if name in ("requestGpus", "releaseGpus"):
            first = {"Pipeline-Session": "s1", "Idempotency-Key": "t1"}
            form = {"cluster": "actor_train", "priority": "ACTOR_TRAINING"}
            await house.client.post(f"{P1}/requests?wait=5", json=form, headers=first)
        if name == "killPipeline":
            pool.scheduler.kill_pipeline = _never  # type: ignore[method-assign,assignment]
        if name == "releaseGpus":
            pool.scheduler.notify_release_gpus = _never  # type: ignore[method-assign,assignment]
        eve = house.with_token(house.services.tokens.create("eve", "editor", ("default",)))
        visits = house.services.visits
        asked = asyncio.create_task(_ask(eve, name))
        await _until(lambda: len(visits) == 1)
        await asyncio.sleep(0.05)  # it is in the middle of its wait
        assert not asked.done(), await asked
        began = time.monotonic()
        await end(house)
        said = await asyncio.wait_for(asked, BOUND_S)
        assert time.monotonic() - began < A_SECOND + BUSY_S
        assert not len(visits) or ASKED[name][0] != "GET"
        if name == "getTraining":
            assert said in ("401 unauthenticated", "503 unavailable")
        if name == "watchTrainings":
            assert '"code": "un' in said  # unauthenticated, or unavailable

    in_pool(tmp_path, test, rounds=Going())


async def _never(*_: object) -> None:
    await asyncio.sleep(60)


async def _ask(client: httpx2.AsyncClient, name: str) -> str:
    """What was heard until the end."""
    method, path, headers, body = ASKED[name]
    said = b""
    with contextlib.suppress(httpx2.TransportError):
        async with client.stream(method, path, headers=headers, json=body) as answer:
            if answer.status_code >= 400:
                await answer.aread()
                return f"{answer.status_code} {error_of(answer)['code']}"
            async for part in answer.aiter_bytes():
                said += part
    return said.decode()


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not holds():
            await asyncio.sleep(0.01)


def test_a_stream_ends_when_its_token_expires(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        tokens = house.services.tokens
        eve = house.with_token(tokens.create("eve", "viewer", expires_in=timedelta(seconds=0.6)))
        began = time.monotonic()
        assert await asyncio.wait_for(_ask(eve, "getLogs"), BOUND_S) == ""
        assert 0.3 < time.monotonic() - began < 0.6 + A_SECOND + BUSY_S
        late = await eve.get(TRAININGS)
        assert late.status_code == 401 and "expired at" in error_of(late)["message"]

    in_house(tmp_path, test)


def test_a_reader_that_takes_nothing_is_cut_off_with_its_token_too(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        await house.settle("demo", "ready")
        house.backend.lines[:] = [b"x" * 65_536] * 1000
        eve = house.services.tokens.create("eve", "viewer")
        lines = [await Line.to(house, asking(house, path, eve)) for path in (f"{TRAININGS}/demo/logs", "/v1/watch")]
        await _until(lambda: len(house.services.visits) == 2)
        house.services.tokens.revoke("eve")
        await _until(lambda: not len(house.services.visits))
        await asyncio.gather(*(one.is_cut() for one in lines))

    in_house(tmp_path, test)


def test_a_body_that_is_finished_after_its_token_has_ended_changes_nothing(tmp_path: Path) -> None:
    """Who is about to lose a token opens requests, and finishes them later."""

    async def test(house: House) -> None:
        eve = house.services.tokens.create("eve", "editor")
        body = json.dumps(a_body("late")).encode()
        head = asking(house, TRAININGS, eve, "POST", f"Content-Length: {len(body)}\r\n")
        line = await Line.to(house, head + body[:-1])
        await _until(lambda: len(house.services.visits) == 1)
        house.services.tokens.revoke("eve")
        await line.is_cut()
        assert house.store.version == 0 and not len(house.services.visits)

    in_house(tmp_path, test)


def test_who_keeps_what_it_needs_goes_on(tmp_path: Path) -> None:
    """A file that is written again, a rotation with grace, more rights, or another's end is nobody's end."""

    async def test(house: House) -> None:
        await house.submit()
        tokens = house.services.tokens
        eve = house.with_token(tokens.create("eve", "viewer", ("default",)))
        tokens.create("other", "viewer")
        asked = asyncio.create_task(_ask(eve, "getTraining"))
        await _until(lambda: len(house.services.visits) == 1)
        tokens.revoke("other")
        fresh = tokens.rotate("eve")
        path = house.home / "tokens.json"
        kept = json.loads(path.read_text())
        kept[1] |= {"role": "editor", "namespaces": ["default", "more"]}
        path.write_text(json.dumps(kept))
        for _ in range(3):
            house.services.visits.look(tokens)
        await house.settle("demo", "ready")
        assert '"ready"' in await asyncio.wait_for(asked, BOUND_S)
        assert (await house.with_token(fresh).get(TRAININGS)).status_code == 200

    in_house(tmp_path, test)


# How many at once ---------------------------------------------------------------------------------


def test_one_token_cannot_have_everything_open(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        house.services.visits.most = 16
        await house.submit()
        eve, ann = (house.services.tokens.create(name, "viewer") for name in ("eve", "ann"))
        path = f"{TRAININGS}/demo/logs?follow=true"
        lines = [await Line.to(house, asking(house, path, eve)) for _ in range(4)]
        for one in lines:
            await one.reader.readuntil(b"\r\n\r\n")
        refused = await house.with_token(eve).get(TRAININGS)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_requests")
        assert refused.headers["retry-after"] == "1" and refused.headers["connection"] == "close"
        for token in (ann, house.services.tokens.create("root2", "admin")):
            assert (await house.with_token(token).get(TRAININGS)).status_code == 200
        lines[0].writer.close()
        await _until(lambda: len(house.services.visits) == 3)
        assert (await house.with_token(eve).get(TRAININGS)).status_code == 200

    in_house(tmp_path, test)


def test_a_request_that_has_ended_leaves_neither_a_count_nor_an_entry(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        eve = house.as_role("viewer")
        for path in ("/v1/pools", "/v1/nothing", TRAININGS, "/v1/trainings?limit=0"):
            await eve.get(path)
        assert (await train(house, wait=5)).status_code == 200
        assert not len(house.services.visits) and not house.services.visits._open

    in_pool(tmp_path, test)
