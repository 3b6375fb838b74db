"""Finding the control plane: who wins, what is sent to whom, and that two who start at once start one."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from muster.errors import InvalidRequest, Unavailable
from muster.sdk import find, flows
from muster.sdk.client import Client
from muster.sdk.effects import HttpRequest
from muster.sdk.find import Search
from muster.sdk.home import is_locked, mark_stopped
from tests.fleet import eventually
from tests.sdk.conftest import STAND_IN, started_in
from tests.sdk.scripted import PATIENCE_S, Caller, Dropped, House, Plane, a_training


def an_embedded(home: Path) -> Search:
    return Search(home, daemon=STAND_IN)


# Who is meant ------------------------------------------------------------------------------------


def test_an_argument_wins_over_the_environment_which_wins_over_the_context_file(tmp_path: Path) -> None:
    env = {"MUSTER_HOME": str(tmp_path), "MUSTER_URL": "http://env:1", "MUSTER_TOKEN": "of-env"}
    given = find.find(Search.of("http://given:2/", "mine", env))
    told = find.find(Search.of(env=env))
    assert (given.url, given.token) == ("http://given:2", "mine")
    assert (told.url, told.token) == ("http://env:1", "of-env")


def test_the_home_is_in_the_user_s_own_directory_unless_said_otherwise() -> None:
    assert Search.of(env={}).home == Path.home() / ".muster"


def test_the_embedded_token_is_sent_to_the_embedded_control_plane_alone(tmp_path: Path, house: House) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert find.find(Search(tmp_path)).token == "secret"
    assert find.find(Search(tmp_path, url=house.url)).token == "secret"
    assert find.find(Search(tmp_path, url="http://elsewhere:1")).token is None


def test_a_token_is_shown_by_no_record() -> None:
    assert "secret" not in repr(Search(Path("/"), token="secret")) + repr(find.Server("http://a", "secret"))


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://host", "http://", "http://host:port"])
def test_an_address_that_is_none_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an address"):
        Client(url)


def test_a_bearer_token_travels_with_every_call(caller: Caller, plane: Plane, house: House) -> None:
    plane.token = "mine"
    with Client(house.url, "mine") as client:
        assert caller.call(client, "get", "demo").name == "demo"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "url": "http://a"}'])
def test_a_context_file_that_says_nothing_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "server.json").write_text(text)
    assert find.serving(Search(tmp_path)) is None


def test_a_context_file_of_one_that_is_gone_counts_as_none(tmp_path: Path, house: House) -> None:
    house.die()
    assert find.serving(Search(tmp_path)) is None


# Starting it -------------------------------------------------------------------------------------


def test_the_embedded_control_plane_is_started_when_it_is_first_needed(caller: Caller, home: Path) -> None:
    client = Client(search=an_embedded(home))
    assert not home.exists()
    assert caller.call(client, "get", "demo").phase == "ready"
    assert caller.call(client, "get", "demo").phase == "ready"
    assert len(started_in(home)) == 1


def test_it_runs_in_a_session_of_its_own_and_not_in_the_user_s_directory(home: Path) -> None:
    Client(search=an_embedded(home)).get("demo")
    pid, session, folder = (home / "starts").read_text().split()
    assert pid == session
    assert Path(folder) == home
    assert (home / "daemon.log").stat().st_mode & 0o077 == 0


def test_clients_that_start_at_the_same_time_start_one(home: Path) -> None:
    together = threading.Barrier(4)
    seen: list[str] = []

    def use() -> None:
        client = Client(search=an_embedded(home))
        together.wait(PATIENCE_S)
        seen.append(client.get("demo").name)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert seen == ["demo"] * 4
    assert len(started_in(home)) == 1


def test_one_that_does_not_start_is_told_with_the_end_of_its_log(caller: Caller, home: Path) -> None:
    home.mkdir()
    (home / "broken").touch()
    (home / "daemon.log").write_text("something from last week\n")
    with pytest.raises(Unavailable, match="the database is from a newer version") as caught:
        caller.call(Client(search=an_embedded(home)), "get", "demo")
    assert "ended with code 1" in str(caught.value)
    assert "last week" not in str(caught.value)


def test_one_that_says_nothing_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    silent = (sys.executable, "-c", "import os, signal; open('pid', 'w').write(str(os.getpid())); signal.pause()")
    with pytest.raises(Unavailable, match="did not become ready in time"):
        find.find(Search(tmp_path, daemon=silent), within_s=0.5)
    written = tmp_path / "pid"
    if written.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(written.read_text()), 0)


def test_a_home_that_cannot_be_written_to_is_told_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable) as caught:
        find.find(Search(tmp_path / "file" / "home"))
    assert "MUSTER_HOME" in caught.value.hint


def test_a_killed_control_plane_is_started_again_in_the_middle_of_a_wait(caller: Caller, home: Path) -> None:
    handle = Client(search=an_embedded(home)).get("demo")
    (home / "phase").write_text("succeeded")
    assert caller.call(handle, "wait", PATIENCE_S).ready == 0
    assert len(started_in(home)) == 2


# One that runs and does not answer ----------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "SILENT_S", 0.2)
    monkeypatch.setattr(find, "HEALTH_S", 0.1)


@pytest.mark.parametrize("named", [False, True])
def test_a_control_plane_that_was_stopped_is_told_and_no_second_one_is_started(
    caller: Caller, home: Path, impatient: None, named: bool
) -> None:
    url = Client(search=an_embedded(home)).url
    search = replace(an_embedded(home), url=url if named else None)
    (pid,) = started_in(home)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(Unavailable, match=rf"\(pid {pid}\) is hung: .* because a signal stopped it") as caught:
        caller.call(Client(search=search), "get", "demo")
    assert caught.value.hint == f"kill -CONT {pid}"
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: find.serving(search), "it answers again", PATIENCE_S)
    assert caller.call(Client(search=search), "get", "demo").name == "demo"
    assert started_in(home) == [pid]


@pytest.mark.parametrize("removed", [False, True])
def test_one_that_was_stopped_on_purpose_is_started_by_who_comes_anew_and_not_by_who_was_there(
    caller: Caller, home: Path, removed: bool
) -> None:
    was_there = Client(search=an_embedded(home))
    caller.call(was_there, "get", "demo")
    (pid,) = started_in(home)
    mark_stopped(home, True)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_locked(home), "it is gone", PATIENCE_S)
    if removed:
        home.rename(home.with_name("removed"))
    with pytest.raises(Unavailable, match="the control plane was stopped") as caught:
        caller.call(was_there, "get", "demo")
    assert "muster server start" in caught.value.hint
    assert home.exists() is not removed
    if not removed:
        assert started_in(home) == [pid]
        assert caller.call(Client(search=an_embedded(home)), "get", "demo").name == "demo"


def test_one_that_is_alive_and_answers_nobody_is_hung_and_did_not_fail_to_start(
    caller: Caller, plane: Plane, house: House, tmp_path: Path, impatient: None
) -> None:
    house.die()
    with open(tmp_path / "daemon.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match=rf"\(pid {os.getpid()}\) is hung: it runs but does not answer"):
            caller.call(Client(search=an_embedded(tmp_path)), "get", "demo")
    assert started_in(tmp_path) == []


def test_one_that_holds_the_home_and_has_not_said_where_is_waited_for(caller: Caller, home: Path) -> None:
    home.mkdir()
    with open(home / "daemon.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="it is still starting, or on another machine"):
            find.find(an_embedded(home), within_s=0.1)
        ending = threading.Timer(0.1, fcntl.flock, (lock, fcntl.LOCK_UN))
        ending.start()
        assert caller.call(Client(search=an_embedded(home)), "get", "demo").name == "demo"
        ending.join()
    assert len(started_in(home)) == 1


# One that moves ----------------------------------------------------------------------------------


def test_a_plain_call_finds_a_server_that_has_moved(caller: Caller, plane: Plane, house: House, client: Client) -> None:
    handle = client.get("demo")
    house.move()
    caller.call(handle, "refresh")
    caller.call(handle, "cancel")
    assert [one.path.rpartition("/")[2] for one in plane.writes()] == ["cancel"]


def test_a_creation_whose_answer_was_lost_is_repeated_under_the_same_key(
    caller: Caller, plane: Plane, client: Client
) -> None:
    def drop() -> None:
        raise Dropped

    plane.on_write.append(drop)
    made = caller.call(client, "train", script=__file__, name="mine")
    keys = [one.headers["idempotency-key"] for one in plane.writes()]
    assert made.name == "mine"
    assert len(keys) == 2 and len(set(keys)) == 1


def test_a_request_that_never_left_is_sent_again_even_if_it_must_not_happen_twice(
    caller: Caller, plane: Plane, house: House, client: Client
) -> None:
    assert client.url == house.url
    house.move()
    body = {"metadata": {"name": "mine"}, "spec": {"script": "/a.py"}}
    answer = caller.call(client, "run", flows.call(HttpRequest("POST", "/v1/namespaces/default/trainings", json=body)))
    assert answer.status == 201 and len(plane.writes()) == 1


def test_a_client_is_usable_from_one_event_loop_after_another(house: House, plane: Plane, client: Client) -> None:
    plane.put(a_training("other"))
    twice = Caller("async")
    assert [twice.call(client, "get", name).name for name in ("demo", "other")] == ["demo", "other"]
