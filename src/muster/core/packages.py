"""Packages of code: which no training needs any more, and how another one finds room. Pure.

A package is sent before the training that runs it is created, so one that no training names may be about to be used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

SHARE = 4  # a namespace has at most this part of all room
RECENT = timedelta(minutes=5)  # a client that has just sent code, or asked for it, is about to submit
UNUSED = timedelta(hours=1)  # for whoever has sent code to submit a training with it


@dataclass(frozen=True)
class KeptPackage:
    namespace: str
    digest: str
    size: int
    at: datetime  # when it was sent, or last asked for by somebody who is about to submit


def unused(
    kept: Iterable[KeptPackage], named: Collection[tuple[str, str]], now: datetime, left: tuple[str, str] | None = None
) -> list[KeptPackage]:
    """Those that no training names. `left` is what a training named that has just gone: it need not wait."""
    return [
        one
        for one in kept
        if (one.namespace, one.digest) not in named and (now - one.at >= UNUSED or (one.namespace, one.digest) == left)
    ]


@dataclass(frozen=True)
class RoomPlan:
    """How one more package finds room: packages to remove for it, or why it has none."""

    removed: tuple[KeptPackage, ...] = ()
    share: int = 0  # bytes that the namespace may have now
    taken: int = 0  # bytes that it needs or has just sent
    refusal: str = ""


def plan_room(
    kept: Iterable[KeptPackage], new: KeptPackage, most: int, needed: Callable[[], Collection[str]]
) -> RoomPlan:
    """Find room for a package within the share of its namespace.

    The share is a quarter of all room, and at most half of what other namespaces leave, so that the next namespace
    has room, too. Only packages of the same namespace are removed, oldest first, and none that a training names
    (`needed`, asked only if room is short) or that was sent or asked for just now.
    """
    kept = list(kept)
    own = sorted((one for one in kept if one.namespace == new.namespace), key=lambda one: one.at)
    others = sum(one.size for one in kept if one.namespace != new.namespace)
    share = max(0, min(most // SHARE, (most - others) // 2))
    taken = sum(one.size for one in own)
    removed: list[KeptPackage] = []
    in_use = needed() if taken + new.size > share else ()
    for one in own:
        if taken + new.size <= share:
            break
        if one.digest not in in_use and new.at - one.at >= RECENT:
            removed.append(one)
            taken -= one.size
    if taken + new.size <= share:
        return RoomPlan(tuple(removed), share, taken)
    refusal = (
        f"namespace {new.namespace!r} has {_mib(taken)} of code that its trainings name or that was just sent, and may "
        f"have {_mib(share)} now: there is no room for a package of {_mib(new.size)}"
    )
    return RoomPlan((), share, taken, refusal)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.3g} MiB"


def names_package(raw: bytes) -> bool:
    """Return whether a stored training may name a package. Most name none, and their bytes say so."""
    return b'"package":"sha256:' in raw or b'"package": "sha256:' in raw
