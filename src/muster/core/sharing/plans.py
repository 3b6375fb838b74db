"""What a plan says: which bundles to shrink, which requests to grant, which bundles to expand, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.types.sharing import Bundle


@dataclass(frozen=True)
class ClusterGrant:
    """A fixed request that can be met. `ready` when all its GPUs are vacant now; else it waits for drains."""

    seq: int
    bundles: tuple[Bundle, ...]
    mask: int
    ready: bool


@dataclass(frozen=True)
class Expand:
    """A generation bundle to be woken. `ready` when its own GPUs are vacant now."""

    bundle: Bundle
    mask: int
    ready: bool


@dataclass(frozen=True)
class Seat:
    """GPUs for one more worker of a training. `ready` when they are vacant now."""

    training: str  # its uid
    name: str
    mask: int
    ready: bool
    why: str = ""


@dataclass(frozen=True)
class Standing:
    """How a training fares in the pool: whether its minimum was ever met, and what it lacks."""

    admitted: bool
    reason: str
    message: str


@dataclass(frozen=True)
class SharePlan:
    """Shrinks and leaves are to be begun at once; grants, expands and seats as soon as they are ready (ask again at
    every vacating)."""

    shrinks: tuple[Bundle, ...] = ()
    grants: tuple[ClusterGrant, ...] = ()
    expands: tuple[Expand, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)  # bundle or request (`#seq`) → a sentence
    recheck_at: float | None = None
    leaves: Mapping[str, str] = field(default_factory=dict)  # key of a worker's lease → why it has to go
    seats: tuple[Seat, ...] = ()
    standings: Mapping[str, Standing] = field(default_factory=dict)  # of trainings, by their uids
