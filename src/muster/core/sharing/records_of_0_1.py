"""How did muster 0.1 write a pool's state? One positional list for each thing that had changed. Only read."""

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

_TENANT = 9  # its place in a pipeline's list; 0.1.0 wrote none


def applied(shares: Shares, record: Mapping[str, Any]) -> Shares:
    """The state after a record."""
    pipelines, leases, rollouts = dict(shares.pipelines), dict(shares.leases), dict(shares.rollouts)
    for name, kept in record.get("pipelines", {}).items():
        _put(pipelines, PipelineId(name), kept and _pipeline(name, kept))
    for kept in record.get("leases", ()):
        bundle = Bundle(PipelineId(kept[0]), kept[1], kept[2])
        _put(leases, bundle, _lease(bundle, kept[3:], pipelines) if len(kept) > 3 else None)
    for name, kept in record.get("rollouts", {}).items():
        _put(rollouts, PipelineId(name), kept and _rollout(kept))
    places = {one.seq: one for one in shares.requests}
    changed = record.get("requests", {"gone": (), "new": ()})
    for seq in changed["gone"]:
        places.pop(seq, None)
    places |= {one.seq: one for one in map(_request, changed["new"])}  # or changed: in its place
    return replace(
        shares,
        pipelines=pipelines,
        leases=leases,
        rollouts=rollouts,
        requests=tuple(places.values()),
        lost_gpus=dict(record["lost"]) if "lost" in record else shares.lost_gpus,
        epoch=record["epoch"],
        seq=record["seq"],
    )


def _put(entries: dict[Any, Any], key: object, value: object) -> None:
    if value is None:
        entries.pop(key, None)
    else:
        entries[key] = value


def _pipeline(name: str, kept: list[Any]) -> Pipeline:
    clusters = {
        cluster: ClusterSpec(gpus_of(int(mask, 16)), tp, slots) for cluster, (mask, tp, slots) in kept[0].items()
    }
    known, tenant = kept[1:_TENANT], kept[_TENANT:]
    return Pipeline(PipelineId(name), clusters, *known, *(Tenant(*one) for one in tenant))


def _lease(bundle: Bundle, kept: list[Any], pipelines: Mapping[PipelineId, Pipeline]) -> Lease:
    state, epoch, priority, *rest = kept
    mask = pipelines[bundle.pipeline].clusters[bundle.cluster].masks[bundle.rank]
    return Lease(bundle, mask, LeaseState(state), epoch, Priority(priority), *rest)


def _request(kept: list[Any]) -> Request:
    seq, pipeline, cluster, priority, *rest = kept
    return Request(seq, PipelineId(pipeline), cluster, Priority(priority), *rest)


def _rollout(kept: list[Any]) -> Rollout:
    estimate, streams, *rest = kept
    return Rollout(estimate, {name: Stream(*counts) for name, counts in streams.items()}, *rest)
