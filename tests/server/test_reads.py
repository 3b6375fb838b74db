"""Logs, events, usage and explanations, as a client sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from muster.ports import LogQuery, Write
from muster.server.routes import reads
from muster.types.event import WORKER_EXITED, WORKER_STARTED, Event
from muster.types.training import Condition, Key, RankStatus, Uid
from tests.server.house import BOUND_S, TRAININGS, House, a_body, error_of, in_house

LOGS = f"{TRAININGS}/demo/logs"


def test_logs_are_asked_of_the_backend_as_the_client_asked(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        await house.settle("demo", "ready")
        house.backend.lines = [b"one\n", b"two\n"]
        asked: dict[str, str | int] = {"rank": 1, "round": 0, "tail": 5, "markers": "true", "timestamps": "true"}
        answer = await house.client.get(LOGS, params=asked)
        assert answer.text == "one\ntwo\n" and answer.headers["content-type"].startswith("text/plain")
        assert house.backend.asked == [LogQuery(rank=1, round=0, tail=5, markers=True, timestamps=True)]
        for bad in ("rank=-1", "rank=../..", "tail=x", "follow=1", "round=%00", "timestamps=2"):
            assert (await house.client.get(f"{LOGS}?{bad}")).status_code == 422

    in_house(tmp_path, test)


def test_output_that_cannot_be_is_refused_with_the_ranks_and_rounds_that_there_are(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit(procsPerWorker=2)
        impossible = await house.client.get(LOGS, params={"rank": 8, "follow": "true"})
        assert (impossible.status_code, error_of(impossible)["code"]) == (404, "not_found")
        assert "can have ranks 0 to 7, and never rank 8" in error_of(impossible)["message"]
        ranks = tuple(RankStatus(rank, round=1) for rank in range(4))
        await house.settle("demo", "ready", ranks=ranks, round=1)
        for query, why in (
            ({"rank": 5}, "no output of rank 5: its last round has ranks 0 to 3"),
            ({"round": 2}, "has no round 2: the newest is 1"),
            ({"rank": 5, "round": 0}, "no output of rank 5"),
        ):
            refused = await house.client.get(LOGS, params=query)
            assert refused.status_code == 404 and why in error_of(refused)["message"]
        for silent in ({}, {"rank": 3}, {"round": 1}, {"rank": 5, "tail": 0}):
            assert (await house.client.get(LOGS, params=silent)).status_code == 200
        house.backend.lines = [b"of an earlier round, which was larger\n"]
        assert (await house.client.get(LOGS, params={"rank": 5})).status_code == 200

    in_house(tmp_path, test)


def test_logs_of_a_pending_training_say_so_and_why(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        why = Condition("Admitted", "False", "NoGpus", "2 GPUs are needed, 1 is free")
        await house.settle("demo", "pending", conditions=(why,))
        answer = await house.client.get(LOGS)
        assert answer.status_code == 200 and answer.headers["x-muster-note"] == "pending"
        assert "'demo' is pending" in answer.text and "2 GPUs are needed" in answer.text
        assert house.backend.asked == []

    in_house(tmp_path, test)


def test_following_a_pending_training_waits_for_it_and_ends_with_it(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        async with house.client.stream("GET", LOGS, params={"follow": "true"}) as answer:
            lines = answer.aiter_lines()
            house.backend.lines = [b"first\n"]
            await house.settle("demo", "ready")
            assert await asyncio.wait_for(anext(lines), BOUND_S) == "first"
            house.backend.lines.append(b"second\n")
            await house.settle("demo", "succeeded", rank_exits=())
            house.backend.more.set()
            assert await asyncio.wait_for(anext(lines), BOUND_S) == "second"
            assert [line async for line in lines] == []

    in_house(tmp_path, test)


def test_following_ends_when_the_training_is_deleted(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        async with house.client.stream("GET", LOGS, params={"follow": "true"}) as answer:
            await house.store.write(Write(delete=Key("default", "demo")))
            assert await asyncio.wait_for(answer.aread(), BOUND_S) == b""

    in_house(tmp_path, test)


def test_events_can_be_read_after_an_id_and_after_the_training_is_gone(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        await house.client.post(f"{TRAININGS}/demo/scale", json={"target": 3})
        body = (await house.client.get(f"{TRAININGS}/demo/events", params={"after": 1})).json()
        assert [event["reason"] for event in body["items"]] == ["ScaleRequested"]
        assert body["kind"] == "EventList" and body["items"][0]["data"] == {"fromTarget": 2, "toTarget": 3}
        await house.store.write(Write(delete=Key("default", "demo")))
        left = await house.client.get(f"{TRAININGS}/demo/events")
        assert [event["reason"] for event in left.json()["items"]] == ["Created", "ScaleRequested"]
        late = await house.client.get(f"{TRAININGS}/demo/events", params={"after": 99})
        assert late.status_code == 200 and late.json()["items"] == []
        times = [event["at"] for event in left.json()["items"]]
        since = await house.client.get(f"{TRAININGS}/demo/events", params={"since": times[0]})
        assert since.json() == left.json()
        since = await house.client.get(f"{TRAININGS}/demo/events", params={"since": "2999-01-01T00:00:00Z"})
        assert since.json()["items"] == []
        wrong = await house.client.get(f"{TRAININGS}/demo/events", params={"since": "yesterday"})
        assert wrong.status_code == 422
        never = await house.client.get(f"{TRAININGS}/never/events")
        assert error_of(never)["code"] == "not_found"

    in_house(tmp_path, test)


def test_the_newest_events_come_first_and_older_ones_on_demand(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        for target in (3, 4, 1):
            await house.client.post(f"{TRAININGS}/demo/scale", json={"target": target})

        async def targets(**params: int) -> list[int | None]:
            answer = await house.client.get(f"{TRAININGS}/demo/events", params=params)
            return [event["data"].get("toTarget") for event in answer.json()["items"]]

        assert await targets(limit=2) == [4, 1]
        assert await targets(limit=2, before=3) == [None, 3]
        assert await targets(after=2, before=4) == [4]
        await house.store.write(Write(delete=Key("default", "demo")))
        assert await targets(before=1) == []
        for bad in ("limit=0", "limit=x", "before=-1"):
            assert (await house.client.get(f"{TRAININGS}/demo/events?{bad}")).status_code == 422

    in_house(tmp_path, test)


def test_a_search_finds_lines_in_any_case_and_the_last_of_them(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        await house.settle("demo", "ready")
        house.backend.lines = [b"[0] Loss 1\n[1] step\n", b"nothing\n", b"[1] LOSS 2\r over\n[0] loss 3\n"]

        async def found(**params: str | int) -> list[str]:
            return (await house.client.get(LOGS, params=params)).text.split("\n")[:-1]

        assert await found(search="loss") == ["[0] Loss 1", "[1] LOSS 2\r over", "[0] loss 3"]
        assert await found(search="LOSS", tail=2) == ["[1] LOSS 2\r over", "[0] loss 3"]
        assert await found(search="loss", tail=0) == []
        assert await found(search="no such words") == []
        assert [query.tail for query in house.backend.asked] == [None] * 4
        house.backend.lines = [b"2026-01-31T12:00:00.054Z [0] loss 3\n- [0] in 2026\n"]
        assert await found(search="2026", timestamps="true") == ["- [0] in 2026"]
        assert house.backend.asked[-1] == LogQuery(timestamps=True)
        assert (await house.client.get(LOGS, params={"search": "x" * 1001})).status_code == 422
        followed = await house.client.get(LOGS, params={"search": "loss", "follow": "true"})
        assert error_of(followed)["details"]["fields"][0]["field"] == "search"

    in_house(tmp_path, test)


def test_a_search_that_finds_nothing_ends_with_who_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else anybody could leave as many of them behind as he likes."""
    begun, over = asyncio.Event(), asyncio.Event()

    async def endless(uid: Uid, query: LogQuery, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"[0] nothing\n"
                begun.set()
                await asyncio.sleep(0)
        finally:
            over.set()

    async def test(house: House) -> None:
        await house.submit()
        await house.settle("demo", "ready")
        monkeypatch.setattr(house.backend, "logs", endless)
        asked = asyncio.create_task(house.client.get(LOGS, params={"search": "loss"}))
        async with asyncio.timeout(10):
            await begun.wait()
            asked.cancel()
            await over.wait()

    in_house(tmp_path, test)


def test_a_search_that_finds_every_line_leaves_the_loop_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "_TOGETHER", 10)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def test(house: House) -> None:
        nonlocal turns
        await house.submit()
        await house.settle("demo", "ready")
        house.backend.lines = [b"a\n" * 10_000]
        beside = asyncio.create_task(others())
        for params in ({"search": "a"}, {"search": "a", "tail": "20000"}):
            turns = 0
            assert len((await house.client.get(LOGS, params=params)).content) == 20_000
            assert turns >= 1000
        beside.cancel()

    in_house(tmp_path, test)


def test_the_events_of_a_training_are_not_those_of_one_that_had_its_name(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        await house.store.write(Write(delete=Key("default", "demo")))
        again = await house.submit()
        events = (await house.client.get(f"{TRAININGS}/demo/events")).json()["items"]
        assert [event["uid"] for event in events] == [again["metadata"]["uid"]]

    in_house(tmp_path, test)


async def _work(house: House, namespace: str, name: str, seconds: int) -> None:
    made = await house.client.post(
        f"/v1/namespaces/{namespace}/trainings", json={"metadata": {"name": name}, "spec": {"command": ["true"]}}
    )
    assert made.status_code == 201
    stored = house.store.get(Key(namespace, name))
    assert stored is not None
    began = house.services.clock.now().replace(hour=1)
    started = Event(WORKER_STARTED, at=began, data={"worker": "w-0", "gpus": 2})
    exited = replace(started, reason=WORKER_EXITED, at=began.replace(second=seconds))
    await house.store.write(Write(put=stored.training, events=(started, exited)))


def test_usage_is_summed_per_training_and_per_namespace(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await _work(house, "default", "a", 10)
        await _work(house, "default", "b", 20)
        await _work(house, "other", "c", 30)
        [one] = (await house.client.get(f"{TRAININGS}/a/usage")).json()["items"]
        assert (one["training"], one["workerSeconds"], one["gpuSeconds"]) == ("a", 10.0, 20.0)
        assert one["journalBytes"] > 100 and one["logBytes"] == 0
        by_space = (await house.client.get("/v1/usage", params={"by": "namespace"})).json()["items"]
        assert {one["namespace"]: one["workerSeconds"] for one in by_space} == {"default": 30.0, "other": 30.0}
        viewer = house.as_role("viewer", "other")
        seen = (await viewer.get("/v1/usage")).json()["items"]
        assert [one["training"] for one in seen] == ["c"]
        later = await house.client.get("/v1/usage", params={"since": "2026-01-31T11:00:00Z"})
        assert sum(one["workerSeconds"] for one in later.json()["items"]) == 0
        assert (await house.client.get("/v1/usage", params={"by": "moon"})).status_code == 422
        await house.submit("idle")
        [idle] = (await house.client.get(f"{TRAININGS}/idle/usage")).json()["items"]
        assert idle["workerSeconds"] == 0

    in_house(tmp_path, test)


def test_an_explanation_is_a_sentence_and_what_leads_to_it(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        body = (await house.client.get(f"{TRAININGS}/demo/explain")).json()
        assert "demo" in body["summary"] and isinstance(body["details"], list)
        assert (await house.client.get(f"{TRAININGS}/other/explain")).status_code == 404

    in_house(tmp_path, test)


def test_events_of_all_trainings_are_the_newest_that_the_token_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(house: House) -> None:
        for namespace in ("default", "lab"):
            for name in ("one", "two"):
                where = f"/v1/namespaces/{namespace}/trainings"
                assert (await house.client.post(where, json=a_body(name))).status_code == 201

        async def told(client: httpx2.AsyncClient, **params: str | int) -> list[tuple[str, str]]:
            answer = await client.get("/v1/events", params=params)
            assert answer.status_code == 200, answer.text
            return [(one["namespace"], one["training"]) for one in answer.json()["items"]]

        every = [("default", "one"), ("default", "two"), ("lab", "one"), ("lab", "two")]
        assert await told(house.client) == every
        assert await told(house.client, limit=2) == every[2:]
        assert await told(house.client, namespace="lab") == every[2:]
        viewer = house.as_role("viewer", "lab")
        assert await told(viewer) == every[2:]
        assert (await viewer.get("/v1/events", params={"namespace": "default"})).status_code == 403
        first = (await house.client.get("/v1/events")).json()["items"][0]["id"]
        assert await told(house.client, after=first) == every[1:]
        monkeypatch.setattr(reads, "LOOK_BACK", 1)
        assert await told(house.client) == every[3:]
        for bad in ("limit=0", "limit=5001", "namespace=..", "after=-1"):
            assert (await house.client.get(f"/v1/events?{bad}")).status_code == 422

    in_house(tmp_path, test)
