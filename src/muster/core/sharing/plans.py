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
class SharePlan:
    """Shrinks are to be begun at once; grants and expands as soon as they are ready (ask again at every vacating)."""

    shrinks: tuple[Bundle, ...] = ()
    grants: tuple[ClusterGrant, ...] = ()
    expands: tuple[Expand, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)  # bundle or request (`#seq`) → a sentence
    recheck_at: float | None = None
