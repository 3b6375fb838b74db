"""Log lines of a pipeline's process about its pool: rollouts, grants, waits and lost progress.

The logger is `muster.pool`. The process that waits writes these lines; a scheduler behind a server does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from muster.errors import MusterError
from muster.types.sharing import Gpu, Snapshot

SAY_S = 30.0  # how often a wait is logged

log = logging.getLogger("muster.pool")

GetSnapshot = Callable[[], Awaitable[Snapshot]]


def log_grant(pipeline: str, cluster: str, gpus: Sequence[Gpu]) -> None:
    """Log the GPUs that a pipeline was granted."""
    log.info("%s: granted GPU %s for %s", pipeline, _listed(gpus), cluster)


@contextlib.asynccontextmanager
async def logged_wait(
    get_snapshot: GetSnapshot, pipeline: str, cluster: str, *, is_release: bool = False
) -> AsyncIterator[None]:
    """Log every 30 s, as long as the body runs, why its request waits, or its release if `is_release`."""
    loop = asyncio.get_running_loop()
    reports: set[asyncio.Task[None]] = set()
    goal, reason = (f"the release of {cluster}", release_reason) if is_release else (cluster, wait_reason)

    def begin() -> None:
        def explain(snapshot: Snapshot) -> str:
            return reason(snapshot, pipeline, cluster)

        reports.add(asyncio.create_task(_report_waits(get_snapshot, pipeline, goal, explain, began), name="wait log"))

    began = loop.time()
    timer = loop.call_later(SAY_S, begin)  # most waits end earlier, and need no task
    try:
        yield
    finally:
        timer.cancel()
        for report in reports:
            report.cancel()


async def _report_waits(
    get_snapshot: GetSnapshot, pipeline: str, goal: str, explain: Callable[[Snapshot], str], began: float
) -> None:
    while True:
        try:
            reason = explain(await get_snapshot())
        except MusterError as error:
            reason = error.message
        waited_s = asyncio.get_running_loop().time() - began
        log.warning("%s: waited %.0f s for %s: %s", pipeline, waited_s, goal, reason)
        await asyncio.sleep(SAY_S)


def wait_reason(snapshot: Snapshot, pipeline: str, cluster: str) -> str:
    """Return why a request waits: the planner's reason, which names the holder. Without a reason name all holders."""
    if pipeline in snapshot.quarantined:
        return f"{pipeline} is quarantined: {snapshot.quarantined[pipeline]}"
    for request in snapshot.pending:
        if (request.pipeline, request.cluster) == (pipeline, cluster):
            return request.reason or holders(snapshot, pipeline)
    return f"the pool has no such request; {holders(snapshot, pipeline)}"


def release_reason(snapshot: Snapshot, pipeline: str, cluster: str) -> str:
    """Return why a release waits: the GPUs that the pipeline's own hooks have not freed yet."""
    if pipeline in snapshot.quarantined:
        return f"{pipeline} is quarantined: {snapshot.quarantined[pipeline]}"
    leases = snapshot.leases.items()
    gpus = sorted(gpu for gpu, lease in leases if (lease.pipeline, lease.cluster) == (pipeline, cluster))
    return f"its hooks have not freed GPU {_listed(gpus)}" if gpus else "the scheduler has not answered yet"


def holders(snapshot: Snapshot, pipeline: str) -> str:
    """Return in words which GPUs other pipelines and trainings hold."""
    gpus: dict[str, list[Gpu]] = {}
    for gpu, lease in snapshot.leases.items():
        if lease.pipeline != pipeline:
            gpus.setdefault(f"{lease.pipeline}/{lease.cluster}", []).append(gpu)
    for gpu, worker in snapshot.workers.items():
        gpus.setdefault(f"training {worker.training}", []).append(gpu)
    held = [f"GPU {_listed(sorted(some))} is held by {holder}" for holder, some in gpus.items()]
    return "; ".join(held) or "no other pipeline or training holds a GPU"


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(map(str, gpus))
