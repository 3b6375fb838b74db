"""A process that writes to a store until it is killed, and says on stdout what was acknowledged.

Each of several writers counts: its n-th write puts n into its object, an event and a record, in one transaction.
Every fourth write deletes the object instead, and every third is lazy. Lines are `writer n version`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from muster.ports import Record, Write
from muster.store.sqlite import SqliteStore
from muster.types.event import Event
from muster.types.training import Key, Metadata, Spec, Training

WRITERS = 8
KEEP_CHANGES = 200


def a_write(name: str, n: int) -> Write:
    """The n-th write of a writer."""
    event = Event("Wrote", data={"n": n}, namespace="default", training=name)
    record = Record("count", name, {"n": n})
    if n % 4 == 0:
        return Write(delete=Key("default", name), events=[event], records=[record], lazy=n % 3 == 0)
    training = Training(Metadata(name, uid=f"uid-{name}", generation=n), Spec(script="x.py", args=(str(n), "x" * 300)))
    return Write(put=training, expect=0 if n % 4 == 1 else None, events=[event], records=[record], lazy=n % 3 == 0)


async def count(store: SqliteStore, name: str) -> None:
    last = store.record("count", name)
    n = int(last["n"]) if last is not None else 0
    while True:
        n += 1
        written = await store.write(a_write(name, n))
        os.write(1, f"{name} {n} {written.version if written is not None else 0}\n".encode())


async def main(path: Path) -> None:
    store = SqliteStore.open(path, keep_changes=KEEP_CHANGES)
    os.write(1, b"open\n")
    await asyncio.gather(*(count(store, f"w{number}") for number in range(WRITERS)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
