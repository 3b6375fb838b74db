"""Where does a training run, who may have GPUs now, and what do the others wait for?

Order is priority, then age. Whoever is admitted keeps its place and may replace lost workers before anyone new
comes in. One that waits holds back those behind it that want GPUs too, or it would never be served; one that asks
for more than there is at all holds back nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from muster.types.training import QUEUE, SUSPENDED, Key, Spec, Training, Uid

ANYWHERE = Spec().backend  # who did not choose runs wherever there is a choice of one


@dataclass(frozen=True)
class Claim:
    """What a live training asks for, and what it has. Workers that only wait to be replaced still hold theirs."""

    key: Key
    uid: Uid
    created_at: datetime
    min: int
    wanted: int
    have: int = 0
    gpus_each: int = 0
    priority: int = 0
    admitted: bool = False


@dataclass(frozen=True)
class Grant:
    """How many workers a training may have now. `message` says what is missing, for users."""

    workers: int
    admitted: bool
    reason: str
    message: str


def backend_of(spec: Spec, served: Collection[str]) -> str:
    """The name under which the backend is served that a spec means; its own word, if there is none."""
    if spec.backend == ANYWHERE and len(served) == 1:
        return next(iter(served))
    return spec.backend


def suspended(training: Training) -> Grant:
    """What one may have that is not to run now, and what it waits for."""
    queue = training.metadata.labels.get(QUEUE)
    waits = f"the queue {queue!r} to admit it" if queue else "spec.suspend to be false"
    return Grant(0, False, SUSPENDED, f"suspended: it waits for {waits}")


def admit(claims: Iterable[Claim], gpus: int) -> Mapping[Uid, Grant]:
    """A grant for each claim, given that many GPUs in all."""
    ordered = sorted(claims, key=lambda claim: (-claim.priority, claim.created_at, str(claim.key)))
    held = {claim.uid: claim.have for claim in ordered}
    free = gpus - sum(claim.have * claim.gpus_each for claim in ordered)
    holders = [claim for claim in ordered if claim.have and claim.gpus_each]
    for claim in ordered:
        if claim.admitted:
            free -= _give(held, claim, claim.min, free)
    grants: dict[Uid, Grant] = {}
    waiting: Claim | None = None
    for claim in ordered:
        if claim.gpus_each == 0:
            grants[claim.uid] = Grant(claim.wanted, True, "Admitted", "it needs no GPU")
            continue
        short = (claim.min - held[claim.uid]) * claim.gpus_each
        if not claim.admitted and (waiting is not None or short > free):
            grants[claim.uid] = _refusal(claim, gpus, free, waiting, holders)
            if claim.min * claim.gpus_each <= gpus:
                waiting = waiting or claim
            continue
        if waiting is None or not claim.admitted:
            free -= _give(held, claim, claim.wanted, free)
        grants[claim.uid] = _grant(claim, held[claim.uid], gpus, waiting)
    return grants


def _give(held: dict[Uid, int], claim: Claim, up_to: int, free: int) -> int:
    """Raise what a claim holds as far as there is room; returns the GPUs that it took."""
    if claim.gpus_each == 0:
        return 0
    more = max(0, min(up_to - held[claim.uid], free // claim.gpus_each))
    held[claim.uid] += more
    return more * claim.gpus_each


def _grant(claim: Claim, workers: int, gpus: int, waiting: Claim | None) -> Grant:
    if workers >= claim.wanted:
        return Grant(workers, True, "Admitted", f"{workers * claim.gpus_each} of {gpus} GPUs are its own")
    behind = f"; {waiting.key} waits for them too" if waiting is not None else ""
    missing = (claim.wanted - workers) * claim.gpus_each
    return Grant(
        workers, True, "InsufficientGPUs", f"waits for {_gpus(missing)} to have {claim.wanted} workers{behind}"
    )


def _refusal(claim: Claim, gpus: int, free: int, waiting: Claim | None, holders: list[Claim]) -> Grant:
    need = claim.min * claim.gpus_each
    workers = f"{claim.min} worker{'s' if claim.min > 1 else ''} × {claim.gpus_each}"
    if need > gpus:
        message = f"needs {_gpus(need)} ({workers}), there are only {gpus} here: it can never start"
        return Grant(claim.have, False, "InsufficientGPUs", message)
    held_by = ", ".join(f"{one.key} ({one.have * one.gpus_each})" for one in holders if one.uid != claim.uid)
    message = f"needs {_gpus(need)} ({workers}), {max(0, free)} of {gpus} free; held by {held_by or 'nobody'}"
    if waiting is not None:
        message += f"; {waiting.key} is before it"
        return Grant(claim.have, False, "Queued", message)
    return Grant(claim.have, False, "InsufficientGPUs", message)


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
