"""A resize and a drain are planned: ranks are told first, have the time that they have on cancel, and lose nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import muster
from muster.node import progress, word
from tests.fleet import PROGRAMS, Fleet, Process, eventually

PLANNED = str(PROGRAMS / "planned.py")


class Trained:
    """A coordinator and workers whose ranks run `planned.py`."""

    def __init__(self, fleet: Fleet, how: str, *names: str, target: int) -> None:
        self.fleet, self._how = fleet, how
        fleet.coordinator()
        self.nodes: dict[str, Process] = {}
        for index, name in enumerate(names):
            self.join(name, index, target)
        fleet.training(0, target)

    def join(self, name: str, index: int, target: int) -> None:
        options = ("--nnodes", "1:3", "--target", str(target), "--infra-rank", str(index), "--last-call-s", "20")
        program = (PLANNED, str(self.fleet.notes), self._how)
        self.nodes[name] = self.fleet.node(name, *options, program=program)

    def lines(self, name: str) -> list[list[int]]:
        path = self.fleet.notes / name
        return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []

    def makes_steps(self, number: int, count: int = 2) -> None:
        """Wait until that round has made some."""
        begun = eventually(lambda: [one for one in self.lines("begun") if one[0] == number], f"round {number} begins")
        first = begun[0][2]
        eventually(
            lambda: self.lines("steps") and self.lines("steps")[-1][0] >= first + count, f"round {number} trains"
        )

    @property
    def made_twice(self) -> list[int]:
        """Steps that were lost and had to be made again."""
        return [step for step, times in Counter(step for (step,) in self.lines("steps")).items() if times > 1]

    def finish(self) -> None:
        self.fleet.go()
        for node in self.nodes.values():
            node.wait()


@pytest.mark.parametrize("how", ["term", "word"])
def test_planned_resizes_lose_no_step(fleet: Fleet, how: str) -> None:
    world = Trained(fleet, how, "a", "b", target=2)
    for number, target in enumerate((1, 2, 1)):
        world.makes_steps(number)
        if target == 2:
            world.join("c", 2, 2)
        fleet.order("set-target", target=target)
        fleet.training(number + 1, target)
    world.makes_steps(3)
    assert world.made_twice == []
    world.finish()


@pytest.mark.soak
@pytest.mark.parametrize("how", ["term", "word"])
def test_a_hundred_planned_resizes_lose_no_step(fleet: Fleet, how: str) -> None:
    world = Trained(fleet, how, "a", "b", target=2)
    for number in range(100):
        target = 1 + number % 2
        world.makes_steps(number)
        if target == 2:
            world.join(f"w{number}", 2 + number, 2)
        fleet.order("set-target", target=target)
        fleet.training(number + 1, target)
    world.makes_steps(100)
    assert world.made_twice == []
    world.finish()


@pytest.mark.parametrize("how", ["term", "word"])
def test_a_worker_that_is_asked_to_go_costs_no_step(fleet: Fleet, how: str) -> None:
    world = Trained(fleet, how, "a", "b", target=2)
    world.join("c", 2, 2)
    fleet.until("the spare is here", lambda view: view["spares"] == 1)
    world.makes_steps(0)
    world.nodes["b"].kill(signal.SIGTERM)
    assert "b leaves: it was told to leave (SIGTERM)" in str(fleet.training(1, 2)["story"])
    assert world.nodes["b"].wait() == 128 + signal.SIGTERM
    world.makes_steps(1)
    assert world.made_twice == []
    world.finish()


def test_all_ranks_are_told_to_save_at_the_same_step(fleet: Fleet) -> None:
    world = Trained(fleet, "nothing", "a", "b", "c", target=3)
    world.makes_steps(0)
    fleet.order("set-target", target=2)
    fleet.training(1, 2)
    told = [path.name.split("-") for path in fleet.notes.glob("told-0-*")]
    assert sorted(rank for *_, rank in told) == ["0", "1", "2"]
    assert len({step for _, _, step, _ in told}) == 1
    world.finish()


def test_a_crash_is_not_waited_for(fleet: Fleet) -> None:
    """The ranks of a round whose worker died would wait for it: they are not asked to save, and end soon."""
    world = Trained(fleet, "nothing", "a", "b", target=2)
    world.makes_steps(0)
    world.nodes["b"].kill()
    fleet.order("set-target", target=1)
    fleet.training(1, 1)
    assert list(fleet.notes.glob("told-0-*")) == []
    world.finish()


# Alone --------------------------------------------------------------------------------------------


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "mark")
    progress.create(path)
    monkeypatch.setenv(progress.FILE_VARIABLE, path)
    return path


def test_outside_muster_nothing_has_to_be_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(progress.FILE_VARIABLE, raising=False)
    assert not muster.should_save()
    for content in (None, b"", b"\0" * 16):  # no file, an empty one, one of an agent of 0.1
        path = tmp_path / f"mark-{content!r}"
        if content is not None:
            path.write_bytes(content)
        monkeypatch.setenv(progress.FILE_VARIABLE, str(path))
        assert not muster.should_save()
        assert word.asked(str(path)) == word.Asked(0, 0)


def test_a_rank_is_told_from_the_named_call_on(mark: str) -> None:
    assert [muster.should_save() for _ in range(3)] == [False] * 3
    word.tell(mark, 5, for_s=60.0)
    assert [muster.should_save() for _ in range(2)] == [False, True]
    word.over(mark)
    assert [muster.should_save() for _ in range(2)] == [True, True]
    word.withdraw(mark)
    assert not muster.should_save()
    assert word.asked(mark).calls == 8


def test_a_rank_that_is_held_goes_on_when_it_is_told_or_when_nobody_says_more(mark: str) -> None:
    word.hold(mark, for_s=0.05)
    assert not muster.should_save()
    word.hold(mark, for_s=60.0)
    answers: list[bool] = []
    rank = threading.Thread(target=lambda: answers.append(muster.should_save()))
    rank.start()
    eventually(lambda: word.asked(mark).calls == 2, "it asks")
    assert answers == []
    word.tell(mark, 2, for_s=60.0)
    rank.join(10)
    assert answers == [True]


@pytest.mark.parametrize("how", ["asks again", "has saved"])
def test_a_rank_that_has_saved_waits_for_its_end(mark: str, how: str) -> None:
    word.tell(mark, 1, for_s=60.0)
    assert muster.should_save() and not word.asked(mark).is_done(1)

    def go_on() -> None:
        if how == "asks again":
            muster.should_save()
        else:
            with muster.saving(), muster.saving():
                pass

    rank = threading.Thread(target=go_on)
    rank.start()
    eventually(lambda: word.asked(mark).is_done(1), "it has done what it could")
    assert rank.is_alive()
    word.over(mark)
    rank.join(10)
    assert not rank.is_alive()


def test_to_ask_costs_next_to_nothing(mark: str) -> None:
    began = time.perf_counter()
    for _ in range(10_000):
        muster.should_save()
    assert time.perf_counter() - began < 2.0  # a few milliseconds, on a machine that has time
    assert word.asked(mark).calls == 10_000 and os.path.getsize(mark) == progress.FILE_SIZE
