"""The event loop on virtual time."""

from __future__ import annotations

import asyncio
import time

import pytest

from muster.sim import virtual


def test_an_hour_passes_without_waiting() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    begun = time.monotonic()
    assert virtual.run(main()) == pytest.approx(3600)
    assert time.monotonic() - begun < 5


def test_sleepers_wake_in_the_order_of_their_times() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, delay: float) -> None:
        await asyncio.sleep(delay)
        woken.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(sleeper("late", 7), sleeper("early", 2), sleeper("middle", 5))

    virtual.run(main())
    assert woken == [("early", 2), ("middle", 5), ("late", 7)]


def test_a_timeout_counts_virtual_seconds() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert virtual.run(main()) == pytest.approx(30)


def test_a_deadlock_names_who_would_wait_for_ever() -> None:
    async def main() -> None:
        await asyncio.sleep(4)
        await asyncio.create_task(asyncio.Event().wait(), name="the one that waits")

    with pytest.raises(virtual.Deadlock, match=r"at 4 s .* the one that waits"):
        virtual.run(main())


def test_what_a_callback_raises_ends_the_run() -> None:
    def broken() -> None:
        raise ZeroDivisionError("in a callback")

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, broken)
        await asyncio.sleep(10)

    with pytest.raises(ZeroDivisionError, match="in a callback"):
        virtual.run(main())


def test_tasks_that_are_left_are_cancelled() -> None:
    ended: list[str] = []

    async def left() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("cancelled")

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(left())
        await asyncio.sleep(0)
        return task

    assert virtual.run(main()).cancelled()
    assert ended == ["cancelled"]
