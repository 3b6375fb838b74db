"""The identity of a launch (one start of a group of workers), from the user or from Slurm."""

from __future__ import annotations

from collections.abc import Mapping

from muster.types.frames import MAX_TEXT

VARIABLE = "MUSTER_LAUNCH_ID"


def identity(launch_id: str | None, env: Mapping[str, str]) -> str:
    """Return the identity that only the workers of one launch share, or "". ValueError if it is too long.

    A requeued Slurm job keeps its id and gets another restart count.
    """
    if launch_id and len(launch_id) > MAX_TEXT:
        raise ValueError(f"--launch-id has {len(launch_id)} characters; at most {MAX_TEXT} are possible")
    if launch_id or not (job := env.get("SLURM_JOB_ID")):
        return launch_id or ""
    return f"slurm {job} restart {env.get('SLURM_RESTART_COUNT') or 0}"[:MAX_TEXT]
