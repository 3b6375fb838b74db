"""The time of day is set, forwards and back, while the control plane runs and while it is down.

0.1.0 measured with it: a one-hour deadline ended a training two days early, and 160 worker-seconds became 11,359.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.backends import records
from muster.control.loop import Loop
from muster.core.training import metering
from muster.ports import Write
from muster.types.training import Key, Training, Uid
from muster.types.worker import Worker
from tests.clocks import HandClock
from tests.fleet import eventually
from tests.memory_store import MemoryStore
from tests.plane import Plane, fresh, reasons
from tests.simulator.control import SimulatedBackend, SimulatedWorlds
from tests.training_builders import a_training

BOUND_S = 20.0
TWO_DAYS = timedelta(days=2)
BOTH_WAYS = pytest.mark.parametrize("set_by", [TWO_DAYS, -TWO_DAYS], ids=["forwards", "back"])


class House:
    """A control loop with a clock that is set by hand."""

    def __init__(self) -> None:
        self.store, self.clock = MemoryStore(), HandClock()
        self.backend = SimulatedBackend(self.clock)
        self.worlds = SimulatedWorlds(self.clock, lambda uid: self.loop.run_changed(uid))
        self.loop = Loop(self.store, {"local": self.backend}, self.worlds, self.clock, alive_every_s=None)
        self.backend.changed = self._changed

    def _changed(self, worker: Worker) -> None:
        self.worlds.worker_changed(worker)
        self.loop.workers_changed(worker.uid)

    async def put(self, training: Training) -> None:
        await self.store.write(Write(put=training))
        await self.loop.idle()

    async def after(self, passes: timedelta, key: Key) -> Training | None:
        self.clock.at += passes
        for _ in range(4):
            self.loop.wake(key)
            await self.loop.idle()
        stored = self.store.get(key)
        return stored.training if stored is not None else None


def play(scenario: Callable[[House], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(BOUND_S):
            house = House()
            house.loop.start()
            try:
                await scenario(house)
            finally:
                await house.loop.stop()
                await house.store.close()

    asyncio.run(run())


@BOTH_WAYS
def test_a_deadline_is_over_when_so_much_time_has_gone_by(set_by: timedelta) -> None:
    async def scenario(house: House) -> None:
        training = a_training(world=(2, 2, 2), active_deadline_seconds=3600.0)
        await house.put(training)
        house.clock.set_by = set_by
        now = await house.after(timedelta(minutes=59), training.key)
        assert now is not None and now.status.phase == "ready"
        now = await house.after(timedelta(minutes=2), training.key)
        assert now is not None and now.status.phase == "failed"
        assert now.status.outcome is not None and now.status.outcome.reason == "deadline_exceeded"
        shown = now.status.finished_at
        assert shown is not None and abs(shown - house.clock.now()) < timedelta(minutes=1), "people see the time of day"

    play(scenario)


@BOTH_WAYS
@pytest.mark.parametrize("before", [True, False], ids=["before the end", "after it"])
def test_what_has_ended_is_kept_for_as_long_as_was_asked(set_by: timedelta, before: bool) -> None:
    async def scenario(house: House) -> None:
        training = a_training(world=(1, 1, 1), active_deadline_seconds=60.0, ttl_seconds_after_finished=3600.0)
        await house.put(training)
        house.clock.set_by = set_by if before else timedelta()
        assert (await house.after(timedelta(minutes=2), training.key)) is not None
        house.clock.set_by = set_by
        assert (await house.after(timedelta(minutes=59), training.key)) is not None
        assert (await house.after(timedelta(minutes=2), training.key)) is None

    play(scenario)


def test_what_is_deleted_does_not_wait_for_a_clock_that_was_set_back() -> None:
    async def scenario(house: House) -> None:
        training = a_training(world=(1, 1, 1), active_deadline_seconds=60.0)
        await house.put(training)
        ended = await house.after(timedelta(minutes=2), training.key)
        assert ended is not None and ended.is_terminal
        marked = replace(ended.metadata, deletion_timestamp=house.clock.now())
        house.clock.set_by = -TWO_DAYS
        await house.put(replace(ended, metadata=marked))
        assert (await house.after(timedelta(seconds=11), training.key)) is None, "once its workers have left"

    play(scenario)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e5), st.floats(-1000, 1000), st.integers(0, 2)
        ),  # seconds pass, days are set, who moves
        max_size=12,
    )
)
def test_usage_is_the_time_that_has_gone_by(steps: list[tuple[float, float, int]]) -> None:
    clock, store, key = HandClock(), MemoryStore(), Key("default", "demo")
    events, alive, lived = [], dict[str, Worker](), timedelta()
    for number, (seconds, days, what) in enumerate(steps):
        clock.at += timedelta(seconds=seconds)
        lived += timedelta(seconds=seconds) * len(alive)
        clock.set_by += timedelta(days=days)
        if what == 1:
            worker = alive[f"w{number}"] = Worker(f"w{number}", Uid("u"), "here", clock.steady())
            events.append(records.started(worker, key, clock))
        elif what == 2 and alive:
            over = replace(alive.popitem()[1], ended_at=clock.steady())
            events.append(records.exited(over, key, clock, store))
    found = metering.totals(metering.intervals(events, clock.steady()), now=clock.steady())
    assert abs(sum(one.worker_seconds for one in found) - lived.total_seconds()) < 1.0
    assert sum(one.running for one in found) == len(alive)


@pytest.mark.usefixtures("processes")
@BOTH_WAYS
def test_a_real_control_plane_counts_on_whatever_its_clock_is_set_to(tmp_path: Path, set_by: timedelta) -> None:
    """Set while it runs, and once more while it is down: deadline, usage and the times that people see."""
    offset, plane = tmp_path / "clock", Plane(tmp_path)
    offset.write_text("0")
    plane.serve(TIME_SET=str(offset))
    try:
        _lives_through(plane, offset, set_by)
    finally:
        plane.close()


def _lives_through(plane: Plane, offset: Path, set_by: timedelta) -> None:
    training = plane.train(active_deadline_seconds=3600.0)
    training.wait_until_target_world(timeout=60)
    offset.write_text(str(set_by.total_seconds()))
    plane.client.train(name="later", command=["true"]).result(timeout=60)
    plane.crash()
    offset.write_text(str(2 * set_by.total_seconds()))
    plane.serve(TIME_SET=str(offset))
    training.scale(3)
    training.wait_until_target_world(timeout=60)
    assert fresh(training).phase == "ready"
    usage = training.usage()
    assert usage.running == 3 and 0 < usage.worker_seconds < 3 * 120, usage
    assert plane.client.get("later").usage().worker_seconds < 60
    shown = [event.at for event in training.events() if event.at is not None]
    assert abs((shown[-1] - shown[0]) - 2 * set_by) < timedelta(minutes=5), "people see the time of day"
    assert "DeadlineExceeded" not in reasons(training)
    explained = plane.muster("explain", "demo")
    assert explained.wait() == 0 and "its deadline is in 5" in explained.text, explained.text  # 59m, 58m…
    training.cancel()
    eventually(lambda: fresh(training).phase == "cancelled", "it is cancelled")
