"""Attacks on another namespace's pipeline by an editor, over a real socket with a real scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from muster.sharing import tenants
from muster.sharing.pending_calls import MOST_WAITING
from muster.sharing.service import PoolService
from tests.server.house import House, error_of
from tests.server.test_pools import CLUSTERS, P1, POOL, Going, in_pool

OWNER = {"Pipeline-Session": "s1", "Pipeline-Process": "one"}
BODY = {"clusters": CLUSTERS}
TRAIN = {"cluster": "actor_train", "priority": "ACTOR_TRAINING"}
GENERATE = {"cluster": "actor_infer", "priority": "GENERATION", "stepTargetEstimate": 8}


async def register(
    client: httpx2.AsyncClient, headers: dict[str, str] | None = None, path: str = P1
) -> httpx2.Response:
    return await client.put(path, json=BODY, headers=OWNER if headers is None else headers)


async def hold(client: httpx2.AsyncClient) -> None:
    """Register p1 with a session, and hold its training stage."""
    assert (await register(client)).status_code == 200
    headers = {**OWNER, "Idempotency-Key": "t1"}
    granted = await client.post(f"{P1}/requests", params={"wait": 5}, json=TRAIN, headers=headers)
    assert granted.json()["gpus"] == [0, 1]


def attacks(action: str = "shrink-1", epoch: int = 1) -> list[tuple[str, str, Any]]:
    return [
        ("PUT", P1, BODY),
        ("PUT", P1, {**BODY, "onlyAttach": True}),
        ("DELETE", P1, None),
        ("DELETE", f"{P1}/requests/t1", None),
        ("POST", f"{P1}/quarantine", {"why": "spite"}),
        ("POST", f"{P1}/kill", {"force": True}),
        ("POST", f"{P1}/requests", GENERATE),
        ("POST", f"{P1}/release", {"cluster": "actor_train"}),
        ("POST", f"{P1}/release", {"cluster": "actor_infer", "wait": True}),
        ("POST", f"{P1}/progress", {"completed": 1, "target": 8}),
        ("POST", f"{P1}/progress", {"clear": True}),
        ("GET", f"{P1}/actions", None),
        ("POST", f"{P1}/actions/{action}", {"ok": True, "epoch": epoch}),
    ]


async def refusals(client: httpx2.AsyncClient, calls: list[tuple[str, str, Any]], **headers: str) -> list[int]:
    sent = {"Idempotency-Key": "k", **headers}
    return [(await client.request(method, path, json=body, headers=sent)).status_code for method, path, body in calls]


def test_an_editor_of_another_namespace_that_leaves_the_session_out_controls_nothing(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await hold(house.as_role("editor", "team-a"))
        before = pool.scheduler.snapshot()
        mallory = house.as_role("editor", "team-b")
        assert await refusals(mallory, attacks()) == [403] * len(attacks())
        stolen = {"Pipeline-Session": "s2", "Pipeline-Process": "two"}
        assert set(await refusals(mallory, attacks(), **stolen)) <= {403, 409}
        assert pool.scheduler.snapshot() == before
        [there] = (await house.client.get(POOL)).json()["pipelines"]
        assert (there["state"], there["held"]) == ("attached", [0, 1])

    in_pool(tmp_path, test)


def test_a_shrink_is_answered_by_the_owner_only(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        owner, mallory = house.as_role("editor", "team-a"), house.as_role("editor", "team-b")
        assert (await register(owner)).status_code == 200
        await owner.post(f"{P1}/requests", json=GENERATE, headers={**OWNER, "Idempotency-Key": "g1"})
        fetched = await owner.get(f"{P1}/actions", params={"wait": 5}, headers=OWNER)
        asked = fetched.json()
        answer = {"ok": True, "epoch": asked["epoch"]}
        for headers in ({}, {"Pipeline-Session": "s2"}):
            forged = await mallory.post(f"{P1}/actions/{asked['id']}", json=answer, headers=headers)
            assert forged.status_code in (403, 409)
        assert {one.state for one in pool.scheduler.snapshot().leases.values()} == {"granting"}
        own = await owner.post(f"{P1}/actions/{asked['id']}", json=answer, headers=OWNER)
        assert own.status_code == 200

    in_pool(tmp_path, test)


def test_a_quarantined_pipeline_is_not_taken_over_with_another_namespaces_token(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        owner, mallory = house.as_role("editor", "team-a"), house.as_role("editor", "team-b")
        await hold(owner)
        await pool.scheduler.quarantine_pipeline("p1", "nothing was heard")
        taken = await register(mallory, {"Pipeline-Session": "s2", "Pipeline-Process": "two"})
        assert (taken.status_code, error_of(taken)["code"]) == (403, "forbidden")
        assert "muster share kill p1" in error_of(taken)["hint"]
        restarted = {"Pipeline-Session": "s3", "Pipeline-Process": "three"}
        assert (await register(owner, restarted)).status_code == 202
        asked = (await owner.get(f"{P1}/actions", params={"wait": 5}, headers=restarted)).json()
        body = {"ok": True, "epoch": asked["epoch"]}
        assert (await owner.post(f"{P1}/actions/{asked['id']}", json=body, headers=restarted)).status_code == 200
        again = await owner.put(P1, json=BODY, params={"wait": 5}, headers=restarted)
        assert again.status_code == 200
        late = await owner.post(f"{P1}/release", json={"cluster": "actor_train"}, headers=OWNER)
        assert late.status_code == 409, "the former process speaks no more"

    in_pool(tmp_path, test)


def test_a_pipeline_is_ended_by_admins_and_by_tokens_of_its_trainings_namespace(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        uid = (await house.submit("rl"))["metadata"]["uid"]
        headers = {**OWNER, "Pipeline-Training": uid, "Pipeline-Round": "0"}
        for client, allowed in (
            (house.as_role("editor", "team-b"), False),
            (house.as_role("viewer", "default"), False),
            (house.as_role("editor", "default"), True),
            (house.client, True),
        ):
            for method, path in (("DELETE", P1), ("POST", f"{P1}/kill")):
                assert (await register(house.client, headers)).status_code == 200
                body = {"force": True} if method == "POST" else None
                answer = await client.request(method, path, json=body)
                assert (answer.status_code == 200) is allowed, answer.text
                assert ("p1" not in pool.scheduler.shares.pipelines) is allowed
                headers["Pipeline-Process"] += "x"  # a killed process does not come back
                if not allowed:
                    await house.client.delete(P1)

    in_pool(tmp_path, test, rounds=Going())


def test_a_process_that_was_replaced_does_not_end_its_successor(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await hold(house.client)
        assert (await register(house.client, {**OWNER, "Pipeline-Session": "s2"})).status_code == 200
        late = await house.client.delete(P1, headers=OWNER)
        assert late.status_code == 409
        assert sorted(pool.scheduler.snapshot().leases) == [0, 1]

    in_pool(tmp_path, test)


def test_a_session_controls_its_pipeline_also_after_a_restart_of_the_control_plane(tmp_path: Path) -> None:
    journal = tmp_path / "pool.journal"

    async def first(house: House, pool: PoolService) -> None:
        await hold(house.client)

    async def second(house: House, pool: PoolService) -> None:
        before = pool.scheduler.snapshot()
        mallory = house.as_role("editor", "team-b")
        assert await refusals(mallory, attacks()) == [403] * len(attacks())
        assert set(await refusals(mallory, attacks(), **{"Pipeline-Session": "s2"})) <= {403, 409}
        assert pool.scheduler.snapshot() == before
        freed = await house.client.post(f"{P1}/release", json={"cluster": "actor_train"}, headers=OWNER)
        assert freed.json()["gpus"] == [0, 1]
        assert (await register(house.client)).status_code == 200
        assert b"s1" not in journal.read_bytes().replace(b"p1", b"")

    in_pool(tmp_path / "a", first, journal=journal)
    in_pool(tmp_path / "b", second, journal=journal)


def test_a_pipeline_without_a_session_is_controlled_by_the_token_that_registered_it(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        owner, mallory = house.as_role("editor", "team-a"), house.as_role("editor", "team-b")
        assert (await register(owner, {})).status_code == 200
        assert await refusals(mallory, attacks()) == [403] * len(attacks())
        key = {"Idempotency-Key": "t1"}
        reply = await owner.post(f"{P1}/requests", json=TRAIN, headers=key, params={"wait": 5})
        assert reply.json()["gpus"] == [0, 1]
        assert (await register(owner, {})).status_code == 200
        assert (await owner.delete(P1)).status_code == 200

    in_pool(tmp_path, test)


def test_nobody_else_answers_for_a_pipeline_without_a_session_that_registers_again(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        owner, mallory = house.as_role("editor", "team-a"), house.as_role("editor", "team-b")
        assert (await register(owner, {})).status_code == 200
        key = {"Idempotency-Key": "t1"}
        assert (await owner.post(f"{P1}/requests", json=TRAIN, headers=key, params={"wait": 5})).status_code == 200
        await pool.scheduler.quarantine_pipeline("p1", "nothing was heard")
        assert (await register(owner, {})).status_code == 202, "its ranks have to shrink first"
        asked = (await owner.get(f"{P1}/actions", params={"wait": 5})).json()
        assert await refusals(mallory, attacks(asked["id"], asked["epoch"])) == [403] * len(attacks())
        answer = {"ok": True, "epoch": asked["epoch"]}
        assert (await owner.post(f"{P1}/actions/{asked['id']}", json=answer)).status_code == 200
        assert (await owner.put(P1, json=BODY, params={"wait": 5})).status_code == 200

    in_pool(tmp_path, test)


def test_a_token_and_a_namespace_may_have_so_many_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MOST_OF_TOKEN", 3)
    monkeypatch.setattr(tenants, "MOST_OF_NAMESPACE", 5)

    async def test(house: House, pool: PoolService) -> None:
        alice, bob = house.as_role("editor", "team-a"), house.as_role("editor", "team-a", "team-c")
        carol = house.as_role("editor", "team-b")

        async def many(client: httpx2.AsyncClient, prefix: str) -> list[int]:
            calls = [register(client, {}, f"{POOL}/pipelines/{prefix}{number}") for number in range(6)]
            return sorted(one.status_code for one in await asyncio.gather(*calls))

        assert await many(alice, "a") == [200] * 3 + [403] * 3
        assert await many(bob, "b") == [200] * 2 + [403] * 4
        full = await register(alice, {}, f"{POOL}/pipelines/more")
        assert (full.status_code, error_of(full)["code"]) == (403, "quota_exceeded")
        assert error_of(full)["details"]["limit"] == 3
        assert await many(carol, "c") == [200] * 3 + [403] * 3
        assert await many(house.client, "admin") == [200] * 6

    in_pool(tmp_path, test)


def test_waiting_calls_of_a_pipeline_have_a_bound(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        owner = house.as_role("editor", "team-a")
        assert (await register(owner)).status_code == 200
        await owner.post(f"{P1}/requests", json=GENERATE, headers={**OWNER, "Idempotency-Key": "g1"})
        body = {"cluster": "actor_infer", "wait": True}
        answers = [
            await owner.post(f"{P1}/release", json=body, headers={**OWNER, "Idempotency-Key": f"r{number}"})
            for number in range(MOST_WAITING + 1)
        ]
        assert {one.status_code for one in answers[: MOST_WAITING - 1]} == {202}
        assert (answers[-1].status_code, error_of(answers[-1])["code"]) == (429, "too_many_requests")
        repeated = await owner.post(f"{P1}/release", json=body, headers={**OWNER, "Idempotency-Key": "r0"})
        assert repeated.status_code == 202

    in_pool(tmp_path, test)
