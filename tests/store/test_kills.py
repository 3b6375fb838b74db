"""Does an acknowledged write survive the death of its process at any moment? Real processes, real SIGKILL."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from muster.ports import Filter
from muster.store.sqlite import SqliteStore
from tests.store import writer
from tests.store.files import opened
from tests.training_builders import key_of

ROOT = Path(__file__).parents[2]


@dataclass
class Promises:
    """What was acknowledged, over all the processes that were killed."""

    counts: dict[str, int] = field(default_factory=dict)
    versions: dict[tuple[str, int], int] = field(default_factory=dict)
    highest: int = 0

    def hear(self, line: str) -> None:
        name, n, version = line.split()
        assert int(n) == self.counts.get(name, 0) + 1 or name not in self.counts
        self.counts[name] = int(n)
        if int(version):
            self.versions[name, int(n)] = int(version)
            self.highest = max(self.highest, int(version))


def write_until_killed(path: Path, promises: Promises, acknowledged: int) -> None:
    """Let a process write until that many writes were acknowledged, then kill it wherever it is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.store.writer", str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    watchdog = threading.Timer(30, process.kill)
    with process, contextlib.ExitStack() as ending:
        watchdog.start()
        ending.callback(watchdog.cancel)
        assert process.stdout.readline() == "open\n"
        for _ in range(acknowledged):
            promises.hear(process.stdout.readline())
        process.kill()
        for line in process.stdout.readlines():  # acknowledged before it died, read after
            if line.endswith("\n"):
                promises.hear(line)


async def check(store: SqliteStore, promises: Promises) -> None:
    """Everything acknowledged is there, and every transaction as a whole or not at all."""
    assert store.version >= promises.highest
    for name in (f"w{number}" for number in range(writer.WRITERS)):
        record = store.record("count", name)
        n = int(record["n"]) if record is not None else 0
        acknowledged = promises.counts.get(name, 0)
        assert acknowledged <= n <= acknowledged + 1, f"{name}: {acknowledged} acknowledged, {n} found"
        events = await store.events(training=name)
        assert [event.data["n"] for event in events] == list(range(1, n + 1))
        found = store.get(key_of(name))
        if n % 4 == 0:
            assert found is None
        else:
            assert found is not None and found.training.spec.args[0] == str(n)
            assert found.version == promises.versions.get((name, n), found.version)
            assert found.training.metadata.resource_version == str(found.version)
        promises.counts[name] = n  # what was not acknowledged may count as done, but then it stays
    await check_history(store)


async def check_history(store: SqliteStore) -> None:
    """The kept changes have no gap, and lead to the objects that are there."""
    first = max(0, store.version - writer.KEEP_CHANGES)
    changes = store.changes(first, Filter())
    told = [await anext(changes) for _ in range(store.version - first)]
    assert [change.version for change in told] == list(range(first + 1, store.version + 1))
    for change in {change.stored.key: change for change in told}.values():
        found = store.get(change.stored.key)
        if change.type == "DELETED":
            assert found is None
        else:
            assert found is not None and found.raw == change.stored.raw
    ids = [event.id for event in await store.events()]
    assert ids == sorted(set(ids))


def survive(path: Path, *, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    promises = Promises()
    before = 0
    for _ in range(kills):
        write_until_killed(path, promises, chance.randrange(0, 120))

        async def story(store: SqliteStore) -> None:
            nonlocal before
            assert store.version >= before
            before = store.version
            await check(store, promises)

        opened(path, story, keep_changes=writer.KEEP_CHANGES)
    assert promises.highest > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_acknowledged_writes_survive_kills(tmp_path: Path, seed: int) -> None:
    survive(tmp_path / "store.db", seed=seed, kills=3)


@pytest.mark.soak
def test_acknowledged_writes_survive_many_kills(tmp_path: Path) -> None:
    survive(tmp_path / "store.db", seed=random.randrange(1 << 30), kills=200)


def test_a_kill_at_any_statement_leaves_whole_transactions_and_what_was_acknowledged(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.statements", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    promises = {int(file.stem): Promises() for file in tmp_path.glob("*.db")}
    for line in done.stdout.splitlines():
        step, n = line.split()
        promises[int(step)].counts["w0"] = int(n)
    found = set()
    for number, promised in promises.items():

        async def story(store: SqliteStore, promised: Promises = promised) -> None:
            await check(store, promised)

        opened(tmp_path / f"{number}.db", story, keep_changes=writer.KEEP_CHANGES)
        found.add(promised.counts["w0"])
    assert found == set(range(6)), "kills must have hit between all writes"


# Disk ----------------------------------------------------------------------------------------------

FILL = """
import asyncio, json, os, resource, sys
from pathlib import Path
from muster import errors
from muster.ports import Write
from muster.store.sqlite import SqliteStore
from muster.types.event import Event
from tests.training_builders import a_training

async def main(path):
    store = SqliteStore.open(path)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, most))
    acknowledged, refusals = [], []
    for n in range(400):
        names = [f"t{n}-{k}" for k in range(3)]
        writes = [Write(put=a_training(name, args=("x" * 500,)), expect=0, events=[Event("T")]) for name in names]
        for name, end in zip(names, await asyncio.gather(*map(store.write, writes), return_exceptions=True)):
            if isinstance(end, errors.Unavailable):
                refusals.append([name, end.message, end.hint, store.get(a_training(name).key) is None])
            else:
                acknowledged.append([name, end.version])
        if len(refusals) > 10:
            break
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    after = await store.write(Write(put=a_training("after"), expect=0))
    print(json.dumps([acknowledged, refusals, after.version]), flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_disk_that_takes_no_more_refuses_writes_until_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    done = subprocess.run(
        [sys.executable, "-c", FILL, path], cwd=ROOT, check=False, capture_output=True, text=True, timeout=30
    )
    assert done.stdout, done.stderr
    acknowledged, refusals, after = json.loads(done.stdout)
    assert acknowledged and len(refusals) > 10
    assert all(str(path) in message and hint and unseen for _, message, hint, unseen in refusals)

    async def story(store: SqliteStore) -> None:
        found = {one.key.name: one.version for one in store.page(Filter()).items}
        assert found == {**dict(acknowledged), "after": after}
        assert sorted(found.values()) == list(range(1, after + 1))
        assert {event.training for event in await store.events()} == {name for name, _ in acknowledged}

    opened(path, story)
