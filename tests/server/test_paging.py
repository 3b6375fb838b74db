"""What a list and its continue tokens tell: all that the caller may see, page by page, and nothing of anybody else."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.server.sealing import NotSealedHere, PageSeal
from tests.server.house import TRAININGS, House, a_body, error_of, in_house

EVERYWHERE = "/v1/trainings"
SECRET_PLACE = "merger"  # a namespace of which others must not even learn the name


async def fill(house: House) -> None:
    for space, name in itertools.product(("apples", SECRET_PLACE, "pears", "plums"), ("a", "b", "c")):
        answer = await house.client.post(f"/v1/namespaces/{space}/trainings", json=a_body(f"{space}-{name}"))
        assert answer.status_code == 201


async def pages(client: Any, path: str = EVERYWHERE, limit: int = 2, **query: str) -> list[dict[str, Any]]:
    found, token = [], ""
    while True:
        answer = await client.get(path, params={"limit": limit, "continue": token, **query})
        assert answer.status_code == 200, answer.text
        found.append(answer.json())
        if not (token := found[-1]["metadata"]["continue"]):
            return found


def names(found: list[dict[str, Any]]) -> list[str]:
    return [one["metadata"]["name"] for page in found for one in page["items"]]


def decoded(token: str) -> bytes:
    return base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_")


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7, 100])
def test_pages_of_somebody_who_sees_two_namespaces_are_whole_and_full(tmp_path: Path, limit: int) -> None:
    async def test(house: House) -> None:
        await fill(house)
        found = await pages(house.as_role("viewer", "pears", "apples", "empty", "zzz"), limit=limit)
        assert names(found) == [f"{space}-{name}" for space in ("apples", "pears") for name in "abc"]
        assert all(len(page["items"]) == limit for page in found[:-1]) and found[-1]["items"]

    in_house(tmp_path, test)


def test_a_continue_token_decodes_to_no_name(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await fill(house)
        for client in (house.as_role("viewer", "apples", "pears"), house.client):
            for limit in range(1, 6):
                for page in await pages(client, limit=limit):
                    token = page["metadata"]["continue"]
                    raw = decoded(token)
                    assert not any(word in raw for word in (b"apples", b"pears", b"merger", b"plums"))
                    assert not any(word in token for word in ("YXBwbGVz", "bWVyZ2Vy"))

    in_house(tmp_path, test)


def test_what_others_have_changes_nothing_that_a_caller_sees_of_pages(tmp_path: Path) -> None:
    """Neither how many pages there are, nor how long their tokens are."""

    async def test(house: House) -> None:
        viewer = house.as_role("viewer", "apples", "zebra")
        for name in "abcd":
            await house.client.post("/v1/namespaces/apples/trainings", json=a_body(f"x-{name}"))
        before = await pages(viewer)
        for number in range(20):
            await house.client.post(f"/v1/namespaces/{SECRET_PLACE}/trainings", json=a_body(f"hidden-{number}"))
        after = await pages(viewer)
        for one, other in zip(before, after, strict=True):
            assert one["items"] == other["items"]
            assert len(one["metadata"]["continue"]) == len(other["metadata"]["continue"])

    in_house(tmp_path, test)


def test_a_continue_token_is_good_for_its_caller_its_namespaces_and_its_filter_alone(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await fill(house)
        token = (await house.client.get(EVERYWHERE, params={"limit": 4})).json()["metadata"]["continue"]
        here = f"/v1/namespaces/{SECRET_PLACE}/trainings"
        of_one = (await house.client.get(here, params={"limit": 1})).json()["metadata"]["continue"]
        viewer, other = house.as_role("viewer", "pears"), house.as_role("admin")
        tries = [
            (viewer, EVERYWHERE, {"continue": token}),
            (other, EVERYWHERE, {"continue": token}),
            (viewer, "/v1/namespaces/pears/trainings", {"continue": of_one}),
            (house.client, TRAININGS, {"continue": token}),
            (house.client, EVERYWHERE, {"continue": of_one}),
            (house.client, EVERYWHERE, {"continue": token, "phase": "ready"}),
            (house.client, EVERYWHERE, {"continue": token, "labelSelector": "a=b"}),
        ]
        said = set()
        for client, path, query in tries:
            answer = await client.get(path, params=query)
            assert answer.status_code == 422, (path, query)
            said.add((error_of(answer)["message"], error_of(answer)["hint"]))
        assert len(said) == 1  # nobody learns why
        assert (await house.client.get(EVERYWHERE, params={"continue": token, "limit": 1})).status_code == 200

    in_house(tmp_path, test)


def test_a_continue_token_ends_with_the_namespace_that_it_was_for(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await fill(house)
        tokens = house.services.tokens
        eve = house.with_token(tokens.create("eve", "viewer", ("apples", "pears")))
        token = (await eve.get(EVERYWHERE, params={"limit": 1})).json()["metadata"]["continue"]
        tokens.revoke("eve")
        eve = house.with_token(tokens.create("eve", "viewer", ("pears",)))
        assert (await eve.get(EVERYWHERE, params={"continue": token})).status_code == 422
        assert names(await pages(eve)) == ["pears-a", "pears-b", "pears-c"]

    in_house(tmp_path, test)


def of_0_1(*place: str) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


@pytest.mark.parametrize(
    "token",
    ["x", "=", "AAAA", "é", " ", "%00", "A" * 64, "A" * 1024, of_0_1("apples", "a"), of_0_1("a"), "....", "\n"],
)
def test_a_continue_token_that_was_made_elsewhere_has_one_clean_error(tmp_path: Path, token: str) -> None:
    async def test(house: House) -> None:
        await fill(house)
        answer = await house.as_role("viewer", "apples").get(EVERYWHERE, params={"continue": token})
        assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid")
        assert error_of(answer)["hint"] == "start again from the first page"

    in_house(tmp_path, test)


def test_a_continue_token_outlives_the_server_and_not_its_secret(tmp_path: Path) -> None:
    given_out: list[str] = []

    async def first(house: House) -> None:
        await fill(house)
        token = house.services.tokens.create("eve", "admin")
        client = house.with_token(token)
        given_out.append((await client.get(EVERYWHERE, params={"limit": 1})).json()["metadata"]["continue"])

    async def again(house: House) -> None:
        await fill(house)
        eve = house.with_token(house.services.tokens.rotate("eve"))
        for one, status in ((given_out[0], 200), (given_out[0][:-1], 422), (given_out[0][1:], 422)):
            assert (await eve.get(EVERYWHERE, params={"continue": one})).status_code == status

    async def another(house: House) -> None:
        eve = house.with_token(house.services.tokens.rotate("eve"))
        assert (await eve.get(EVERYWHERE, params={"continue": given_out[0]})).status_code == 422

    in_house(tmp_path, first, seal=PageSeal(b"one"))
    (tmp_path / "tokens.json").write_text(_without(tmp_path, "root"))
    in_house(tmp_path, again, seal=PageSeal(b"one"))
    (tmp_path / "tokens.json").write_text(_without(tmp_path, "root"))
    in_house(tmp_path, another, seal=PageSeal(b"other"))


def _without(home: Path, name: str) -> str:
    """The next server makes that token again."""
    return json.dumps([one for one in json.loads((home / "tokens.json").read_text()) if one["name"] != name])


@given(st.text(), st.text(), st.binary(min_size=1))
def test_what_is_sealed_comes_back_for_the_same_use_only(text: str, good_for: str, secret: bytes) -> None:
    seal = PageSeal(secret)
    closed = seal.close(text, good_for)
    assert seal.open(closed, good_for) == text
    assert seal.close(text, good_for) != closed
    for other, use in ((seal, good_for + "x"), (PageSeal(secret + b"x"), good_for)):
        with pytest.raises(NotSealedHere):
            other.open(closed, use)


@given(st.data())
def test_no_changed_bit_goes_unnoticed(data: st.DataObject) -> None:
    seal = PageSeal(b"key")
    raw = bytearray(decoded(seal.close("a place", "a list")))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(NotSealedHere):
        seal.open(base64.urlsafe_b64encode(bytes(raw)).decode().rstrip("="), "a list")
