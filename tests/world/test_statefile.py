"""What a stand-alone coordinator keeps on disk: it is read again, also what one of 0.1.0 left."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from muster.core.world import records
from muster.types.frames import AskFrame
from muster.types.world import OutcomeState, RunId
from muster.world import wire
from muster.world.connection import ask
from muster.world.service import Coordinator
from muster.world.statefile import StateFile, StateFileBusy
from tests.data.old import STATE_FILE, missing, transcript

RUN, DONE = RunId("run"), RunId("done")
BOUND_S = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A state file of 0.1.0 with a run that goes on and one that has ended."""
    shutil.copy(STATE_FILE, tmp_path / "state.json")
    return tmp_path / "state.json"


def serving(path: Path, test: Callable[[tuple[str, int]], Awaitable[None]]) -> None:
    """Run a test against a coordinator that was started with that file."""

    async def run() -> None:
        kept = StateFile(path, keep_s=math.inf)
        coordinator = Coordinator(state=kept)
        try:
            async with asyncio.timeout(BOUND_S):
                await test(await coordinator.start("127.0.0.1", 0))
        finally:
            await coordinator.stop()
            kept.close(remove=False)

    asyncio.run(run())


async def shown(where: tuple[str, int], run_id: RunId) -> dict[str, Any]:
    return dict(await ask([where], run_id, AskFrame(ask="show"), token=None))


async def joins(where: tuple[str, int], hello: dict[str, Any], until: str) -> list[dict[str, Any]]:
    """Say what a member of 0.1.0 said; returns what it hears until that comes. The connection stays open."""
    reader, writer = await asyncio.open_connection(*where)
    decoder = wire.Decoder()
    heard: list[dict[str, Any]] = []
    writer.write(wire.pack(hello))
    while not any(frame["type"] == until for frame in heard):
        heard += decoder.feed(await reader.read(65536))
    OPEN.append(writer)
    return heard


OPEN: list[asyncio.StreamWriter] = []  # a connection is closed when nobody holds it


# 0.1.0


def test_a_run_of_0_1_0_goes_on_in_its_round_when_its_members_come_back(path: Path) -> None:
    hellos = [
        line.frame for line in transcript() if line.type == "hello" and line.frame.get("present", {}).get("round")
    ]
    assert [hello["member"]["name"] for hello in hellos] == ["a", "c"]

    async def test(where: tuple[str, int]) -> None:
        before = await shown(where, RUN)
        assert (before["round"], before["restarts_used"], before["epoch"]) == (2, 1, 3)
        for hello in hellos:
            heard = await joins(where, hello, "release")
            release = next(frame for frame in heard if frame["type"] == "release")
            assert (release["round"], release["epoch"]) == (2, 3)
            assert release["record"]["seats"] == hello["present"]["record"]["seats"]
        after = await shown(where, RUN)
        assert (after["state"], after["round"], after["world"]) == ("training", 2, 2)
        assert "recovered" in [line["kind"] for line in after["story"]]

    serving(path, test)
    OPEN.clear()


def test_the_outcome_of_a_run_of_0_1_0_is_still_known(path: Path) -> None:
    async def test(where: tuple[str, int]) -> None:
        view = await shown(where, DONE)
        assert view["outcome"]["state"] == "succeeded"
        assert view["outcome"]["message"] == "all 1 ranks of round 0 exited 0"

    serving(path, test)
    kept = StateFile(path, keep_s=math.inf)
    [end] = records.read(kept.records()[DONE]).exits
    kept.close(remove=False)
    assert (end.rank, end.exit_code, end.worker) == (0, 0, "one")


def test_what_is_written_again_has_everything_that_0_1_0_wrote(path: Path) -> None:
    old = json.loads(path.read_text())
    kept = StateFile(path, keep_s=math.inf)
    for run_id, record in kept.records().items():
        kept.save(run_id, records.read(record))
    kept.close(remove=False)
    new = json.loads(path.read_text())
    assert new["version"] == old["version"] == 1
    for run_id, was in old["runs"].items():
        lost = missing(was["record"], new["runs"][run_id]["record"])
        assert not [one for one in lost if "].reason: " not in one]  # of an end: it follows from the rest


# Today


def test_an_outcome_is_kept_for_its_time_and_a_run_without_one_for_ever(path: Path) -> None:
    kept = StateFile(path, keep_s=60.0)
    runs = kept.records()
    kept.close(remove=False)
    assert list(runs) == [RUN], "the other had ended long ago"


def test_a_second_coordinator_cannot_have_the_file(path: Path) -> None:
    kept = StateFile(path, keep_s=60.0)
    with pytest.raises(StateFileBusy, match="in use by another coordinator"):
        StateFile(path, keep_s=60.0)
    kept.close(remove=True)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"runs": 3}', '{"runs": {"run": {"at": "now"}}}'])
def test_a_file_that_cannot_be_read_keeps_nobody_from_serving(path: Path, text: str) -> None:
    path.write_text(text)

    async def test(where: tuple[str, int]) -> None:
        _, writer = await asyncio.open_connection(*where)
        writer.close()

    serving(path, test)
    kept = StateFile(path, keep_s=60.0)
    assert kept.records() == {}
    kept.close(remove=False)


def test_a_record_that_cannot_be_used_costs_only_its_run(path: Path) -> None:
    text = json.loads(path.read_text())
    text["runs"]["run"]["record"]["seats"] = "gone"
    path.write_text(json.dumps(text))

    async def test(where: tuple[str, int]) -> None:
        assert (await shown(where, DONE))["outcome"]["state"] == OutcomeState.SUCCEEDED

    serving(path, test)
