"""Does the benchmark of state count as lost what was lost, and say whether a goal is met?"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from bench import report, state, state_gpu, state_marks, table
from bench.launchers import Spot
from bench.state_marks import Mark, Resumed
from bench.state_runs import Series, muster, preloading

A_LOSS = """\
1.0 done 0 10 7 0.01
1.1 done 1 11 7 0.02
2.0 done 0 10 8 0.01
2.3 grouped 0 12 0 0.05
2.4 restored 0 12 7 -
2.5 reduced 1 13 7 -
2.6 reduced 0 12 7 -
2.7 done 0 12 8 -
"""


def marks(text: str) -> list[Mark]:
    return state_marks.parsed(text)


def test_only_whole_lines_are_read() -> None:
    assert marks("1.5 done 0 10 7 0.25\n2.0 done 1 1") == [Mark(1.5, "done", 0, 10, 7, "0.25")]


def test_a_step_is_committed_when_the_commit_of_the_last_rank_has_returned() -> None:
    found = marks(A_LOSS)
    assert [state_marks.done_by_all(found, 2, before) for before in (0.5, 1.05, 1.2, 2.2)] == [0, 0, 7, 7]
    assert state_marks.done_by_all([*found, Mark(2.1, "done", 1, 11, 8, "-")], 2, 2.2) == 8
    assert state_marks.done_by_all([*found, *marks("3.0 done 0 14 3 -\n3.1 done 1 15 3 -\n")], 2, 4.0) == 3, "went back"


def test_a_loss_is_over_with_the_first_all_reduce_of_every_rank_and_costs_what_all_had_committed() -> None:
    found = marks(A_LOSS)
    assert state_marks.resumed(found[:6], 2, 2.2) is None
    told = state_marks.resumed(found, 2, 2.2)
    assert told is not None
    assert (told.took_s, told.step, told.lost, told.after_s) == pytest.approx((0.3, 7, 0, 0.2))
    assert state_marks.typical([told]) == pytest.approx({"script begins": 0.05, "grouped": 0.1, "restored": 0.2})
    both = state_marks.resumed([*found, Mark(2.1, "done", 1, 11, 8, "-")], 2, 2.2)
    assert both is not None and both.lost == 1


def test_waits_are_those_of_rank_0_that_saved_without_the_first() -> None:
    assert state_marks.waits(marks(A_LOSS)) == [0.01]


def test_what_commits_take_is_the_difference_of_medians_of_rank_0() -> None:
    lines = [f"1.0 without 0 1 1 {value}" for value in (1.0, 1.1, 1.0)] + ["1.0 without 1 1 1 9.0"]
    lines += [f"1.0 with 0 1 1 {value}" for value in (1.02, 1.02, 1.5)] + ["1.0 memcpy 0 1 1 0.016"]
    found = state_marks.taken(marks("\n".join([*lines, ""])))
    assert (found.step_s, found.commits_s, found.samples) == pytest.approx((1.0, 0.02, 3))
    assert (found.copies, found.share) == pytest.approx((1.25, 0.02))
    assert [figure.ok for figure in state.costs("copy", found)] == [True, True]
    slower = state_marks.Taken(1.0, 0.031, 0.016, 3, 0.0)
    assert [figure.ok for figure in state.costs("copy", slower)] == [False, False]


def lossy(*lost: int, instead: tuple[str, ...] = ()) -> Series:
    return Series([Resumed(0.2, 10, one, 0.5) for one in lost], list(instead), [0.1, 0.3, 0.2], 5)


def test_one_lost_step_is_a_miss_and_so_is_a_kill_that_was_not_survived() -> None:
    peers = {"torchrun": lossy(3, 1), "other": lossy(instead=("never",))}
    figure = state.lost("lost", lossy(0, 0, 0), peers, 1.0)
    assert (figure.value, figure.ok, figure.samples, figure.note) == (0.0, True, 3, "")
    assert str(figure.peers["torchrun"]) == "2 a kill, worst 3 of 2; a save each 5 steps, 4.0% of the time"
    assert str(figure.peers["other"]) == "never"
    assert not state.lost("lost", lossy(0, 1, 0), {}, 1.0).ok
    assert not state.lost("lost", lossy(0, instead=("never in 90 s",)), {}, 1.0).ok
    row = {"part": "kills", **vars(figure), "peers": {who: vars(told) for who, told in figure.peers.items()}}
    _, torchrun, other = table.rows(row)
    assert torchrun[1:3] == ("torchrun", "–")
    assert torchrun[-1] == "2 a kill, worst 3 of 2; a save each 5 steps, 4.0% of the time"
    assert other[1:3] == ("other", "never")


def test_weights_are_equal_only_if_all_ranks_have_those_of_the_run_without_a_loss() -> None:
    same, other = (9, "a" * 64), (9, "b" * 64)
    assert state.weights("weights", {same}, {same}).ok
    for ended in ({same, other}, {other}, {(8, "a" * 64)}):
        figure = state.weights("weights", ended, {same})
        assert not figure.ok and figure.note.startswith("differ")


def test_a_peer_that_never_waits_says_so() -> None:
    assert state.waited(Series()) == ["never: state lives in replicas"]
    assert report.measured(state.waited(lossy(0)), "ms").p50 == pytest.approx(200)


def test_modules_to_preload_come_before_the_script() -> None:
    spot = Spot("w", "127.0.0.1", "127.0.0.1:1", first=False, active=2)
    words = preloading(muster, ["json"]).launcher.command(spot, ("script.py", "--keep", "muster"))
    assert words[-5:] == ("--preload", "json", "script.py", "--keep", "muster")


def test_on_a_gpu_commits_are_compared_by_both_clocks() -> None:
    without = [{"wall": 8.0, "device": 8.0, "called": 0.0}] * 3
    told = state_gpu.compared(without, [{"wall": 8.2, "device": 8.1, "called": 0.04}] * 3, 8)
    assert told["share, wall"] == pytest.approx(0.025) and told["share, device"] == pytest.approx(0.0125)
    assert (told["steps"], told["commit call"]) == (24.0, 0.005)


@pytest.mark.pages
def test_the_benchmark_for_gpus_runs_as_its_docstring_says(tmp_path: Path) -> None:
    """The environment has torch, and finds muster only by the relative path in the command."""
    command = next(line.strip() for line in (state_gpu.__doc__ or "").splitlines() if "--device cpu" in line)
    words = command.partition("#")[0].split()
    variable, _, source = words[0].partition("=")
    assert (variable, words[1:3]) == ("PYTHONPATH", ["python", "bench/state_gpu.py"])
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([source, sysconfig.get_paths()["purelib"]])}
    small = ("--gb", "0.005", "--kills", "1", "--steps", "4", "--settle-s", "1", "--turns", "0", "--step-s", "0.1")
    run = subprocess.run(
        [str(tmp_path / "bare/bin/python"), *words[2:], *small, "--json"],
        cwd=Path(__file__).parents[2],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert '"lost"' in run.stdout
