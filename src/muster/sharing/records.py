"""How does the scheduler's state look on disk? One record per change: what is different from the state before.

A lease's GPUs are not written: its name and its pipeline's map say them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from muster.types.sharing import (
    Bundle,
    ClusterSpec,
    Lease,
    LeaseState,
    Pipeline,
    PipelineId,
    Priority,
    Request,
    Rollout,
    Shares,
    Stream,
    Tenant,
    gpus_of,
)

Record = dict[str, Any]  # a line of the journal, as JSON reads it
_TENANT = 9  # its place in a pipeline's list


def difference(before: Shares, after: Shares) -> Record:
    """What has to be written so that `after` can be had from `before`."""
    record: Record = {"epoch": after.epoch, "seq": after.seq}
    pipelines = _changed(before.pipelines, after.pipelines)
    if pipelines:
        record["pipelines"] = {name: one and _pipeline(one) for name, one in pipelines.items()}
    leases = _changed(before.leases, after.leases)
    if leases:
        record["leases"] = [_lease(bundle, lease) for bundle, lease in leases.items()]
    rollouts = _changed(before.rollouts, after.rollouts)
    if rollouts:
        record["rollouts"] = {name: one and _rollout(one) for name, one in rollouts.items()}
    if before.requests != after.requests:
        kept = {one.seq: one for one in after.requests}
        gone = [one.seq for one in before.requests if one.seq not in kept]
        new = [_request(one) for one in after.requests if one not in before.requests]
        record["requests"] = {"gone": gone, "new": new}
    if before.lost_gpus != after.lost_gpus:
        record["lost"] = [[gpu, why] for gpu, why in after.lost_gpus.items()]
    return record


def applied(shares: Shares, record: Record) -> Shares:
    """The state after a record."""
    pipelines, leases, rollouts = dict(shares.pipelines), dict(shares.leases), dict(shares.rollouts)
    for name, kept in record.get("pipelines", {}).items():
        _put(pipelines, PipelineId(name), kept and _read_pipeline(name, kept))
    for kept in record.get("leases", ()):
        bundle = Bundle(PipelineId(kept[0]), kept[1], kept[2])
        _put(leases, bundle, _read_lease(bundle, kept[3:], pipelines) if len(kept) > 3 else None)
    for name, kept in record.get("rollouts", {}).items():
        _put(rollouts, PipelineId(name), kept and _read_rollout(kept))
    requests = shares.requests
    if "requests" in record:
        gone = set(record["requests"]["gone"])
        places = {one.seq: one for one in requests if one.seq not in gone}
        places |= {one.seq: one for one in map(_read_request, record["requests"]["new"])}  # or changed: in its place
        requests = tuple(places.values())
    lost = {gpu: why for gpu, why in record["lost"]} if "lost" in record else shares.lost_gpus
    return replace(
        shares,
        pipelines=pipelines,
        leases=leases,
        rollouts=rollouts,
        requests=requests,
        lost_gpus=lost,
        epoch=record["epoch"],
        seq=record["seq"],
    )


def _changed(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Any, Any]:
    """Entries that are new or others; None for those that are gone. Unchanged ones are the same objects."""
    if before is after:
        return {}
    found: dict[Any, Any] = {key: one for key, one in after.items() if before.get(key) is not one}
    found.update((key, None) for key in before if key not in after)
    return found


def _put(entries: dict[Any, Any], key: object, value: object) -> None:
    if value is None:
        entries.pop(key, None)
    else:
        entries[key] = value


def _pipeline(one: Pipeline) -> list[Any]:
    clusters = {
        name: [format(spec.mask, "x"), spec.tp_size, spec.slots_per_bundle] for name, spec in one.clusters.items()
    }
    measured = [one.shrink_s, one.expand_s]
    known = [one.weight, one.admitted, one.detached_since, one.quarantined, *measured, one.last_rollout_id, one.unsure]
    tenant = [] if one.tenant == Tenant() else [[one.tenant.process, one.tenant.training, one.tenant.round]]
    return [clusters, *known, *tenant]


def _read_pipeline(name: str, kept: list[Any]) -> Pipeline:
    clusters = {
        cluster: ClusterSpec(gpus_of(int(mask, 16)), tp, slots) for cluster, (mask, tp, slots) in kept[0].items()
    }
    known, tenant = kept[1:_TENANT], kept[_TENANT:]  # nobody said who it was, or could: 0.1.0 wrote none
    return Pipeline(PipelineId(name), clusters, *known, *(Tenant(*one) for one in tenant))


def _lease(bundle: Bundle, lease: Lease | None) -> list[Any]:
    name: list[Any] = [bundle.pipeline, bundle.cluster, bundle.rank]
    if lease is None:
        return name
    return [*name, lease.state, lease.epoch, int(lease.priority), lease.since, lease.held_since, lease.reason]


def _read_lease(bundle: Bundle, kept: list[Any], pipelines: Mapping[PipelineId, Pipeline]) -> Lease:
    state, epoch, priority, *rest = kept
    mask = pipelines[bundle.pipeline].clusters[bundle.cluster].masks[bundle.rank]
    return Lease(bundle, mask, LeaseState(state), epoch, Priority(priority), *rest)


def _request(one: Request) -> list[Any]:
    return [one.seq, one.pipeline, one.cluster, int(one.priority), one.since, one.estimate, one.opened, one.absent]


def _read_request(kept: list[Any]) -> Request:
    seq, pipeline, cluster, priority, *rest = kept
    return Request(seq, PipelineId(pipeline), cluster, Priority(priority), *rest)


def _rollout(one: Rollout) -> list[Any]:
    streams = {name: [stream.target, stream.completed] for name, stream in one.streams.items()}
    return [one.estimate, streams, one.rollout_id, one.opened_at, one.waiting_since, one.rate, one.reported_at]


def _read_rollout(kept: list[Any]) -> Rollout:
    estimate, streams, *rest = kept
    return Rollout(estimate, {name: Stream(*counts) for name, counts in streams.items()}, *rest)
