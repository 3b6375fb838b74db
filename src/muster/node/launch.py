"""The identity of a launch (one start of a group of workers), from the user or from Slurm."""

from __future__ import annotations

from collections.abc import Mapping

from muster.types.frames import MAX_TEXT

VARIABLE = "MUSTER_LAUNCH_ID"
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm gives such numbers to the batch script and to the shell of salloc


def identity(launch_id: str | None, env: Mapping[str, str]) -> str:
    """Return the identity that only the workers of one launch share, or "". ValueError if it is too long.

    In Slurm one call of srun is a launch: all its tasks have one step id. A requeued job keeps its id and gets another
    restart count. A batch script, the shell of salloc and `srun --pty` can start many launches, so they are none.
    """
    if launch_id and len(launch_id) > MAX_TEXT:
        raise ValueError(f"--launch-id has {len(launch_id)} characters; at most {MAX_TEXT} are possible")
    return launch_id or _slurm_step(env)[:MAX_TEXT]


def _slurm_step(env: Mapping[str, str]) -> str:
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
    is_task = step.isascii() and step.isdigit() and int(step) < _FIRST_SPECIAL_STEP
    if not job or not is_task or env.get("SLURM_PTY_PORT"):
        return ""
    return f"slurm {job} restart {env.get('SLURM_RESTART_COUNT') or 0} step {step}"
