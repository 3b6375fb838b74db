"""What is written down of a worker: does it come back, also as earlier versions wrote it?"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from muster.backends import records
from muster.ports import Record, Write
from muster.store.sqlite import SqliteStore
from muster.types.training import Key, Uid
from muster.types.worker import Worker

BEGUN, OVER = datetime(2026, 1, 31, 12, 0, 0, 250_000, UTC), datetime(2026, 1, 31, 12, 5, 0, 500_000, UTC)
# As 0.1.0 wrote it: one that runs as a process, and one that ended as a Pod.
PROCESS = {
    "name": "demo-0",
    "uid": "u1",
    "namespace": "default",
    "training": "demo",
    "node": "here",
    "startedAt": "2026-01-31T12:00:00.250000+00:00",
    "gpus": [0, 1],
    "endedAt": None,
    "exitCode": None,
    "why": "",
    "lastWords": "",
    "reason": "",
    "pid": 4711,
    "ticks": 99,
    "boot": "b",
}
POD = {
    "name": "demo-1",
    "uid": "u1",
    "namespace": "default",
    "training": "demo",
    "node": "there",
    "startedAt": "2026-01-31T12:00:00.260000+00:00",
    "gpus": [],
    "endedAt": "2026-01-31T12:05:00.500000+00:00",
    "exitCode": 137,
    "why": "exit code 137 (OOMKilled)",
    "lastWords": "no memory",
    "reason": "OOMKilled",
}


def test_records_of_the_first_version_are_read_oldest_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = SqliteStore.open(tmp_path / "store.db")
        kept = (Record(records.KIND, "u1/demo-1", POD), Record(records.KIND, "u1/demo-0", PROCESS))
        await store.write(Write(records=kept))
        process, pod = records.oldest_first(store)
        running = Worker("demo-0", Uid("u1"), "here", BEGUN, (0, 1), 4711)
        assert records.read(process) == (running, Key("default", "demo"))
        assert (process.ticks, process.boot) == (99, "b")
        ended, _ = records.read(pod)
        assert (ended.ended_at, ended.exit_code, ended.reason) == (OVER, 137, "OOMKilled")
        assert (ended.why_ended, ended.last_words, ended.alive) == ("exit code 137 (OOMKilled)", "no memory", False)
        await store.close()

    asyncio.run(scenario())


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, key = SqliteStore.open(tmp_path / "store.db"), Key("default", "demo")
        worker = Worker(
            "demo-0", Uid("u1"), "here", BEGUN, (3,), 7, ended_at=OVER, exit_code=1, why_ended="it fell", last_words="x"
        )
        await records.write(store, worker, key, ticks=5, boot="b")
        (kept,) = records.oldest_first(store)
        assert records.read(kept) == (worker, key)
        assert (kept.ticks, kept.boot) == (5, "b")
        await store.close()

    asyncio.run(scenario())
