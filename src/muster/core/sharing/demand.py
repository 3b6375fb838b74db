"""Who wants GPUs, and how much is left to generate? How requests, rollouts and progress change.

Every function takes the state and returns the next one, or raises before anything has changed.
Demand is durable: a rollout stays open when its request is granted, until somebody closes it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace

from muster.errors import (
    InvalidRequest,
    NotFound,
    PipelineKilled,
    PipelineQuarantined,
    RequestRefused,
    WouldDeadlock,
)
from muster.types.codec import MOST, is_text
from muster.types.sharing import (
    GENERATION_CLUSTER,
    Bundle,
    Gpu,
    Lease,
    LeaseState,
    Pipeline,
    PipelineId,
    Priority,
    ProgressReport,
    Request,
    Rollout,
    Shares,
    Stream,
    gpus_of,
)

NEWEST = 0.5  # how much the newest measurement counts in a moving average


@dataclass(frozen=True)
class Wish:
    """What somebody asks for."""

    pipeline: PipelineId
    cluster: str
    priority: Priority
    estimate: int | None = None
    rollout_id: str | None = None


@dataclass(frozen=True)
class Asked:
    """What became of a wish: a request that waits, or, with none, the GPUs that are held already."""

    shares: Shares
    request: Request | None
    gpus: tuple[Gpu, ...] = ()


def moving(average: float | None, measured: float) -> float:
    return measured if average is None else (1 - NEWEST) * average + NEWEST * measured


def known(shares: Shares, pipeline: PipelineId) -> Pipeline:
    found = shares.pipelines.get(pipeline)
    if found is None:
        for one in reversed(shares.killed):
            if one.pipeline == pipeline:
                raise PipelineKilled(f"{pipeline} was killed: {one.why}", hint="another process may register it anew")
        raise NotFound(f"pipeline {pipeline!r} is not registered")
    return found


def frozen(there: Pipeline) -> PipelineQuarantined:
    """What whoever asks for a quarantined pipeline is told."""
    if there.killed:
        told = f"{there.pipeline_id} was killed: {there.killed}"
        return PipelineKilled(told, hint="release what is held and end; another process may register it anew")
    return PipelineQuarantined(
        f"{there.pipeline_id} is quarantined: {there.quarantined}",
        hint="register it again: it then has to shrink all its ranks",
    )


def leases_of(shares: Shares, pipeline: PipelineId, cluster: str) -> Iterator[Lease]:
    """A cluster's leases, lowest rank first."""
    for rank in range(len(shares.pipelines[pipeline].clusters[cluster].bundles)):
        lease = shares.leases.get(Bundle(pipeline, cluster, rank))
        if lease is not None:
            yield lease


def held_gpus(shares: Shares, pipeline: PipelineId, cluster: str) -> tuple[Gpu, ...]:
    """What the pipeline may use of that cluster now, sorted."""
    mask = 0
    for lease in leases_of(shares, pipeline, cluster):
        if lease.state is LeaseState.HELD:
            mask |= lease.mask
    return tuple(gpus_of(mask))


def pending(shares: Shares, pipeline: PipelineId, cluster: str) -> Request | None:
    for request in shares.requests:
        if request.pipeline == pipeline and request.cluster == cluster:
            return request
    return None


# Requests ----------------------------------------------------------------------------------------


def requested(shares: Shares, wish: Wish, now: float, *, orphans: Container[int] = ()) -> Asked:
    """Somebody asks. `orphans` are requests whose waiter is gone: the same wish takes its place again."""
    _check_wish(shares, wish)
    waiting = pending(shares, wish.pipeline, wish.cluster)
    if waiting is not None:
        if waiting.seq not in orphans:
            raise RequestRefused(f"{wish.pipeline}/{wish.cluster} is already pending at {waiting.priority.name}")
        if (waiting.priority, waiting.estimate) == (wish.priority, wish.estimate):
            back = replace(waiting, absent=False)
            places = tuple(back if one is waiting else one for one in shares.requests)
            return Asked(replace(shares, requests=places), back)
        shares = withdrawn(shares, waiting.seq)
    _check_priority_held(shares, wish)
    if wish.priority is Priority.GENERATION:
        return _generation(shares, wish, now)
    gpus = held_gpus(shares, wish.pipeline, wish.cluster)
    spec = shares.pipelines[wish.pipeline].clusters[wish.cluster]
    if len(gpus) == len(spec.gpus):  # held at this priority, so the answer got lost; or a cluster without GPUs
        return Asked(shares, None, gpus)
    if gpus:
        raise RequestRefused(f"{wish.pipeline}/{wish.cluster} has lost bundles: release what is left of it first")
    loop = cycle(shares, wish.pipeline, spec.mask)
    if loop:
        raise WouldDeadlock(f"would wait forever: {loop}", hint="release what is held before asking for more")
    return _enqueued(shares, wish, now)


def _check_wish(shares: Shares, wish: Wish) -> None:
    pipeline = known(shares, wish.pipeline)
    if pipeline.quarantined:
        raise frozen(pipeline)
    if wish.cluster not in pipeline.clusters:
        raise RequestRefused(f"{wish.pipeline} has no cluster {wish.cluster!r}")
    if not pipeline.admitted:
        raise RequestRefused(f"{wish.pipeline} is not admitted", hint="call admit_pipeline first")
    if wish.priority is Priority.GENERATION:
        if wish.cluster != GENERATION_CLUSTER:
            raise RequestRefused(f"only {GENERATION_CLUSTER} generates, not {wish.cluster}")
        if wish.estimate is not None and not _counts(wish.estimate, least=1):
            raise InvalidRequest(f"step_target_estimate must be a whole number of at least 1, not {wish.estimate!r}")
        if wish.rollout_id is not None and not _is_name(wish.rollout_id):
            raise InvalidRequest(f"rollout_id is a text or a number, not {wish.rollout_id!r}")
    elif wish.estimate is not None:
        raise RequestRefused(f"step_target_estimate is for generation, not for {wish.priority.name}")


def _check_priority_held(shares: Shares, wish: Wish) -> None:
    """Draining bundles are on their way out: a request for them just waits."""
    for lease in leases_of(shares, wish.pipeline, wish.cluster):
        if lease.state is not LeaseState.DRAINING and lease.priority is not wish.priority:
            raise RequestRefused(
                f"{wish.pipeline}/{wish.cluster} is held at {lease.priority.name}, not at {wish.priority.name}",
                hint="use notify_release_then_request_gpus",
            )


def _generation(shares: Shares, wish: Wish, now: float) -> Asked:
    before = shares.rollouts.get(wish.pipeline)
    gpus = held_gpus(shares, wish.pipeline, wish.cluster)
    if wish.estimate is not None:
        shares = _new_step(shares, wish, before, now)
    elif before is None:
        raise RequestRefused(
            f"{wish.pipeline} asks for generation with neither an estimate nor progress: nothing says how much",
            hint="give step_target_estimate",
        )
    elif not gpus and before.remaining == 0:
        raise RequestRefused(f"{wish.pipeline} has nothing left to generate", hint="give step_target_estimate")
    if gpus:
        return Asked(shares, None, gpus)
    # A named rollout is a declared demand: it stays open when the request that opened it is withdrawn.
    return _enqueued(shares, wish, now, opened=before is None and wish.rollout_id is None)


def _new_step(shares: Shares, wish: Wish, before: Rollout | None, now: float) -> Shares:
    if before is not None and before.rollout_id not in (None, wish.rollout_id):
        shares = _remember_id(shares, wish.pipeline, before)
    rollout = Rollout(
        estimate=wish.estimate,
        rollout_id=wish.rollout_id,
        opened_at=now,
        waiting_since=before.waiting_since if before else None,
        rate=before.rate if before else None,
    )
    return settled(replace(shares, rollouts={**shares.rollouts, wish.pipeline: rollout}), wish.pipeline, now)


def _enqueued(shares: Shares, wish: Wish, now: float, *, opened: bool = False) -> Asked:
    seq = shares.seq + 1
    request = Request(seq, wish.pipeline, wish.cluster, wish.priority, now, wish.estimate, opened)
    return Asked(replace(shares, seq=seq, requests=(*shares.requests, request)), request)


def withdrawn(shares: Shares, seq: int) -> Shares:
    """Withdraw a request. The rollout that it opened closes too, unless it has a name, GPUs or a report."""
    request = next((one for one in shares.requests if one.seq == seq), None)
    if request is None:
        return shares
    shares = answered(shares, seq)
    rollout = shares.rollouts.get(request.pipeline)
    untouched = rollout is not None and not rollout.streams and not held_gpus(shares, request.pipeline, request.cluster)
    return closed(shares, request.pipeline) if request.opened and untouched else shares


def answered(shares: Shares, seq: int) -> Shares:
    return replace(shares, requests=tuple(one for one in shares.requests if one.seq != seq))


def cycle(shares: Shares, pipeline: PipelineId, mask: int) -> str:
    """The hold-and-wait cycle that a wait of this pipeline for these GPUs would close, in words; "" if none."""
    fixed = [lease for lease in shares.leases.values() if lease.priority is not Priority.GENERATION]
    waits: dict[PipelineId, int] = {}
    for request in shares.requests:
        if request.priority is not Priority.GENERATION:
            wanted = shares.pipelines[request.pipeline].clusters[request.cluster].mask
            waits[request.pipeline] = waits.get(request.pipeline, 0) | wanted
    paths: list[tuple[PipelineId, int, str]] = [(pipeline, waits.get(pipeline, 0) | mask, "")]
    seen: set[PipelineId] = set()
    while paths:
        waiter, wanted, said = paths.pop()
        for lease in fixed:
            if not lease.mask & wanted:
                continue
            holder = lease.bundle.pipeline
            gpu = gpus_of(lease.mask & wanted)[0]
            step = f"{said}{waiter} waits for GPU {gpu}, held by {holder}/{lease.bundle.cluster}"
            if holder == pipeline:
                return step
            if holder not in seen:
                seen.add(holder)
                paths.append((holder, waits.get(holder, 0), step + "; "))
    return ""


def deadlocked(shares: Shares, pipeline: PipelineId) -> tuple[Request, str] | None:
    """A pipeline's youngest fixed request, if its waits and what it holds are part of a cycle; with the cycle."""
    waiting = [one for one in shares.requests if one.pipeline == pipeline and one.priority is not Priority.GENERATION]
    if not waiting:
        return None
    loop = cycle(shares, pipeline, 0)
    return (waiting[-1], loop) if loop else None


# Rollouts and progress ---------------------------------------------------------------------------


def closed(shares: Shares, pipeline: PipelineId) -> Shares:
    """Its demand is over: nothing expands it before its next generation request; who waits for it waits in vain."""
    rollout = shares.rollouts.get(pipeline)
    if rollout is not None:
        left = {name: one for name, one in shares.rollouts.items() if name != pipeline}
        shares = _remember_id(replace(shares, rollouts=left), pipeline, rollout)
    waiting = pending(shares, pipeline, GENERATION_CLUSTER)
    if waiting is not None and waiting.priority is Priority.GENERATION:
        shares = answered(shares, waiting.seq)
    return shares


def cleared(shares: Shares, pipeline: PipelineId) -> Shares:
    known(shares, pipeline)
    return closed(shares, pipeline)


def reported(shares: Shares, report: ProgressReport, now: float) -> tuple[Shares, str]:
    """Progress. With it, why it was not counted ("" if it was)."""
    if not isinstance(report, ProgressReport):
        raise InvalidRequest(f"progress is told by a ProgressReport, not by {type(report).__name__}")
    _check_report(report)
    pipeline = known(shares, PipelineId(report.pipeline))
    rollout = shares.rollouts.get(pipeline.pipeline_id)
    if rollout is None:
        return shares, "its rollout is not open"
    if report.rollout_id is not None:
        if rollout.rollout_id is None and _is_over(report.rollout_id, pipeline.last_rollout_id):
            return shares, f"{report.rollout_id} is over"
        if rollout.rollout_id not in (None, report.rollout_id):
            return shares, f"{report.rollout_id} is not the open rollout, {rollout.rollout_id} is"
    stream = Stream(report.target, min(report.completed, report.target))
    streams = {**rollout.streams, report.stream or "": stream}
    after = replace(
        rollout,
        streams=streams,
        rollout_id=report.rollout_id or rollout.rollout_id,
        reported_at=now,
        rate=_rate(shares, pipeline.pipeline_id, rollout, streams, now),
    )
    shares = replace(shares, rollouts={**shares.rollouts, pipeline.pipeline_id: after})
    return settled(shares, pipeline.pipeline_id, now), ""


def _is_over(rollout_id: str, last: str | None) -> bool:
    """Whether that rollout is the one before the open one, or, where rollouts are counted, an older one."""
    if rollout_id.isdecimal() and last is not None and last.isdecimal():
        return int(rollout_id) <= int(last)
    return rollout_id == last


def _check_report(report: ProgressReport) -> None:
    for name in ("completed", "target"):
        value = getattr(report, name)
        if not _counts(value, least=0):
            raise InvalidRequest(f"a report's {name} is a whole number, not {value!r}")
    for name in ("stream", "rollout_id"):
        value = getattr(report, name)
        if value is not None and not _is_name(value):
            raise InvalidRequest(f"a report's {name} is a text, a number or None, not {value!r}")


def _rate(
    shares: Shares, pipeline: PipelineId, rollout: Rollout, streams: Mapping[str, Stream], now: float
) -> float | None:
    """How quickly one bundle completes trajectories, from what was done since the last report."""
    since = rollout.reported_at
    bundles = sum(
        lease.state is LeaseState.HELD and lease.priority is Priority.GENERATION
        for lease in leases_of(shares, pipeline, GENERATION_CLUSTER)
    )
    done = sum(one.completed for one in streams.values()) - sum(one.completed for one in rollout.streams.values())
    if since is None or now <= since or not bundles or done <= 0:
        return rollout.rate
    return moving(rollout.rate, done / (now - since) / bundles)


def settled(shares: Shares, pipeline: PipelineId, now: float) -> Shares:
    """Since when it waits with nothing, kept right after its leases or its demand have changed."""
    rollout = shares.rollouts.get(pipeline)
    if rollout is None or pipeline not in shares.pipelines:
        return shares
    has = any(
        lease.state is not LeaseState.DRAINING and lease.priority is Priority.GENERATION
        for lease in leases_of(shares, pipeline, GENERATION_CLUSTER)
    )
    since = None if has or not rollout.remaining else now if rollout.waiting_since is None else rollout.waiting_since
    if since == rollout.waiting_since:
        return shares
    return replace(shares, rollouts={**shares.rollouts, pipeline: replace(rollout, waiting_since=since)})


def _remember_id(shares: Shares, pipeline: PipelineId, rollout: Rollout) -> Shares:
    if rollout.rollout_id is None or pipeline not in shares.pipelines:
        return shares
    after = replace(shares.pipelines[pipeline], last_rollout_id=rollout.rollout_id)
    return replace(shares, pipelines={**shares.pipelines, pipeline: after})


def _is_name(value: object) -> bool:
    return is_text(value) and bool(value)


def _counts(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < MOST
