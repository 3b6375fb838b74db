"""Create, list, read, patch and delete, as a client sees them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx2
import pytest

from muster.ports import Write
from muster.server.routes import objects
from muster.types.training import Key, Training
from tests.server.house import BOUND_S, SECRET, TRAININGS, House, a_body, error_of, in_house


def test_what_is_submitted_is_stored_with_everything_that_only_the_server_sets(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        body = a_body()
        body["metadata"] |= {"uid": "mine", "generation": 7, "resourceVersion": "99", "creationTimestamp": "never"}
        body["status"] = {"phase": "succeeded"}
        answer = await house.client.post(TRAININGS, json=body)
        assert answer.status_code == 201
        made = answer.json()
        assert made["metadata"]["generation"] == 1 and made["metadata"]["uid"] != "mine"
        assert made["metadata"]["resourceVersion"] == "1" and made["status"]["phase"] == "pending"
        assert made["metadata"]["creationTimestamp"] == "2026-01-31T12:00:00.000Z"
        assert (made["apiVersion"], made["kind"]) == ("muster.dev/v1alpha1", "Training")
        assert answer.headers["etag"] == '"1"'
        assert (await house.client.get(f"{TRAININGS}/demo")).json() == made

    in_house(tmp_path, test)


def test_every_wrong_field_is_named_at_once_and_nothing_is_stored(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        body = a_body("Bad_Name", spares="two", worldSize={"min": 3, "target": 2, "max": 1}, priority=None)
        body["spec"] |= {"script": "x.py", "colour": "red", "maxRestarts": -1}
        body["metadata"]["namespace"] = "elsewhere"
        answer = await house.client.post(TRAININGS, json=body)
        assert answer.status_code == 422
        fields = {one["field"] for one in error_of(answer)["details"]["fields"]}
        assert fields == {
            "metadata.name",
            "metadata.namespace",
            "spec",
            "spec.colour",
            "spec.maxRestarts",
            "spec.priority",
            "spec.spares",
            "spec.worldSize",
        }
        assert house.store.version == 0

    in_house(tmp_path, test)


def test_a_name_that_is_taken_is_a_conflict_of_its_own_kind(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        for query in ("", "?dryRun=true"):
            answer = await house.client.post(TRAININGS + query, json=a_body())
            assert (answer.status_code, error_of(answer)["code"]) == (409, "already_exists")

    in_house(tmp_path, test)


def test_a_dry_run_shows_object_and_plan_and_stores_nothing(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        answer = await house.client.post(f"{TRAININGS}?dryRun=true", json=a_body(spares=1))
        assert answer.status_code == 200
        assert answer.json()["plan"]["workers"] == 3 and answer.json()["metadata"]["name"] == "demo"
        assert house.store.version == 0
        answer = await house.client.post(f"{TRAININGS}?dryRun=perhaps", json=a_body())
        assert error_of(answer)["details"]["fields"][0]["field"] == "dryRun"

    in_house(tmp_path, test)


def test_a_repeat_with_the_same_key_returns_the_first_and_another_body_is_a_conflict(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        once = {"Idempotency-Key": "k-1"}
        answers = await asyncio.gather(*(house.client.post(TRAININGS, json=a_body(), headers=once) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.json()["metadata"]["uid"] for answer in answers}) == 1
        assert sum("idempotent-replay" not in answer.headers for answer in answers) == 1
        assert house.store.version == 1
        answer = await house.client.post(TRAININGS, json=a_body("other"), headers=once)
        assert (answer.status_code, error_of(answer)["code"]) == (409, "conflict")
        elsewhere = await house.client.post("/v1/namespaces/elsewhere/trainings", json=a_body("other"), headers=once)
        assert elsewhere.status_code == 201

    in_house(tmp_path, test)


def test_the_key_of_a_training_that_is_gone_creates_anew(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        once = {"Idempotency-Key": "k-1"}
        first = (await house.client.post(TRAININGS, json=a_body(), headers=once)).json()
        await house.store.write(Write(delete=Key("default", "demo")))
        again = await house.client.post(TRAININGS, json=a_body(), headers=once)
        assert again.status_code == 201 and again.json()["metadata"]["uid"] != first["metadata"]["uid"]
        assert (await house.client.post(TRAININGS, json=a_body("x"), headers={"Idempotency-Key": "a b"})).is_error

    in_house(tmp_path, test)


def test_keys_of_trainings_that_are_gone_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_KEYS_BETWEEN_SWEEPS", 1)

    async def test(house: House) -> None:
        for name in ("gone", "kept", "last"):
            answer = await house.client.post(TRAININGS, json=a_body(name), headers={"Idempotency-Key": f"k-{name}"})
            assert answer.status_code == 201
            if name == "kept":
                await house.store.write(Write(delete=Key("default", "gone")))
        assert set(house.store.records("idempotency")) == {"default/k-kept", "default/k-last"}

    in_house(tmp_path, test)


def test_a_page_is_made_without_reading_a_single_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(house: House) -> None:
        for number in range(3):
            await house.submit(f"t-{number}", args=['"secretEnv":["x"]'] if number else [])
            await house.settle(f"t-{number}", "ready")  # written by the control loop, so that nobody has read it yet
        monkeypatch.setattr(Training, "from_wire", None)
        assert await _names(house) == ["t-0", "t-1", "t-2"]

    in_house(tmp_path, test)


def test_a_list_can_be_narrowed_and_paged(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        for number in range(7):
            labels = {"team": "vision" if number % 2 else "text", "stage": "dev"}
            answer = await house.client.post(TRAININGS, json=a_body(f"t-{number}", labels=labels))
            assert answer.status_code == 201
        await house.settle("t-3", "ready")
        names, token = [], ""
        while True:
            page = (await house.client.get(TRAININGS, params={"limit": 3, "continue": token})).json()
            assert page["kind"] == "TrainingList" and page["metadata"]["resourceVersion"] == "8"
            names += [one["metadata"]["name"] for one in page["items"]]
            if not (token := page["metadata"]["continue"]):
                break
        assert names == [f"t-{number}" for number in range(7)]
        assert await _names(house, labelSelector="team=vision,stage==dev") == ["t-1", "t-3", "t-5"]
        assert await _names(house, labelSelector="team=vision", phase="ready") == ["t-3"]
        assert await _names(house, labelSelector="team=speech") == []

    in_house(tmp_path, test)


async def _names(house: House, **query: str) -> list[str]:
    items = (await house.client.get(TRAININGS, params=query)).json()["items"]
    return [one["metadata"]["name"] for one in items]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("labelSelector=team", "labelSelector"),
        ("labelSelector=a%3Db,,", "labelSelector"),
        ("phase=done", "phase"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=many", "limit"),
        ("limit=1&limit=2", "limit"),
        ("labelselector=a%3Db", "labelselector"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused_by_name(tmp_path: Path, query: str, field: str) -> None:
    async def test(house: House) -> None:
        answer = await house.client.get(f"{TRAININGS}?{query}")
        assert answer.status_code == 422
        assert [one["field"] for one in error_of(answer)["details"]["fields"]] == [field]

    in_house(tmp_path, test)


def test_a_continue_token_of_somebody_else_is_refused(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        answer = await house.client.get(TRAININGS, params={"continue": "made-up"})
        assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid")

    in_house(tmp_path, test)


def test_a_read_that_waits_is_answered_by_the_change_itself(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        made = await house.submit()
        version = made["metadata"]["resourceVersion"]
        waiting = asyncio.create_task(
            house.client.get(f"{TRAININGS}/demo", params={"resourceVersion": version, "timeoutSeconds": 60})
        )
        while not house.store._ledger._waiting:  # the request has arrived and waits
            await asyncio.sleep(0)
        await house.settle("demo", "ready")
        answer = await asyncio.wait_for(waiting, BOUND_S)
        assert answer.json()["status"]["phase"] == "ready"
        at_once = await house.client.get(f"{TRAININGS}/demo", params={"resourceVersion": version, "timeoutSeconds": 60})
        assert at_once.json()["metadata"]["resourceVersion"] == "2"

    in_house(tmp_path, test)


def test_a_read_that_waits_in_vain_returns_the_object_unchanged(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        made = await house.submit()
        answer = await house.client.get(f"{TRAININGS}/demo", params={"resourceVersion": "1", "timeoutSeconds": "0.01"})
        assert answer.status_code == 200 and answer.json() == made
        for bad in ({"timeoutSeconds": "61"}, {"resourceVersion": "-1"}, {"resourceVersion": "new"}):
            assert (await house.client.get(f"{TRAININGS}/demo", params=bad)).status_code == 422

    in_house(tmp_path, test)


def test_a_training_that_is_removed_while_somebody_waits_is_not_found(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        waiting = asyncio.create_task(house.client.get(f"{TRAININGS}/demo?resourceVersion=1&timeoutSeconds=60"))
        while not house.store._ledger._waiting:
            await asyncio.sleep(0)
        await house.store.write(Write(delete=Key("default", "demo")))
        answer = await asyncio.wait_for(waiting, BOUND_S)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")

    in_house(tmp_path, test)


async def _patch(house: House, patch: object, **headers: str) -> httpx2.Response:
    kind = {"Content-Type": "application/merge-patch+json"}
    sent = {**kind, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return await house.client.patch(f"{TRAININGS}/demo", content=json.dumps(patch), headers=sent)


def test_a_patch_of_spec_makes_a_generation_and_one_of_labels_does_not(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        labelled = await _patch(house, {"metadata": {"labels": {"team": "vision"}}})
        assert labelled.status_code == 200 and labelled.json()["metadata"]["generation"] == 1
        grown = await _patch(house, {"spec": {"worldSize": {"target": 3}, "maxRestarts": 9}})
        assert grown.json()["metadata"]["generation"] == 2
        assert grown.json()["spec"]["worldSize"] == {"min": 1, "target": 3, "max": 4}
        same = await _patch(house, {"spec": {"maxRestarts": 9}})
        assert same.json() == grown.json()
        cleared = await _patch(house, {"metadata": {"labels": {"team": None}}, "spec": {"maxRestarts": None}})
        assert cleared.json()["metadata"]["labels"] == {} and cleared.json()["spec"]["maxRestarts"] == 3

    in_house(tmp_path, test)


def test_a_stale_if_match_is_a_conflict_and_a_current_one_is_not(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        await house.settle("demo", "ready")
        stale = await _patch(house, {"spec": {"spares": 1}}, If_Match='"1"')
        assert (stale.status_code, error_of(stale)["code"]) == (409, "conflict")
        assert (await _patch(house, {"spec": {"spares": 1}}, If_Match='"2"')).status_code == 200
        assert (await _patch(house, {"spec": {"spares": 2}}, If_Match="*")).status_code == 200
        assert (await _patch(house, {"spec": {"spares": 2}}, If_Match="new")).status_code == 422

    in_house(tmp_path, test)


def test_patches_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        answers = await asyncio.gather(
            *(_patch(house, {"metadata": {"labels": {f"l{number}": "x"}}}) for number in range(12))
        )
        assert {answer.status_code for answer in answers} == {200}
        labels = (await house.client.get(f"{TRAININGS}/demo")).json()["metadata"]["labels"]
        assert set(labels) == {f"l{number}" for number in range(12)}

    in_house(tmp_path, test)


def test_delete_marks_once_and_can_be_repeated(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        first = await house.client.delete(f"{TRAININGS}/demo")
        again = await house.client.delete(f"{TRAININGS}/demo")
        assert (first.status_code, again.status_code) == (202, 202)
        assert first.json()["metadata"]["deletionTimestamp"] == "2026-01-31T12:00:00.000Z"
        assert again.json() == first.json()
        gone = await house.client.delete(f"{TRAININGS}/other")
        assert error_of(gone)["code"] == "not_found"

    in_house(tmp_path, test)


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        body = a_body(env={"TOKEN": SECRET, "PLAIN": "x"}, secretEnv=["TOKEN"])
        shown = [await house.client.post(f"{TRAININGS}?dryRun=true", json=body)]
        shown.append(await house.client.post(TRAININGS, json=body, headers={"Idempotency-Key": "k"}))
        shown.append(await house.client.post(TRAININGS, json=body, headers={"Idempotency-Key": "k"}))
        shown.append(await _patch(house, {"spec": {"env": {"TOKEN": "***"}, "spares": 1}}))
        shown.append(await house.client.post(f"{TRAININGS}/demo/scale", json={"target": 3}))
        shown += [await house.client.get(TRAININGS + part) for part in ("", "/demo", "/demo/events", "/demo/explain")]
        shown.append(await house.client.get(f"{TRAININGS}/demo/logs"))
        shown.append(await house.client.post(f"{TRAININGS}/demo/cancel"))
        shown.append(await house.client.delete(f"{TRAININGS}/demo"))
        assert {answer.is_success for answer in shown} == {True}
        wrong = a_body("other", env={"TOKEN": [SECRET], "B": SECRET + "\0"}, secretEnv=["TOKEN", "B"])
        shown.append(await house.client.post(TRAININGS, json=wrong))
        shown.append(await house.client.post(TRAININGS, json=a_body("other", env=SECRET)))
        shown.append(await house.client.post(TRAININGS, content='{"spec": {"env": {"T": ' + SECRET))
        shown.append(await _patch(house, {"spec": {"env": {"TOKEN": SECRET * 2}}}))
        assert all(SECRET not in answer.text for answer in shown)
        assert shown[1].json()["spec"]["env"] == {"TOKEN": "***", "PLAIN": "x"}
        stored = house.store.get(Key("default", "demo"))
        assert stored is not None and stored.training.spec.env["TOKEN"] == SECRET

    in_house(tmp_path, test)


@pytest.mark.parametrize("dry_run", [False, True])
def test_more_gpus_than_there_are_are_refused_unless_forced(tmp_path: Path, dry_run: bool) -> None:
    async def test(house: House) -> None:
        asked = {"dryRun": "true"} if dry_run else {}
        body = a_body("huge", resources={"gpus": 3}, worldSize={"min": 3, "target": 3, "max": 4})
        refused = await house.client.post(TRAININGS, json=body, params=asked)
        error = error_of(refused)
        assert (refused.status_code, error["code"]) == (422, "invalid")
        assert "it needs 9 GPUs (3 workers × 3), there are only 8 here: it could never start" in error["message"]
        assert "muster pool" in error["hint"] and "--force" in error["hint"]
        assert error["details"]["fields"][0]["field"] == "spec.resources.gpus"
        assert house.store.get(Key("default", "huge")) is None
        forced = await house.client.post(TRAININGS, json=body, params={**asked, "force": "true"})
        assert forced.status_code == (200 if dry_run else 201)

    in_house(tmp_path, test)


def test_gpus_are_only_counted_where_somebody_counts_them(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        body = a_body("huge", resources={"gpus": 100})
        house.backend.gpus = None  # the cluster places workers
        assert (await house.client.post(TRAININGS, json=body, params={"dryRun": "true"})).status_code == 200
        house.backend.gpus = 0
        refused = await house.client.post(TRAININGS, json=body)
        assert "it needs 100 GPUs (1 worker × 100), there is none here" in error_of(refused)["message"]

    in_house(tmp_path, test)


def test_a_pool_says_how_many_gpus_there_are_in_a_cluster(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        house.backend.gpus = None
        for gpus, status in ((4, 201), (5, 422)):
            made = await house.client.post(TRAININGS, json=a_body(f"with-{gpus}", resources={"gpus": gpus}))
            assert made.status_code == status

    in_house(tmp_path, test, pooled={"local": 4})


def test_a_repeated_submission_is_answered_even_if_gpus_have_gone(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        body, headers = a_body("first", resources={"gpus": 4}), {"Idempotency-Key": "one"}
        assert (await house.client.post(TRAININGS, json=body, headers=headers)).status_code == 201
        house.backend.gpus = 1
        again = await house.client.post(TRAININGS, json=body, headers=headers)
        assert (again.status_code, again.headers["idempotent-replay"]) == (201, "true")

    in_house(tmp_path, test)
