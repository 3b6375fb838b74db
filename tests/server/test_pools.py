"""Pools over HTTP: every call, every refusal, over a real socket with a real scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from muster.sharing.service import PoolService
from muster.types.sharing import Crew, Pool
from tests.server.house import BOUND_S, TRAININGS, House, error_of, serving

POOL = "/v1/pools/default"
P1 = f"{POOL}/pipelines/p1"
FOUR = {"gpus": [0, 1, 2, 3]}
CLUSTERS = {"actor_train": {"gpus": [0, 1]}, "actor_infer": FOUR}


class Going:
    """All trainings are known, and all their rounds go on."""

    def knows(self, training: str) -> bool:
        return True

    def over(self, training: str, number: int) -> str:
        return ""


def in_pool(home: Path, test: Callable[[House, PoolService], Awaitable[None]], **options: Any) -> None:
    """Run a test against a server with a pool of four GPUs."""

    async def run() -> None:
        pool = PoolService("default", Pool(4, 4), devices=("4", "5", "6", "7"), **options)
        await pool.start()
        try:
            async with serving(home, pools={"default": pool}) as house, asyncio.timeout(4 * BOUND_S):
                await test(house, pool)
        finally:
            await pool.stop()

    asyncio.run(run())


async def put(house: House, pipeline: str = "p1", **more: Any) -> httpx2.Response:
    return await house.client.put(f"{POOL}/pipelines/{pipeline}", json={"clusters": CLUSTERS, **more})


async def ask(house: House, key: str, wait: float = 0, pipeline: str = "p1", **body: Any) -> httpx2.Response:
    path = f"{POOL}/pipelines/{pipeline}/requests"
    return await house.client.post(path, params={"wait": wait}, json=body, headers={"Idempotency-Key": key})


async def generate(house: House, key: str = "g1", wait: float = 0, pipeline: str = "p1") -> httpx2.Response:
    form = {"cluster": "actor_infer", "priority": "GENERATION", "stepTargetEstimate": 8}
    return await ask(house, key, wait, pipeline, **form)


async def train(house: House, key: str = "t1", wait: float = 0, pipeline: str = "p1") -> httpx2.Response:
    return await ask(house, key, wait, pipeline, cluster="actor_train", priority="ACTOR_TRAINING")


async def action(house: House, pipeline: str = "p1", **params: Any) -> dict[str, Any]:
    answer = await house.client.get(f"{POOL}/pipelines/{pipeline}/actions", params={"wait": 5, **params})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def answered(house: House, one: dict[str, Any], pipeline: str = "p1", **body: Any) -> httpx2.Response:
    form = {"epoch": one["epoch"], "ok": True, **body}
    return await house.client.post(f"{POOL}/pipelines/{pipeline}/actions/{one['id']}", json=form)


async def attend(house: House, *deeds: str, pipeline: str = "p1") -> None:
    """Answer the next actions, which must be these."""
    for deed in deeds:
        one = await action(house, pipeline)
        assert one["do"] == deed
        assert (await answered(house, one, pipeline)).status_code == 200


def fields(answer: httpx2.Response) -> set[str]:
    assert answer.status_code == 422, answer.text
    return {one["field"] for one in error_of(answer)["details"]["fields"]}


# Looking


def test_a_pool_shows_its_gpus_and_who_holds_them(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        assert (await put(house)).json() == {"state": "registered"}
        assert (await train(house, wait=5)).json()["gpus"] == [0, 1]
        shown = (await house.client.get(POOL)).json()
        assert (shown["gpus"], shown["gpusPerNode"], shown["devices"]) == (4, 4, ["4", "5", "6", "7"])
        assert shown["leases"]["0"] == {
            "pipeline": "p1",
            "cluster": "actor_train",
            "rank": 0,
            "state": "held",
            "epoch": pool.scheduler.snapshot().leases[0].epoch,
        }
        assert shown["idle"] == [2, 3]
        [one] = shown["pipelines"]
        assert (one["id"], one["state"], one["held"], one["admitted"]) == ("p1", "attached", [0, 1], True)
        assert (await house.client.get("/v1/pools")).json()["items"][0]["name"] == "default"

    in_pool(tmp_path, test)


def test_a_pool_shows_every_gpu_who_waits_and_what_each_holder_used(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        assert (await train(house, wait=5)).json()["gpus"] == [0, 1]
        crew = Crew("uid-1", "research/demo", 1, 1, 3, 3, "lend", using=0b1100, parked=1, admitted=True)
        pool.scheduler.trainings.adopt("uid-1", [1 << 2, 1 << 3])
        pool.scheduler.trainings.declare(crew)
        await put(house, pipeline="p2")
        assert (await train(house, "t2", pipeline="p2")).status_code == 202
        shown = (await house.as_role("viewer", "research").get(POOL)).json()
        zero, one, two, three = shown["holders"]
        assert (zero["gpu"], zero["device"], zero["pipeline"], zero["cluster"]) == (0, "4", "p1", "actor_train")
        assert (zero["lentBy"], zero["lentWorker"], zero["state"]) == ("research/demo", "demo-0", "held")
        assert zero["seconds"] >= 0 and zero["since"] and zero["reason"].startswith("request #")
        assert "lentBy" not in one
        assert (two["state"], three["training"], three["worker"]) == ("held", "research/demo", "demo-3")
        assert shown["workers"]["3"] == {"training": "research/demo", "state": "held"}
        waits = {one.get("pipeline") or one["training"]: one for one in shown["waiting"]}
        assert set(waits) == {"p2", "research/demo"} and shown["waitingCount"] == 2
        assert waits["p2"]["reason"] == shown["pending"][0]["reason"]
        told = (waits["research/demo"]["state"], waits["research/demo"]["workers"], waits["research/demo"]["wanted"])
        assert told == ("Lent", 2, 3)
        assert {(one["kind"], one["name"], one["gpus"]) for one in shown["usage"]} == {
            ("idle", "", 0),
            ("pipeline", "p1", 2),
            ("training", "research/demo", 2),
        }

    in_pool(tmp_path, test, workers=lambda uid: {0: "demo-0", 3: "demo-3"})


def test_usage_has_pipelines_for_those_who_may_see_whose_they_are(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        mine = (await house.submit("rl"))["metadata"]["uid"]
        headers = {"Pipeline-Training": mine, "Pipeline-Round": "0", "Pipeline-Session": "s1"}
        path = f"{POOL}/pipelines/p1"
        assert (await house.client.put(path, json={"clusters": CLUSTERS}, headers=headers)).status_code == 200
        body, keys = {"cluster": "actor_train", "priority": 1}, {**headers, "Idempotency-Key": "t1"}
        granted = await house.client.post(f"{path}/requests", params={"wait": 5}, json=body, headers=keys)
        assert granted.status_code == 200
        await put(house, pipeline="p2", clusters={"actor_train": {"gpus": [3]}, "actor_infer": {"gpus": [3]}})
        assert (await train(house, "t2", 5, "p2")).status_code == 200

        async def pipelines(client: httpx2.AsyncClient, path: str = "/v1/usage") -> list[tuple[str, ...]]:
            items = (await client.get(path)).json()["items"]
            assert all(one["gpuSeconds"] >= 0 for one in items)
            return [(one["namespace"], one["training"], one["pipeline"]) for one in items if one.get("pipeline")]

        assert await pipelines(house.client) == [("", "", "p2"), ("default", "rl", "p1")]
        assert await pipelines(house.as_role("viewer", "default")) == [("default", "rl", "p1")]
        assert await pipelines(house.as_role("viewer", "research")) == []
        assert await pipelines(house.client, f"{TRAININGS}/rl/usage") == [("default", "rl", "p1")]
        spaces = (await house.client.get("/v1/usage", params={"by": "namespace"})).json()["items"]
        assert {one["namespace"] for one in spaces} == {"", "default"}
        other = house.as_role("editor", "research")
        theirs = await other.put(f"{POOL}/pipelines/p3", json={"clusters": CLUSTERS}, headers=headers)
        assert theirs.status_code == 403, "nobody lets others pay"
        await house.client.delete(path)
        assert ("default", "rl", "p1") in await pipelines(house.client), "it outlives its pipeline"

    in_pool(tmp_path, test, rounds=Going())


def test_events_have_ids_that_one_can_go_on_from(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        events = (await house.client.get(f"{POOL}/events")).json()["items"]
        assert [one["kind"] for one in events] == ["started", "registered", "admitted"]
        await put(house, pipeline="p2")
        later = (await house.client.get(f"{POOL}/events", params={"after": events[-1]["id"]})).json()["items"]
        assert [(one["kind"], one["pipeline"]) for one in later] == [("registered", "p2"), ("admitted", "p2")]

    in_pool(tmp_path, test)


def test_a_viewer_looks_and_an_editor_of_any_namespace_takes_part(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        viewer, editor = house.as_role("viewer", "research"), house.as_role("editor", "research")
        assert (await viewer.get(POOL)).status_code == 200
        assert (await viewer.get(f"{POOL}/events")).status_code == 200
        refused = [
            await viewer.put(P1, json={"clusters": CLUSTERS}),
            await viewer.delete(P1),
            await viewer.get(f"{P1}/actions"),
            await viewer.post(f"{P1}/progress", json={"clear": True}),
        ]
        assert [one.status_code for one in refused] == [403] * 4
        assert error_of(refused[0])["code"] == "forbidden"
        assert not pool.scheduler.shares.pipelines
        assert (await editor.put(P1, json={"clusters": CLUSTERS})).status_code == 200
        assert (await house.with_token(None).get(POOL)).status_code == 401

    in_pool(tmp_path, test)


def test_a_viewer_freezes_nobody_and_only_an_admin_takes_a_node_out_of_use(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        viewer, editor = house.as_role("viewer"), house.as_role("editor")
        await put(house)
        assert (await viewer.get(f"{POOL}/reports")).json()["items"] == []
        lost = {"state": "lost", "why": "its rack is dark"}
        refused = [
            await viewer.post(f"{P1}/quarantine", json={"why": "spite"}),
            await viewer.put(f"{POOL}/nodes/0", json=lost),
            await editor.put(f"{POOL}/nodes/0", json=lost),
        ]
        assert [one.status_code for one in refused] == [403] * 3
        assert not pool.scheduler.snapshot().quarantined
        for path, status in ((f"{POOL}/nodes/0", 200), (f"{POOL}/nodes/9", 422), (f"{POOL}/nodes/-1", 404)):
            assert (await house.client.put(path, json=lost)).status_code == status, path
        assert pool.scheduler.snapshot().quarantined == {f"gpu {gpu}": "its rack is dark" for gpu in range(4)}
        assert (await editor.post(f"{P1}/quarantine", json={})).status_code == 403, "another token registered it"
        assert (await house.client.post(f"{P1}/quarantine", json={})).status_code == 200
        assert pool.scheduler.snapshot().quarantined["p1"] == "no reason was given"

    in_pool(tmp_path, test)


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        for method, path in [
            ("GET", "/v1/pools/other"),
            ("GET", f"{P1}/actions"),
            ("DELETE", f"{P1}/requests/k"),
            ("PUT", f"{POOL}/pipelines/%20"),
        ]:
            answer = await house.client.request(method, path)
            assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found"), path
        assert (await house.client.post(f"{P1}/progress", json={"clear": True})).status_code == 404
        assert (await train(house)).status_code == 404

    in_pool(tmp_path, test)


# Bad input


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, {"clusters"}),
        ({"clusters": [], "weight": "x", "colour": 1}, {"clusters", "weight", "colour"}),
        ({"clusters": {"actor_infer": {"gpus": [0, "x"], "tpSize": 0}}}, {"clusters.actor_infer.gpus[1]"}),
        ({"clusters": {"actor_infer": {"tpSize": 0, "slotsPerBundle": 0}}, "weight": 0}, {"weight"}),
        ({"clusters": {"actor_train": {"gpus": [9]}, "cook": FOUR}}, {"clusters", "clusters.actor_train"}),
    ],
)
def test_a_bad_registration_lists_its_fields_and_stores_nothing(
    tmp_path: Path, body: dict[str, Any], named: set[str]
) -> None:
    async def test(house: House, pool: PoolService) -> None:
        assert named <= fields(await house.client.put(P1, json=body))
        assert not pool.scheduler.shares.pipelines
        assert (await house.client.get(f"{P1}/actions")).status_code == 404

    in_pool(tmp_path, test)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, {"cluster"}),
        ({"cluster": "actor_train"}, {"priority"}),
        ({"cluster": "actor_train", "priority": "URGENT"}, {"priority"}),
        ({"cluster": "actor_train", "priority": 7}, {"priority"}),
        ({"cluster": "actor_train", "priority": True}, {"priority"}),
        (
            {"cluster": 1, "priority": 6, "stepTargetEstimate": 0, "release": 2},
            {"cluster", "stepTargetEstimate", "release"},
        ),
        ({"cluster": "actor_train", "priority": 1, "release": "actor_infer", "rolloutId": "r"}, {"rolloutId"}),
    ],
)
def test_a_bad_request_lists_its_fields_and_asks_for_nothing(
    tmp_path: Path, body: dict[str, Any], named: set[str]
) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        assert fields(await ask(house, "k", **body)) == named
        assert not pool.scheduler.shares.requests
        assert not pool.scheduler.shares.leases

    in_pool(tmp_path, test)


def test_a_request_without_a_usable_key_or_with_a_bad_wait_is_refused_by_name(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        body: dict[str, Any] = {"cluster": "actor_train", "priority": 1}
        assert fields(await house.client.post(f"{P1}/requests", json=body)) == {"Idempotency-Key"}
        assert fields(await ask(house, "a/b", **body)) == {"Idempotency-Key"}
        assert fields(await ask(house, "k", wait=61, **body)) == {"wait"}
        assert fields(await house.client.get(f"{P1}/actions", params={"wait": "soon", "after": -1})) == {
            "wait",
            "after",
        }
        assert fields(await house.client.get(f"{POOL}/events", params={"after": "x"})) == {"after"}

    in_pool(tmp_path, test)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("progress", {}, {"completed", "target"}),
        ("progress", {"completed": -1, "target": "x"}, {"completed", "target"}),
        ("progress", {"clear": True, "completed": 1, "rolloutId": "r"}, {"completed", "rolloutId"}),
        ("release", {"wait": "yes"}, {"cluster", "wait"}),
        ("actions/shrink-1", {"ok": 1}, {"epoch", "ok"}),
    ],
)
def test_other_bad_bodies_list_their_fields(tmp_path: Path, path: str, body: dict[str, Any], named: set[str]) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        assert fields(await house.client.post(f"{P1}/{path}", json=body)) == named

    in_pool(tmp_path, test)


# Registering


def test_registering_is_idempotent_and_other_values_are_refused(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        assert (await train(house, wait=5)).status_code == 200
        assert (await put(house)).status_code == 200
        assert sorted(pool.scheduler.snapshot().leases) == [0, 1]
        other = await put(house, weight=2.0)
        assert (other.status_code, error_of(other)["code"]) == (409, "already_exists")
        assert (await house.client.delete(P1)).json() == {"state": "unregistered"}
        assert (await house.client.delete(P1)).json() == {"state": "unregistered"}
        assert pool.scheduler.snapshot().idle == (0, 1, 2, 3)

    in_pool(tmp_path, test)


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"Pipeline-Process": "a b"}, {"Pipeline-Process"}),
        ({"Pipeline-Training": "uid"}, {"Pipeline-Round"}),
        ({"Pipeline-Round": "1"}, {"Pipeline-Training"}),
        ({"Pipeline-Training": "uid", "Pipeline-Round": "one"}, {"Pipeline-Round"}),
        ({"Pipeline-Training": "uid", "Pipeline-Round": "9" * 40}, {"Pipeline-Round"}),
    ],
)
def test_what_a_process_says_of_itself_is_checked(tmp_path: Path, headers: dict[str, str], named: set[str]) -> None:
    async def test(house: House, pool: PoolService) -> None:
        assert fields(await house.client.put(P1, json={"clusters": CLUSTERS}, headers=headers)) == named
        assert not pool.scheduler.shares.pipelines

    in_pool(tmp_path, test)


def test_a_process_that_waits_for_its_predecessor_is_told_so_and_may_only_fetch(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        body = {"clusters": CLUSTERS}
        await house.client.put(P1, json=body, headers={"Pipeline-Session": "one"})
        coming = await house.client.put(P1, json=body, headers={"Pipeline-Session": "two"})
        assert coming.status_code == 202 and "before has not ended" in coming.json()["reason"]
        nothing = await house.client.get(f"{P1}/actions", headers={"Pipeline-Session": "two"})
        assert nothing.status_code == 204
        early = await house.client.post(f"{P1}/progress", json={"clear": True}, headers={"Pipeline-Session": "two"})
        assert (early.status_code, error_of(early)["code"]) == (409, "conflict")
        third = await house.client.put(P1, json=body, headers={"Pipeline-Session": "three"})
        assert third.status_code == 202 and "registered by another process" in third.json()["reason"]
        alive = await house.client.get(f"{P1}/actions", headers={"Pipeline-Session": "one"})
        assert alive.status_code == 204
        refused = await house.client.put(P1, json=body, headers={"Pipeline-Session": "two"})
        assert (refused.status_code, error_of(refused)["code"]) == (409, "already_exists")

    in_pool(tmp_path, test)


def test_a_pipeline_that_is_not_admitted_waits_for_a_second_registration(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house, admit=False)
        assert error_of(await train(house))["code"] == "request_refused"
        await put(house)
        assert (await train(house, wait=5)).status_code == 200

    in_pool(tmp_path, test)


# Requests and releases


def test_a_request_is_granted_once_however_often_its_key_asks(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        first = await generate(house)
        assert (first.status_code, first.json()["state"]) == (202, "pending")
        waiting = asyncio.create_task(generate(house, wait=10))
        await attend(house, "expand")
        granted = await waiting
        assert (granted.status_code, granted.json()["gpus"]) == (200, [0, 1, 2, 3])
        assert (await generate(house)).json() == granted.json()
        assert [one.kind for one in pool.events() if one.kind == "requested"] == ["requested"]
        other = await ask(house, "g1", cluster="actor_train", priority=1)
        assert (other.status_code, error_of(other)["code"]) == (409, "conflict")

    in_pool(tmp_path, test)


def test_a_request_that_waits_says_why_and_can_be_withdrawn(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        await put(house, pipeline="p2")
        await train(house, wait=5)
        pending = await train(house, key="t2", wait=0.1, pipeline="p2")
        assert pending.status_code == 202
        assert "p1" in pending.json()["reason"]
        gone = await house.client.delete(f"{POOL}/pipelines/p2/requests/t2")
        assert gone.json() == {"state": "withdrawn"}
        assert not pool.scheduler.shares.requests
        late = await train(house, key="t2", pipeline="p2")
        assert (late.status_code, error_of(late)["code"]) == (409, "conflict")

    in_pool(tmp_path, test)


def test_withdrawing_gives_back_a_grant_that_came_meanwhile(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        assert (await train(house, wait=5)).status_code == 200
        await house.client.delete(f"{P1}/requests/t1")
        assert pool.scheduler.snapshot().idle == (0, 1, 2, 3)

    in_pool(tmp_path, test)


def test_withdrawing_does_not_take_what_was_held_before(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        for key in ("t1", "t2"):
            assert (await train(house, key, wait=5)).json()["gpus"] == [0, 1]
        await house.client.delete(f"{P1}/requests/t2")
        assert sorted(pool.scheduler.snapshot().leases) == [0, 1]

    in_pool(tmp_path, test)


def test_a_withdrawal_that_overtakes_its_request_still_counts(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        await house.client.delete(f"{P1}/requests/t1")
        late = await train(house, wait=5)
        assert (late.status_code, error_of(late)["code"]) == (409, "conflict")
        assert not pool.scheduler.shares.leases

    in_pool(tmp_path, test)


def test_an_error_is_told_once_and_the_key_may_try_again(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house, admit=False)
        assert error_of(await train(house))["code"] == "request_refused"
        await put(house)
        assert (await train(house, wait=5)).status_code == 200

    in_pool(tmp_path, test)


def test_release_then_request_is_one_step(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        await ask(house, "t1", 5, cluster="actor_train", priority="OLD_LOG_PROBS")
        form: dict[str, Any] = {"cluster": "actor_train", "priority": 1, "release": "actor_train"}
        assert (await ask(house, "t2", 5, **form)).json()["gpus"] == [0, 1]
        wrong = await ask(house, "t3", 5, cluster="cook", priority=1, release="actor_train")
        assert wrong.status_code == 409
        assert sorted(pool.scheduler.snapshot().leases) == [0, 1]

    in_pool(tmp_path, test)


def test_a_release_that_waits_is_pending_until_the_shrink_is_answered(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house, vacated=True)
        await generate(house)
        await attend(house, "expand")
        body, headers = {"cluster": "actor_infer", "wait": True}, {"Idempotency-Key": "r1"}
        path = f"{P1}/release"
        assert (await house.client.post(path, json=body, headers=headers)).status_code == 202
        waiting = asyncio.create_task(house.client.post(path, json=body, headers=headers, params={"wait": 9}))
        await attend(house, "shrink", "vacated")
        done = await waiting
        assert (done.status_code, done.json()["gpus"]) == (200, [0, 1, 2, 3])
        assert (await house.client.post(path, json=body, headers=headers)).json() == done.json()
        again = await house.client.post(path, json=body)
        assert again.json() == {"state": "done", "gpus": [], "text": "nothing was held"}

    in_pool(tmp_path, test)


def test_progress_counts_and_clearing_closes_the_rollout(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        await generate(house)
        await attend(house, "expand")
        reported = await house.client.post(f"{P1}/progress", json={"completed": 3, "target": 8})
        assert reported.json() == {"state": "reported"}
        [one] = (await house.client.get(POOL)).json()["pipelines"]
        assert (one["remaining"], one["target"]) == (5, 8)
        assert (await house.client.post(f"{P1}/progress", json={"clear": True})).json() == {"state": "cleared"}
        assert (await house.client.get(POOL)).json()["openRollouts"] == {}

    in_pool(tmp_path, test)


# Actions


def test_an_action_is_given_until_it_is_answered(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        nothing = await house.client.get(f"{P1}/actions")
        assert (nothing.status_code, nothing.content) == (204, b"")
        await generate(house)
        one = await action(house)
        assert (one["do"], one["ranks"]) == ("expand", [0, 1, 2, 3])
        assert one["bundles"] == {"0": [0], "1": [1], "2": [2], "3": [3]}
        assert await action(house) == one
        assert (await house.client.get(f"{P1}/actions", params={"after": one["epoch"]})).status_code == 204
        assert (await answered(house, one)).status_code == 200
        assert (await generate(house, wait=5)).status_code == 200
        assert (await answered(house, one)).status_code == 200  # its answer got lost, and it says so again
        contrary = await answered(house, one, ok=False)
        assert (contrary.status_code, error_of(contrary)["code"]) == (409, "conflict")
        assert (await house.client.get(f"{P1}/actions")).status_code == 204

    in_pool(tmp_path, test)


def test_an_answer_of_an_older_epoch_changes_nothing(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        await generate(house)
        first = await action(house)
        assert (await answered(house, first, ok=False, error="no memory")).status_code == 200
        second = await action(house, after=first["epoch"])
        assert second["epoch"] > first["epoch"]
        for epoch in (second["epoch"] - 1, first["epoch"], second["epoch"] + 1):
            stale = await answered(house, second, epoch=epoch)
            assert (stale.status_code, error_of(stale)["code"]) == (409, "conflict")
        assert {one.state for one in pool.scheduler.snapshot().leases.values()} == {"granting"}
        assert (await answered(house, second)).status_code == 200
        assert (await generate(house, wait=5)).status_code == 200

    in_pool(tmp_path, test)


def test_a_call_that_was_given_up_comes_again_with_its_id_and_a_newer_epoch(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        await generate(house)
        first = await action(house)
        second = await action(house, after=first["epoch"])  # comes when the first one's time is over
        assert second["id"] == first["id"] and second["epoch"] > first["epoch"]
        late = await answered(house, first)
        assert (late.status_code, error_of(late)["code"]) == (409, "conflict")
        assert {one.state for one in pool.scheduler.snapshot().leases.values()} == {"granting"}
        assert (await answered(house, second)).status_code == 200
        assert (await generate(house, wait=5)).json()["gpus"] == [0, 1, 2, 3]

    in_pool(tmp_path, test, hook_timeout_s=0.3)


def test_a_pipeline_whose_actions_fail_is_quarantined_until_it_has_shrunk_everything(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        await generate(house)
        for _ in range(2):
            one = await action(house)
            await answered(house, one, ok=False, error="no memory")
        over = await house.client.get(f"{P1}/actions", params={"wait": 5})
        assert (over.status_code, error_of(over)["code"]) == (409, "pipeline_quarantined")
        assert "no memory" in error_of(over)["message"]
        refused = await generate(house, key="g2")
        assert error_of(refused)["code"] == "pipeline_quarantined"
        attached = await put(house, onlyAttach=True)
        assert error_of(attached)["code"] == "pipeline_quarantined"
        proving = await put(house)
        assert (proving.status_code, proving.json()["state"]) == (202, "pending")
        one = await action(house)
        assert (one["do"], one["ranks"]) == ("shrink", [0, 1, 2, 3])
        await answered(house, one)
        body = {"clusters": CLUSTERS}
        assert (await house.client.put(P1, json=body, params={"wait": 5})).status_code == 200
        assert not pool.scheduler.snapshot().quarantined
        await attend(house, "expand")  # its rollout is still open
        assert (await generate(house, key="g3", wait=5)).json()["gpus"] == [0, 1, 2, 3]

    in_pool(tmp_path, test)


# Silence


def test_a_silent_pipeline_is_quarantined_also_with_fixed_leases_only(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        await put(house, pipeline="p2")
        assert (await train(house, wait=5)).status_code == 200
        while not pool.scheduler.snapshot().quarantined:  # p2 goes on being heard
            await house.client.get(f"{POOL}/pipelines/p2/actions", params={"wait": 60})
        assert list(pool.scheduler.snapshot().quarantined) == ["p1"]
        assert "nothing was heard" in pool.scheduler.snapshot().quarantined["p1"]
        assert sorted(pool.scheduler.snapshot().leases) == [0, 1]
        # A fixed lease of a quarantined pipeline can still be released.
        freed = await house.client.post(f"{P1}/release", json={"cluster": "actor_train"})
        assert freed.json()["gpus"] == [0, 1]

    in_pool(tmp_path, test, pipeline_ttl_s=0.6)


def test_a_time_at_which_the_server_could_hear_nobody_is_not_silence(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        time.sleep(1.0)  # noqa: ASYNC251  # the whole process stands still, as on a machine that was suspended
        for _ in range(20):  # whoever looks for silence has looked
            await asyncio.sleep(0)
        assert not pool.scheduler.snapshot().quarantined

    in_pool(tmp_path, test, pipeline_ttl_s=0.4)


def test_a_stopped_pool_says_so_and_can_be_asked_again(tmp_path: Path) -> None:
    async def test(house: House, pool: PoolService) -> None:
        await put(house)
        fetching = asyncio.create_task(house.client.get(f"{P1}/actions", params={"wait": 9}))
        await put(house, pipeline="p2")  # so that the fetch is under way
        await pool.stop()
        for answer in (await fetching, await put(house), await train(house)):
            assert (answer.status_code, error_of(answer)["code"]) == (503, "scheduler_stopped")

    in_pool(tmp_path, test)
