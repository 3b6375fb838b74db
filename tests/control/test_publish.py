"""Do the keys of a training become what they have to be, whatever fails and however often minds change?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import errors
from muster.backoff import Backoff
from muster.control import publish
from muster.control.publish import KIND, Publisher
from muster.mesh.serving import MemoryKeys
from muster.types.training import Key
from tests.memory_store import MemoryStore

DEMO = Key("default", "demo")
NEIGHBOUR = {"muster/default/demo-2/mesh-ready/demo-2-0": "round 0", "muster/other/demo/mesh-ready/demo-0": "round 0"}


class Flaky(MemoryKeys):
    """Keys that cannot be reached at times: before an order is carried out, or after."""

    def __init__(self, rng: Random, often: float) -> None:
        super().__init__()
        self._rng, self._often = rng, often

    async def _perhaps(self) -> None:
        await asyncio.sleep(0)
        if self._rng.random() < self._often:
            raise errors.Unavailable("no answer")

    async def put(self, path: str, value: str) -> None:
        await self._perhaps()
        await super().put(path, value)
        await self._perhaps()

    async def delete(self, path: str) -> None:
        await self._perhaps()
        await super().delete(path)
        await self._perhaps()

    async def list(self, prefix: str) -> Mapping[str, str]:
        await self._perhaps()
        return await super().list(prefix)


async def settled(publisher: Publisher) -> None:
    async with asyncio.timeout(10):
        while publisher._tasks:
            await asyncio.wait(publisher._tasks.values())


def state(number: int, *, degraded: bool = False, workers: int = 2) -> dict[str, str]:
    return {f"mesh-{'degraded' if degraded else 'ready'}/demo-{i}": f"round {number}" for i in range(workers)}


states = st.builds(state, st.integers(0, 3), degraded=st.booleans(), workers=st.integers(0, 3))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "RETRY", Backoff(0.0, 5.0))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(states, st.integers(0, 4), st.booleans()), min_size=1, max_size=8), st.integers(0, 999))
def test_keys_become_what_was_wanted_last(wishes: list[tuple[dict[str, str], int, bool]], seed: int) -> None:
    async def play() -> None:
        keys, store = Flaky(Random(seed), 0.3), MemoryStore()
        for path, value in NEIGHBOUR.items():
            keys.set(f"/{path}", value)
        publisher = Publisher(store, keys)
        for wanted, turns, dies in wishes:
            publisher.want(DEMO, wanted)
            for _ in range(turns):
                await asyncio.sleep(0)
            if dies:  # another control plane starts, which knows only what was written down
                await publisher.stop()
                publisher = Publisher(store, keys)
        last = wishes[-1][0]
        publisher.want(DEMO, last)
        await settled(publisher)
        found = await MemoryKeys.list(keys, DEMO.mesh_prefix)
        assert found == {f"{DEMO.mesh_prefix}/{name}": value for name, value in last.items()}
        others = await MemoryKeys.list(keys, "muster")
        assert {path: others.get(path) for path in NEIGHBOUR} == NEIGHBOUR, "nobody else's keys are touched"
        assert (store.record(KIND, str(DEMO)) is not None) == bool(last)
        await publisher.stop()

    asyncio.run(play())


def test_what_an_ended_training_left_is_removed_at_the_next_start() -> None:
    async def play() -> None:
        keys, store = MemoryKeys(), MemoryStore()
        before = Publisher(store, keys)
        before.want(DEMO, state(0))
        await settled(before)
        await before.stop()
        after = Publisher(store, keys)
        after.clean_up(but={DEMO})
        await settled(after)
        assert len(await keys.list("muster")) == 2, "it lives: its own look decides"
        after.clean_up(but=())
        await settled(after)
        assert not await keys.list("muster") and not store.records(KIND)

    asyncio.run(play())


def test_a_worse_state_is_never_hidden_by_a_better_one_of_before() -> None:
    """Who finds both keys believes that the mesh is ready."""

    async def play() -> None:
        keys, seen = MemoryKeys(), []
        told = keys._tell

        def tell(event: object) -> object:
            seen.append(set(keys.space.files("/muster/default/demo")))
            return told(event)  # type: ignore[arg-type]

        keys._tell = tell  # type: ignore[assignment,method-assign]
        publisher = Publisher(MemoryStore(), keys)
        for wanted in (state(0), state(1, degraded=True), state(1)):
            publisher.want(DEMO, wanted)
            await settled(publisher)
        for names in seen:
            assert len({name.split("/")[-2] for name in names}) <= 1, names

    asyncio.run(play())


def test_what_was_said_of_a_round_can_be_withdrawn_and_the_next_be_told_meanwhile() -> None:
    async def play() -> None:
        keys, store = MemoryKeys(), MemoryStore()
        publisher = Publisher(store, keys)
        assert publisher.withdraw(DEMO) is None, "the first round finds nothing to wait for"
        publisher.want(DEMO, state(0))
        await settled(publisher)
        told = publisher.withdraw(DEMO)
        assert told is not None
        await asyncio.wait({told}, timeout=5)
        assert not await keys.list("muster") and publisher.withdraw(DEMO) is None
        publisher.want(DEMO, state(1))
        await settled(publisher)
        told = publisher.withdraw(DEMO)
        publisher.want(DEMO, state(2, degraded=True))
        assert told is not None
        await asyncio.wait({told}, timeout=5)
        assert set((await keys.list("muster")).values()) == {"round 2"}

    asyncio.run(play())


def test_a_training_without_keys_costs_nothing() -> None:
    async def play() -> None:
        publisher = Publisher(MemoryStore(), MemoryKeys())
        publisher.want(DEMO, {})
        assert not publisher._tasks

    asyncio.run(play())
