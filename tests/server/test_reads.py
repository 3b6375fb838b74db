"""Logs, events, usage and explanations, as a client sees them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from muster.ports import LogQuery, Write
from muster.types.event import WORKER_EXITED, WORKER_STARTED, Event
from muster.types.training import Condition, Key
from tests.server.house import BOUND_S, TRAININGS, House, error_of, in_house

LOGS = f"{TRAININGS}/demo/logs"


def test_logs_are_asked_of_the_backend_as_the_client_asked(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        await house.settle("demo", "ready")
        house.backend.lines = [b"one\n", b"two\n"]
        answer = await house.client.get(LOGS, params={"rank": 1, "round": 0, "tail": 5})
        assert answer.text == "one\ntwo\n" and answer.headers["content-type"].startswith("text/plain")
        assert house.backend.asked == [LogQuery(rank=1, round=0, tail=5, follow=False)]
        for bad in ("rank=-1", "rank=../..", "tail=x", "follow=1", "round=%00"):
            assert (await house.client.get(f"{LOGS}?{bad}")).status_code == 422

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
        never = await house.client.get(f"{TRAININGS}/never/events")
        assert error_of(never)["code"] == "not_found"

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
