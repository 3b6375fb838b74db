"""Trainings for tests: whatever a test does not name has a value that is allowed and dull."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from muster.types.training import Key, Metadata, RankExit, Spec, Status, Training, WorldSize, WorldStatus

BIRTH = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
_numbers = itertools.count(1)


def a_training(
    name: str = "demo",
    *,
    namespace: str = "default",
    uid: str | None = None,
    generation: int = 1,
    labels: Mapping[str, str] | None = None,
    status: Status | None = None,
    phase: str | None = None,
    world: tuple[int, int, int] | None = None,
    **spec: Any,
) -> Training:
    """A training; further keywords are fields of its spec, `world` is (min, target, max)."""
    if not {"command", "script", "module"} & spec.keys():
        spec["script"] = "train.py"
    if world is not None:
        spec["world_size"] = WorldSize(*world)
    metadata = Metadata(
        name=name,
        namespace=namespace,
        uid=uid if uid is not None else f"uid-{next(_numbers)}",
        generation=generation,
        creation_timestamp=BIRTH,
        labels=labels or {},
    )
    given = status if status is not None else Status()
    if phase is not None:
        given = dataclasses.replace(given, phase=phase)  # type: ignore[arg-type]
    return Training(metadata, Spec(**spec), given)


def a_status(*, ready: int = 0, world: tuple[int, int, int] = (1, 1, 1), **more: Any) -> Status:
    """A status; `world` is (min, target, max)."""
    least, target, most = world
    return Status(world_size=WorldStatus(ready=ready, target=target, min=least, max=most), **more)


def a_rank_exit(rank: int = 0, exit_code: int | None = 0, **more: Any) -> RankExit:
    return RankExit(rank, exit_code, more.pop("termination_reason", f"Exit {exit_code}"), **more)


def key_of(name: str = "demo", namespace: str = "default") -> Key:
    return Key(namespace, name)
