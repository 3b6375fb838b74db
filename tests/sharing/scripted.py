"""Hooks that do as they are told, and schedulers to try them on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from muster.sharing import ClusterSpec, Pool, Priority, Scheduler
from muster.sharing import journal as journals
from tests.core.sharing.invariants import broken

FOUR = {"actor_train": ClusterSpec(gpus=[0, 1]), "actor_infer": ClusterSpec(gpus=[0, 1, 2, 3])}
OTHER = {"actor_train": ClusterSpec(gpus=[2, 3]), "actor_infer": ClusterSpec(gpus=[0, 1, 2, 3])}
TIMEOUT_S = 10.0


class Hooks:
    """Each call takes the next step of its script: seconds, "raise", "hang", "deaf" (not even a cancel ends it)."""

    def __init__(self, *, shrink: Sequence[Any] = (), expand: Sequence[Any] = ()) -> None:
        self.scripts = {"shrink": list(shrink), "expand": list(expand)}
        self.calls: list[tuple[str, list[int]]] = []
        self.awake: dict[int, list[int]] = {}
        self.running: set[int] = set()  # ranks that some call is about
        self.cancelled = 0
        self.called = asyncio.Event()

    async def shrink(self, ranks: Sequence[int]) -> None:
        await self._act("shrink", list(ranks))
        for rank in ranks:
            self.awake.pop(rank, None)

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        await self._act("expand", list(ranks))
        self.awake.update({rank: list(gpus) for rank, gpus in ranks.items()})

    async def _act(self, kind: str, ranks: list[int]) -> None:
        self.calls.append((kind, ranks))
        self.called.set()
        assert not self.running & {*ranks}, "two calls about one rank overlap"
        self.running |= {*ranks}
        try:
            await self._step(self.scripts[kind].pop(0) if self.scripts[kind] else 0.0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= {*ranks}

    async def _step(self, step: Any) -> None:
        if step == "raise":
            raise OSError("the engine is gone")
        if step == "hang":
            await asyncio.Event().wait()
        elif step == "deaf":
            for _ in range(3):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1000)
        elif step == "cancel":
            raise asyncio.CancelledError
        else:
            await asyncio.sleep(step)

    def of(self, kind: str) -> list[list[int]]:
        return [ranks for name, ranks in self.calls if name == kind]


class PlainHooks:
    """As somebody writes them who has forgotten `async`."""

    def shrink(self, ranks: Sequence[int]) -> Any:
        raise AssertionError("nobody calls it")

    def expand(self, ranks: Mapping[int, Sequence[int]]) -> Any:
        raise AssertionError("nobody calls it")


def plain_vacated() -> Hooks:
    hooks: Any = Hooks()
    hooks.vacated = lambda gpus: True
    return hooks  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def a_scheduler(
    pool: Pool | None = None, journal: Path | None = None, *, hook_timeout_s: float = TIMEOUT_S, **more: Any
) -> AsyncIterator[Scheduler]:
    """A scheduler that runs; at the end its state must be sound."""
    scheduler = Scheduler(pool or Pool(gpus=4, gpus_per_node=4), journal, hook_timeout_s, **more)
    await scheduler.start()
    try:
        yield scheduler
        assert broken(scheduler.shares) == []
    finally:
        await scheduler.stop()


async def joined(
    scheduler: Scheduler, name: str, clusters: Mapping[str, ClusterSpec] | None = None, hooks: Hooks | None = None
) -> Hooks:
    """A pipeline that is registered and admitted."""
    hooks = hooks or Hooks()
    await scheduler.register_pipeline(name, clusters=clusters or FOUR, hooks=hooks)
    await scheduler.admit_pipeline(name)
    return hooks


async def generating(scheduler: Scheduler, name: str, estimate: int = 100, **more: Any) -> list[int]:
    return await scheduler.request_gpus(name, "actor_infer", Priority.GENERATION, step_target_estimate=estimate, **more)


async def training(scheduler: Scheduler, name: str, **more: Any) -> list[int]:
    return await scheduler.request_gpus(name, "actor_train", Priority.ACTOR_TRAINING, **more)


def held_by(scheduler: Scheduler, name: str) -> dict[int, str]:
    """GPU → state, of what a pipeline has."""
    return {gpu: one.state for gpu, one in scheduler.snapshot().leases.items() if one.pipeline == name}


async def turns(count: int = 20) -> None:
    """Let everything that is ready happen."""
    for _ in range(count):
        await asyncio.sleep(0)


def restart_the_machine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as journals can tell."""
    (place / "boot_id").write_text("another boot")
    monkeypatch.setattr(journals, "BOOT_ID", place / "boot_id")
