"""Does whoever reads the log of the ranks find what must never be, and nothing else?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet import PROGRAMS
from tests.netns.fenced_log import WAKING_S, Mark, at_work, beginning, problems, read, read_file


def a_mark(number: int, rank: int, at: float = 0.0, *, worker: str = "", pid: int = 0, world: int = 2) -> Mark:
    worker = worker or f"w{rank}"
    return Mark("beat", number, rank, world, worker, pid or 100 * (number + 1) + rank, at)


CLEAN = [a_mark(0, 0, 1), a_mark(0, 1, 1), a_mark(0, 0, 2), a_mark(1, 0, 3), a_mark(1, 1, 3, worker="w2")]


def test_rounds_one_after_the_other_are_well() -> None:
    assert problems(CLEAN) == []
    assert problems([]) == []


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        (
            a_mark(0, 1, 4),
            "rank 1 of round 0 on w1 (pid 101) was at work when rank 0 of round 1 on w0 (pid 200) had begun",
        ),
        (a_mark(0, 1, 2), "had begun"),  # it took the time before, and wrote after
        (
            a_mark(1, 1, 4, worker="w1", pid=7),
            "rank 1 of round 1 on w1 (pid 7) is rank 1 of round 1 on w2 (pid 201), too",
        ),
        (a_mark(1, 2, 4), "is in a world of 2"),
        (a_mark(1, 2, 4, world=3), "is in a world of 3"),
    ],
)
def test_what_must_never_be_is_found_once(mark: Mark, says: str) -> None:
    (found,) = problems([*CLEAN, mark, mark])
    assert says in found


def test_a_machine_that_stood_still_may_leave_a_last_mark_when_it_goes_on() -> None:
    late = a_mark(0, 1, 50)
    assert problems([*CLEAN, late], thawed={"w1": 49.9}) == []
    assert problems([*CLEAN, late], thawed={"w0": 49.9}), "another did not stand still"
    assert problems([*CLEAN, late], thawed={"w1": 49.9 - WAKING_S}), "it should have ended long ago"


def test_a_round_has_begun_when_all_its_ranks_are_at_work() -> None:
    assert beginning(CLEAN, 0) == 1
    assert beginning(CLEAN[:1], 0) is None
    assert beginning(CLEAN, 2) is None


def test_those_are_at_work_who_have_just_said_so() -> None:
    assert at_work(CLEAN, 3.1) == (1, {0: "w0", 1: "w2"})
    assert at_work(CLEAN, 9.0) is None
    assert at_work(CLEAN[:-1], 3.1) is None, "one of two"
    assert at_work([], 0.0) is None


def test_what_the_program_writes_is_read(tmp_path: Path) -> None:
    env = {"MUSTER_ROUND": "3", "RANK": "1", "WORLD_SIZE": "2", "MUSTER_WORKER": "w1"}
    (tmp_path / "go").touch()
    subprocess.run([sys.executable, str(PROGRAMS / "fenced.py"), str(tmp_path)], env=os.environ | env, check=True)
    text = (tmp_path / "fenced.log").read_text()
    start, end = read(text + "beat 3 1")
    assert (start.kind, start.round, start.rank, start.world, start.worker) == ("start", 3, 1, 2, "w1")
    assert (end.kind, end.pid) == ("end", start.pid)
    assert read_file(tmp_path / "fenced.log") == [start, end]
    assert read_file(tmp_path / "fenced.log", last=len(text.split("\n")[1]) + 5) == [end]
    assert read_file(tmp_path / "none") == []
