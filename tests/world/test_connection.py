"""The connection of a member: what is said when, while it is being made."""

from __future__ import annotations

import asyncio
from typing import Any

from muster.types.world import RunId
from muster.world.connection import Link
from muster.world.wire import Channel, Frame


def test_what_comes_up_between_hello_and_welcome_is_said_with_the_welcome() -> None:
    """A rank that ended just then was reported to nobody: the hello had not said it, and nobody was connected yet."""

    async def scenario() -> None:
        heard: asyncio.Queue[Frame] = asyncio.Queue()
        span = {"low": "1.0", "high": "1.0"}

        def greet(channel: Channel) -> None:
            channel.send({"v": "1.0", "type": "challenge", "nonce": "n", **span})

        def came(channel: Channel, frame: Frame) -> None:
            heard.put_nowait(frame)
            if frame["type"] == "hello":
                assert link.send("exits", round=2, exits=[])
                channel.send({"v": "1.0", "type": "welcome", "epoch": 7})

        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Channel(came, lambda *_: None, greet), "127.0.0.1", 0)
        address: Any = server.sockets[0].getsockname()[:2]
        link = Link(
            lambda: [address], RunId("run"), "agent", token=None, hello=lambda local: {}, on_frame=lambda frame: None
        )
        assert not link.send("exits", round=2, exits=[])  # nobody is there: the hello will say it
        running = asyncio.create_task(link.run())
        async with asyncio.timeout(10):
            said = [await heard.get(), await heard.get()]
        assert [frame["type"] for frame in said] == ["hello", "exits"]
        assert (said[1]["round"], said[1]["epoch"]) == (2, 7)
        running.cancel()
        server.close()

    asyncio.run(scenario())
