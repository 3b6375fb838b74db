"""One side's connection to a coordinator: find it, prove the token to each other, and come back when it is lost.

A coordinator can be *dead* (its process is gone: the connection was refused, or closed by the one that had proved
itself) or *silent* (nothing comes back at all, or nothing that has to be believed: `core.member.verdict`). Only silence
is dangerous: on the other side of a partition the world may go on without us. `on_dead` is called each time that it is
found dead where it last proved itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from muster.core.member import verdict
from muster.core.member.verdict import Contact, Listener
from muster.types.frames import AnswerFrame, AskFrame, ErrorFrame, Frame, HelloFrame, MovedFrame, WelcomeFrame
from muster.types.world import RunId
from muster.world import neighbours, wire
from muster.world.opening import PASSING, CoordinatorRefused, Opening
from muster.world.wire import Channel, Version

__all__ = ["PASSING", "Address", "Connection", "CoordinatorRefused", "ask"]

Address = tuple[str, int]

CONNECT_TIMEOUT_S = 1.0
WELCOME_TIMEOUT_S = 5.0
ELSEWHERE_S = 1.0  # for a proof, at an address where the coordinator was not when it last proved itself
PAUSE_S = (0.1, 0.2)
MOST_HOPS = 3  # from one who says that another leads to that other, without a pause
LOOK_S = 0.5  # while nothing is proved: is it still the same that listens there?
ASK_LOOK_S = 0.25
MOST_ADDRESSES = 8  # of one name


class Connection:
    """One connection that is renewed for as long as `run` runs. Callbacks run on the loop."""

    def __init__(
        self,
        addresses: Callable[[], list[Address]],
        run_id: RunId,
        kind: str,
        *,
        token: str | None,
        hello: Callable[[str], HelloFrame],
        on_frame: Callable[[Frame], None],
        on_down: Callable[[str], None] = lambda why: None,
        on_dead: Callable[[], None] = lambda: None,
        on_gone: Callable[[], None] = lambda: None,
        version: Version = wire.VERSION,
    ) -> None:
        """`on_gone` is called when it is certain that the process which was connected has ended."""
        self._addresses = addresses
        self._run_id = run_id
        self._kind = kind
        self._token = token
        self._hello = hello
        self._on_frame = on_frame
        self._on_down = on_down
        self._on_dead = on_dead
        self._on_gone = on_gone
        self._version = version
        self._told: list[Address] = []  # where to go first, says somebody who knows
        self._attempt: asyncio.Task[_Ended] | None = None
        self._spoken_to: Address | None = None  # who may have read our hello
        self._sought = asyncio.Event()
        self._channel: Channel | None = None
        self._is_near = False  # the process that has proved itself is at the other end, on this machine
        self._welcomed = False  # ever
        self._home: Address | None = None  # where the coordinator last proved itself, and the socket behind which
        self._listener: Listener | None = None
        self._silent: Address | None = None  # it said nothing there for a lease: others are asked first
        self.epoch = 0
        self.up = False
        self.why_down = "not connected yet"

    @property
    def place(self) -> Address | None:
        """Where the coordinator last proved itself."""
        return self._home

    def send(self, frame: Frame) -> bool:
        """Send if the connection is up."""
        if self._channel is None or not self.up:
            return False
        self._channel.send(frame, epoch=self.epoch)
        return True

    def has_delivered(self) -> bool:
        """Return True if all that was sent is where the coordinator reads it: in the kernel of this machine.

        A connection that has ended, or to a process between us and the coordinator, has delivered nothing.
        """
        return self.up and self._is_near and self._channel is not None and self._channel.has_delivered()

    def drop(self, why: str) -> None:
        """Give up on a connection that is open but silent."""
        if self._channel is not None:
            self._silent = self._home
            self._channel.abort(why)

    def seek(self, place: Address) -> None:
        """Somebody leads there: do not wait for anybody else.

        An attempt that has got as far as that goes on: who has read our hello may have given us a seat for it.
        """
        if place in self._told or place == self._spoken_to:
            return
        self._told = [place]
        self._sought.set()
        if self._attempt is not None and not self.up:
            self._attempt.cancel()

    async def run(self) -> None:
        """Connect, and reconnect for ever; raises CoordinatorRefused when the coordinator will not have us."""
        attempt = hops = 0
        while True:
            places, told = await self._places(), self._told
            dead, refusals = [], []
            for place in places:
                ended = await self._try(place, elsewhere=place != self._home and self._home in places)
                dead.append(ended.dead)
                refusals += [ended.refusal] if ended.refusal and ended.refusal.code not in PASSING else []
                if ended.dead and place == self._home:
                    self._on_dead()
                if ended.gone:
                    self._on_gone()
                was_up, self.up = self.up, False
                self.why_down = f"{wire.show_address(*place)}: {ended.why}"
                self._on_down(self.why_down)
                if was_up:
                    attempt = hops = 0
                    break  # it may be back in a moment, and it is there that we hear of it
                if told is not self._told:
                    break
                told[:] = [one for one in told if one != place]
            if refusals and not self._welcomed:
                raise refusals[0]  # one who has been welcomed is not sent away by somebody who proves nothing
            if self._home not in places and all(dead):
                self._on_dead()
            hops = hops + 1 if told is not self._told and self._told else 0
            if attempt and not 0 < hops <= MOST_HOPS:
                await self._pause()
            attempt += 1

    async def _pause(self) -> None:
        """Unless somebody is known to lead."""
        self._sought.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(*PAUSE_S)):
                await self._sought.wait()

    async def _places(self) -> list[Address]:
        """Every address of every name, for one of them can be somebody else's; first where it is said to be, then where
        it last proved itself."""
        found = [place for address in (*self._told, *self._addresses()) for place in await _resolved(*address)]
        silent = self._silent if self._silent == self._home else None

        known = list(dict.fromkeys(found))
        told = [place for place in known if place in self._told]
        rest = [place for place in known if place not in self._told]
        return told + sorted(rest, key=lambda place: (place == silent, place != self._home))

    async def _try(self, place: Address, *, elsewhere: bool) -> _Ended:
        """A session that `seek` can end while it has not begun."""
        self._attempt = asyncio.get_running_loop().create_task(self._session(place, elsewhere=elsewhere))
        try:
            await asyncio.wait({self._attempt})
        except asyncio.CancelledError:
            self._attempt.cancel()
            with contextlib.suppress(asyncio.CancelledError, CoordinatorRefused):
                await self._attempt
            raise
        if self._attempt.cancelled():
            return _Ended("somebody else leads", dead=False)
        return self._attempt.result()

    async def _session(self, address: Address, *, elsewhere: bool) -> _Ended:
        """One connection from start to end."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[str] = loop.create_future()
        greeting: asyncio.Future[None] = loop.create_future()
        opening = Opening(self._run_id, self._kind, self._token, self._hello, self._version)

        def frame_came(channel: Channel, frame: Frame) -> None:
            if opening.takes(channel, frame):
                return
            if isinstance(frame, MovedFrame):
                self._told = [post for post in frame.posts if post != address]
                channel.abort("the run is led elsewhere" if frame.posts else "nobody leads the run yet")
                return
            if not greeting.done():
                greeting.set_result(None)
                self._home, self._listener = address, _listener(channel)
                self._silent = None
                self._is_near = opening.proved and opening.near
            self._follow(frame)

        def ended(channel: Channel, why: str) -> None:
            if not over.done():
                over.set_result(why)

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, channel = await loop.create_connection(
                    lambda: Channel(frame_came, ended, screen=opening.screen), *address
                )
        except TimeoutError:
            return _Ended("connecting timed out", dead=False)
        except OSError as error:
            dead = isinstance(error, ConnectionError) or getattr(error, "errno", None) == socket.EAI_NONAME
            return _Ended(_why(error), dead=dead)
        self._channel, self._spoken_to = channel, address
        seen = _Found(opening, channel, self._listener if address == self._home else None)
        try:
            patience_s = ELSEWHERE_S if elsewhere else WELCOME_TIMEOUT_S
            await self._expect({over, greeting}, seen, patience_s)
            why = await over
        finally:
            self._spoken_to = None
            channel.close()
        refusal = opening.refusal
        if opening.proved and refusal is not None and refusal.code not in PASSING:
            raise refusal
        gone = greeting.done() and opening.proved and opening.direct and channel.ended_cleanly and refusal is None
        return _Ended(str(refusal or why), dead=seen.is_dead(), refusal=refusal, gone=gone)

    async def _expect(self, waits: set[asyncio.Future[Any]], seen: _Found, patience_s: float) -> None:
        """Until it greets us, or it is over, or too late. Meanwhile ranks may go on if it is known to be dead."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while (left := deadline - loop.time()) > 0:
            done, _ = await asyncio.wait(waits, timeout=min(left, LOOK_S), return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if seen.is_dead():
                self._on_dead()
        seen.channel.abort("no welcome in time")

    def _follow(self, frame: Frame) -> None:
        self.epoch = max(self.epoch, frame.epoch or 0)
        if isinstance(frame, WelcomeFrame):
            self.up = self._welcomed = True
        self._on_frame(frame)


class _Ended(NamedTuple):
    why: str
    dead: bool
    refusal: CoordinatorRefused | None = None  # by whom, is not known
    gone: bool = False  # whoever was there, and had proved itself, has ended


class _Found:
    """What a connection shows of the coordinator."""

    def __init__(self, opening: Opening, channel: Channel, before: Listener | None) -> None:
        self._opening = opening
        self.channel = channel
        self._before = before
        self._there = channel.there
        self._near = neighbours.on_this_machine(channel.here, channel.there)

    def is_dead(self) -> bool:
        opening, channel = self._opening, self.channel
        noise = channel.fault is not None and opening.refusal is None
        attempt = Contact(
            proved=opening.proved,
            closed=channel.peer_died,
            near=self._near,
            another=opening.another or noise,
            turned_away=opening.turned_away,
            before=self._before,
        )
        if attempt.proved or not self._near or self._before is None or self._there is None:
            return verdict.is_dead(attempt)
        try:
            return verdict.is_dead(attempt._replace(now=neighbours.listener_at(self._there)))
        except OSError:
            return verdict.is_dead(attempt._replace(known=False))


def _listener(channel: Channel) -> Listener | None:
    if not neighbours.on_this_machine(channel.here, channel.there) or channel.there is None:
        return None
    try:
        return neighbours.listener_at(channel.there)
    except OSError:
        return None


async def _resolved(host: str, port: int) -> list[Address]:
    """The addresses of a name; the name itself, if they cannot be had, so that connecting says why."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return [(host, port)]
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return [(host, port)]
    return list(dict.fromkeys((str(name[0]), port) for *_, name in found))[:MOST_ADDRESSES]


def _why(error: OSError) -> str:
    """asyncio puts the address into the text; the caller knows it already."""
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno).lower()


async def ask(
    addresses: list[Address], run_id: RunId, question: AskFrame, *, token: str | None, timeout_s: float = 5.0
) -> Mapping[str, Any]:
    """One question about a run, as `muster world` asks it.

    Raises CoordinatorRefused, or TimeoutError when there is nobody.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Mapping[str, Any]] = loop.create_future()
    dead = asyncio.Event()

    def heard(frame: Frame) -> None:
        if isinstance(frame, WelcomeFrame):
            connection.send(replace(question, seq=1))
        elif isinstance(frame, AnswerFrame) and not answer.done():
            answer.set_result(frame.view)
        elif isinstance(frame, ErrorFrame) and not answer.done():
            answer.set_exception(CoordinatorRefused(frame.code, frame.message))

    connection = Connection(
        lambda: addresses,
        run_id,
        "control",
        token=token,
        hello=lambda local: HelloFrame(),
        on_frame=heard,
        on_dead=dead.set,
    )
    task = loop.create_task(connection.run())
    waits: set[asyncio.Future[Any]] = {task, answer}
    deadline = loop.time() + timeout_s
    try:
        while not answer.done():
            await asyncio.wait(waits, timeout=ASK_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            if not answer.done() and (dead.is_set() or loop.time() > deadline):
                raise TimeoutError(f"no answer from {connection.why_down}")
        return answer.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, CoordinatorRefused):
            await task
