"""One namespace has more trainings than can be handled at once: do those of others have their turn, and all theirs?"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

from muster.control import work_queue
from muster.control.work_queue import WorkQueue
from muster.types.training import Key

CROWD = [Key("crowd", f"t{at}") for at in range(1_000)]
VICTIM = Key("victim", "demo")


def test_a_crowd_of_one_namespace_that_hangs_keeps_nobody_else_waiting() -> None:
    async def scenario() -> None:
        at_once: Counter[str] = Counter()
        handled: Counter[Key] = Counter()
        most, end = 0, asyncio.Event()

        async def handle(key: Key) -> None:
            nonlocal most
            handled[key] += 1
            at_once[key.namespace] += 1
            most = max(most, at_once["crowd"])
            if key in CROWD:
                await end.wait()
            at_once[key.namespace] -= 1

        queue = WorkQueue(handle, lambda key, why: None)
        for key in (*CROWD, VICTIM):
            queue.wake(key)
        while not handled[VICTIM]:
            await asyncio.sleep(0)
        assert sum(at_once.values()) == work_queue.AT_ONCE, "as many of the crowd as may, and no more"
        queue.wake(CROWD[-1])
        queue.wake(CROWD[0])
        end.set()
        await queue.idle()
        assert set(handled) == {*CROWD, VICTIM}
        assert handled[CROWD[0]] == 2, "what happened to it meanwhile makes it be handled once more"
        assert most <= work_queue.AT_ONCE

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_others_of_the_process_have_their_turn_while_very_many_become_due() -> None:
    """The renewal of a lease must not wait until thousands of trainings were looked at."""

    async def scenario() -> None:
        begun, seen = 0, []

        async def handle(key: Key) -> None:
            nonlocal begun
            begun += 1

        queue = WorkQueue(handle, lambda key, why: None)
        for at in range(2_000):
            queue.wake(Key(f"n{at}", "demo"))
        while begun < 2_000:
            seen.append(begun)
            await asyncio.sleep(0)
        assert max(later - before for before, later in itertools.pairwise(seen)) <= 2 * work_queue.SLICE

    asyncio.run(asyncio.wait_for(scenario(), 20))
