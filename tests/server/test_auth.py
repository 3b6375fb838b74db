"""Tokens, roles and namespaces: who may do what, and what the files look like."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from muster.errors import AlreadyExists, InvalidRequest, NotFound, Unauthenticated, Unavailable
from muster.server import auth
from muster.server.auth import Identity, Role, Tokens
from tests.server.house import TRAININGS, House, a_body, error_of, in_house

DEMO = f"{TRAININGS}/demo"
READS = [
    ("GET", TRAININGS),
    ("GET", DEMO),
    ("GET", f"{DEMO}/logs"),
    ("GET", f"{DEMO}/events"),
    ("GET", f"{DEMO}/usage"),
    ("GET", f"{DEMO}/explain"),
]
WRITES = [
    ("POST", TRAININGS),
    ("PATCH", DEMO),
    ("POST", f"{DEMO}/scale"),
    ("POST", f"{DEMO}/cancel"),
    ("DELETE", DEMO),
]
BODIES = {TRAININGS: a_body("new"), DEMO: {"spec": {"spares": 1}}, f"{DEMO}/scale": {"target": 3}}
CASES: list[tuple[Role, str, bool, bool]] = [
    ("viewer", "default", True, False),
    ("editor", "default", True, True),
    ("admin", "default", True, True),
    ("viewer", "other", False, False),
    ("editor", "other", False, False),
    ("admin", "other", True, True),
    ("viewer", "*", True, False),
    ("editor", "*", True, True),
]


@pytest.mark.parametrize(("role", "namespace", "reads", "writes"), CASES)
def test_a_role_reads_and_writes_what_it_may_and_nothing_else(
    tmp_path: Path, role: Role, namespace: str, reads: bool, writes: bool
) -> None:
    async def test(house: House) -> None:
        await house.submit()
        client = house.as_role(role, namespace)
        for method, path in READS:
            answer = await client.request(method, path)
            assert answer.status_code == (200 if reads else 403), (method, path)
        for method, path in WRITES:
            version = house.store.version
            answer = await client.request(method, path, json=BODIES.get(path, {}) if method != "DELETE" else None)
            assert answer.is_success is writes, (method, path)
            if not writes:
                assert error_of(answer)["code"] == "forbidden" and house.store.version == version

    in_house(tmp_path, test)


def test_who_may_not_see_a_namespace_does_not_learn_what_is_in_it(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        stranger = house.as_role("editor", "other")
        there, not_there = await stranger.get(DEMO), await stranger.get(f"{TRAININGS}/never")
        assert error_of(there)["message"] == error_of(not_there)["message"]

    in_house(tmp_path, test)


def test_a_list_across_namespaces_shows_what_the_token_may_see(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        for space in ("a", "b", "c"):
            await house.client.post(f"/v1/namespaces/{space}/trainings", json=a_body(f"in-{space}"))
        viewer = house.as_role("viewer", "a", "c")
        items = (await viewer.get("/v1/trainings")).json()["items"]
        assert [one["metadata"]["name"] for one in items] == ["in-a", "in-c"]
        assert len((await house.client.get("/v1/trainings")).json()["items"]) == 3

    in_house(tmp_path, test)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", "Basic cm9vdDpyb290", "Token x", "Bearer \xff\xfe", "Bearer a b"],
)
def test_without_a_known_token_nothing_is_answered(tmp_path: Path, header: str | None) -> None:
    async def test(house: House) -> None:
        nobody = house.with_token(None)
        headers = {} if header is None else {b"Authorization": header.encode("latin-1")}
        for path in (TRAININGS, DEMO, "/v1/watch", "/v1/usage", "/v1/trainings", "/metrics", "/v1/nothing"):
            answer = await nobody.get(path, headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (401, "unauthenticated")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await nobody.post(TRAININGS, json=a_body(), headers=headers)).status_code == 401

    in_house(tmp_path, test)


def test_a_token_works_from_its_creation_to_its_revocation(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        beside = Tokens(house.home)  # another process, which shares only the file
        token = beside.create("ci", "viewer", ("default",))
        client = house.with_token(token)
        assert (await client.get(TRAININGS)).status_code == 200
        beside.revoke("ci")
        assert (await client.get(TRAININGS)).status_code == 401

    in_house(tmp_path, test)


def test_tokens_are_kept_hashed_in_a_file_for_the_owner_alone(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    clear = tokens.create("ci", "editor", ("a", "b"))
    path = tmp_path / "tokens.json"
    assert clear not in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert set(json.loads(path.read_text())[0]) == {"name", "sha256", "role", "namespaces"}
    assert tokens.identify(clear) == Identity("ci", "editor", ("a", "b"))
    assert tokens.list() == (Identity("ci", "editor", ("a", "b")),)
    assert sorted(os.listdir(tmp_path)) == ["tokens.json"]
    with pytest.raises(Unauthenticated):
        tokens.identify(clear + "x")
    with pytest.raises(AlreadyExists):
        tokens.create("ci", "viewer")
    with pytest.raises(NotFound):
        tokens.revoke("other")


def test_a_token_for_nonsense_is_refused_with_every_reason(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Tokens(tmp_path).create("no spaces", "king", ("Bad_",))  # type: ignore[arg-type]
    assert [problem.field for problem in caught.value.problems] == ["name", "role", "namespaces"]
    assert not (tmp_path / "tokens.json").exists()


@pytest.mark.parametrize("content", ["{", '[{"name": "x"}]', "[1]"])
def test_a_file_of_tokens_that_cannot_be_read_lets_nobody_in(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokens.json").write_text(content)
    with pytest.raises(Unavailable):
        Tokens(tmp_path).identify("anything")


def test_the_embedded_token_is_made_once_and_made_again_when_lost(tmp_path: Path) -> None:
    token = auth.ensure_embedded(tmp_path)
    path = tmp_path / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text().strip() == token
    assert auth.ensure_embedded(tmp_path) == token
    assert Tokens(tmp_path).identify(token) == Identity("embedded", "admin", ("*",))
    path.unlink()
    fresh = auth.ensure_embedded(tmp_path)
    assert fresh != token and Tokens(tmp_path).identify(fresh).role == "admin"
    with pytest.raises(Unauthenticated):
        Tokens(tmp_path).identify(token)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_encryption(host: str) -> None:
    auth.check_listen(host, tls=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "127.0.0.1.example.org"])
def test_beyond_loopback_encryption_is_needed_or_a_word(host: str) -> None:
    with pytest.raises(ValueError, match="--insecure"):
        auth.check_listen(host, tls=False, insecure=False)
    auth.check_listen(host, tls=True, insecure=False)
    auth.check_listen(host, tls=False, insecure=True)
