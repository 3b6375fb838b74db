"""What every backend writes down of a worker: its record in the store, and its start and end in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from muster.core.keeping import WORKER
from muster.ports import Record, Store
from muster.types.event import WORKER_EXITED, WORKER_STARTED, Event
from muster.types.training import Key, Uid
from muster.types.worker import Worker

KIND = WORKER
LAST_WORDS = 2000
SHORTAGE = 71  # it could not be started now (files, memory, disk, quota): trying again may help


def record(worker: Worker, key: Key, **more: Any) -> Record:
    """`more` is what its backend needs to find it again."""
    kept = {
        "name": worker.name,
        "uid": worker.uid,
        "namespace": key.namespace,
        "training": key.name,
        "node": worker.node,
        "startedAt": worker.started_at.isoformat(),
        "gpus": list(worker.gpus),
        "endedAt": worker.ended_at.isoformat() if worker.ended_at else None,
        "exitCode": worker.exit_code,
        "why": worker.why_ended,
        "lastWords": worker.last_words,
        "reason": worker.reason,
    }
    return Record(KIND, f"{worker.uid}/{worker.name}", kept | more)


def read(kept: Mapping[str, Any]) -> tuple[Worker, Key]:
    ended = kept.get("endedAt")
    worker = Worker(
        name=str(kept["name"]),
        uid=Uid(str(kept["uid"])),
        node=str(kept["node"]),
        started_at=datetime.fromisoformat(str(kept["startedAt"])),
        gpus=tuple(kept["gpus"]),
        pid=int(kept.get("pid") or 0),
        ended_at=datetime.fromisoformat(str(ended)) if ended else None,
        exit_code=kept.get("exitCode"),
        why_ended=str(kept.get("why") or ""),
        last_words=str(kept.get("lastWords") or ""),
        reason=str(kept.get("reason") or ""),
    )
    return worker, Key(str(kept["namespace"]), str(kept["training"]))


def oldest_first(store: Store) -> list[Mapping[str, Any]]:
    return sorted(store.records(KIND).values(), key=lambda kept: str(kept["startedAt"]))


def removals(uid: Uid, names: Mapping[str, object]) -> tuple[Record, ...]:
    return tuple(Record(KIND, f"{uid}/{name}", None) for name in names)


def started(worker: Worker, key: Key, now: datetime, *, shown: str = "") -> Event:
    data = {"worker": worker.name, "gpus": len(worker.gpus)}
    return _about(Event(WORKER_STARTED, f"{worker.name}{shown}", data=data), key, worker.uid, now)


def exited(worker: Worker, key: Key, now: datetime, store: Store) -> Event:
    """A warning unless it ended well, was asked to, or its training had its outcome: workers then leave with a code."""
    assert worker.ended_at is not None
    bad = worker.exit_code not in (0, None) and not worker.stopping and not _is_over(store, key, worker.uid)
    data = {"worker": worker.name, "gpus": len(worker.gpus), "exitCode": worker.exit_code}
    data |= {"at": worker.ended_at.isoformat()} | ({"reason": worker.reason} if worker.reason else {})
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
