"""Which packages of code does nobody need any more? Pure.

A package is sent before the training that runs it is created, so one that no training names may be about to be used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

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


def too_many(kept: Iterable[KeptPackage], size: int, most: int) -> str:
    """Why one more of that size has no room; empty if it has."""
    taken = sum(one.size for one in kept)
    if taken + size <= most:
        return ""
    return f"packages of code take {taken >> 20} MiB, and with this one more than the {most >> 20} MiB that they may"
