"""The published document against the server: whatever follows from it, right or wrong, is answered as it says.

`positive_data_acceptance` is left out: a schema cannot say that min ≤ target ≤ max, or which continue token is ours;
so is `use_after_free`: what was deleted is there until the control loop, which does not run here, has stopped it.
Streams, which never end by themselves, are ended here after a moment, as a store does that closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.ports import Filter, StoreChange, Stored
from muster.server.app import OPERATIONS
from muster.types.training import Key
from tests.server.house import House, in_house

_LONGEST_WAIT_S = 0.02


def _impatient(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """End what would last by design: every training succeeds at once, no read waits and no watch goes on for long."""
    patient, endless = house.store.newer, house.store.changes

    async def changes(since: int, which: Filter) -> AsyncIterator[StoreChange]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_WAIT_S):
                async for change in endless(since, which):
                    yield change

    async def newer(key: Key, than: int, timeout_s: float | None) -> Stored | None:
        return await patient(key, than, min(_LONGEST_WAIT_S, timeout_s or _LONGEST_WAIT_S))

    settling: set[asyncio.Task[Stored]] = set()

    def hear(change: StoreChange) -> None:
        if change.type == "ADDED" and change.stored.key.namespace == "default":
            settling.add(asyncio.create_task(house.settle(change.stored.key.name, "succeeded", rank_exits=())))

    monkeypatch.setattr(house.store, "newer", newer)
    monkeypatch.setattr(house.store, "changes", changes)
    house.store.subscribe(hear)


async def _fuzz(house: House, *options: str, bound_s: float) -> None:
    token = house.client.headers["Authorization"]
    command = (
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{house.url}/openapi.json"),
        *("-H", f"Authorization: {token}", "--request-timeout", "5"),
        *("--exclude-checks", "positive_data_acceptance,use_after_free", "--warnings", "off", "--no-color"),
        *("--generation-database", "none", "--no-shrink", *options),
    )
    process = await asyncio.create_subprocess_exec(
        *command, cwd=house.home, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), bound_s)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode == 0, said.decode()[-6000:]
    tested = len(OPERATIONS) - 1 - options.count("--exclude-path")  # nor the document itself, which it has read
    assert b"Tested: %d" % tested in said, said.decode()[-2000:]


def test_the_server_keeps_what_its_document_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(house: House) -> None:
        _impatient(house, monkeypatch)
        few = ("--phases", "coverage,fuzzing", "--max-examples", "12", "--seed", "7")
        await _fuzz(house, *few, "--exclude-path", "/v1/watch", bound_s=120)  # which takes a moment each time

    in_house(tmp_path, test)


@pytest.mark.soak
def test_the_server_keeps_what_its_document_says_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(house: House) -> None:
        _impatient(house, monkeypatch)
        await _fuzz(house, "--max-examples", "500", "--seed", "1", bound_s=7200)

    in_house(tmp_path, test)
