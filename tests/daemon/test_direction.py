"""What workers measure gets from the coordinator to the control plane: by their names, deciding nothing, bounded."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from muster.daemon import direction
from muster.daemon.direction import Direction
from muster.types.frames import HelloFrame, Introduction, MetricsFrame, RenewFrame
from muster.types.measured import LoggedNumber, WorkerUse
from muster.types.training import Uid
from muster.types.world import MemberId, RunId, Settings
from muster.world.protocol import RunProtocol
from tests.memory_store import MemoryStore

TOLD = MetricsFrame(
    round=0, names=("loss",), points=(LoggedNumber(1, 0, 0.5, 7, 0.25),), use=WorkerUse(cpu_percent=50.0)
)


class Line:
    """A connection whose other end is the test."""

    peer = "192.0.2.1:1"

    def send_raw(self, data: bytes) -> None:
        pass

    def refuse(self, code: str, message: str) -> None:
        raise AssertionError(f"{code}: {message}")


class Hears:
    """The control plane, which only listens."""

    def __init__(self) -> None:
        self.told: list[tuple[Uid, str, MetricsFrame]] = []

    def run_measured(self, uid: Uid, worker: str, told: MetricsFrame) -> None:
        self.told.append((uid, worker, told))


def test_what_a_worker_tells_changes_nothing_and_is_told_on_by_its_name() -> None:
    protocol, line = RunProtocol(RunId("run"), settings=Settings(min=1, max=1), directed=True), Line()
    protocol.greet(line, HelloFrame(kind="agent", member=Introduction(MemberId("m"), "demo-0", store_port=1)), 0.0)
    protocol.settle(0.0)
    before, protocol.at.outbox = protocol.run, []
    protocol.hear(line, TOLD, 1.0)  # nobody wants it: it is dropped
    told: list[tuple[str, MetricsFrame]] = []
    protocol.at.on_metrics = lambda worker, frame: told.append((worker, frame))
    protocol.hear(line, TOLD, 1.0)
    assert told == [("demo-0", TOLD)]
    assert protocol.run is before and protocol.at.outbox == [] and not protocol.news
    protocol.hear(line, RenewFrame(round=0), 2.0)
    assert protocol.at.outbox != [], "it is still heard"


def test_a_flood_of_numbers_does_not_pile_up(monkeypatch: Any) -> None:
    monkeypatch.setattr(direction, "MOST_UNHEARD", 10)

    async def play() -> None:
        hears = Hears()
        made = Direction(MemoryStore(), cast(Any, hears))
        try:
            for _ in range(100):
                made._measured(RunId("run"), "demo-0", TOLD)
            assert hears.told == [], "the coordinator does not wait for it"
            await asyncio.sleep(0)
            assert hears.told == [(Uid("run"), "demo-0", TOLD)] * 10
            made._measured(RunId("run"), "demo-0", TOLD)
            await asyncio.sleep(0)
            assert len(hears.told) == 11, "and it goes on"
        finally:
            await made.stop()

    asyncio.run(play())
