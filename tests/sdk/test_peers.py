"""Another user of the machine takes the port of a control plane that is gone, and gets nothing for it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muster import DistributedTraining, sockets
from muster.errors import MusterError, Unavailable
from muster.sdk import find, peers
from muster.sdk import home as homes
from muster.sdk.client import Client
from muster.sdk.find import Search
from tests.fleet import PROGRAMS
from tests.sdk.conftest import STAND_IN, started_in
from tests.sdk.scripted import PATIENCE_S, Caller, Episode, House, Plane

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


class Imposter:
    """Another user's process. Whatever it was sent is kept."""

    def __init__(self, record: Path, host: str = "127.0.0.1", port: int = 0, how: str = "") -> None:
        self._record = record
        command = [sys.executable, str(PROGRAMS / "imposter.py"), str(record), host, str(port), how]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def got(self) -> bytes:
        return self._record.read_bytes()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


Imposters = Callable[..., Imposter]


@pytest.fixture
def imposter(tmp_path: Path) -> Iterator[Imposters]:
    made: list[Imposter] = []

    def start(*args: Any, **how: Any) -> Imposter:
        made.append(Imposter(tmp_path / f"record-{len(made)}", *args, **how))
        return made[-1]

    yield start
    for one in made:
        one.end()


def left_behind(folder: Path, url: str, **more: Any) -> None:
    """What a control plane leaves that was killed; its pid is in use again."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "token").write_text("secret\n")
    (folder / "server.json").write_text(json.dumps({"pid": os.getppid(), "url": url, **more}))


def a_handle(home: Path) -> DistributedTraining:
    (home / "token").write_text("secret\n")
    return Client(search=Search(home, daemon=("/bin/false",))).get("demo")


def a_takeover(house: House, imposter: Imposters, end: Callable[[], None]) -> tuple[Callable[[], None], list[Imposter]]:
    """What replaces the control plane by somebody else on its port, and who that is then."""
    others: list[Imposter] = []

    def replaced() -> None:
        port = int(house.url.rpartition(":")[2])
        end()
        others.append(imposter(port=port))

    return replaced, others


# A control plane that is gone --------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_embedded_token_is_not_sent_to_whoever_took_the_port_that_muster_url_names(
    caller: Caller, tmp_path: Path, imposter: Imposters, host: str
) -> None:
    other = imposter(host)
    left_behind(tmp_path, other.url)
    with pytest.raises(Unavailable, match="not by yours: nothing was sent") as caught:
        caller.call(Client(search=Search(tmp_path, url=other.url)), "list")
    assert other.got == b""
    assert "MUSTER_INSECURE" in caught.value.hint


@needs_root
def test_a_port_that_was_taken_is_left_alone_and_the_control_plane_is_started_elsewhere(
    caller: Caller, home: Path, imposter: Imposters
) -> None:
    other = imposter()
    left_behind(home, other.url)
    assert caller.call(Client(search=Search(home, daemon=STAND_IN)), "get", "demo").name == "demo"
    assert len(started_in(home)) == 1
    assert other.got == b""


@needs_root
@pytest.mark.parametrize("how", ["", "deaf"])
def test_a_token_that_the_user_gave_is_not_sent_to_somebody_else_either(
    caller: Caller, tmp_path: Path, imposter: Imposters, how: str
) -> None:
    other = imposter(how=how)
    with pytest.raises(Unavailable, match="nothing was sent"):
        caller.call(Client(search=Search(tmp_path, url=other.url, token="secret")), "list")
    assert other.got == b""


@needs_root
def test_somebody_who_hands_everything_on_to_the_real_one_is_not_told_anything(
    caller: Caller, plane: Plane, house: House, tmp_path: Path, imposter: Imposters
) -> None:
    other = imposter(how=house.url.rpartition(":")[2])
    left_behind(tmp_path, other.url)
    with pytest.raises(Unavailable, match="nothing was sent"):
        caller.call(Client(search=Search(tmp_path, url=other.url)), "list")
    assert other.got == b"" and plane.asked == []


@needs_root
def test_a_client_that_was_connected_does_not_come_back_to_somebody_else(
    caller: Caller, plane: Plane, house: House, tmp_path: Path, imposter: Imposters
) -> None:
    handle = a_handle(tmp_path)
    replaced, others = a_takeover(house, imposter, house.die)
    plane.on_poll.append(replaced)
    with pytest.raises(MusterError):
        caller.call(handle, "wait", PATIENCE_S / 4)
    assert [other.got for other in others] == [b""]


@needs_root
def test_following_a_log_does_not_go_on_with_somebody_else(
    caller: Caller, plane: Plane, house: House, tmp_path: Path, imposter: Imposters
) -> None:
    handle = a_handle(tmp_path)
    replaced, others = a_takeover(house, imposter, house._server.server_close)
    plane.play("logs", Episode("[0] a\n", breaks=True, before=replaced))
    with pytest.raises(MusterError):
        caller.take(99, handle, "logs", follow=True)
    assert [other.got for other in others] == [b""]


# What the user says ------------------------------------------------------------------------------


@needs_root
def test_a_user_may_say_that_a_token_of_theirs_goes_to_whoever_it_is(
    caller: Caller, tmp_path: Path, imposter: Imposters
) -> None:
    other = imposter()
    env = {"MUSTER_HOME": str(tmp_path), "MUSTER_INSECURE": "1"}
    assert caller.call(Client(search=Search.of(other.url, "mine", env)), "list") == []
    assert b"Bearer mine" in other.got


@needs_root
@pytest.mark.parametrize("given", [None, "secret"])
def test_nobody_can_say_that_of_the_embedded_token(
    caller: Caller, tmp_path: Path, imposter: Imposters, given: str | None
) -> None:
    other = imposter()
    left_behind(tmp_path, other.url)
    env = {"MUSTER_HOME": str(tmp_path), "MUSTER_INSECURE": "1"}
    with pytest.raises(Unavailable, match="nothing was sent"):
        caller.call(Client(search=Search.of(other.url, given, env)), "list")
    assert other.got == b""


# Whose end it is ---------------------------------------------------------------------------------


@pytest.fixture(params=["sock_diag", "/proc/net"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to ask it. The second is taken where the first is not to be had."""

    def refuse(*_: object) -> None:
        raise PermissionError("no netlink in this container")

    if request.param == "/proc/net":
        monkeypatch.setattr(sockets, "find", refuse)


ENDS = [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("::", "::1")]


@needs_root
@pytest.mark.parametrize(("listens", "to"), [*ENDS, ("127.0.0.1", "::ffff:127.0.0.1"), ("::", "::ffff:127.0.0.1")])
def test_a_connection_is_its_acceptor_s_and_until_then_its_listener_s(kernel: None, listens: str, to: str) -> None:
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    os.seteuid(NOBODY)  # as whom a socket is made counts
    try:
        listener = socket.create_server((listens, 0), family=family, dualstack_ipv6=listens == "::")
    finally:
        os.seteuid(0)
    with listener, socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET) as guest:
        guest.connect((to, listener.getsockname()[1]))
        assert peers.owner_of(guest) == NOBODY
        accepted, _ = listener.accept()
        with accepted:
            assert peers.owner_of(guest) == 0
        listener.close()
        assert peers.owner_of(guest) is None  # closed: nobody reads what is sent there


def connected() -> tuple[socket.socket, ...]:
    listener = socket.create_server(("127.0.0.1", 0))
    guest = socket.create_connection(listener.getsockname())
    return listener, guest, listener.accept()[0]


def test_a_user_trusts_root_and_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    assert [peers._is_trusted(uid) for uid in (0, 1001, 1002, NOBODY)] == [True, True, False, False]


def test_our_own_processes_are_trusted(kernel: None) -> None:
    listener, guest, accepted = connected()
    with listener, guest, accepted:
        peers.check(guest)
        assert peers.owner_of(guest) == os.geteuid()


def test_a_user_whom_the_namespace_does_not_know_is_not_ours_even_if_called_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert peers._is_trusted(NOBODY)
    monkeypatch.setattr(Path, "read_text", lambda self: "0 100000 65536\n")
    assert not peers._is_trusted(NOBODY)


@pytest.mark.parametrize(
    ("host", "why"), [("192.0.2.7", "plain http from another machine proves nothing"), ("127.0.0.1", "cannot be seen")]
)
def test_an_end_that_this_machine_does_not_have_has_proved_nothing(
    kernel: None, monkeypatch: pytest.MonkeyPatch, host: str, why: str
) -> None:
    listener, guest, accepted = connected()
    with listener, accepted:

        class Elsewhere(socket.socket):
            def getpeername(self) -> Any:
                return host, 9

        elsewhere = Elsewhere(fileno=guest.detach())
        with elsewhere, pytest.raises(peers.Unproved, match=why):
            peers.check(elsewhere)


def test_a_connection_that_is_gone_has_proved_nothing() -> None:
    with socket.socket() as never, pytest.raises(peers.Unproved):
        peers.check(never)


# What stands in the home -------------------------------------------------------------------------


def planted(folder: Path, name: str, how: str) -> None:
    path = folder / name
    if how == "link":
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "writable":
        path.chmod(0o622)
    elif how == "owner":
        os.chown(path, NOBODY, NOBODY)
    else:
        os.chown(folder, NOBODY, NOBODY)


@needs_root
@pytest.mark.parametrize("how", ["link", "pipe", "writable", "owner", "home"])
@pytest.mark.parametrize("name", ["server.json", "token"])
def test_what_others_can_have_written_says_neither_where_to_go_nor_with_what(
    plane: Plane, house: House, tmp_path: Path, name: str, how: str
) -> None:
    (tmp_path / "token").write_text("secret\n")
    planted(tmp_path, name, how)
    with pytest.raises(Unavailable, match=r"is not used|nothing in it is used"):
        Client(search=Search(tmp_path, daemon=STAND_IN)).list()
    assert plane.asked == [] and started_in(tmp_path) == []


@pytest.mark.parametrize(("name", "how"), [("start.lock", "link"), ("daemon.log", "link"), ("daemon.log", "pipe")])
def test_files_that_were_put_in_the_place_of_ours_are_neither_followed_nor_waited_for(
    tmp_path: Path, name: str, how: str
) -> None:
    (tmp_path / name).write_text("mine")
    planted(tmp_path, name, how)
    with pytest.raises(Unavailable, match="cannot be started"):
        find.find(Search(tmp_path, daemon=STAND_IN))
    assert how == "pipe" or (tmp_path / "elsewhere").read_text() == "mine"
    assert started_in(tmp_path) == []


@pytest.mark.parametrize("how", ["link", "pipe"])
def test_a_lock_that_is_none_is_not_waited_for(tmp_path: Path, how: str) -> None:
    (tmp_path / "daemon.lock").touch()
    planted(tmp_path, "daemon.lock", how)
    assert not homes.is_locked(tmp_path)


@needs_root
def test_a_home_of_somebody_else_does_not_keep_a_user_from_a_server_that_they_name(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    assert find.find(Search(tmp_path, url="https://elsewhere:1", token="mine")).token == "mine"


def test_a_pid_that_another_process_has_by_now_is_not_the_control_plane_s(tmp_path: Path) -> None:
    now = homes.process_of(os.getpid())
    assert now is not None
    boot, _, ticks = now.partition("/")
    for process, lives in ((now, True), ("", True), (f"{boot}/{int(ticks) - 1}", False), (f"before/{ticks}", False)):
        left_behind(tmp_path, "http://127.0.0.1:1", pid=os.getpid(), process=process)
        context = homes.written(tmp_path)
        assert context is not None and context.lives == lives
