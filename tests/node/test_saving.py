"""A rank on a healthy worker is not ended in the middle of a save because another worker died."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

import muster
from muster.node import progress, saves
from muster.node.saves import Busy, Patience, Saves, WatchedRank, Where, roots_of
from tests.fleet import PROGRAMS, Fleet, Process, eventually, gone
from tests.node.test_faults import below
from tests.plane import Plane, reasons

SAVER = str(PROGRAMS / "saver.py")
SHORT = Patience(0.2, 0.2)


class Pair:
    """Two workers and a spare; the worker of rank 1 is about to die."""

    def __init__(self, fleet: Fleet, how: str, *options: str) -> None:
        self.fleet = fleet
        fleet.coordinator()
        common = ("--nnodes", "2", "--spares", "1", *options)
        program = (SAVER, str(fleet.notes), how)
        self.nodes = [
            fleet.node(name, "--infra-rank", str(index), *common, program=program)
            for index, name in enumerate(("healthy", "victim", "spare"))
        ]

    @property
    def healthy(self) -> Process:
        return self.nodes[0]

    def there(self, *names: str) -> None:
        eventually(lambda: all((self.fleet.notes / name).exists() for name in names), f"{names} are told")

    def say(self, name: str) -> None:
        (self.fleet.notes / name).touch()

    def lose_one(self) -> None:
        self.nodes[1].kill()

    def finish(self) -> None:
        self.there("runs-1-0", "runs-1-1")
        self.fleet.go()
        assert [node.wait() for node in (self.nodes[0], self.nodes[2])] == [0, 0]

    def content(self, name: str) -> str:
        return (self.fleet.folder / name).read_text()


@pytest.mark.parametrize(
    ("how", "told"), [pytest.param("block", "rank 0 saves", marks=pytest.mark.scenario), ("file", "rank 0 writes")]
)
def test_a_recall_waits_for_a_save_and_says_so(fleet: Fleet, how: str, told: str) -> None:
    pair = Pair(fleet, how)
    pair.there("saving-half", "runs-0-1")
    pair.lose_one()
    view = fleet.until("the recall is held back", lambda v: told in v["reason"])
    assert "ranks of round 0 on healthy" in view["reason"] and "is given up to" in view["reason"]
    assert view["round"] == 0
    pair.say("finish")
    pair.finish()
    assert pair.content("half") == "begun and done"


def test_the_next_file_of_a_checkpoint_is_waited_for_too(fleet: Fleet) -> None:
    pair = Pair(fleet, "files")
    pair.there("saving-half", "runs-0-1")
    pair.lose_one()
    fleet.until("the recall is held back", lambda v: "writes" in v["reason"])
    pair.say("finish")
    pair.there("saving-half2")
    fleet.until("it is held back again", lambda v: "half2" in v["reason"])
    pair.say("finish2")
    pair.finish()
    assert (pair.content("half"), pair.content("half2")) == ("begun and done", "begun and done")


@pytest.mark.parametrize("how", ["folder", "folder-block"])
def test_half_a_folder_is_not_left(fleet: Fleet, how: str) -> None:
    """Its files are written at once, with pauses between them: when the other worker dies, none is open."""
    pair = Pair(fleet, how)
    pair.there("saving-checkpoint", "runs-0-1")
    pair.lose_one()
    pair.finish()
    assert sorted(path.name for path in (fleet.folder / "checkpoint").iterdir()) == [f"{part}.pt" for part in range(8)]


@pytest.mark.parametrize(("how", "limit"), [("block", "--saving-timeout-s"), ("file", "--save-grace-s")])
def test_a_save_that_does_not_end_holds_the_world_for_a_bounded_time(fleet: Fleet, how: str, limit: str) -> None:
    pair = Pair(fleet, how, limit, "0.5")
    pair.there("saving-half", "runs-0-1")
    pair.lose_one()
    pair.finish()
    assert pair.content("half") == "begun"


@pytest.mark.parametrize("how", ["block", "file"])
def test_a_rank_whose_agent_died_ends_its_save_too(fleet: Fleet, how: str) -> None:
    """Its guard sees to that, as long as the lease lasts."""
    pair = Pair(fleet, how, "--lease-s", "30")
    pair.there("saving-half", "runs-0-1")
    pair.healthy.kill()
    fleet.until("its death is known", lambda v: v["state"] != "training")
    pair.say("finish")
    pair.there("runs-1-0")
    assert pair.content("half") == "begun and done"
    fleet.go()
    assert [node.wait() for node in pair.nodes[1:]] == [0, 0]


@pytest.mark.parametrize("stopped", [False, True], ids=["lease over", "guard stopped"])
def test_a_save_without_an_agent_ends_with_the_lease_or_where_no_guard_watches(fleet: Fleet, stopped: bool) -> None:
    pair = Pair(fleet, "file", "--lease-s", "3600" if stopped else "1.5")
    pair.there("saving-half", "runs-0-1")
    guard = below(pair.healthy.proc.pid, "muster.node.bootstrap")
    rank = below(guard, SAVER)
    if stopped:
        os.kill(guard, signal.SIGSTOP)
    pair.healthy.kill()
    eventually(lambda: gone(rank), "the rank is ended")
    assert pair.content("half") == "begun"
    if stopped:
        os.kill(guard, signal.SIGCONT)
    pair.there("runs-1-0")
    fleet.go()
    assert [node.wait() for node in pair.nodes[1:]] == [0, 0]


def test_files_that_are_written_all_the_time_hold_nothing_back(fleet: Fleet) -> None:
    pair = Pair(fleet, "logs")
    pair.there("runs-0-0", "runs-0-1")
    pair.lose_one()
    pair.finish()
    assert "is given up to" not in pair.healthy.text


def test_a_handler_that_saves_when_it_is_asked_to_end_can(fleet: Fleet) -> None:
    pair = Pair(fleet, "handler", "--restart-grace-s", "20")
    pair.there("runs-0-0", "runs-0-1")
    began = time.monotonic()
    pair.lose_one()
    pair.finish()
    assert pair.content("last") == "begun and done"
    assert time.monotonic() - began < 15, "it did not wait for a lock that nobody gives back"


def test_explain_and_the_journal_tell_that_a_recall_is_held_back(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2), spares=1, script=SAVER, args=[str(plane.notes), "block"])
    eventually(lambda: (plane.notes / "saving-half").exists(), "it saves")
    eventually(lambda: (plane.notes / "runs-0-1").exists(), "the other one runs")
    training.refresh()
    victim = next(rank.worker for rank in training.ranks if rank.rank == 1)
    plane.kill_worker(victim)

    def told() -> bool:
        shown = plane.muster("explain", "demo")
        return shown.wait() == 0 and "rank 0 saves, and is given up to 60 s for it" in " ".join(shown.text.split())

    eventually(told, "explain tells it")
    assert "RecallHeld" in reasons(training)
    (plane.notes / "finish").touch()
    eventually(lambda: (plane.notes / "runs-1-1").exists(), "the world goes on")
    assert (plane.folder / "half").read_text() == "begun and done"
    plane.go()
    training.result(timeout=60)


def test_a_cancel_lets_a_save_end_first(plane: Plane) -> None:
    training = plane.train(world=(1, 1, 1), script=SAVER, args=[str(plane.notes), "file"])
    eventually(lambda: (plane.notes / "saving-half").exists(), "it saves")
    training.cancel()
    eventually(lambda: "RecallHeld" in reasons(training), "the order is held back")
    (plane.notes / "finish").touch()
    with pytest.raises(muster.TrainingCancelled):
        training.result(timeout=60)
    assert (plane.folder / "half").read_text() == "begun and done"


# Alone --------------------------------------------------------------------------------------------


def a_rank(folder: Path) -> WatchedRank:
    mark = str(folder / "mark")
    progress.create(mark)
    return WatchedRank(0, mark, os.getpid())


def waited(rank: WatchedRank, cwd: Path) -> list[str]:
    """What was told until the rank could be ended."""
    told: list[str] = []

    async def wait() -> None:
        await Saves(Where(str(cwd), (), (), str(cwd / "scratch"))).over(lambda: [rank], SHORT, told.append)

    asyncio.run(wait())
    return told


def test_without_an_agent_saving_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entered = 0
    for value in (None, str(tmp_path / "none")):
        monkeypatch.delenv(progress.FILE_VARIABLE, raising=False)
        if value:
            monkeypatch.setenv(progress.FILE_VARIABLE, value)
        with muster.saving(), muster.saving():
            entered += 1
    assert entered == 2 and list(tmp_path.iterdir()) == []


def test_saves_may_be_nested_and_end_with_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rank = a_rank(tmp_path)
    monkeypatch.setenv(progress.FILE_VARIABLE, rank.mark)
    with muster.saving():
        with pytest.raises(KeyError), muster.saving():
            raise KeyError
        assert waited(rank, tmp_path) == ["rank 0 saves, and is given up to 0.2 s for it"]
    assert waited(rank, tmp_path) == []


def test_a_child_that_was_forked_in_a_save_does_not_prolong_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rank = a_rank(tmp_path)
    monkeypatch.setenv(progress.FILE_VARIABLE, rank.mark)
    reader, writer = os.pipe()
    with muster.saving():
        if (child := os.fork()) == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    os.close(reader)
    assert waited(rank, tmp_path) == []
    os.close(writer)
    os.waitpid(child, 0)


def test_what_a_rank_started_saves_for_it(tmp_path: Path) -> None:
    rank = a_rank(tmp_path)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writer)
        with open(tmp_path / "model.pt", "w"):
            os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    eventually(lambda: (tmp_path / "model.pt").exists(), "it writes")
    assert waited(rank, tmp_path) == [f"rank 0 writes {tmp_path}/model.pt, and is given up to 0.2 s for it"]
    os.close(writer)
    os.waitpid(child, 0)


def test_a_file_that_is_kept_open_is_no_save(tmp_path: Path) -> None:
    rank, told = a_rank(tmp_path), list[str]()

    async def wait(kept: Saves) -> None:
        await kept.over(lambda: [rank], SHORT, told.append)

    async def play() -> None:
        kept = Saves(Where(str(tmp_path), (), (), str(tmp_path / "ours")))
        now = asyncio.get_running_loop().time()
        kept.sample([rank], now - saves.LONG_OPEN_S)
        await wait(kept)
        assert told == []
        with open(tmp_path / "new.pt", "w"):
            await wait(kept)
        assert told == [f"rank 0 writes {tmp_path}/new.pt, and is given up to {SHORT.grace_s:g} s for it"]

    with open(tmp_path / "data.bin", "w"):
        asyncio.run(play())


def test_a_checkpoint_is_not_over_between_two_of_its_files(tmp_path: Path) -> None:
    """Nothing is open at that moment, but its folder has just got a file."""
    rank, patience = a_rank(tmp_path), Patience(20.0, 20.0)

    async def over_after(folder: str, size: int) -> float:
        (tmp_path / folder).mkdir()
        began = asyncio.get_running_loop().time()
        (tmp_path / folder / "model.pt").write_bytes(b"x" * size)
        where = Where(str(tmp_path), (), (), str(tmp_path / "ours"))
        await Saves(where).over(lambda: [rank], patience, lambda busy: None)
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(over_after("checkpoint-40", 4096)) >= saves.SETTLE_S
    assert not saves._grows((f"{tmp_path}/",), (f"{tmp_path}/checkpoint-40/",))
    asyncio.run(over_after("notes", 10))
    assert not saves._grows((f"{tmp_path}/",), (f"{tmp_path}/checkpoint-40/",))


def test_a_folder_that_has_just_been_made_is_a_save_before_it_has_a_file(tmp_path: Path) -> None:
    roots = (f"{tmp_path}/",)
    (tmp_path / "checkpoint-4").mkdir()
    assert saves._grows(roots, (f"{tmp_path}/ours/",))
    before = time.time() - saves.FRESH_S - 0.1
    os.utime(tmp_path / "checkpoint-4", (before, before))
    assert not saves._grows(roots, (f"{tmp_path}/ours/",)), "it was there before"


@pytest.mark.parametrize(
    ("words", "roots"),
    [
        ((), ["CWD/"]),
        (("train.py", "--lr=0.1", "3"), ["CWD/"]),
        (("--out=OTHER/run1",), ["CWD/", "OTHER/"]),
        (("OTHER",), ["CWD/", "OTHER/"]),
        (("/tmp/checkpoint.pt",), ["/tmp/checkpoint.pt", "CWD/"]),
        (("/", "/tmp", "/dev/shm"), ["CWD/"]),
    ],
)
def test_checkpoints_are_looked_for_where_the_program_may_put_them(
    tmp_path: Path, words: tuple[str, ...], roots: list[str]
) -> None:
    cwd, other = tmp_path / "cwd", tmp_path / "other"
    cwd.mkdir()
    other.mkdir()

    def placed(text: str) -> str:
        return text.replace("CWD", str(cwd)).replace("OTHER", str(other))

    assert roots_of(str(cwd), tuple(map(placed, words))) == tuple(sorted(map(placed, roots)))


def test_many_saves_are_told_in_one_short_line() -> None:
    assert Busy((0, 1), {2: "a"}).told == "rank 0 saves, rank 1 saves, rank 2 writes a"
    assert Busy(tuple(range(9))).told.endswith("rank 3 saves and others")


def test_who_says_that_it_saves_is_given_more_time_than_who_only_writes() -> None:
    patience = Patience(10.0, 60.0)
    assert [patience.of(busy) for busy in (Busy(), Busy(writing={0: "a"}), Busy((0,), {1: "a"}))] == [0.0, 10.0, 60.0]
