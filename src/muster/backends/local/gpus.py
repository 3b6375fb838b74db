"""Which GPUs this machine has to give."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

ASK_TIMEOUT_S = 10.0


def pooled(env: Mapping[str, str]) -> tuple[str, ...]:
    """Those that `MUSTER_POOL_GPUS` names: what the pool had when trainings had GPUs of their own, until 0.1."""
    named = tuple(part.strip() for part in env.get("MUSTER_POOL_GPUS", "").split(",") if part.strip())
    twice = sorted({one for one in named if named.count(one) > 1})
    if twice:
        raise ValueError(f"MUSTER_POOL_GPUS names {', '.join(twice)} more than once")
    return named


def visible(env: Mapping[str, str]) -> tuple[str, ...]:
    """All that is there. What the pool had in 0.1 comes first: pipelines know their GPUs by their numbers."""
    first = pooled(env)
    return (*first, *(one for one in _present(env) if one not in first))


def counted(env: Mapping[str, str]) -> tuple[str, ...]:
    """As many as `MUSTER_GPUS=N` says, where the platform owns them: how many of a cluster's GPUs are for us."""
    told = env.get("MUSTER_GPUS", "").strip()
    if told and not told.isdecimal():
        raise ValueError(f"MUSTER_GPUS must be a number, not {told!r}")
    return tuple(map(str, range(int(told or 0))))


def _present(env: Mapping[str, str]) -> tuple[str, ...]:
    """`MUSTER_GPUS=N` says so; else those that were left to us; else what nvidia-smi lists."""
    if (told := env.get("MUSTER_GPUS", "")).isdigit():
        return tuple(str(index) for index in range(int(told)))
    if (left := env.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(part.strip() for part in left.split(",") if part.strip() not in ("", "-1"))
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(line.strip() for line in asked.stdout.splitlines() if line.strip()) if asked.returncode == 0 else ()
