"""Tokens, roles and namespaces: who may do what, and what the files look like."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from muster.daemon import plane
from muster.daemon.options import Options
from muster.errors import AlreadyExists, InvalidRequest, NotFound, Unauthenticated, Unavailable
from muster.server import auth, token_use
from muster.server.auth import ExpiredToken, Identity, Role, Tokens
from tests.server.house import TRAININGS, House, a_body, error_of, in_house
from tests.strangers import shared_place, stranger, two_users

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
    assert set(json.loads(path.read_text())[0]) == {"name", "sha256", "role", "namespaces", "created", "former"}
    assert tokens.identify(clear) == Identity("ci", "editor", ("a", "b"))
    assert tokens.list() == (Identity("ci", "editor", ("a", "b")),)
    assert sorted(os.listdir(tmp_path)) == ["tokens.json", "tokens.lock"]
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


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]")),
        *((host, False) for host in ("0.0.0.0", "::", "", "10.0.0.1", "example.org", "127.0.0.1.example.org")),
    ],
)
def test_beyond_loopback_encryption_is_needed_or_a_word(host: str, is_loopback: bool) -> None:
    with nullcontext() if is_loopback else pytest.raises(ValueError, match="--insecure"):
        auth.check_listen(host, tls=False, insecure=False)
    auth.check_listen(host, tls=True, insecure=False)
    auth.check_listen(host, tls=False, insecure=True)


# Time ---------------------------------------------------------------------------------------------


class Wall:
    """The time of day, as the test has it."""

    def __init__(self) -> None:
        self.time = datetime(2026, 1, 31, 12, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time

    def passes(self, **span: float) -> None:
        self.time += timedelta(**span)


def test_an_expired_token_is_refused_with_the_reason_and_says_whose_it_was(tmp_path: Path) -> None:
    wall = Wall()
    tokens = Tokens(tmp_path, wall)
    token = tokens.create("ci", "viewer", expires_in=timedelta(days=7))
    wall.passes(days=6, hours=23)
    shown = tokens.admit(token)
    wall.passes(hours=1)
    for refused in (lambda: tokens.admit(token), lambda: tokens.check(shown)):
        with pytest.raises(ExpiredToken, match="expired at 2026-02-07T12:00:00") as caught:
            refused()
        assert caught.value.name == "ci" and "muster token rotate ci" in caught.value.hint
    fresh = tokens.rotate("ci")
    assert tokens.identify(fresh).name == "ci"
    with pytest.raises(Unauthenticated):
        tokens.identify(token)  # no grace brings it back


def test_a_rotation_leaves_no_gap_and_its_grace_an_end(tmp_path: Path) -> None:
    wall = Wall()
    tokens, beside = Tokens(tmp_path, wall), Tokens(tmp_path, wall)
    first = tokens.create("ci", "editor", ("a",))
    second = beside.rotate("ci", grace=timedelta(hours=1))
    assert tokens.identify(first) == tokens.identify(second) == Identity("ci", "editor", ("a",))
    wall.passes(minutes=59)
    tokens.identify(first)
    wall.passes(minutes=1)
    with pytest.raises(ExpiredToken, match="was rotated"):
        tokens.identify(first)
    tokens.identify(second)


def test_a_rotation_at_once_ends_all_that_were_before(tmp_path: Path) -> None:
    """Who rotates twice because the first secret has leaked must not be left with it."""
    tokens = Tokens(tmp_path)
    secrets = [tokens.create("ci", "viewer")]
    secrets += [tokens.rotate("ci") for _ in range(3)]
    for one in secrets:
        tokens.identify(one)
    last = tokens.rotate("ci", grace=timedelta(0))
    for one in secrets:
        with pytest.raises(Unauthenticated):
            tokens.identify(one)
    assert tokens.identify(last).name == "ci"
    tokens.revoke("ci")
    with pytest.raises(Unauthenticated):
        tokens.identify(last)


def test_many_rotations_do_not_make_the_file_grow(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    tokens.create("ci", "viewer")
    for _ in range(40):
        tokens.rotate("ci")
    assert (tmp_path / "tokens.json").stat().st_size < 4096


def test_tokens_that_are_made_at_the_same_moment_are_all_kept(tmp_path: Path) -> None:
    names = [f"t-{number}" for number in range(12)]
    with ThreadPoolExecutor(12) as threads:
        made = list(threads.map(lambda name: Tokens(tmp_path).create(name, "viewer"), names))
    assert sorted(one.name for one in Tokens(tmp_path).list()) == sorted(names)
    assert [Tokens(tmp_path).identify(token).name for token in made] == names


def test_tokens_of_0_1_are_read_rotated_and_kept(tmp_path: Path) -> None:
    old = Path(__file__).parents[1] / "data" / "0.1.0" / "home" / "tokens.json"
    (tmp_path / "tokens.json").write_text(old.read_text())
    tokens = Tokens(tmp_path)
    assert [(one.name, one.created, one.expires, one.last_use) for one in tokens.listed()] == [
        ("embedded", None, None, None),
        ("ada", None, None, None),
    ]
    assert tokens.identify(tokens.rotate("ada")) == Identity("ada", "viewer", ("*",))
    assert [one.name for one in tokens.list()] == ["embedded", "ada"]


def test_the_last_use_is_kept_without_a_write_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(token_use.TokenUse, "write", lambda self, text: written.append(text))

    async def test(house: House) -> None:
        for _ in range(50):
            await house.client.get(TRAININGS)
        assert len(written) <= 1

    in_house(tmp_path, test)
    assert 1 <= len(written) <= 2  # and at the end


def test_the_last_use_outlives_the_server_and_a_rotation_but_not_the_token(tmp_path: Path) -> None:
    wall = Wall()
    tokens = Tokens(tmp_path, wall)
    token = tokens.create("ci", "viewer")
    used = wall.time
    tokens.identify(token)
    tokens.save_use()
    path = tmp_path / "token-use.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and token not in path.read_text()
    wall.passes(hours=2)
    fresh = Tokens(tmp_path, wall)
    fresh.rotate("ci")
    assert [one.last_use for one in fresh.listed()] == [used]
    fresh.revoke("ci")
    fresh.create("ci", "viewer")
    assert [one.last_use for one in fresh.listed()] == [None]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}', '{"a": "yesterday"}', '{"a": "2026-01-31"}'])
def test_a_file_of_uses_that_cannot_be_read_keeps_nobody_out(tmp_path: Path, content: str) -> None:
    tokens = Tokens(tmp_path)
    token = tokens.create("ci", "viewer")
    (tmp_path / "token-use.json").write_text(content)
    assert tokens.identify(token).name == "ci"
    tokens.save_use()
    assert tokens.listed()[0].last_use is not None


@two_users
def test_another_user_who_writes_tokens_json_first_becomes_no_admin() -> None:
    with shared_place() as home:
        text = json.dumps([{"name": "evil", "sha256": "ab" * 32, "role": "admin", "namespaces": ["*"]}])
        assert stranger("Path(sys.argv[1]).write_text(sys.argv[2])", home / "tokens.json", text).returncode == 0
        with pytest.raises(PermissionError):
            Tokens(home).create("mine", "viewer")
        assert plane.run(Options(home)) == 1
        assert not (home / "muster.db").exists()


def test_whoever_fills_the_disk_can_be_revoked_and_nothing_else_can_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Tokens(tmp_path)
    greedy, other = serving.create("greedy", "editor"), serving.create("other", "viewer")
    assert serving.identify(greedy).name == "greedy"

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(auth, "write_private", no_room)
    with pytest.raises(Unavailable, match="No space left"):
        Tokens(tmp_path).create("more", "viewer")
    Tokens(tmp_path).revoke("greedy")
    with pytest.raises(Unauthenticated):
        serving.identify(greedy)
    assert serving.identify(other).name == "other"
    assert [one.name for one in Tokens(tmp_path).list()] == ["other"]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", ["tokens.json", "identity.json", "token"])
def test_a_pipe_in_the_place_of_what_is_read_at_the_start_holds_nobody_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    os.mkfifo(tmp_path / name)
    served = subprocess.run([sys.executable, "-m", "muster.daemon", "--home", tmp_path], timeout=60)
    assert served.returncode == 1
    assert "cannot be read" in (said := capfd.readouterr().err) or "not a regular file" in said
    assert "Traceback" not in said


def test_a_pipe_in_the_place_of_the_tokens_of_a_server_does_not_freeze_it(tmp_path: Path) -> None:
    serving = Tokens(tmp_path)
    token = serving.create("mine", "viewer")
    (tmp_path / "tokens.json").unlink()
    os.mkfifo(tmp_path / "tokens.json")
    with pytest.raises(Unavailable):
        serving.identify(token)
