"""How is it seen that nothing of a worker is left, however it died? By the end of a connection that all of it held.

A lifeline says hello, is welcomed, and then neither side says anything. Every process of the worker keeps it open, so
the kernel ends it when the last of them is gone, and whoever has the other end knows it at once. `Lifelines` is the
worker's side; what such an end proves is entered by `world.joining`.

Processes below the agent were started before a lifeline is made, and are there when another coordinator takes over. So
they do not hold the connection itself but one end of a pair of sockets, which they inherit: a descriptor that is under
way to that end, and that nobody takes, stays open for as long as anybody has the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct

from muster.core.succession import electorate
from muster.types.frames import Frame, HelloFrame, Introduction
from muster.types.world import Electorate, MemberId, RunId
from muster.world import wire
from muster.world.connection import CONNECT_TIMEOUT_S, PASSING, Address
from muster.world.opening import Opening
from muster.world.wire import Channel

AGAIN_S = 1.0
NUMBER = 200  # of the descriptor that ranks find beside those of any program, or the next that is free
_AT_ONCE = struct.pack("ii", 1, 0)  # for SO_LINGER: closing resets the connection
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


class Lifelines:
    """A worker's lifelines, one to each place. Whatever is started below has to inherit `descriptor`."""

    def __init__(self, run_id: RunId, member_id: MemberId, name: str, token: str | None) -> None:
        self._run_id = run_id
        self._member = Introduction(member_id, name)
        self._token = token
        self._held = _Held()
        self._tasks: dict[Address, asyncio.Task[None]] = {}
        self._electors: set[Address] = set()

    @property
    def descriptor(self) -> int:
        return self._held.descriptor

    def lead_to(self, place: Address) -> None:
        """Have a lifeline to there, and a new one if there was one: a coordinator knows of none from before it."""
        self.let_go(place)
        self._tasks[place] = asyncio.get_running_loop().create_task(self._keep(place))

    def follow(self, known: Electorate, standalone: list[Address], welcomed_at: Address | None) -> None:
        """Have one to whoever leads, who was an elector perhaps before, of whom this worker lets go."""
        self._lead_to_electors(known, standalone)
        if welcomed_at is not None:
            self._electors.discard(welcomed_at)
            self.lead_to(welcomed_at)

    def _lead_to_electors(self, known: Electorate, standalone: list[Address]) -> None:
        """If this worker is lost with its coordinator, whoever goes on has to see that nothing of it is left.

        It is if it leads itself, or has brought the coordinator that listens at `standalone`.
        """
        leader, me = known.leader, self._member.member_id
        with_it = leader is not None and (leader.member_id == me or leader.post in standalone)
        electors = electorate.everyone(known.groups) if with_it else ()
        wanted = {one.post for one in electors if one != leader and one.member_id != me}
        for place in self._electors - wanted:
            self.let_go(place)
        for place in wanted - self._electors:
            self.lead_to(place)
        self._electors = wanted

    def let_go(self, place: Address) -> None:
        if (task := self._tasks.pop(place, None)) is not None:
            task.cancel()

    async def _keep(self, place: Address) -> None:
        while await self._is_worth_another(place):
            await asyncio.sleep(AGAIN_S)

    async def _is_worth_another(self, place: Address) -> bool:
        """One lifeline from start to end; False where there can be none."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        opening = Opening(self._run_id, "lifeline", self._token, lambda local: self._hello(line), wire.VERSION)

        def frame_came(channel: Channel, frame: Frame) -> None:
            opening.takes(channel, frame)

        def ended(channel: Channel, why: str) -> None:
            if not over.done():
                over.set_result(None)

        line = _Line(frame_came, ended, self._held)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: line, *place)
            await over
        except OSError:
            pass  # nobody is there, or it takes too long
        finally:
            line.abort("it is let go")
        return opening.refusal is None or opening.refusal.code in PASSING

    def _hello(self, line: Channel) -> HelloFrame:
        return HelloFrame(member=self._member, here=wire.show_address(*line.here) if line.here else "")


class _Line(Channel):
    """The worker's end. It is held before it is spoken of; while the worker lives, it ends with a reset only."""

    def __init__(self, on_frame: wire.OnFrame, on_end: wire.OnEnd, held: _Held) -> None:
        super().__init__(on_frame, on_end, self._hold)
        self._held = held
        self._raw: socket.socket | None = None

    def _hold(self, channel: Channel) -> None:
        assert self._transport is not None
        raw = self._raw = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
        try:
            self._held.put(raw)
        except OSError:  # too many are under way
            self.abort("it cannot be held")

    def refuse(self, code: str, message: str) -> None:
        self.abort(message)

    def close(self) -> None:
        self.abort("it is over")

    def abort(self, why: str) -> None:
        """Without a goodbye in TLS, and with a reset: a clean end would say that nobody is left."""
        raw, self._raw = self._raw, None
        if raw is not None:
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._held.take_out(raw)
            raw.close()
        super().abort(why)


class _Held:
    """Connections that live as long as anybody has `descriptor` open."""

    def __init__(self) -> None:
        self._in, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end = _out_of_the_way(end)
        self._in.setblocking(False)
        self._end.setblocking(False)
        self._kept: list[socket.socket] = []
        self._under_way = 0

    @property
    def descriptor(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        """Leave them to whoever else has `descriptor`."""
        self._in.close()
        self._end.close()

    def put(self, line: socket.socket) -> None:
        socket.send_fds(self._in, [b"."], [line.fileno()])
        self._kept.append(line)
        self._under_way += 1

    def take_out(self, line: socket.socket) -> None:
        """The others go in once more before all are taken out: if we are killed meanwhile, none is missing."""
        if line not in self._kept:
            return
        old, others = self._under_way, [one for one in self._kept if one is not line]
        self._kept, self._under_way = [], 0
        for other in others:
            self.put(other)
        for _ in range(old):
            for taken in socket.recv_fds(self._end, 1, 1)[1]:
                os.close(taken)


def _out_of_the_way(end: socket.socket) -> socket.socket:
    """The same under a number that is not the next one to a program that opens something."""
    try:
        moved = fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, NUMBER)
    except OSError:  # there may not be as many
        return end
    end.close()
    return socket.socket(fileno=moved)
