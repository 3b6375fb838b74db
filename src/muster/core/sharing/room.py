"""What of the pool is free, and what is in whose hands? GPUs as masks, for the two parts of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from muster.types.sharing import Gpu, Lease, LeaseState, Priority, Shares, gpus_of


@dataclass(frozen=True)
class Room:
    free: int
    lost: int
    fixed: int  # in whole-cluster leases, which nobody takes away
    frozen: int  # of pipelines that cannot be moved
    draining: int
    generating: tuple[Lease, ...]  # that may be taken away, now or as soon as they are granted
    working: int  # of workers of trainings, those on their way out included


def room_of(shares: Shares) -> Room:
    lost = 0
    for gpu in shares.lost_gpus:
        lost |= 1 << gpu
    fixed = frozen = draining = leased = 0
    generating = []
    for bundle, lease in shares.leases.items():
        leased |= lease.mask
        if lease.priority is not Priority.GENERATION:
            fixed |= lease.mask
        elif not shares.pipelines[bundle.pipeline].movable:
            frozen |= lease.mask
        elif lease.state is LeaseState.DRAINING:
            draining |= lease.mask
        else:
            generating.append(lease)
    working = 0
    for worker in shares.workers.values():
        working |= worker.mask
        if worker.state is LeaseState.DRAINING:
            draining |= worker.mask
    free = shares.pool.mask & ~(leased | lost | working)
    return Room(free, lost, fixed, frozen, draining, tuple(generating), working)


def holders(shares: Shares, mask: int) -> str:
    """Who has these GPUs, and why they stay there, in words."""
    told = []
    for bundle, lease in shares.leases.items():
        if lease.mask & mask:
            pipeline = shares.pipelines[bundle.pipeline]
            state = f" ({pipeline.quarantined})" if pipeline.quarantined else ""
            state = state or (" (detached)" if pipeline.detached_since is not None else "")
            told.append(f"{bundle.pipeline}/{bundle.cluster}{state}")
    return ", ".join(sorted(set(told)))


def listed(mask: int) -> str:
    found: list[Gpu] = gpus_of(mask)
    shown = ", ".join(map(str, found[:8]))
    return shown + (f" and {len(found) - 8} more" if len(found) > 8 else "")
