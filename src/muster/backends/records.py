"""What every backend writes down of a worker: its record in the store, and its start and end in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from muster.core.keeping import WORKER, WorkerRecord
from muster.core.training import metering
from muster.ports import Clock, Record, Store, Write, insist
from muster.types.codec import from_wire, to_wire
from muster.types.event import WORKER_EXITED, WORKER_STARTED, Event
from muster.types.training import Key, Uid
from muster.types.worker import Worker

KIND = WORKER
LAST_WORDS = 2000
_SAME = ("name", "uid", "node", "started_at", "gpus", "pid", "ended_at", "exit_code", "last_words", "reason")


async def write(store: Store, worker: Worker, key: Key, *events: Event, durable: bool = False, **process: Any) -> None:
    """`process` is what its backend needs to find it again. What is not durable is insisted on: nobody asks again."""
    same: dict[str, Any] = {name: getattr(worker, name) for name in _SAME}
    kept = WorkerRecord(namespace=key.namespace, training=key.name, why=worker.why_ended, **same, **process)
    record = Record(KIND, f"{worker.uid}/{worker.name}", to_wire(kept))
    noted = Write(events=events, records=(record,), lazy=not durable)
    await (store.write(noted) if durable else insist(store, noted))


def read(kept: WorkerRecord) -> tuple[Worker, Key]:
    same: dict[str, Any] = {name: getattr(kept, name) for name in _SAME}
    return Worker(why_ended=kept.why, **same), Key(kept.namespace, kept.training)


def oldest_first(store: Store) -> list[WorkerRecord]:
    kept = [from_wire(WorkerRecord, value, strict=False) for value in store.records(KIND).values()]
    return sorted(kept, key=lambda one: one.started_at)


def removals(uid: Uid, names: Mapping[str, object]) -> tuple[Record, ...]:
    return tuple(Record(KIND, f"{uid}/{name}", None) for name in names)


def started(worker: Worker, key: Key, clock: Clock, *, shown: str = "") -> Event:
    at = worker.started_at + (clock.now() - clock.steady())
    data = {"worker": worker.name, "gpus": len(worker.gpus)} | metering.when(at, worker.started_at)
    return _about(Event(WORKER_STARTED, f"{worker.name}{shown}", data=data), key, worker.uid, at)


def exited(worker: Worker, key: Key, clock: Clock, store: Store) -> Event:
    """A warning unless it ended well, was asked to, or its training had its outcome: workers then leave with a code."""
    assert worker.ended_at is not None
    bad = worker.exit_code not in (0, None) and not worker.stopping and not _is_over(store, key, worker.uid)
    data = {"worker": worker.name, "gpus": len(worker.gpus), "exitCode": worker.exit_code}
    now = clock.now()
    at = worker.ended_at + (now - clock.steady())
    data |= {"at": at.isoformat()} | metering.when(at, worker.ended_at)
    data |= {"reason": worker.reason} if worker.reason else {}
    told = Event(WORKER_EXITED, f"{worker.name}: {worker.why_ended}", "Warning" if bad else "Normal", data=data)
    return _about(told, key, worker.uid, now)


def last_words(text: str) -> str:
    """The last lines that say something, of what a worker that failed wrote."""
    lines = [line for line in text.splitlines() if line and "see muster-node --help" not in line]
    return "; ".join(line.removeprefix("muster-node: ") for line in lines[-3:])


def _about(event: Event, key: Key, uid: Uid, now: datetime) -> Event:
    return replace(event, namespace=key.namespace, training=key.name, uid=uid, at=now)


def _is_over(store: Store, key: Key, uid: Uid) -> bool:
    stored = store.get(key)
    return stored is not None and stored.uid == uid and stored.training.status.outcome is not None
