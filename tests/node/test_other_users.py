"""What can another user of the machine do to a run without a control plane? Nothing; its own user needs no set-up."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from muster.node.logs import Echo
from muster.node.rank_files import RankFiles
from muster.node.timekeeping import Timekeeper
from muster.types.world import MemberId, Place, Round, Seat
from tests.fleet import PROBE, Fleet, Process, eventually, free_port
from tests.node.test_faults import below
from tests.strangers import shared_place, stranger, two_users

WORLD = (sys.executable, "-m", "muster.cli.main", "world")
NODE = (sys.executable, "-m", "muster.node.cli")


def standalone(fleet: Fleet, *options: str, program: tuple[str, ...] = (), **env: str) -> Process:
    fleet.port = fleet.port or free_port()
    listen = ("--standalone", "--listen", fleet.address, "--run-id", fleet.run_id)
    return fleet.node("a", *listen, *options, program=program, join=False, **env)


ASKING = """
_, port, token, *asks = sys.argv
for what in asks:
    for run in ("run", "other"):
        question = AskFrame(ask=what, why="I can", target=1)
        try:
            print(asyncio.run(ask([("127.0.0.1", int(port))], RunId(run), question, token=token or None)))
        except CoordinatorRefused as refused:
            print("refused", refused.code, refused)
for kind in ("agent", "guard"):
    hello = HelloFrame(member=Introduction(MemberId("m"), "a"))
    known = {"token": token or None, "hello": lambda _: hello, "on_frame": print}
    line = Connection(lambda: [("127.0.0.1", int(port))], RunId("run"), kind, **known)
    try:
        asyncio.run(line.run())
    except CoordinatorRefused as refused:
        print("refused", refused.code, refused)
"""


@two_users
@pytest.mark.parametrize("token", [pytest.param("", marks=pytest.mark.scenario), "0" * 64])
def test_another_user_can_neither_see_nor_end_nor_join_a_run(fleet: Fleet, token: str) -> None:
    node = standalone(fleet, "--nnodes", "1:2", "--last-call-s", "0", MUSTER_IDLE_S="0.5")
    fleet.started(0, 1)
    tried = stranger(ASKING, fleet.port, token, "show", "cancel", "set-target")
    answers = tried.stdout.splitlines()
    assert len(answers) == 8, tried.stderr
    assert all(line.startswith("refused bad_token wrong or missing run token") for line in answers), answers
    assert len({line for line in answers}) == 1, "it does not show which run there is"
    (kept,) = (fleet.home / "coordinators").glob(f"*-{fleet.port}@*.token")
    assert "Permission denied" in stranger("open(sys.argv[1])", kept).stderr
    view = fleet.view()
    assert view is not None and view["state"] == "training" and len(view["members"]) == 1
    fleet.go()
    assert node.wait() == 0
    eventually(lambda: not kept.exists(), "its token goes with the coordinator")
    fleet.assert_nothing_left()


def test_its_own_user_needs_nothing(fleet: Fleet) -> None:
    script = fleet.folder / "asks.py"
    script.write_text(
        f"import subprocess, sys, runpy\n"
        f"subprocess.run({[*WORLD, '--coordinator', 'HERE', 'show', '-o', 'json']!r}, check=True)\n"
        f"sys.argv = {[PROBE, str(fleet.notes), 'wait']!r}\nrunpy.run_path({PROBE!r}, run_name='__main__')\n"
    )
    fleet.port = free_port()
    script.write_text(script.read_text().replace("HERE", fleet.address))
    early = fleet.node("b", "--nnodes", "2", program=(str(script),), MUSTER_HOME=str(fleet.home))
    first = standalone(fleet, "--nnodes", "2", program=(str(script),))
    fleet.started(0, 2)
    early.expect(r'"run_id": "run"')
    shown = fleet.start(*WORLD, "--coordinator", fleet.address, "--run-id", "run", "show")
    assert shown.wait() == 0 and "2 of 2 workers" in shown.text
    missing = fleet.start(*WORLD, "--coordinator", fleet.address, "--run-id", "nope", "show")
    assert missing.wait() == 3 and missing.text == "muster world: no run 'nope' here\n"
    token = fleet.token
    assert token is not None and token not in first.text + early.text
    os.kill(below(first.pid, "muster.coordinator"), signal.SIGKILL)
    first.expect("starting it again")
    fleet.until("both are back", lambda view: len(view["members"]) == 2)
    assert fleet.token == token, "those who were there before can come back"
    fleet.go()
    assert [first.wait(), early.wait()] == [0, 0]


def test_beyond_loopback_it_says_what_to_type_elsewhere(fleet: Fleet) -> None:
    fleet.port, fleet.host = free_port(), "0.0.0.0"
    node = standalone(fleet, MUSTER_IDLE_S="0.5")
    fleet.host = "127.0.0.1"
    fleet.started(0, 1)
    said = node.expect(r"on other machines: export MUSTER_RUN_TOKEN=\$\(ssh \S+ cat (\S+)\)\n")
    token = Path(said[1]).read_text().strip()
    assert token == fleet.token and token not in node.text
    wrong = fleet.node("b", MUSTER_RUN_TOKEN="wrong")
    assert wrong.wait() == 1 and "export MUSTER_RUN_TOKEN=$(ssh HOST cat FILE)" in wrong.text.splitlines()[-1]
    right = fleet.node("c", MUSTER_RUN_TOKEN=token)
    fleet.until("the right one is here", lambda view: len(view["members"]) == 2)
    fleet.go()
    assert [node.wait(), right.wait()] == [0, 0]


def test_a_token_that_is_given_is_kept_nowhere(fleet: Fleet) -> None:
    fleet.env["MUSTER_RUN_TOKEN"] = "given"
    node = standalone(fleet)
    fleet.started(0, 1)
    assert not list(fleet.home.rglob("*.token")) and fleet.view() is not None
    fleet.go()
    assert node.wait() == 0


@two_users
def test_a_home_that_cannot_be_written_keeps_nobody_from_training(fleet: Fleet) -> None:
    fleet.home.touch()
    node = fleet.node("a", "--standalone", join=False)
    fleet.started(0, 1)
    fleet.go()
    assert node.wait() == 0 and "cannot keep the run token for others to find" in node.text


# Folders in shared places


@two_users
def test_a_folder_that_another_user_made_first_gets_nothing(fleet: Fleet) -> None:
    secret = fleet.folder / "secret"
    secret.mkdir()
    with shared_place() as place:
        attack = "_, name, secret = sys.argv; os.makedirs(name + '/logs'); os.symlink(secret, name + '/logs/run')"
        assert stranger(attack, place / "muster-0", secret).returncode == 0
        words = ("--standalone", "--run-id", "run", PROBE, str(fleet.notes))
        node = fleet.start(*NODE, *words, TMPDIR=str(place))
        assert node.wait() == 0
        assert not list(secret.iterdir()), "it wrote where the link leads"
        logs_in = Path(node.expect(r"others can write \S+/muster-0: logs are in (\S+)")[1])
        assert (logs_in / "round-0" / "rank-0.out").exists()
        seen = stranger("print(os.listdir(sys.argv[1]))", logs_in)
        assert "Permission denied" in seen.stderr
        fleet.assert_nothing_left()


@pytest.mark.parametrize("what", ["a link", "a pipe", "a second name", "a link to a folder"])
def test_a_rank_prints_into_a_regular_file_or_not_at_all(tmp_path: Path, what: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = tmp_path / "logs" / "round-0"
    if what == "a link to a folder":
        (tmp_path / "theirs").mkdir()
        folder.parent.mkdir()
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.mkdir(parents=True)
        path = folder / "rank-0.out"
        {"a link": path.symlink_to, "a second name": path.hardlink_to}.get(what, lambda _: os.mkfifo(path))(secret)
    seat = Seat(0, MemberId("m"), "a", "127.0.0.1", 1)
    with pytest.raises(OSError, match=r"round-0"):
        told = Echo(enabled=False), Timekeeper(enabled=False)
        RankFiles(Place(Round(0, (seat,)), seat, 0, 0), "run", tmp_path / "logs", str(tmp_path), *told, "")
    assert secret.read_text() == "secret"
