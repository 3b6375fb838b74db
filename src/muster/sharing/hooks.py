"""What does a pipeline bring, and how does it speak to the scheduler?

`PipelineHooks` is what the scheduler calls; `PipelineClient` is what the pipeline's own loop calls.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from muster.errors import InvalidRequest, MusterError, RequestRefused
from muster.sharing.api import RolloutApi
from muster.sharing.pool_log import log
from muster.types.codec import Problem
from muster.types.sharing import GENERATION_CLUSTER, Gpu, Priority, ProgressReport

STEPS = 50  # progress is reported so many times per batch: every 2 %
_REQUIRED = ("shrink", "expand")


class PipelineHooks(Protocol):
    """Both calls are idempotent, and may be cancelled and made again.

    A pipeline may also have `async vacated(gpus) -> bool`. It is asked after each shrink until it says yes: an
    engine's word that its memory is free is not proof.
    """

    async def shrink(self, ranks: Sequence[int], /) -> Any:
        """Returns when routing is off, turns in flight are queued again and memory is free."""

    async def expand(self, ranks: Mapping[int, Sequence[Gpu]], /) -> Any:
        """Returns when each rank has the newest published weights and takes work."""


def problems(hooks: object) -> tuple[Problem, ...]:
    """What is missing. Hooks that cannot be called are an error at the start, not a quarantine at their first use."""
    if hooks is None:
        return (Problem("hooks", "are required: without them nothing can be moved"),)
    if isinstance(hooks, type):
        return (Problem("hooks", f"must be an object, not the class {hooks.__name__} itself"),)
    missing = [name for name in _REQUIRED if not callable(getattr(hooks, name, None))]
    found = [Problem("hooks", f"must have an async {name}") for name in missing]
    for name in (*_REQUIRED, "vacated"):
        hook = getattr(hooks, name, None)
        if name not in missing and hook is not None and not _is_async(hook):
            found.append(Problem("hooks", f"{name} must be an async function: a plain one cannot be awaited"))
    return tuple(found)


def _is_async(hook: object) -> bool:
    """Whether a call of it can be awaited, as far as can be told without calling it."""
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004


@dataclass
class _Batch:
    target: int
    completed: int = 0
    refused: str = ""  # why the scheduler does not count it any more

    @property
    def step(self) -> int:
        return self.completed * STEPS // self.target if self.target else STEPS


class PipelineClient:
    """Demand and progress of one pipeline, from inside its rollout loop."""

    def __init__(self, scheduler: RolloutApi, pipeline: str) -> None:
        missing = [
            name
            for name in ("request_gpus", "report_progress", "clear_progress")
            if not callable(getattr(scheduler, name, None))
        ]
        if missing:
            raise InvalidRequest(f"{type(scheduler).__name__} is no scheduler: it has no {', '.join(missing)}")
        self._scheduler = scheduler
        self.pipeline = pipeline
        self._rollout_id: str | None = None
        self._demand_waits = False  # after a time-out the demand stays, and another call for it begins no rollout
        self._batches: dict[str | None, _Batch] = {}

    async def signal_rollout_demand(
        self, rollout_id: str | int, step_target: int, timeout: float | None = None
    ) -> list[Gpu]:
        """Declare how much this rollout needs, and return when a bundle is awake: call it before the first sample.

        Without a `timeout` it waits without a limit. After a `timeout` it raises GrantTimeout, and the rollout stays
        open: GPUs may still be granted, and `begin_progress_batch` is accepted.
        """
        before, self._rollout_id = self._rollout_id, str(rollout_id)
        self._batches.clear()
        if not (self._demand_waits and before == self._rollout_id):
            log.info("%s: rollout %s begins: %s trajectories to generate", self.pipeline, self._rollout_id, step_target)
        self._demand_waits = True
        gpus = await self._scheduler.request_gpus(
            self.pipeline,
            GENERATION_CLUSTER,
            Priority.GENERATION,
            step_target_estimate=step_target,
            timeout=timeout,
            rollout_id=self._rollout_id,
        )
        self._demand_waits = False
        return gpus

    async def begin_progress_batch(self, target: int, stream: str | None = None) -> None:
        """The rollout must be open: `signal_rollout_demand`, or a request for generation, comes first."""
        if isinstance(target, bool) or not isinstance(target, int) or target < 0:
            raise InvalidRequest(f"a batch's target is a whole number, not {target!r}")
        is_first = self._rollout_id is None and not self._batches  # otherwise `signal_rollout_demand` has logged it
        batch = self._batches[stream] = _Batch(target)
        if why := await self._report(stream, batch):
            self._batches.pop(stream, None)
            raise self._uncounted("begin_progress_batch", why)
        if is_first:
            log.info("%s: a rollout begins: %s trajectories to generate", self.pipeline, target)

    async def bump_completed(self, n: int = 1, stream: str | None = None) -> None:
        """Count; the scheduler hears of it once per step of 2 %, and says then if the rollout is not open any more."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise InvalidRequest(f"completed trajectories are counted in whole numbers, not by {n!r}")
        batch = self._batch("bump_completed", stream)
        before = batch.step
        batch.completed = min(batch.completed + n, batch.target)
        if batch.step != before and not batch.refused:
            batch.refused = await self._report(stream, batch)
        if batch.refused:
            raise self._uncounted("bump_completed", batch.refused)

    async def end_progress_batch(self, stream: str | None = None) -> None:
        """The last stream's end is the end of the rollout."""
        await self._report(stream, self._batch("end_progress_batch", stream))
        self._batches.pop(stream, None)
        if not self._batches:
            with self._logged_loss("the end of its rollout"):
                await self._scheduler.clear_progress(self.pipeline)

    def _batch(self, call: str, stream: str | None) -> _Batch:
        if stream not in self._batches:
            told = f"{call}: {self.pipeline} has no batch {stream or ''!r} open"
            raise RequestRefused(told, hint="begin_progress_batch comes first")
        return self._batches[stream]

    def _uncounted(self, call: str, why: str) -> RequestRefused:
        return RequestRefused(f"{call} of {self.pipeline}: {why}", hint="signal_rollout_demand comes first")

    async def _report(self, stream: str | None, batch: _Batch) -> str:
        """Why it was not counted, if it was not."""
        report = ProgressReport(self.pipeline, batch.completed, batch.target, stream, self._rollout_id)
        progress = f"progress {batch.completed} of {batch.target}"
        with self._logged_loss(progress):
            refusal = await self._scheduler.report_progress(report) or ""
        if refusal:
            log.warning("%s: %s was refused: %s", self.pipeline, progress, refusal)
        return refusal

    @contextlib.contextmanager
    def _logged_loss(self, report: str) -> Iterator[None]:
        """Log that a report did not arrive, and raise its error again."""
        try:
            yield
        except MusterError as error:
            log.warning("%s: %s was lost: %s", self.pipeline, report, error.message)
            raise
