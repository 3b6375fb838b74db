"""Who finds the token of a coordinator, and who does not?"""

from __future__ import annotations

import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from muster import files, run_token
from muster.run_token import AnotherUsersPort, KeptToken
from tests.strangers import NOBODY, stranger, two_users

TOKEN = "ab" * 32


def kept(home: Path, host: str = "127.0.0.1", port: int = 29400, token: str = TOKEN) -> Path:
    KeptToken(home, host, port, token).listens()
    return run_token.file_of(home, host, port)


def found(home: Path, host: str = "127.0.0.1", port: int = 29400) -> str | None:
    return run_token.find(home, [(host, port)])


def test_it_has_256_bits_and_is_its_owners_alone(tmp_path: Path) -> None:
    one = KeptToken(tmp_path / "home", "127.0.0.1", 29400)
    assert len(bytes.fromhex(one.token)) == 32 and one.token != KeptToken(tmp_path, "127.0.0.1", 29401).token
    for _ in range(2):
        assert one.path.read_text() == f"{one.token}\n"
        assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
        one.listens()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (one.path.parent, tmp_path / "home")] == [0o700, 0o700]


def test_the_next_one_on_an_address_has_the_token_of_before(tmp_path: Path) -> None:
    kept(tmp_path)
    assert KeptToken(tmp_path, "127.0.0.1", 29400).token == TOKEN
    assert KeptToken(tmp_path, "127.0.0.1", 29401).token != TOKEN


def test_of_many_who_start_at_once_all_have_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: KeptToken(tmp_path, "127.0.0.1", 29400), range(64)))
    assert {one.token for one in made} == {found(tmp_path)}
    made[7].listens()
    for one in made[:7] + made[8:]:
        one.close(remove=True)
    assert found(tmp_path) == made[7].token, "and the one that has the port keeps it"


@pytest.mark.parametrize(
    ("listens", "asked"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("localhost", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"),
        (socket.gethostname(), "127.0.0.1"),
    ],
)
def test_an_address_has_several_names(tmp_path: Path, listens: str, asked: str) -> None:
    kept(tmp_path, listens)
    assert found(tmp_path, asked) == TOKEN


def test_it_is_looked_for_only_on_this_machine(tmp_path: Path) -> None:
    kept(tmp_path, "192.0.2.1")
    kept(tmp_path, "0.0.0.0")
    assert found(tmp_path, "192.0.2.1") is None and found(tmp_path, "no-such-host.invalid") is None
    assert found(tmp_path, port=29401) is None


def test_machines_that_share_a_home_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert found(tmp_path) is None


@pytest.mark.parametrize("what", ["link", "readable", "two names", "pipe", "folder", "empty", "garbage", "long"])
def test_what_may_be_somebody_elses_work_is_no_token(tmp_path: Path, what: str) -> None:
    path = kept(tmp_path)
    aside = path.with_name("aside")
    match what:
        case "readable":
            path.chmod(0o640)
        case "two names":
            os.link(path, aside)
        case "empty" | "garbage" | "long":
            path.write_text({"empty": "", "garbage": "x" * 64, "long": "ab" * 5000}[what])
        case "link":
            path.rename(aside)
            path.symlink_to(aside)
        case "pipe":
            path.unlink()
            os.mkfifo(path, 0o600)
        case "folder":
            path.unlink()
            path.mkdir()
    assert found(tmp_path) is None


@two_users
def test_a_file_of_another_user_is_no_token(tmp_path: Path) -> None:
    os.chown(kept(tmp_path), NOBODY, NOBODY)
    assert found(tmp_path) is None


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(OSError, match="belongs to another user"):
        KeptToken(tmp_path, "127.0.0.1", 29401, TOKEN)


# Leaving


def test_it_goes_with_its_coordinator(tmp_path: Path) -> None:
    one = KeptToken(tmp_path, "127.0.0.1", 29400, TOKEN)
    one.listens()
    one.close(remove=False)
    assert one.path.exists(), "one that was told to stop may be started again"
    again = KeptToken(tmp_path, "127.0.0.1", 29400, TOKEN)
    again.listens()
    again.close(remove=True)
    assert not one.path.exists()


def test_one_that_finds_the_port_taken_leaves_the_file_of_the_other(tmp_path: Path) -> None:
    first = KeptToken(tmp_path, "127.0.0.1", 29400, TOKEN)
    first.listens()
    late = KeptToken(tmp_path, "127.0.0.1", 29400, "cd" * 32)
    assert found(tmp_path) == TOKEN
    late.close(remove=True)
    assert found(tmp_path) == TOKEN


def test_one_that_leaves_does_not_take_along_the_file_of_the_next(tmp_path: Path) -> None:
    first, second = (KeptToken(tmp_path, "127.0.0.1", 29400, TOKEN) for _ in range(2))
    first.listens()
    second.listens()
    first.close(remove=True)
    assert found(tmp_path) == TOKEN
    second.close(remove=True)
    assert found(tmp_path) is None


def test_what_a_killed_one_left_misleads_nobody(tmp_path: Path) -> None:
    old, other = kept(tmp_path), kept(tmp_path, port=29401)
    run_token.clear_others(tmp_path, "127.0.0.1", 29400, but=old)
    assert old.exists()
    everywhere = kept(tmp_path, "0.0.0.0", token="cd" * 32)
    run_token.clear_others(tmp_path, "0.0.0.0", 29400, but=everywhere)
    assert found(tmp_path) == "cd" * 32 and other.exists()
    run_token.clear_others(tmp_path, "0.0.0.0", 29400, but=None)
    assert not everywhere.exists(), "one that was given a token keeps none"


# Coming before the coordinator


def test_one_who_comes_first_waits_for_the_file(tmp_path: Path) -> None:
    with socket.socket() as later:
        later.bind(("127.0.0.1", 0))
        port = later.getsockname()[1]
        waits: list[str] = []

        def starts(why: str) -> None:
            waits.append(why)
            kept(tmp_path, port=port)

        assert run_token.await_found(tmp_path, lambda: [("127.0.0.1", port)], 30.0, starts) == TOKEN
        assert waits == [f"127.0.0.1:{port}: connection refused"]


def test_one_of_an_older_version_has_no_file(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as older:
        assert run_token.await_found(tmp_path, lambda: [older.getsockname()], 30.0) is None
    assert run_token.await_found(tmp_path, lambda: [("192.0.2.1", 29400)], 30.0) is None, (
        "nor can it be known elsewhere"
    )


def test_one_who_comes_to_nobody_gives_up(tmp_path: Path) -> None:
    with socket.socket() as never, pytest.raises(TimeoutError, match="connection refused"):
        never.bind(("127.0.0.1", 0))
        run_token.await_found(tmp_path, lambda: [never.getsockname()], 0.0)


@two_users
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_nobody_joins_a_stranger_who_took_the_port_first(tmp_path: Path, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as theirs:
        theirs.bind((host, 0))
        os.fchown(theirs.fileno(), NOBODY, NOBODY)
        theirs.listen()
        where = ("127.0.0.1" if host == "0.0.0.0" else host, theirs.getsockname()[1])
        with pytest.raises(AnotherUsersPort, match="another user listens on"):
            run_token.await_found(tmp_path, lambda: [where], 30.0)
        kept(tmp_path, *where)
        assert run_token.await_found(tmp_path, lambda: [where], 30.0) == TOKEN, "it could not prove that it knows it"


@two_users
def test_another_user_cannot_read_it(tmp_path: Path) -> None:
    path = kept(files.private_folder(tmp_path / "home"))
    tried = stranger("print(open(sys.argv[1]).read())", path)
    assert "Permission denied" in tried.stderr and TOKEN not in tried.stdout


def test_a_pipe_in_its_place_holds_up_nobody(tmp_path: Path) -> None:
    path = kept(tmp_path)
    path.unlink()
    os.mkfifo(path, 0o600)
    looked = threading.Thread(target=found, args=(tmp_path,), daemon=True)
    looked.start()
    looked.join(20)
    assert not looked.is_alive()
