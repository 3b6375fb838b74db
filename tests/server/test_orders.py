"""Scale and cancel, and the quotas that orders and submissions must keep."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.server.house import TRAININGS, House, a_body, error_of, in_house


def test_scaling_answers_with_the_generation_that_is_the_receipt(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        answer = await house.client.post(f"{TRAININGS}/demo/scale", json={"target": 3})
        assert answer.status_code == 202
        assert answer.json()["metadata"]["generation"] == 2
        assert answer.json()["spec"]["worldSize"]["target"] == 3
        again = await house.client.post(f"{TRAININGS}/demo/scale", json={"target": 3})
        assert again.status_code == 202 and again.json() == answer.json()

    in_house(tmp_path, test)


@pytest.mark.parametrize("target", [0, 5, -1, 10_000])
def test_a_target_beyond_the_bounds_is_refused_with_the_bounds(tmp_path: Path, target: int) -> None:
    async def test(house: House) -> None:
        await house.submit()
        answer = await house.client.post(f"{TRAININGS}/demo/scale", json={"target": target})
        assert answer.status_code == 422
        error = error_of(answer)
        assert error["code"] == "world_size_out_of_bounds"
        assert error["details"] == {"requested": target, "min": 1, "max": 4}
        assert house.store.version == 1

    in_house(tmp_path, test)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"target": "3"}', b'{"target": 3.5}', b'{"target": true}', b'{"target": 3, "x": 1}']
)
def test_a_scale_that_is_no_scale_changes_nothing(tmp_path: Path, body: bytes) -> None:
    async def test(house: House) -> None:
        await house.submit()
        answer = await house.client.post(f"{TRAININGS}/demo/scale", content=body)
        assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid")
        assert house.store.version == 1

    in_house(tmp_path, test)


def test_a_training_that_has_ended_takes_no_orders(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        await house.settle("demo", "succeeded", rank_exits=())
        scaled = await house.client.post(f"{TRAININGS}/demo/scale", json={"target": 3})
        assert scaled.status_code == 409
        assert error_of(scaled)["details"] == {"phase": "succeeded", "requestedTarget": 3}
        patched = await house.client.patch(f"{TRAININGS}/demo", json={"spec": {"worldSize": {"target": 4}}})
        assert error_of(patched)["code"] == "terminal_state"
        assert error_of(patched)["details"] == {"phase": "succeeded", "requestedTarget": 4}
        labelled = await house.client.patch(f"{TRAININGS}/demo", json={"metadata": {"labels": {"kept": "yes"}}})
        assert labelled.status_code == 200

    in_house(tmp_path, test)


def test_cancelling_is_accepted_and_of_an_ended_training_changes_nothing(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit("running")
        await house.submit("over")
        await house.settle("over", "failed", rank_exits=())
        first = await house.client.post(f"{TRAININGS}/running/cancel", json={"graceSeconds": 5})
        assert first.status_code == 202
        assert first.json()["spec"]["cancel"] == {"requestedAt": "2026-01-31T12:00:00.000Z", "graceSeconds": 5.0}
        assert first.json()["metadata"]["generation"] == 2
        again = await house.client.post(f"{TRAININGS}/running/cancel", json={"graceSeconds": 0})
        assert again.status_code == 202 and again.json() == first.json()
        before = (await house.client.get(f"{TRAININGS}/over")).json()
        ended = await house.client.post(f"{TRAININGS}/over/cancel")
        assert ended.status_code == 200 and ended.json() == before
        wrong = await house.client.post(f"{TRAININGS}/running/cancel", json={"graceSeconds": -1})
        assert wrong.status_code == 422

    in_house(tmp_path, test)


def test_orders_at_the_same_time_are_all_obeyed_in_some_order(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit(worldSize={"min": 1, "target": 1, "max": 40})
        answers = await asyncio.gather(
            *(house.client.post(f"{TRAININGS}/demo/scale", json={"target": target}) for target in range(2, 14))
        )
        assert {answer.status_code for answer in answers} == {202}
        assert {answer.json()["metadata"]["generation"] for answer in answers} == set(range(2, 14))

    in_house(tmp_path, test)


def test_every_mutation_is_an_event_with_its_actor(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        editor = house.as_role("editor", "default")
        await editor.post(f"{TRAININGS}/demo/scale", json={"target": 3})
        await editor.patch(f"{TRAININGS}/demo", json={"spec": {"spares": 1}})
        await editor.post(f"{TRAININGS}/demo/cancel")
        await editor.delete(f"{TRAININGS}/demo")
        events = (await house.client.get(f"{TRAININGS}/demo/events")).json()["items"]
        reasons = ["Created", "ScaleRequested", "Edited", "CancelRequested", "DeleteRequested"]
        assert [event["reason"] for event in events] == reasons
        assert [event["actor"] for event in events] == ["root"] + ["editor-0"] * 4

    in_house(tmp_path, test)


def test_a_quota_is_kept_by_submissions_and_by_growth(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        quotas = {"default": {"trainings": 2, "gpus": 4}, "*": {"trainings": 1}}
        (house.home / "quotas.json").write_text(json.dumps(quotas))
        await house.submit("first", resources={"gpus": 1}, spares=1)
        too_much = await house.client.post(TRAININGS, json=a_body("second", resources={"gpus": 1}))
        assert (too_much.status_code, error_of(too_much)["code"]) == (403, "quota_exceeded")
        assert "4 gpus: 3 are in use, 2 more" in error_of(too_much)["message"]
        assert error_of(too_much)["details"] == {"resource": "gpus", "current": 3, "requested": 2, "limit": 4}
        grown = await house.client.post(f"{TRAININGS}/first/scale", json={"target": 4})
        assert error_of(grown)["code"] == "quota_exceeded"
        assert error_of(grown)["details"] == {"resource": "gpus", "current": 3, "requested": 2, "limit": 4}
        assert (await house.client.post(f"{TRAININGS}/first/scale", json={"target": 3})).status_code == 202
        spared = await house.client.patch(f"{TRAININGS}/first", json={"spec": {"spares": 2}})
        assert error_of(spared)["code"] == "quota_exceeded"
        await house.submit("second")
        third = await house.client.post(TRAININGS, json=a_body("third"))
        assert third.status_code == 403
        assert error_of(third)["details"] == {"resource": "trainings", "current": 2, "requested": 1, "limit": 2}
        await house.settle("second", "succeeded", rank_exits=())
        await house.submit("third")
        (house.home / "quotas.json").write_text(json.dumps({"default": {"gpus": 1}}))
        assert (await house.client.post(f"{TRAININGS}/first/scale", json={"target": 1})).status_code == 202

    in_house(tmp_path, test)


def test_two_submissions_cannot_both_take_the_last_place(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        (house.home / "quotas.json").write_text('{"*": {"trainings": 3}}')
        answers = await asyncio.gather(
            *(house.client.post(TRAININGS, json=a_body(f"t-{number}")) for number in range(10))
        )
        assert sorted(answer.status_code for answer in answers) == [201] * 3 + [403] * 7

    in_house(tmp_path, test)


def test_quotas_that_cannot_be_read_let_nothing_through(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        (house.home / "quotas.json").write_text('{"*": {"trainings": "many"}}')
        answer = await house.client.post(TRAININGS, json=a_body())
        assert (answer.status_code, error_of(answer)["code"]) == (503, "unavailable")

    in_house(tmp_path, test)
