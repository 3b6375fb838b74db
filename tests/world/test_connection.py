"""The connection of a member: what is said when, while it is being made."""

from __future__ import annotations

import asyncio
from typing import Any

from muster.core.member.held_round import InRound
from muster.core.member.state import MemberState
from muster.types.frames import ChallengeFrame, ExitsFrame, Frame, HelloFrame, WelcomeFrame
from muster.types.world import MemberId, Place, RankEnd, Round, RunId, Seat, Settings
from muster.world.connection import Connection
from muster.world.membership import MemberIdentity, Membership
from muster.world.wire import Channel


def test_what_comes_up_between_hello_and_welcome_is_said_with_the_welcome() -> None:
    """A rank that ended just then was reported to nobody: the hello had not said it, and nobody was connected yet."""

    async def scenario() -> None:
        heard: asyncio.Queue[Frame] = asyncio.Queue()

        def greet(channel: Channel) -> None:
            channel.send(ChallengeFrame(nonce="n", low="1.0", high="1.0"))

        def came(channel: Channel, frame: Frame) -> None:
            heard.put_nowait(frame)
            channel.proved = True
            if isinstance(frame, HelloFrame):
                member.handle(state.held.exited(RankEnd(0, 3, round=2), member.now))
                channel.send(WelcomeFrame(), epoch=7)

        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Channel(came, lambda *_: None, greet), "127.0.0.1", 0)
        address: Any = server.sockets[0].getsockname()[:2]
        me = MemberId("m")
        seat = Seat(0, me, "a", "127.0.0.1", 1)
        state = MemberState(me, RunId("run"), Settings(), loop.time())
        state.held.current = InRound(Place(Round(2, (seat,)), seat, 0, 3))
        member = Membership(MemberIdentity(lambda: [address], RunId("run"), me, "a", {}), state, lambda order: None)
        running = asyncio.create_task(member.run())
        async with asyncio.timeout(10):
            said = [await heard.get(), await heard.get()]
        assert isinstance(said[0], HelloFrame) and said[0].present.exits == ()
        assert isinstance(said[1], ExitsFrame) and (said[1].round, said[1].epoch) == (2, 7)
        assert [end.exit_code for end in said[1].exits] == [3]
        running.cancel()
        member.close()
        server.close()

    asyncio.run(scenario())


def test_a_hello_that_was_read_is_not_taken_back_by_the_word_that_its_reader_leads() -> None:
    """It has a seat for us by then: another connection would cost the round that it has just released."""

    async def scenario() -> None:
        came: list[Channel] = []
        welcomed = asyncio.Event()

        def greet(channel: Channel) -> None:
            channel.send(ChallengeFrame(nonce="n", low="1.0", high="1.0"))

        def hear(channel: Channel, frame: Frame) -> None:
            came.append(channel)
            connection.seek(address)
            loop.call_soon(channel.send, WelcomeFrame())

        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Channel(hear, lambda *_: None, greet), "127.0.0.1", 0)
        address: Any = server.sockets[0].getsockname()[:2]
        connection = Connection(
            lambda: [address],
            RunId("run"),
            "control",
            token=None,
            hello=lambda local: HelloFrame(),
            on_frame=lambda frame: welcomed.set(),
        )
        running = asyncio.create_task(connection.run())
        async with asyncio.timeout(10):
            await welcomed.wait()
        assert connection.up and len(came) == 1
        running.cancel()
        server.close()

    asyncio.run(scenario())
