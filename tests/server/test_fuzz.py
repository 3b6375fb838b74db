"""The published document against the server: whatever follows from it, right or wrong, is answered as it says.

`positive_data_acceptance` is left out: a schema cannot say that min ≤ target ≤ max, or which continue token is ours;
so is `use_after_free`: what was deleted is there until the control loop, which does not run here, has stopped it.
`/v1/watch` never ends by itself and is left to tests/server/test_watch.py.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from muster.ports import StoreChange, Stored
from muster.types.training import Key
from tests.server.house import House, in_house

_LONGEST_WAIT_S = 0.05


def _impatient(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """End what would wait by design: every training succeeds at once, and no read waits for long."""
    patient = house.store.newer

    async def newer(key: Key, than: int, timeout_s: float | None) -> Stored | None:
        return await patient(key, than, min(_LONGEST_WAIT_S, timeout_s or _LONGEST_WAIT_S))

    settling: set[asyncio.Task[Stored]] = set()

    def hear(change: StoreChange) -> None:
        if change.type == "ADDED" and change.stored.key.namespace == "default":
            settling.add(asyncio.create_task(house.settle(change.stored.key.name, "succeeded", rank_exits=())))

    monkeypatch.setattr(house.store, "newer", newer)
    house.store.subscribe(hear)


async def _fuzz(house: House, *options: str, bound_s: float) -> None:
    token = house.client.headers["Authorization"]
    command = (
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{house.url}/openapi.json"),
        *("-H", f"Authorization: {token}", "--exclude-path", "/v1/watch", "--request-timeout", "5"),
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
    assert b"Tested: 31" in said, said.decode()[-2000:]


def test_the_server_keeps_what_its_document_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(house: House) -> None:
        _impatient(house, monkeypatch)
        await _fuzz(house, "--phases", "coverage,fuzzing", "--max-examples", "12", "--seed", "7", bound_s=120)

    in_house(tmp_path, test)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_the_server_keeps_what_its_document_says_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    async def test(house: House) -> None:
        _impatient(house, monkeypatch)
        await _fuzz(house, "--max-examples", "150", "--seed", str(seed), bound_s=900)

    in_house(tmp_path, test)
