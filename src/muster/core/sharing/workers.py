"""Which GPUs do trainings hold? How crews come and go, and how what their workers have changes.

Every function takes the state and returns the next one. There are no epochs: whoever runs trainings says what is there
as often as it likes, and a GPU is free when it has said that no process of its worker is left on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from muster.core.sharing import demand
from muster.core.sharing.leases import used_mask
from muster.core.sharing.plans import Seat
from muster.types.sharing import Crew, LeaseState, Shares, WorkerLease, gpus_of


def declared(shares: Shares, crew: Crew, now: float) -> Shares:
    """A training wants something, or something else than before. What was measured of it, and its place, stay."""
    there = shares.crews.get(crew.training)
    if there is None:
        crew = replace(crew, asked_at=now)
    else:
        seen = {name: getattr(there, name) for name in ("asked_at", "vacate_s", "return_s", "kept_s")}
        crew = replace(crew, **seen)
    if crew == there:
        return shares
    return replace(shares, crews={**shares.crews, crew.training: crew})


def ending(shares: Shares, training: str, using: int) -> Shares:
    """It has ended, and something of its workers is left on these GPUs."""
    if (crew := shares.crews.get(training)) is None:
        return shares
    crew = replace(crew, min=0, wanted=0, most=0, using=using, resting=0, parked=0)
    return shares if crew == shares.crews[training] else replace(shares, crews={**shares.crews, training: crew})


def withdrawn(shares: Shares, training: str) -> Shares:
    """It has ended, and so have all its workers."""
    if training not in shares.crews:
        return shares
    return replace(
        shares,
        crews={uid: one for uid, one in shares.crews.items() if uid != training},
        workers={key: one for key, one in shares.workers.items() if one.training != training},
    )


def adopted(shares: Shares, training: str, masks: Iterable[int], now: float) -> Shares:
    """Workers that are there, and of which the journal does not know: what they have, others must not be given."""
    used, found = used_mask(shares), {}
    for mask in masks:
        if mask and not mask & used:
            lease = WorkerLease(training, mask, LeaseState.HELD, now, now, "it was there when the pool was started")
            found[lease.key] = lease
            used |= mask
    return replace(shares, workers={**shares.workers, **found}) if found else shares


def seated(shares: Shares, seats: Iterable[Seat], now: float) -> Shares:
    """Workers may use these GPUs from now on."""
    found = {}
    for seat in seats:
        lease = WorkerLease(seat.training, seat.mask, LeaseState.HELD, now, now, seat.why)
        found[lease.key] = lease
    return replace(shares, workers={**shares.workers, **found}) if found else shares


def leaving(shares: Shares, leaves: Mapping[str, str], now: float) -> Shares:
    """These workers have to go. Where there is none, the GPU is free at once."""
    workers = dict(shares.workers)
    for key, why in leaves.items():
        lease = workers.get(key)
        if lease is None or lease.state is LeaseState.DRAINING:
            continue
        crew = shares.crews.get(lease.training)
        if crew is not None and not lease.mask & crew.using:
            del workers[key]
            continue
        workers[key] = replace(lease, state=LeaseState.DRAINING, since=now, reason=why)
        shares = measured(shares, lease.training, kept_s=now - lease.held_since)
    return replace(shares, workers=workers) if workers != shares.workers else shares


def left(shares: Shares, training: str, mask: int, now: float) -> Shares:
    """No process of its workers is left on these GPUs. What it was not asked to leave stays its own."""
    gone = [
        lease
        for lease in shares.workers.values()
        if lease.training == training and lease.state is LeaseState.DRAINING and lease.mask & mask
    ]
    if not gone:
        return shares
    keys = {lease.key for lease in gone}
    shares = replace(shares, workers={key: one for key, one in shares.workers.items() if key not in keys})
    return measured(shares, training, vacate_s=max(now - lease.since for lease in gone))


def measured(shares: Shares, training: str, **seconds: float) -> Shares:
    """What a change took (`vacate_s`, `return_s`), or what it was good for (`kept_s`), to weigh others with."""
    crew = shares.crews.get(training)
    if crew is None:
        return shares
    means: dict[str, Any] = {name: demand.moving(getattr(crew, name), took) for name, took in seconds.items()}
    return replace(shares, crews={**shares.crews, training: replace(crew, **means)})


def held(shares: Shares, training: str) -> list[int]:
    """Masks of the GPUs that its workers may use."""
    return sorted(
        one.mask for one in shares.workers.values() if one.training == training and one.state is LeaseState.HELD
    )


def dated(before: Shares, after: Shares, now: float) -> Shares:
    """Since when nobody has had the GPUs that nobody has."""
    was, free = before.pool.mask & ~used_mask(before), after.pool.mask & ~used_mask(after)
    if was == free and before.vacant_since:
        return after if after.vacant_since is before.vacant_since else replace(after, vacant_since=before.vacant_since)
    since = {gpu: at for gpu, at in before.vacant_since.items() if free >> gpu & 1}
    for gpu in gpus_of(free & ~was):
        since[gpu] = now
    for gpu in gpus_of(free):
        since.setdefault(gpu, now)
    return replace(after, vacant_since=since)
