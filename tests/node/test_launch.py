"""The identity of a launch: which variables of Slurm name it."""

from __future__ import annotations

import pytest

from muster.node import launch

SRUN = {"SLURM_JOB_ID": "80", "SLURM_STEP_ID": "3"}


def test_all_tasks_of_a_step_share_an_identity_and_nothing_else_does() -> None:
    tasks = [SRUN | {"SLURM_PROCID": task, "SLURM_RESTART_COUNT": "0"} for task in ("0", "1")]
    others = [SRUN | {"SLURM_RESTART_COUNT": "1"}, SRUN | {"SLURM_STEP_ID": "4"}, SRUN | {"SLURM_JOB_ID": "81"}]
    assert {launch.identity(None, task) for task in tasks} == {launch.identity(None, SRUN)}
    assert len({launch.identity(None, env) for env in (SRUN, *others)}) == 4


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_STEP_ID": "3"},
        {"SLURM_JOB_ID": "80", "SLURM_RESTART_COUNT": "1"},
        SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA)},
        SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFB)},
        SRUN | {"SLURM_PTY_PORT": "40001"},
    ],
    ids=["no job", "no job id", "batch script or salloc", "shell of salloc as a step", "batch step", "srun --pty"],
)
def test_a_shell_that_can_start_many_launches_is_none(env: dict[str, str]) -> None:
    assert launch.identity(None, env) == ""
    assert launch.identity("monday", env) == "monday"
