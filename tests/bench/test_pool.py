"""What the measurements of a shared pool are made of."""

from __future__ import annotations

from pathlib import Path

from bench import handovers, pool
from bench.handovers import Line
from muster.core.sharing.planner import plan
from tests.core.sharing import invariants


def test_the_pool_that_is_planned_is_sound_and_everybody_wants_something() -> None:
    shares = pool.a_shared_pool(16, 16, 128)
    made = plan(shares, 1000.0)
    assert invariants.broken(shares) == [] and invariants.broken_by(shares, made) == []
    assert made.shrinks and made.leaves and made.expands and made.seats and made.grants
    assert sum(one.mask.bit_count() for one in shares.workers.values()) == 64, "half of it"


def test_a_step_that_was_committed_and_is_done_again_is_a_loss() -> None:
    def line(what: str, at: float, step: int) -> Line:
        return Line(what, at, 0, 2, step, 0, "0")

    told = [line("begin", 1, 0), line("step", 2, 1), line("safe", 2.1, 1), line("step", 3, 2)]
    same = [*told, line("begin", 4, 2), line("step", 5, 3)]
    assert [lost.committed for lost in handovers.losses(same)] == [0, 0]
    again = [*told, line("begin", 4, 1), line("step", 5, 2), line("begin", 6, 0)]
    assert [(lost.committed, lost.safe) for lost in handovers.losses(again)] == [(0, 0), (1, 0), (2, 1)]


def test_the_log_of_ranks_is_read(tmp_path: Path) -> None:
    assert handovers.read_log(tmp_path / "steps.log") == []
    (tmp_path / "steps.log").write_text("begin 1.5 0 3 0 2 2\nstep 2.5 0 3 1 0 \n")
    assert handovers.read_log(tmp_path / "steps.log") == [
        Line("begin", 1.5, 0, 3, 0, 2, "2"),
        Line("step", 2.5, 0, 3, 1, 0, ""),
    ]
