"""Who used how much of a pool? GPU-seconds of each holder, and of nobody.

A holder has a sum up to a moment and the number of GPUs that it has had since. Both are brought up to date when that
number changes, so that every GPU counts for somebody at every moment and for two at none: a lease counts from when its
GPU is taken, which is when it begins to be granted, until it is free again, which is when it was vacated. What nobody
holds counts as idle, what is out of use as lost. All sums together are GPUs × time.

`at` is the time of a clock that goes on over restarts. While nobody schedules nothing changes hands, so that time
counts for whoever held the GPU before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from muster.types.sharing import HolderKind, PipelineId, Shares, Used
from muster.types.usage import Usage

MOST_KEPT = 256  # holders that have nothing any more; the oldest beyond that are told as one
Owners = Mapping[str, tuple[str, str]]  # uid of a training → its namespace and its name
Cost = Callable[[float], float]  # of so many GPU-seconds


def begun(shares: Shares, at: float) -> Shares:
    """Counting begins, or goes on."""
    return _counted(shares, at)


def metered(before: Shares, after: Shares, at: float) -> Shares:
    """The state with what was used up to this change of hands."""
    same = before.leases is after.leases and before.workers is after.workers and before.lost_gpus is after.lost_gpus
    return after if same and before.pipelines is after.pipelines else _counted(after, at)


def totals(shares: Shares, at: float) -> list[Used]:
    """All sums up to that moment, the largest first."""
    found = [_until(one, at) if one.held else one for one in shares.usage.values()]
    return sorted(found, key=lambda one: (-one.gpu_seconds, one.kind, one.name, one.training))


def _counted(shares: Shares, at: float) -> Shares:
    holding = _holding(shares)
    usage = dict(shares.usage)
    for key, one in holding.items():
        there = usage.get(key)
        if there is None:
            usage[key] = replace(one, since=at, at=at)
        elif (there.held, there.name) != (one.held, name := one.name if one.name != one.training else there.name):
            usage[key] = replace(_until(there, at), held=one.held, name=name)
    for key, there in shares.usage.items():
        if there.held and key not in holding:
            usage[key] = replace(_until(there, at), held=0)
    changed = len(usage) != len(shares.usage) or any(usage[key] is not one for key, one in shares.usage.items())
    return replace(shares, usage=_bounded(usage)) if changed else shares


def _holding(shares: Shares) -> dict[str, Used]:
    """Who has how many GPUs now."""
    masks: dict[str, int] = {}
    named: dict[str, Used] = {}
    taken = 0
    for bundle, lease in shares.leases.items():
        uid = shares.pipelines[bundle.pipeline].tenant.training or ""
        key = _key(bundle.pipeline, uid)
        masks[key] = masks.get(key, 0) | lease.mask
        named.setdefault(key, Used("pipeline", bundle.pipeline, uid))
        taken |= lease.mask
    for worker in shares.workers.values():
        key = f"training/{worker.training}"
        crew = shares.crews.get(worker.training)
        masks[key] = masks.get(key, 0) | worker.mask
        named.setdefault(key, Used("training", crew.name if crew is not None else worker.training, worker.training))
        taken |= worker.mask
    lost = sum(1 << gpu for gpu in shares.lost_gpus) & ~taken
    idle = shares.pool.mask & ~taken & ~lost
    kinds: tuple[tuple[HolderKind, int], ...] = (("idle", idle), ("lost", lost))
    for kind, mask in kinds:
        if mask:
            masks[kind], named[kind] = mask, Used(kind)
    return {key: replace(one, held=masks[key].bit_count()) for key, one in named.items()}


def _key(pipeline: PipelineId, training: str) -> str:
    """A pipeline that another training goes on with is another holder."""
    return f"pipeline/{pipeline}@{training}" if training else f"pipeline/{pipeline}"


def _until(one: Used, at: float) -> Used:
    """A clock that was set back takes nothing away."""
    return replace(one, gpu_seconds=one.gpu_seconds + one.held * max(0.0, at - one.at), at=max(one.at, at))


def _bounded(usage: dict[str, Used]) -> dict[str, Used]:
    """The oldest of those that have nothing any more become one, so that sums stay true."""
    ended = [key for key, one in usage.items() if not one.held and one.name]
    for key in sorted(ended, key=lambda name: usage[name].at)[: max(0, len(ended) - MOST_KEPT)]:
        one = usage.pop(key)
        former = f"former/{one.kind}"
        there = usage.get(former, Used(one.kind, since=one.since))
        total = there.gpu_seconds + one.gpu_seconds
        usage[former] = replace(there, gpu_seconds=total, since=min(there.since, one.since), at=max(there.at, one.at))
    return usage


# In usage of trainings ---------------------------------------------------------------------------


def rows(used: Iterable[Used], owners: Owners, now: float, *, since: float | None = None, every: bool) -> list[Usage]:
    """What pipelines used. Those of trainings that are not among the owners are told only if `every` one may be."""
    found = []
    for one in used:
        owner = owners.get(one.training)
        seconds = _seconds(one, since, now)
        if one.kind != "pipeline" or (owner is None and not every) or seconds is None:
            continue
        space, name = owner or ("", "")
        shown = one.name or "(former pipelines)"
        known = one.training if owner is not None else ""
        found.append(Usage(space, name, known, gpu_seconds=seconds, pipeline=shown))
    return sorted(found, key=lambda row: (row.namespace, row.training, row.pipeline, row.uid))


def added(sums: Iterable[Usage], found: Iterable[Usage], cost: Cost | None, *, by_namespace: bool) -> list[Usage]:
    """Sums of trainings with those of pipelines: each on its own, or in its namespace's."""
    priced = [replace(one, cost=None if cost is None else cost(one.gpu_seconds)) for one in found]
    if not by_namespace:
        return [*sums, *priced]
    spaces = {one.namespace: one for one in sums}
    for one in priced:
        there = spaces.get(one.namespace, Usage(one.namespace, cost=None if cost is None else 0.0))
        spent = None if cost is None else (there.cost or 0.0) + (one.cost or 0.0)
        spaces[one.namespace] = replace(there, gpu_seconds=there.gpu_seconds + one.gpu_seconds, cost=spent)
    return [spaces[space] for space in sorted(spaces)]


def _seconds(one: Used, since: float | None, now: float) -> float | None:
    """Its part from `since` on, spread evenly over its time: nobody knows better. None if it was over before."""
    end = now if one.held else min(one.at, now)
    if since is None or since <= one.since:
        return one.gpu_seconds
    if end <= since:
        return None
    return one.gpu_seconds * (end - since) / (end - one.since)
