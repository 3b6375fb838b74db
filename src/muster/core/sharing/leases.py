"""Who holds which bundle? How pipelines come and go, and how leases change from free to held and back.

Every function takes the state and returns the next one, or raises before anything has changed.
A lease that begins to be granted or drained gets a new epoch; a reply names the epoch of its call, so one that
comes late finds nothing to change.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from muster.core.sharing import demand, maps
from muster.errors import AlreadyExists, InvalidRequest, PipelineKilled, RequestRefused
from muster.types.sharing import (
    GENERATION_CLUSTER,
    Bundle,
    ClusterSpec,
    Gpu,
    Killed,
    Lease,
    LeaseState,
    Pipeline,
    PipelineId,
    Priority,
    Request,
    Shares,
    Tenant,
    gpus_of,
)

Epochs = Mapping[Bundle, int]
KILLS_KEPT = 256


def used_mask(shares: Shares) -> int:
    mask = 0
    for lease in shares.leases.values():
        mask |= lease.mask
    for worker in shares.workers.values():
        mask |= worker.mask
    for gpu in shares.lost_gpus:
        mask |= 1 << gpu
    return mask


# Pipelines ---------------------------------------------------------------------------------------


def registered(shares: Shares, pipeline: PipelineId, clusters: Mapping[str, ClusterSpec], weight: float) -> Shares:
    """A new pipeline; one that is there already stays as it is, if it is the same."""
    problems = maps.problems(shares.pool, pipeline, clusters, weight)
    if problems:
        told = "; ".join(f"{problem.field}: {problem.message}" for problem in problems)
        raise InvalidRequest(f"{pipeline!r} cannot be registered: {told}", problems=problems)
    there = shares.pipelines.get(pipeline)
    if there is not None:
        if dict(there.clusters) != dict(clusters) or there.weight != weight:
            raise AlreadyExists(
                f"pipeline {pipeline!r} is registered with other clusters or another weight",
                hint="unregister it first",
            )
        return shares
    new = Pipeline(pipeline, dict(clusters), float(weight))
    return replace(shares, pipelines={**shares.pipelines, pipeline: new})


def occupied(shares: Shares, pipeline: PipelineId, tenant: Tenant) -> Shares:
    """That process speaks for it from now on."""
    there = demand.known(shares, pipeline)
    return shares if there.tenant == tenant else _with(shares, replace(there, tenant=tenant))


def attached(shares: Shares, pipeline: PipelineId, now: float) -> Shares:
    """It has hooks again. What was being granted when they were lost is drained: nobody knows how far it came."""
    there = demand.known(shares, pipeline)
    if there.detached_since is None:
        return shares
    shares = _with(shares, replace(there, detached_since=None))
    unsure = [lease.bundle for lease in _generation(shares, pipeline) if lease.state is LeaseState.GRANTING]
    return draining(shares, unsure, now, reason="it was being granted when the scheduler restarted")


def detached(shares: Shares, now: float, *, unsure: bool = False) -> Shares:
    """The scheduler has just started: it knows no hooks yet. `unsure`: nor what it decided last."""
    lost = {
        name: replace(one, detached_since=now, unsure=one.unsure or unsure) for name, one in shares.pipelines.items()
    }
    absent = tuple(replace(one, absent=True) for one in shares.requests)
    return replace(shares, pipelines=lost, requests=absent)


def admitted(shares: Shares, pipeline: PipelineId) -> Shares:
    there = demand.known(shares, pipeline)
    return shares if there.admitted else _with(shares, replace(there, admitted=True))


def unregistered(shares: Shares, pipeline: PipelineId) -> Shares:
    if pipeline not in shares.pipelines:
        return shares
    return replace(
        shares,
        pipelines={name: one for name, one in shares.pipelines.items() if name != pipeline},
        leases={bundle: lease for bundle, lease in shares.leases.items() if bundle.pipeline != pipeline},
        requests=tuple(one for one in shares.requests if one.pipeline != pipeline),
        rollouts={name: one for name, one in shares.rollouts.items() if name != pipeline},
    )


def quarantined(shares: Shares, pipeline: PipelineId, why: str) -> Shares:
    """Its leases are frozen as they are, its requests end; what it wanted stays known."""
    there = demand.known(shares, pipeline)
    left = tuple(one for one in shares.requests if one.pipeline != pipeline)
    return replace(_with(shares, replace(there, quarantined=why)), requests=left)


def killed(shares: Shares, pipeline: PipelineId, why: str) -> Shares:
    """Somebody ends it. It wants nothing any more; what it holds is frozen until it is known to be free."""
    there = demand.known(shares, pipeline)
    shares = quarantined(shares, pipeline, f"killed: {why}")
    shares = _with(shares, replace(there, quarantined=f"killed: {why}", killed=why))
    shares = barred(shares, pipeline, there.tenant.process or "", why)
    return replace(shares, rollouts={name: one for name, one in shares.rollouts.items() if name != pipeline})


def barred(shares: Shares, pipeline: PipelineId, process: str, why: str) -> Shares:
    """That process does not come back for it."""
    return replace(shares, killed=(*shares.killed, Killed(pipeline, process, why))[-KILLS_KEPT:])


def check_not_killed(shares: Shares, pipeline: PipelineId, tenant: Tenant) -> None:
    """Whoever was killed is not registered again, nor is anybody while that one may still be there."""
    for one in shares.killed:
        if (one.pipeline, one.process) == (pipeline, tenant.process):
            raise PipelineKilled(f"{pipeline} was killed: {one.why}", hint="another process may register it anew")
    there = shares.pipelines.get(pipeline)
    if there is not None and there.killed:
        raise demand.frozen(there)


def shrunk(shares: Shares, pipeline: PipelineId, now: float) -> Shares:
    """All of its generation is down: it was killed, and its hooks have done that last thing."""
    return _dropped(shares, [lease.bundle for lease in _generation(shares, pipeline)], now)


def reinstated(shares: Shares, pipeline: PipelineId, now: float) -> Shares:
    """New hooks have shrunk all its ranks: it generates nowhere, and may ask again. A quarantine ends all it held."""
    there = demand.known(shares, pipeline)
    shares = _with(shares, replace(there, quarantined="", detached_since=None, unsure=False))
    gone = [
        bundle
        for bundle, lease in shares.leases.items()
        if bundle.pipeline == pipeline and (there.quarantined or lease.priority is Priority.GENERATION)
    ]
    return demand.settled(_dropped(shares, gone, now), pipeline, now)


def measured(
    shares: Shares, pipeline: PipelineId, *, shrink_s: float | None = None, expand_s: float | None = None
) -> Shares:
    """What a hook took, for the planner to weigh moves with."""
    there = shares.pipelines.get(pipeline)
    if there is None:
        return shares
    if shrink_s is not None:
        there = replace(there, shrink_s=demand.moving(there.shrink_s, shrink_s))
    if expand_s is not None:
        there = replace(there, expand_s=demand.moving(there.expand_s, expand_s))
    return _with(shares, there)


# Leases ------------------------------------------------------------------------------------------


def granted(shares: Shares, seq: int, now: float) -> Shares:
    """A fixed request gets its whole cluster."""
    request = next((one for one in shares.requests if one.seq == seq), None)
    if request is None or request.priority is Priority.GENERATION:
        raise RequestRefused(f"no fixed request #{seq} waits")
    spec = shares.pipelines[request.pipeline].clusters[request.cluster]
    bundles = [Bundle(request.pipeline, request.cluster, rank) for rank in range(len(spec.bundles))]
    shares = _taken(shares, bundles, LeaseState.HELD, request.priority, now, reason=f"request #{seq}")
    return demand.answered(shares, seq)


def expanding(
    shares: Shares, bundles: Iterable[Bundle], now: float, reasons: Mapping[str, str] | None = None
) -> Shares:
    """Generation bundles begin to be granted."""
    listed = list(bundles)
    shares = _taken(shares, listed, LeaseState.GRANTING, Priority.GENERATION, now, reasons=reasons or {})
    return _settled(shares, listed, now)


def expanded(shares: Shares, epochs: Epochs, now: float) -> Shares:
    """A call to expand has succeeded."""
    changed = {
        bundle: replace(shares.leases[bundle], state=LeaseState.HELD, since=now, held_since=now)
        for bundle in matching(shares, epochs, LeaseState.GRANTING)
    }
    return replace(shares, leases={**shares.leases, **changed}) if changed else shares


def draining(
    shares: Shares,
    bundles: Iterable[Bundle],
    now: float,
    reasons: Mapping[str, str] | None = None,
    *,
    reason: str = "",
) -> Shares:
    """Generation bundles begin to be given back. One that is still being granted is drained when that has ended."""
    changed, epoch = {}, shares.epoch
    for bundle in bundles:
        lease = shares.leases.get(bundle)
        if lease is None or lease.priority is not Priority.GENERATION or lease.state is LeaseState.DRAINING:
            raise RequestRefused(f"{bundle} cannot be drained: it is {_described(lease)}")
        epoch += 1
        said = (reasons or {}).get(str(bundle), reason)
        changed[bundle] = replace(lease, state=LeaseState.DRAINING, epoch=epoch, since=now, reason=said)
    if not changed:
        return shares
    return _settled(replace(shares, leases={**shares.leases, **changed}, epoch=epoch), changed, now)


def vacated(shares: Shares, epochs: Epochs, now: float) -> Shares:
    """A call to shrink has succeeded, and its GPUs are really empty."""
    return _dropped(shares, matching(shares, epochs, LeaseState.DRAINING), now)


def matching(shares: Shares, epochs: Epochs, state: LeaseState) -> list[Bundle]:
    """Those bundles that a reply to a call with these epochs may still change."""
    return [
        bundle
        for bundle, epoch in epochs.items()
        if (lease := shares.leases.get(bundle)) is not None and lease.epoch == epoch and lease.state is state
    ]


def released(
    shares: Shares, pipeline: PipelineId, cluster: str, now: float, *, dispatched: Container[Bundle] = ()
) -> Shares:
    """Its owner gives a cluster back: held bundles are free at once; those whose expand runs are drained after it."""
    there = demand.known(shares, pipeline)
    if cluster not in there.clusters:
        raise RequestRefused(f"{pipeline} has no cluster {cluster!r}")
    found = list(demand.leases_of(shares, pipeline, cluster))
    fixed = any(lease.priority is not Priority.GENERATION for lease in found)
    if there.quarantined and found and not fixed:
        raise demand.frozen(there)
    if cluster == GENERATION_CLUSTER and not fixed:
        shares = demand.closed(shares, pipeline)
    undone = _undispatched(there, found, dispatched)
    finish = [lease.bundle for lease in found if lease.state is LeaseState.GRANTING and lease.bundle not in undone]
    at_once = [lease.bundle for lease in found if lease.state is not LeaseState.DRAINING and lease.bundle not in finish]
    return draining(_dropped(shares, at_once, now), finish, now, reason="its owner has released it")


def suspended(shares: Shares, pipeline: PipelineId, now: float, *, dispatched: Container[Bundle] = ()) -> Shares:
    """Its owner wants its generation cluster drained: demand ends, expands that were not yet called for are off."""
    there = demand.known(shares, pipeline)
    if there.quarantined:
        raise demand.frozen(there)
    found = list(demand.leases_of(shares, pipeline, GENERATION_CLUSTER))
    if any(lease.priority is not Priority.GENERATION for lease in found):
        raise RequestRefused(
            f"{pipeline}/{GENERATION_CLUSTER} is held at {found[0].priority.name}: it has nothing to drain",
            hint="use notify_release_gpus",
        )
    undone = _undispatched(there, found, dispatched)
    drain = [lease.bundle for lease in found if lease.state is not LeaseState.DRAINING and lease.bundle not in undone]
    shares = _dropped(demand.closed(shares, pipeline), undone, now)
    return draining(shares, drain, now, reason="its owner awaits its release")


# Nodes and time ----------------------------------------------------------------------------------


def node_lost(shares: Shares, node: int, why: str, now: float) -> Shares:
    """Its GPUs are out of use; bundles on them are gone, there is nobody to ask."""
    gpus = _node_gpus(shares, node)
    mask = sum(1 << gpu for gpu in gpus)
    workers = {key: one for key, one in shares.workers.items() if not one.mask & mask}
    shares = replace(shares, lost_gpus={**shares.lost_gpus, **dict.fromkeys(gpus, why)}, workers=workers)
    return _dropped(shares, [bundle for bundle, lease in shares.leases.items() if lease.mask & mask], now)


def node_back(shares: Shares, node: int) -> Shares:
    gone = _node_gpus(shares, node)
    return replace(shares, lost_gpus={gpu: why for gpu, why in shares.lost_gpus.items() if gpu not in gone})


def shifted(shares: Shares, by: float) -> Shares:
    """The same state on another clock, for a restart: a new process counts its seconds from elsewhere."""
    return replace(
        shares,
        leases={
            bundle: replace(lease, since=lease.since + by, held_since=lease.held_since + by)
            for bundle, lease in shares.leases.items()
        },
        requests=tuple(replace(one, since=one.since + by) for one in shares.requests),
        rollouts={
            name: replace(
                one,
                opened_at=one.opened_at + by,
                waiting_since=None if one.waiting_since is None else one.waiting_since + by,
                reported_at=None if one.reported_at is None else one.reported_at + by,
            )
            for name, one in shares.rollouts.items()
        },
        crews={uid: replace(one, asked_at=one.asked_at + by) for uid, one in shares.crews.items()},
        workers={
            key: replace(one, since=one.since + by, held_since=one.held_since + by)
            for key, one in shares.workers.items()
        },
    )


# Parts -------------------------------------------------------------------------------------------


def _taken(
    shares: Shares,
    bundles: list[Bundle],
    state: LeaseState,
    priority: Priority,
    now: float,
    *,
    reasons: Mapping[str, str] | None = None,
    reason: str = "",
) -> Shares:
    used, epoch, new = used_mask(shares), shares.epoch, {}
    for bundle in bundles:
        mask = shares.pipelines[bundle.pipeline].clusters[bundle.cluster].masks[bundle.rank]
        if mask & used:
            raise RequestRefused(f"{bundle} needs GPU {gpus_of(mask & used)[0]}, which is not free")
        used |= mask
        epoch += 1
        said = (reasons or {}).get(str(bundle), reason)
        new[bundle] = Lease(bundle, mask, state, epoch, priority, now, now, said)
    return replace(shares, leases={**shares.leases, **new}, epoch=epoch) if new else shares


def _dropped(shares: Shares, bundles: Iterable[Bundle], now: float) -> Shares:
    gone = set(bundles)
    if not gone:
        return shares
    kept = {bundle: lease for bundle, lease in shares.leases.items() if bundle not in gone}
    return _settled(replace(shares, leases=kept), gone, now)


def _settled(shares: Shares, bundles: Iterable[Bundle], now: float) -> Shares:
    for pipeline in {bundle.pipeline for bundle in bundles}:
        shares = demand.settled(shares, pipeline, now)
    return shares


def _undispatched(pipeline: Pipeline, found: Iterable[Lease], dispatched: Container[Bundle]) -> list[Bundle]:
    """Bundles whose expand was decided and not called. After a restart nobody knows: then there are none."""
    if pipeline.detached_since is not None:
        return []
    return [lease.bundle for lease in found if lease.state is LeaseState.GRANTING and lease.bundle not in dispatched]


def _generation(shares: Shares, pipeline: PipelineId) -> list[Lease]:
    found = demand.leases_of(shares, pipeline, GENERATION_CLUSTER)
    return [lease for lease in found if lease.priority is Priority.GENERATION]


def _with(shares: Shares, pipeline: Pipeline) -> Shares:
    return replace(shares, pipelines={**shares.pipelines, pipeline.pipeline_id: pipeline})


def _node_gpus(shares: Shares, node: int) -> range:
    first = node * shares.pool.gpus_per_node
    if not 0 <= first < shares.pool.gpus:
        raise InvalidRequest(f"the pool has no node {node}")
    return range(first, min(first + shares.pool.gpus_per_node, shares.pool.gpus))


def _described(lease: Lease | None) -> str:
    return "free" if lease is None else f"{lease.state} at {lease.priority.name}"


def request_of(shares: Shares, seq: int) -> Request | None:
    return next((one for one in shares.requests if one.seq == seq), None)


def free_gpus(shares: Shares) -> tuple[Gpu, ...]:
    return tuple(gpus_of(shares.pool.mask & ~used_mask(shares)))
