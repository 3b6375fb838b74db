"""What does a program hold that was written for Basilica's SDK? Its handle and its records, over our own."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from muster.errors import MusterError
from muster.sdk import training as ours
from muster.types.bench import BenchSize, bus_bytes
from muster.types.event import Event
from muster.types.training import RankExit, Training, WorldStatus

log = logging.getLogger("muster.compat")

MIN_WORLD_S, TARGET_WORLD_S, COMPLETE_S = 300, 600, 1800
_GB, _MIB = 1e9, 1 << 20


@dataclass(frozen=True)
class RankStatus:
    """A rank; `pod_name` is its worker. Where one rents no machines there is neither provider nor region."""

    rank: int
    pod_name: str
    node: str | None
    provider: str | None
    region: str | None
    phase: str
    restarts: int


@dataclass(frozen=True)
class BenchResult:
    """What `bench=True` measured before the program began, in GB of 10⁹ bytes each second and in microseconds."""

    measured_at: datetime | None
    busbw_gbps_p10: float | None
    busbw_gbps_p50: float | None
    busbw_gbps_p90: float | None
    algbw_gbps_p50: float | None
    latency_us_at_1mib: float | None
    size_bytes_swept: list[int]
    probe_node_a: str
    probe_node_b: str


@dataclass(frozen=True)
class DistributedMetrics:
    world_ready: int
    world_target: int
    rendezvous_restarts_total: int
    rank_restarts_total: int
    time_to_first_rendezvous_seconds: float | None
    last_resize_at: datetime | None


class DistributedTraining:
    """A training, as programs for Basilica's SDK hold it. `muster` is our handle on the same, which can do more."""

    def __init__(self, handle: ours.DistributedTraining) -> None:
        self.muster = handle

    def __repr__(self) -> str:
        return repr(self.muster)

    # What it is

    @property
    def name(self) -> str:
        return self.muster.name

    @property
    def namespace(self) -> str:
        return self.muster.namespace

    @property
    def phase(self) -> str:
        return self.muster.phase

    @property
    def is_terminal(self) -> bool:
        return self.muster.is_terminal

    @property
    def world(self) -> WorldStatus:
        return self.muster.world

    @property
    def rendezvous_endpoint(self) -> str:
        """Empty while no round is out."""
        return self.muster.rendezvous_endpoint or ""

    @property
    def ranks(self) -> list[RankStatus]:
        return [
            RankStatus(one.rank, one.worker, one.node or None, None, None, one.phase, one.restarts)
            for one in self.muster.ranks
        ]

    @property
    def rank_exits(self) -> list[RankExit]:
        return self.muster.rank_exits

    @property
    def bench(self) -> BenchResult | None:
        """None: nothing was measured, for whatever reason; `bench_diagnostics` has that."""
        return bench_of(self.muster.training)

    @property
    def bench_diagnostics(self) -> dict[str, Any] | None:
        found = self.muster.bench
        return None if found is None else {"phase": "failed" if found.error else "succeeded", "message": str(found)}

    def metrics(self) -> DistributedMetrics:
        return metrics_of(self.muster.training)

    async def metrics_async(self) -> DistributedMetrics:
        return metrics_of(self.muster.training)

    # What it can be told

    def refresh(self) -> None:
        self.muster.refresh()

    async def refresh_async(self) -> None:
        await self.muster.refresh_async()

    def scale(self, target: int) -> WorldStatus:
        return self.muster.scale(target)

    async def scale_async(self, target: int) -> WorldStatus:
        return await self.muster.scale_async(target)

    def delete(self) -> None:
        self.muster.delete()

    async def delete_async(self) -> None:
        await self.muster.delete_async()

    # What it tells

    def logs(self, tail: int | None = None, follow: bool = False, rank: int | None = None) -> str:
        return "\n".join(self.muster.logs(rank=rank, follow=follow, tail=tail))

    async def logs_async(self, tail: int | None = None, follow: bool = False, rank: int | None = None) -> str:
        return "\n".join([line async for line in self.muster.logs_async(rank=rank, follow=follow, tail=tail)])

    def stream_logs(self, ranks: Collection[int] | None = None) -> Iterator[tuple[int, str]]:
        return self.muster.stream_logs(ranks)

    def stream_logs_async(self, ranks: Collection[int] | None = None) -> AsyncIterator[tuple[int, str]]:
        return self.muster.stream_logs_async(ranks)

    def events(self, since: str | None = None) -> list[dict[str, Any]]:
        """The newest first."""
        return [event_of(one) for one in reversed(self.muster.events(since))]

    async def events_async(self, since: str | None = None) -> list[dict[str, Any]]:
        return [event_of(one) for one in reversed(await self.muster.events_async(since))]

    # What can be waited for

    def wait_until_min_world(self, timeout: float = MIN_WORLD_S) -> None:
        self.muster.wait_until_min_world(timeout)

    async def wait_until_min_world_async(self, timeout: float = MIN_WORLD_S) -> None:
        await self.muster.wait_until_min_world_async(timeout)

    def wait_until_target_world(self, timeout: float = TARGET_WORLD_S) -> None:
        self.muster.wait_until_target_world(timeout)

    async def wait_until_target_world_async(self, timeout: float = TARGET_WORLD_S) -> None:
        await self.muster.wait_until_target_world_async(timeout)

    def wait_until_complete(self, timeout: float = COMPLETE_S) -> WorldStatus:
        return self.muster.wait_until_complete(timeout)

    async def wait_until_complete_async(self, timeout: float = COMPLETE_S) -> WorldStatus:
        return await self.muster.wait_until_complete_async(timeout)

    # Held for the length of a block

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Delete it, whatever has happened."""
        self.clean_up()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.clean_up_async()

    def clean_up(self) -> None:
        """Delete it if that can be done; what goes wrong is logged, for something else has gone wrong already."""
        try:
            self.muster.delete()
        except MusterError as wrong:
            log.warning("training %s could not be deleted: %s", self.name, wrong.message)

    async def clean_up_async(self) -> None:
        try:
            await self.muster.delete_async()
        except MusterError as wrong:
            log.warning("training %s could not be deleted: %s", self.name, wrong.message)


def event_of(event: Event) -> dict[str, Any]:
    at = event.at.isoformat() if event.at is not None else None
    return {
        "event_type": event.type,
        "reason": event.reason,
        "message": event.message,
        "count": 1,
        "last_timestamp": at,
    }


def metrics_of(training: Training) -> DistributedMetrics:
    status = training.status
    created, first = training.metadata.creation_timestamp, status.started_at
    return DistributedMetrics(
        world_ready=status.world_size.ready,
        world_target=status.world_size.target,
        rendezvous_restarts_total=status.round or 0,
        rank_restarts_total=sum(one.restarts for one in status.ranks),
        time_to_first_rendezvous_seconds=(first - created).total_seconds() if first and created else None,
        last_resize_at=status.last_resize.at if status.last_resize is not None else None,
    )


def bench_of(training: Training) -> BenchResult | None:
    found = training.status.bench
    if found is None or found.error or not found.sizes:
        return None
    largest = max(found.sizes, key=lambda one: one.bytes)
    carried = bus_bytes(largest.bytes, found.ranks) / _GB
    one_mib: BenchSize | None = next((one for one in found.sizes if one.bytes == _MIB), None)
    workers = list(dict.fromkeys(one.worker for one in training.status.ranks))
    return BenchResult(
        measured_at=found.measured_at,
        busbw_gbps_p10=carried / largest.slow_seconds,
        busbw_gbps_p50=carried / largest.median_seconds,
        busbw_gbps_p90=carried / largest.fast_seconds,
        algbw_gbps_p50=largest.bytes / _GB / largest.median_seconds,
        latency_us_at_1mib=one_mib.median_seconds * 1e6 if one_mib is not None else None,
        size_bytes_swept=[one.bytes for one in found.sizes],
        probe_node_a=workers[0] if workers else "",
        probe_node_b=workers[1] if len(workers) > 1 else "",
    )
