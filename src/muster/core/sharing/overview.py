"""What do people see of a pool? Every GPU with who has it, everybody who waits with the reason, and who used how much.

And for a training that lends: where its GPUs are, and when they come back. An estimate is given only where the
pipeline that has them tells how fast it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from muster.core.sharing.crews import in_words
from muster.core.sharing.plans import Standing
from muster.types.pools import GpuView, UsedView, WaitingView
from muster.types.sharing import (
    GENERATION_CLUSTER,
    Crew,
    Gpu,
    Lease,
    LeaseState,
    Priority,
    Shares,
    Used,
    WorkerLease,
    gpus_of,
)

MOST_WAITING = 500
_LONGEST_REASON = 300
_GROUPS_TOLD = 3
_LONG_S = 120.0  # told in minutes from then on

Named = Callable[[str], Mapping[Gpu, str]]  # uid of a training → names of its workers, by GPU


@dataclass(frozen=True)
class Moment:
    """Now, on the scheduler's clock and as people read it."""

    s: float
    shown: datetime

    def of(self, at: float | None) -> datetime | None:
        return None if at is None else self.shown - timedelta(seconds=self.s - at)

    def age(self, at: float | None) -> float | None:
        return None if at is None else round(max(0.0, self.s - at), 3)


# GPUs --------------------------------------------------------------------------------------------


def gpus(shares: Shares, devices: Sequence[str], named: Named, now: Moment) -> list[GpuView]:
    leases = {gpu: one for one in shares.leases.values() for gpu in gpus_of(one.mask)}
    workers = {gpu: one for one in shares.workers.values() for gpu in gpus_of(one.mask)}
    names = {uid: named(uid) for uid in shares.crews}
    lenders = {gpu: crew for crew in shares.crews.values() for gpu in gpus_of(crew.parked)}
    found = []
    for gpu in range(shares.pool.gpus):
        device = devices[gpu] if gpu < len(devices) else ""
        if (lease := leases.get(gpu)) is not None:
            one = _of_pipeline(gpu, device, lease, now)
        elif (worker := workers.get(gpu)) is not None:
            one = _of_training(gpu, device, worker, shares.crews.get(worker.training), names, now)
        elif gpu in shares.lost_gpus:
            one = GpuView(gpu, "lost", device, reason=_short(shares.lost_gpus[gpu]))
        else:
            since = shares.vacant_since.get(gpu)
            one = GpuView(gpu, "idle", device, since=now.of(since), seconds=now.age(since))
        found.append(_lent(one, lenders.get(gpu), names))
    return found


def _of_pipeline(gpu: Gpu, device: str, lease: Lease, now: Moment) -> GpuView:
    bundle = lease.bundle
    return GpuView(
        gpu,
        lease.state.value,
        device,
        pipeline=bundle.pipeline,
        cluster=bundle.cluster,
        rank=bundle.rank,
        reason=_short(lease.reason),
        since=now.of(lease.held_since),
        seconds=now.age(lease.held_since),
    )


def _of_training(
    gpu: Gpu, device: str, lease: WorkerLease, crew: Crew | None, names: Mapping[str, Mapping[Gpu, str]], now: Moment
) -> GpuView:
    return GpuView(
        gpu,
        lease.state.value,
        device,
        training=crew.name if crew is not None else lease.training,
        worker=names.get(lease.training, {}).get(gpu),
        reason=_short(lease.reason),
        since=now.of(lease.held_since),
        seconds=now.age(lease.held_since),
    )


def _lent(one: GpuView, lender: Crew | None, names: Mapping[str, Mapping[Gpu, str]]) -> GpuView:
    if lender is None or one.training == lender.name:
        return one
    return replace(one, lent_by=lender.name, lent_worker=names.get(lender.training, {}).get(one.gpu))


# Who waits, and who used how much ----------------------------------------------------------------


def waiting(
    shares: Shares, reasons: Mapping[int, str], standings: Mapping[str, Standing], now: Moment
) -> list[WaitingView]:
    """Pipelines in the order of their requests; then trainings, those that do not have their minimum first."""
    found = [
        WaitingView(
            _short(reasons.get(one.seq, "")),
            pipeline=one.pipeline,
            cluster=one.cluster,
            priority=one.priority.name,
            since=now.of(one.since),
            seconds=now.age(one.since),
        )
        for one in shares.requests
    ]
    lacking = [(crew, standings[uid]) for uid, crew in shares.crews.items() if _lacks(shares, crew, standings.get(uid))]
    lacking.sort(key=lambda item: (item[1].admitted, -item[0].priority, item[0].created, item[0].training))
    for crew, standing in lacking:
        since = None if standing.admitted else crew.asked_at
        found.append(
            WaitingView(
                _short(standing.message),
                training=crew.name,
                state=standing.reason,
                workers=_has(shares, crew),
                wanted=crew.wanted,
                since=now.of(since),
                seconds=now.age(since),
            )
        )
    return found


def _lacks(shares: Shares, crew: Crew, standing: Standing | None) -> bool:
    return standing is not None and _has(shares, crew) < crew.wanted


def _has(shares: Shares, crew: Crew) -> int:
    return sum(one.training == crew.training and one.state is LeaseState.HELD for one in shares.workers.values())


def used(found: Iterable[Used], shown: Callable[[float], datetime]) -> list[UsedView]:
    return [UsedView(one.kind, one.name, round(one.gpu_seconds, 3), one.held, shown(one.since)) for one in found]


# A training that lends ---------------------------------------------------------------------------


def returning(shares: Shares, training: str, now: float) -> str:
    """Where the GPUs of its workers are that wait for them, and when they come back; "" if they lack none."""
    crew = shares.crews.get(training)
    if crew is None or not crew.lends:
        return ""
    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus_of(crew.parked):
        if where := _whereabouts(shares, crew, gpu, now):
            groups.setdefault(where, []).append(gpu)
    told = [_sentence(some, where) for where, some in groups.items()]
    more = [f"{len(told) - _GROUPS_TOLD} more are elsewhere"] if len(told) > _GROUPS_TOLD else []
    return "; ".join([*told[:_GROUPS_TOLD], *more])


def _whereabouts(shares: Shares, crew: Crew, gpu: Gpu, now: float) -> str:
    for lease in shares.leases.values():
        if lease.mask >> gpu & 1:
            held = f"with {in_words(lease.bundle)} since {_span(now - lease.held_since)}"
            return f"{held}, {_return(shares, lease)}"
    for worker in shares.workers.values():
        if worker.mask >> gpu & 1:
            if worker.training == crew.training or worker.training not in shares.crews:
                return ""
            held = f"with training {shares.crews[worker.training].name} since {_span(now - worker.held_since)}"
            return f"{held}, comes back when it is done"
    return f"out of use: {shares.lost_gpus[gpu]}" if gpu in shares.lost_gpus else "free, and on its way back"


def _return(shares: Shares, lease: Lease) -> str:
    pipeline = shares.pipelines[lease.bundle.pipeline]
    if pipeline.quarantined:
        return f"which is quarantined: {_short(pipeline.quarantined)}"
    if lease.state is LeaseState.DRAINING:
        return "which is leaving it"
    seconds = _left_s(shares, lease)
    return "comes back when it is done" if seconds is None else f"comes back in about {_span(max(1.0, seconds))}"


def _left_s(shares: Shares, lease: Lease) -> float | None:
    """How long its pipeline will generate, where its rollout tells how fast it is."""
    rollout = shares.rollouts.get(lease.bundle.pipeline)
    if lease.priority is not Priority.GENERATION or lease.bundle.cluster != GENERATION_CLUSTER or rollout is None:
        return None
    bundles = sum(
        bundle.pipeline == lease.bundle.pipeline
        and one.priority is Priority.GENERATION
        and one.state is LeaseState.HELD
        for bundle, one in shares.leases.items()
    )
    if not rollout.rate or not bundles:
        return None
    return rollout.remaining / (rollout.rate * bundles)


def _sentence(some: Sequence[Gpu], where: str) -> str:
    if len(some) == 1:
        return f"GPU {some[0]} is {where}"
    listed = f"GPUs {', '.join(map(str, some[:-1]))} and {some[-1]}"
    return f"{listed} are {where.replace(', comes back', ', come back')}"


def _span(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s" if seconds < _LONG_S else f"{seconds / 60:.0f} min"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 1]}…"
