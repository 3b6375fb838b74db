"""Several ranks without an agent: do all of them write the same steps, and go on from the same one?"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muster
from muster.errors import InvalidRequest, StateUnusable
from muster.state import alone, content_hash, disk, layout, leaves
from muster.state.alone import Keeping
from muster.state.layout import Manifest
from tests.state.kept import keep

PROGRAM = Path(__file__).parents[1] / "programs" / "state_alone.py"


class World:
    """Ranks whose clock is ours."""

    def __init__(self, folder: Path, ranks: int, every_s: float = 10.0, base: int = 0) -> None:
        self.now = 0.0
        self.told: list[str] = []
        self._folder = folder
        self.ranks = [
            Keeping(folder, every_s, rank, ranks, base, self.told.append, lambda: self.now) for rank in range(ranks)
        ]

    def commit(self, rank: int, step: int) -> bool:
        """Whether it was written."""
        one = self.ranks[rank]
        if not one.wants(step):
            return False
        rest = leaves.take_apart({"subjects": {"step": step}})[0]
        manifest = Manifest(rank, len(self.ranks), 0, step, *layout.placed([], len(rest)))
        slot = one.take(manifest.room)
        assert slot is not None
        slot.memory[: len(rest)] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        slot.seal(manifest.with_hashes([content_hash.of(slot.memory[: len(rest)])]))
        return True

    def run(self, steps: range, each_s: float = 1.0) -> list[int]:
        written = []
        for step in steps:
            self.now += each_s
            order = list(range(len(self.ranks)))
            random.shuffle(order)
            told = {self.commit(rank, step) for rank in order}
            assert len(told) == 1, "all or none"
            if told.pop():
                written.append(step)
        return written


def test_all_ranks_write_the_same_steps_as_often_as_they_should(tmp_path: Path) -> None:
    world = World(tmp_path, 3)
    written = world.run(range(1, 101))
    assert 6 <= len(written) <= 10
    assert list(disk.steps(tmp_path)) in (written[:-3:-1], written[:-4:-1])
    assert [one.safe for one in world.ranks] == [written[-1]] * 3 and not world.told


@given(stride=st.integers(1, 50), base=st.integers(0, 1000), ranks=st.integers(2, 4))
@settings(max_examples=8, deadline=None)
def test_it_does_not_matter_which_steps_are_committed(
    tmp_path_factory: pytest.TempPathFactory, stride: int, base: int, ranks: int
) -> None:
    folder = tmp_path_factory.mktemp("strides")
    written = World(folder, ranks, base=base).run(range(base + stride, base + 60 * stride, stride))
    assert written and set(disk.steps(folder)) <= set(written)


def test_one_rank_alone_writes_when_it_is_time(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    assert world.run(range(1, 41)) == [10, 20, 30, 40]
    assert World(tmp_path, 1, every_s=0).run(range(41, 44)) == [41, 42, 43]


def test_without_a_folder_nothing_is_copied() -> None:
    keeping = Keeping(None, 0)
    assert not any(keeping.wants(step) for step in range(100))


def test_a_rank_that_hears_of_it_too_late_writes_nothing_and_more_time_is_given(tmp_path: Path) -> None:
    """Nobody keeps them together here: rank 1 is always ten steps ahead."""
    world = World(tmp_path, 2, every_s=0)
    for step in range(1, 600):
        world.now += 1.0
        world.commit(0, step)
        world.commit(1, step + 10)
    assert disk.steps(tmp_path), "after a while steps are named far enough ahead"
    assert len(list(tmp_path.glob("step-*"))) < 8


def test_a_rank_that_never_commits_is_told_of(tmp_path: Path) -> None:
    world = World(tmp_path, 2, every_s=0)
    for step in range(1, 200):
        world.now += 1.0
        world.commit(0, step)
    assert disk.steps(tmp_path) == {} and len(list(tmp_path.glob("step-*"))) <= 2
    assert "was not written by all 2 ranks: does each of them call commit?" in world.told[0]


def test_what_an_attempt_before_has_named_is_not_followed(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    world.run(range(1, 12))
    assert (tmp_path / alone.NEXT).exists()
    left = (tmp_path / alone.NEXT).read_text()
    late = World(tmp_path, 2, base=5)
    (tmp_path / alone.NEXT).write_text(left)  # rank 1 was there before rank 0 took it away
    late.ranks[1]._seen = late.ranks[1]._signature()
    assert not any(late.commit(1, step) for step in range(6, 30))


def test_ranks_that_went_on_from_different_steps_do_not_go_on(tmp_path: Path) -> None:
    world = World(tmp_path, 2, every_s=0)
    world.ranks[1]._base = 7
    world.commit(0, 1)
    world.commit(0, 2)
    with pytest.raises(InvalidRequest, match="rank 0 went on from step 0 and rank 1 from step 7"):
        world.commit(1, 1)


def test_a_damaged_step_ends_all_ranks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may have gone on from it: when all start again, nobody takes it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    world = World(tmp_path, 2, every_s=0)
    world.run(range(1, 20))
    newest, before, *_ = disk.steps(tmp_path)
    damaged = disk.steps(tmp_path)[newest][1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for rank, expected in (("0", newest), ("1", None), ("0", before), ("1", before)):
        monkeypatch.setenv("RANK", rank)
        state = muster.State(durable=tmp_path, random=False, step=0)
        if expected is None:
            with pytest.raises(StateUnusable, match=r"Start all ranks again: .* The step is set aside"):
                state.restore()
        else:
            assert state.restore() == expected and state["step"] == expected


@pytest.mark.torches
def test_a_world_of_another_size_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path, value=7, table={"x": torch.ones(2)})
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        table = {"x": torch.zeros(2)}
        state = muster.State(durable=tmp_path, value=0, table=table)
        assert state.restore() == 1 and state["value"] == 7 and table["x"].tolist() == [1, 1]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start(folder: Path, steps: int) -> list[subprocess.Popen[str]]:
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(steps)],
            env=os.environ | shared | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.torches
@pytest.mark.usefixtures("processes")
def test_two_ranks_that_are_killed_go_on_from_the_same_step(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    first = start(folder, 1_000_000)
    try:
        deadline = time.monotonic() + 120
        while len(disk.steps(folder)) < 2 and time.monotonic() < deadline:
            assert all(one.poll() is None for one in first)
            time.sleep(0.02)
    finally:
        for one in first:
            one.send_signal(signal.SIGKILL)
            one.communicate()
    newest = max(disk.steps(folder))
    told = [one.communicate(timeout=120)[0] for one in start(folder, newest + 5)]
    assert told == [
        f"{rank} went on from {newest} and came to {sum(range(newest + 5)) * 3.0 + rank}\n" for rank in range(2)
    ]
