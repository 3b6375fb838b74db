"""One namespace makes more events than are sent: whose are shown?"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Literal, cast

from muster.kube.client import Json, KubeApi
from muster.kube.events import BURST, MOST_WAITING, EventRecorder
from muster.types.event import Event

NOW = datetime(2026, 1, 31, tzinfo=UTC)


class Heard:
    def __init__(self) -> None:
        self.events: list[Json] = []

    async def request(self, method: str, path: str, *, body: Any) -> Json:
        self.events.append(body)
        return {}


def some(namespace: str, count: int, type: Literal["Normal", "Warning"] = "Normal") -> list[Event]:
    return [
        Event("Said", type=type, namespace=namespace, training="demo", uid="u", id=at, at=NOW) for at in range(count)
    ]


def test_events_of_others_are_sent_and_kept_beside_those_of_a_crowd() -> None:
    async def scenario() -> None:
        api = Heard()
        recorder = EventRecorder(cast(KubeApi, api))
        recorder.offer(some("research", 5))
        recorder.offer(some("crowd", 3 * MOST_WAITING, "Warning"))
        recorder.offer(some("another", 1))
        running = asyncio.create_task(recorder.run())
        async with asyncio.timeout(10):
            while len(api.events) < BURST:
                await asyncio.sleep(0)
        running.cancel()
        first = [one["metadata"]["namespace"] for one in api.events[:11]]
        assert first.count("research") == 5 and first.count("another") == 1, "namespaces have their turns"
        assert recorder._count == sum(map(len, recorder._waiting.values())) <= MOST_WAITING

    asyncio.run(scenario())
