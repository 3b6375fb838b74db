"""Simulated workers, and the notes that are taken of them."""

from __future__ import annotations

import asyncio

import pytest

from muster.sim import virtual
from muster.sim.pipelines import Engine
from muster.sim.recording import DoubleBooking, Recorder, Use
from muster.sim.scenarios import Trajectory


def a_recorder(gpus: int = 2) -> Recorder:
    return Recorder(gpus, asyncio.get_running_loop().time, settle_s=8.0)


def an_engine(slots: int = 2) -> tuple[Engine, Recorder]:
    recorder = a_recorder()
    return Engine(slots, recorder), recorder


def test_a_worker_runs_as_many_trajectories_as_it_has_slots() -> None:
    async def main() -> list[int]:
        engine, _ = an_engine(slots=2)
        engine.serve(0)
        engine.begin([Trajectory(10, 1)] * 5)
        seen = []
        for _ in range(3):
            await asyncio.sleep(10.001)
            seen.append(engine.completed)
        return seen

    assert virtual.run(main()) == [2, 4, 5]


def test_an_aborted_trajectory_keeps_its_whole_turns_and_goes_to_the_front() -> None:
    async def main() -> tuple[int, object, int]:
        engine, recorder = an_engine(slots=1)
        engine.serve(0)
        engine.begin([Trajectory(30, 3), Trajectory(100, 10)])
        await asyncio.sleep(25)
        engine.abort([0])
        await asyncio.sleep(5)
        engine.serve(1)
        await asyncio.sleep(9.9)
        before = engine.completed
        await asyncio.sleep(0.2)
        return before, recorder.lost_slot_s, engine.completed

    assert virtual.run(main()) == (0, pytest.approx(5), 1)


def test_the_next_trajectory_goes_to_the_least_loaded_worker() -> None:
    async def main() -> int:
        engine, _ = an_engine(slots=2)
        engine.serve(0)
        engine.serve(1)
        engine.begin([Trajectory(50, 5)] * 2)
        engine.abort([1])  # had one of the two: the other slot of rank 0 takes it up at once
        await asyncio.sleep(50.001)
        return engine.completed

    assert virtual.run(main()) == 2


def test_a_gpu_that_somebody_has_is_not_given_to_another() -> None:
    async def main() -> None:
        recorder = a_recorder()
        recorder.use([0], "p0", Use.SERVE)
        recorder.use([0], "p1", Use.TRAIN)

    with pytest.raises(DoubleBooking, match="GPU 0 is in serve for p0 and was given to p1"):
        virtual.run(main())


@pytest.mark.parametrize(
    ("taker", "use", "after_s", "vain"),
    [
        ("p1", Use.EXPAND, 0, 0),
        ("p0", Use.EXPAND, 0, 1),
        ("p0", Use.TRAIN, 0, 0),
        ("p1", Use.EXPAND, 20, 1),
        (None, Use.EXPAND, 0, 1),
    ],
)
def test_a_shrink_is_in_vain_when_its_holder_gets_the_gpu_back_or_nobody_does(
    taker: str | None, use: Use, after_s: float, vain: int
) -> None:
    async def main() -> int:
        recorder = a_recorder()
        recorder.use([0], "p0", Use.SERVE)
        recorder.free([0], preempted=True)
        await asyncio.sleep(after_s)
        if taker is not None:
            recorder.use([0], taker, use)
        return recorder.finish().vain_shrinks

    assert virtual.run(main()) == vain


def test_idle_counts_only_where_unmet_demand_can_reach_it() -> None:
    async def main() -> float:
        recorder = a_recorder(gpus=4)
        recorder.demand("p0", remaining=9, slots=8, reach=[(0,), (1,)])
        recorder.bundles("p0", 1)
        recorder.use([0], "p0", Use.SERVE)
        await asyncio.sleep(10)  # GPU 1 is idle and wanted; 2 and 3 are out of reach
        recorder.reserve([1])
        await asyncio.sleep(10)  # somebody's training waits for GPU 1
        recorder.unreserve([1])
        recorder.demand("p0", remaining=8, slots=8, reach=[(0,), (1,)])
        await asyncio.sleep(10)  # one worker is enough
        return recorder.finish().idle_wanted_gpu_s

    assert virtual.run(main()) == pytest.approx(10)
