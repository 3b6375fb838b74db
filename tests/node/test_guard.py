"""A guard that was late to look: what its agent said meanwhile counts."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from muster.node.guard import Guard, Posting, Word, line
from muster.types.world import MemberId, RunId

LEASE_S = 0.3


@pytest.mark.parametrize("speaks", [True, False])
def test_a_guard_that_stood_still_hears_its_agent_before_it_ends_ranks(speaks: bool) -> None:
    async def story() -> None:
        ours, agents = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        cleared = asyncio.Event()

        async def clear() -> None:
            cleared.set()

        agents.sendall(line(Posting(RunId("run"), MemberId("m"), "a", LEASE_S)) + line(Word(lease_s=LEASE_S)))
        guard = asyncio.create_task(Guard(reader, clear).run())
        await asyncio.sleep(LEASE_S / 3)
        if speaks:
            agents.sendall(line(Word(lease_s=60.0)))
        time.sleep(2 * LEASE_S)  # noqa: ASYNC251  the standstill itself is what is tested
        if speaks:
            await asyncio.sleep(LEASE_S)
            assert not cleared.is_set()
            agents.sendall(line(Word(release=True)))
        async with asyncio.timeout(10):
            await guard
        assert cleared.is_set()
        writer.close()
        agents.close()

    asyncio.run(story())
