"""Codes that sign a browser in: once, soon, as who asked, and nobody else."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from muster.sdk import peers
from muster.server import sign_in
from muster.server.audit import AUDIT_FILE
from muster.server.sign_in import GOOD_FOR_S, MOST_OF_ONE, SignInCodes
from tests.clocks import HandClock
from tests.server.house import House, error_of, in_house

CODES = "/v1/sign-in-codes"


async def code_for(client: httpx2.AsyncClient) -> str:
    made = await client.post(CODES)
    assert made.status_code == 201 and made.json()["seconds"] == GOOD_FOR_S
    return str(made.json()["code"])


async def redeem(house: House, code: str) -> httpx2.Response:
    return await house.with_token(None).post("/sign-in", json={"code": code})


def test_a_code_gives_the_token_that_asked_for_it_once(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        viewer = house.as_role("viewer", "lab")
        code = await code_for(viewer)
        answer = await redeem(house, code)
        assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
        told = answer.json()
        assert (told["role"], told["namespaces"]) == ("viewer", ["lab"])
        assert f"Bearer {told['token']}" == viewer.headers["authorization"]
        assert (await house.with_token(told["token"]).get("/v1/whoami")).json()["role"] == "viewer"
        again = await redeem(house, code)
        assert (again.status_code, error_of(again)["code"]) == (401, "unauthenticated")
        assert "muster dashboard" in error_of(again)["hint"]

    in_house(tmp_path, test)


def test_who_has_no_token_gets_no_code(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        assert (await house.with_token(None).post(CODES)).status_code == 401
        assert (await house.with_token("mst_guess").post(CODES)).status_code == 401

    in_house(tmp_path, test)


def test_a_code_is_good_for_a_minute(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        late, soon = await code_for(house.client), await code_for(house.client)
        clock = house.services.clock
        assert isinstance(clock, HandClock)
        clock.at += timedelta(seconds=GOOD_FOR_S - 1)
        assert (await redeem(house, soon)).status_code == 200
        clock.at += timedelta(seconds=1)
        assert (await redeem(house, late)).status_code == 401

    in_house(tmp_path, test)


def test_a_code_of_a_token_that_was_revoked_is_worth_nothing(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        code = await code_for(house.as_role("editor"))
        house.services.tokens.revoke("editor-0")
        assert (await redeem(house, code)).status_code == 401

    in_house(tmp_path, test)


@pytest.mark.parametrize(
    ("asked_by", "redeemed_by", "status"),
    [(1000, 1000, 200), (1000, 1001, 401), (1000, 0, 200), (1000, None, 401), (None, 1001, 200)],
)
def test_a_code_that_another_user_of_the_machine_saw_is_worth_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_by: int | None, redeemed_by: int | None, status: int
) -> None:
    async def test(house: House) -> None:
        monkeypatch.setattr(peers, "owner_of", lambda connection: asked_by)
        code = await code_for(house.client)
        monkeypatch.setattr(peers, "owner_of", lambda connection: redeemed_by)
        assert (await redeem(house, code)).status_code == status
        monkeypatch.setattr(peers, "owner_of", lambda connection: asked_by)
        assert (await redeem(house, code)).status_code == (401 if status == 200 else 200)  # a refusal uses nothing up

    in_house(tmp_path, test)


def test_nobody_is_taken_for_another_machine_because_the_kernel_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(connection: object) -> None:
        raise PermissionError("the kernel is not asked")

    async def test(house: House) -> None:
        code = await code_for(house.client)
        monkeypatch.setattr(peers, "owner_of", fails)
        for refused in (await redeem(house, code), await house.client.post(CODES)):
            assert (refused.status_code, error_of(refused)["code"]) == (503, "unavailable")
            assert "cannot be seen" in error_of(refused)["message"]
        monkeypatch.undo()
        assert (await redeem(house, code)).status_code == 200

    in_house(tmp_path, test)


@pytest.mark.parametrize(("here", "token"), [(True, None), (False, "mst_mine")])
def test_a_code_that_was_asked_for_over_loopback_is_worth_nothing_on_another_machine(
    here: bool, token: str | None
) -> None:
    """Whoever saw it here may have passed it on. One that was asked for by another address is meant to be."""
    codes = SignInCodes()
    assert codes.redeem(codes.issue("mine", "mst_mine", 1000, 0.0, here=here), None, 1.0) == token


def test_guesses_are_counted_like_those_of_tokens_and_are_in_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guessers: list[str] = []

    async def pause(address: str) -> None:
        guessers.append(address)

    async def test(house: House) -> None:
        monkeypatch.setattr(house.services.attempts, "pause", pause)
        assert (await redeem(house, "guess")).status_code == 401
        assert guessers == ["127.0.0.1"]
        assert (await redeem(house, "x" * 200)).status_code == 422
        await redeem(house, await code_for(house.client))
        assert house.services.audit is not None
        house.services.audit.stop()
        told = [json.loads(line) for line in (tmp_path / AUDIT_FILE).read_text().splitlines()]
        entries = [entry for entry in told if entry["path"] == "/sign-in"]
        assert [(one["decision"], one.get("about", "")) for one in entries if one["status"] != 422] == [
            ("refused", ""),
            ("allowed", "token root"),
        ]
        assert "mst_" not in json.dumps(told)

    in_house(tmp_path, test)


def test_codes_are_bounded_for_each_token_and_none_is_kept_in_clear() -> None:
    codes = SignInCodes()
    others = codes.issue("other", "mst_other", None, 0.0)
    mine: list[str] = [codes.issue("mine", "mst_mine", None, 0.0) for _ in range(MOST_OF_ONE + 3)]
    kept: dict[str, Any] = codes._kept
    assert len(kept) == MOST_OF_ONE + 1
    assert not set(kept) & {others, *mine} and "mst_" not in repr(kept)
    assert [codes.redeem(code, None, 1.0) for code in mine[:3]] == [None] * 3
    assert codes.redeem(mine[3], None, 1.0) == "mst_mine" and codes.redeem(others, None, 1.0) == "mst_other"
    codes.issue("mine", "mst_mine", None, sign_in.GOOD_FOR_S)
    assert len(codes._kept) == 1
