"""Is what goes on beside held until it ends, and asked until it is answered?"""

from __future__ import annotations

import asyncio
import threading

import pytest

from muster import ports
from muster.background import LoopThread, Tasks
from muster.errors import InvalidRequest, MusterError, Unavailable
from muster.ports import until_answered


def test_a_task_is_held_until_it_ends_and_its_failure_is_heard() -> None:
    heard: list[BaseException] = []

    async def scenario() -> None:
        tasks, go_on = Tasks(heard.append), asyncio.Event()

        async def fail() -> None:
            await go_on.wait()
            raise ValueError("no")

        tasks.start(fail())
        tasks.start(asyncio.Event().wait())
        assert len(tasks) == 2
        go_on.set()
        while len(tasks) == 2:
            await asyncio.sleep(0)
        tasks.cancel()
        await tasks.finish()
        assert len(tasks) == 0

    asyncio.run(scenario())
    assert [str(error) for error in heard] == ["no"]


def test_it_is_asked_until_there_is_an_answer_or_one_that_will_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "AGAIN_S", 0.0)
    answers: list[MusterError | str] = [Unavailable("away"), Unavailable("away"), "here", InvalidRequest("never")]

    async def ask() -> str:
        match answers.pop(0):
            case MusterError() as error:
                raise error
            case answer:
                return str(answer)

    assert asyncio.run(until_answered("it", ask)) == "here"
    with pytest.raises(InvalidRequest):
        asyncio.run(until_answered("it", ask))


def test_a_loop_on_a_thread_of_its_own_goes_on_while_this_one_stands_still() -> None:
    async def scenario() -> None:
        thread = LoopThread("beside")
        thread.start()
        try:
            went_on = threading.Event()
            thread.loop.call_soon_threadsafe(thread.loop.call_later, 0.01, went_on.set)
            assert went_on.wait(10), "this loop is held, and the other one is not"
            assert thread.do(lambda: threading.current_thread().name) == "beside"
            assert await thread.run(asyncio.sleep(0, "done")) == "done"
            with pytest.raises(ZeroDivisionError):
                thread.do(lambda: 1 // 0)
        finally:
            thread.stop()

    asyncio.run(scenario())
