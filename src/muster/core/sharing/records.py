"""How is a pool's state kept? As small records under keys: one each for a pipeline, a lease, a rollout, a request, a
training and each of its workers, and for what each holder used.

A change is the records that it writes, and None for those that it removes; `head` holds the rest and is in every
change. A lease's GPUs are not written: its name and its pipeline's map say them. `read` gives the state back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from muster.core.sharing import maps
from muster.errors import JournalUnusable
from muster.types.codec import Invalid, from_wire, plain, to_wire
from muster.types.sharing import (
    Crew,
    Gpu,
    Killed,
    Lease,
    LeaseState,
    Pipeline,
    PipelineId,
    Pool,
    Request,
    Rollout,
    Shares,
    Used,
    WorkerLease,
    gpus_of,
    mask_of,
)

HEAD = "head"
KINDS = ("pipeline", "lease", "rollout", "request", "crew", "worker", "usage")
Value = Mapping[str, Any]  # a record, as JSON reads it
Changes = dict[str, Value | None]


@dataclass(frozen=True)
class Head:
    pool: Pool
    epoch: int
    seq: int
    at: float  # when it was written, on the clock of the process that wrote it
    boot: str = ""  # of the machine, where what was written last may be lost with it
    lost_gpus: Mapping[Gpu, str] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)  # why requests wait, until somebody plans anew
    killed: tuple[Killed, ...] = ()


@dataclass(frozen=True)
class KeptWorker:
    training: str
    gpus: tuple[Gpu, ...]
    state: LeaseState
    since: float
    held_since: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class KeptShares:
    """What was found: the state, on the clock of the process that wrote it, and why its requests waited."""

    shares: Shares
    at: float = 0.0
    reasons: Mapping[int, str] = field(default_factory=dict)
    may_lack_its_end: bool = False  # the machine was started anew since, and nobody knows what it had not yet written


def changes(
    before: Shares, after: Shares, at: float, *, boot: str = "", reasons: Mapping[int, str] | None = None
) -> Changes:
    """What has to be written so that `after` can be had from `before`."""
    head = Head(after.pool, after.epoch, after.seq, at, boot, after.lost_gpus, reasons or {}, after.killed)
    found: Changes = {HEAD: _written(head)}
    for kind, old, new in (
        ("pipeline", before.pipelines, after.pipelines),
        ("lease", before.leases, after.leases),
        ("rollout", before.rollouts, after.rollouts),
        ("request", {one.seq: one for one in before.requests}, {one.seq: one for one in after.requests}),
        ("crew", before.crews, after.crews),
        ("worker", before.workers, after.workers),
        ("usage", before.usage, after.usage),
    ):
        if old is not new:  # entries that did not change are the same objects
            there: Mapping[Any, Any] = old
            found |= {f"{kind}/{key}": _written(one) for key, one in new.items() if there.get(key) is not one}
            found |= {f"{kind}/{key}": None for key in there if key not in new}
    return found


def read(entries: Mapping[str, Value], empty: Shares, where: str, *, boot: str = "") -> KeptShares:
    """The state of which these are all records; `empty` says what pool it is to be about."""
    if HEAD not in entries:
        return KeptShares(empty)
    try:
        head = from_wire(Head, entries[HEAD], strict=False, names=plain)
        of_kind = _by_kind(entries)
        pipelines = {PipelineId(name): _read(Pipeline, value) for name, value in of_kind["pipeline"].items()}
        leases = [_read(Lease, value) for value in of_kind["lease"].values()]
        requests = [_read(Request, value) for value in of_kind["request"].values()]
        shares = replace(
            empty,
            pipelines=pipelines,
            leases={one.bundle: replace(one, mask=_mask(one, pipelines)) for one in leases},
            rollouts={PipelineId(name): _read(Rollout, value) for name, value in of_kind["rollout"].items()},
            requests=tuple(sorted(requests, key=lambda one: one.seq)),
            crews={uid: _read(Crew, value) for uid, value in of_kind["crew"].items()},
            workers={one.key: one for value in of_kind["worker"].values() for one in [_worker(value)]},
            usage={key: _read(Used, value) for key, value in of_kind["usage"].items()},
            lost_gpus=head.lost_gpus,
            epoch=head.epoch,
            seq=head.seq,
            killed=head.killed,
        )
    except (Invalid, KeyError, IndexError, ValueError) as error:
        raise JournalUnusable(f"{where} holds what no scheduler has written: {error!r}") from error
    if head.pool != empty.pool and not pipelines and not shares.workers:
        return KeptShares(replace(empty, usage=shares.usage))  # nobody has anything of the other one
    if head.pool != empty.pool and not _fits(shares, empty.pool):
        raise JournalUnusable(
            f"{where} is about {head.pool}, not about {empty.pool}",
            hint=f"start it as it was, and end {', '.join(sorted(pipelines)) or 'its trainings'} first",
        )
    mask = empty.pool.mask  # who trains on a GPU that is not there any more has nothing that others could be given
    workers = {key: one for key, one in shares.workers.items() if not one.mask & ~mask}
    lost = {gpu: why for gpu, why in shares.lost_gpus.items() if gpu < empty.pool.gpus}
    shares = replace(shares, workers=workers, lost_gpus=lost)
    return KeptShares(shares, head.at, head.reasons, head.boot != boot)


def _fits(shares: Shares, pool: Pool) -> bool:
    """Whether everybody could have just what it has in a pool of that size: GPUs were added, or the rest is unused."""
    kept = shares.pipelines.values()
    return not any(maps.problems(pool, one.pipeline_id, one.clusters, one.weight) for one in kept)


def _by_kind(entries: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    found: dict[str, dict[str, Value]] = {kind: {} for kind in KINDS}
    for key, value in entries.items():
        kind, _, name = key.partition("/")
        found.setdefault(kind, {})[name] = value  # other kinds are a newer version's
    return found


def _written(record: Any) -> dict[str, Any]:
    if isinstance(record, Lease):
        record = replace(record, mask=0)
    elif isinstance(record, Crew):  # which workers are there is not for a journal to say
        record = replace(record, using=0, ready=None, resting=0, parked=0)
    elif isinstance(record, WorkerLease):
        gpus = tuple(gpus_of(record.mask))
        record = KeptWorker(record.training, gpus, record.state, record.since, record.held_since, record.reason)
    return to_wire(record, names=plain)


def _read(kind: type[Any], value: Value) -> Any:
    return from_wire(kind, value, strict=False, names=plain)


def _worker(value: Value) -> WorkerLease:
    one: KeptWorker = _read(KeptWorker, value)
    return WorkerLease(one.training, mask_of(one.gpus), one.state, one.since, one.held_since, one.reason)


def _mask(lease: Lease, pipelines: Mapping[PipelineId, Pipeline]) -> int:
    return pipelines[lease.bundle.pipeline].clusters[lease.bundle.cluster].masks[lease.bundle.rank]
