"""What stays of usage when the oldest entries of a cluster's journal go? One sum for each training, as a record.

It is written before they go. Until they have gone both are there, after a crash for longer: a sum says up to which
entry it counts, and what it counts is not told again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from muster.core.keeping import SUM
from muster.core.training import metering
from muster.ports import Record
from muster.store.kube_outbox import USAGE
from muster.store.ledger import KeptRecord
from muster.types import codec
from muster.types.event import Event

Sums = Mapping[str, Event]  # by the uid of a training


def read(values: Mapping[tuple[str, str], Any]) -> dict[str, Event]:
    return {
        uid: codec.from_wire(Event, value, strict=False)
        for (kind, uid), value in values.items()
        if kind == SUM and value
    }


def added(sums: Sums, gone: Iterable[Event], now: datetime) -> dict[str, Event]:
    """The sums that change when these entries go; they are the oldest."""
    by_training: dict[str, list[Event]] = {}
    for event in gone:
        if event.uid:
            by_training.setdefault(event.uid, [sums[event.uid]] if event.uid in sums else []).append(event)
    return {
        uid: metering.folded(events, now)
        for uid, events in by_training.items()
        if any(event.reason in USAGE for event in events)  # a sum is one of them
    }


def kept(sums: Sums) -> Iterator[KeptRecord]:
    for uid, event in sums.items():
        value = codec.to_wire(event)
        yield KeptRecord(Record(SUM, uid, value), msgspec.json.encode(value))
