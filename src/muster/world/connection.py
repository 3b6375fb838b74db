"""A member's side of the connection: find the coordinator, prove the token, and come back when it is lost.

A coordinator can be *dead* (the connection was closed or refused: somebody answered, and it was not running) or
*silent* (nothing comes back at all). Only silence is dangerous: on the other side of a partition the world may go
on without us. `dead_at` is when it was last found dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import socket
from collections.abc import Callable
from typing import Any

from muster.types.world import RunId
from muster.world import wire
from muster.world.wire import Channel, Frame, Version

Address = tuple[str, int]

CONNECT_TIMEOUT_S = 1.0
WELCOME_TIMEOUT_S = 5.0
ASK_LOOK_S = 0.25

# Errors after which saying hello again can help.
_PASSING = frozenset({"lost", "timeout", "closing"})


class Refused(Exception):
    """The coordinator answered, and its answer is no."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Link:
    """One connection that is renewed for as long as `run` runs. Callbacks run on the loop."""

    def __init__(
        self,
        addresses: Callable[[], list[Address]],
        run_id: RunId,
        kind: str,
        *,
        token: str | None,
        hello: Callable[[str], dict[str, Any]],
        on_frame: Callable[[Frame], None],
        on_down: Callable[[str], None] = lambda why: None,
        version: Version = wire.VERSION,
    ) -> None:
        self._addresses = addresses
        self._run_id = run_id
        self._kind = kind
        self._token = token
        self._hello = hello
        self._on_frame = on_frame
        self._on_down = on_down
        self._version = version
        self._channel: Channel | None = None
        self._welcomed = False
        self._unsaid: list[tuple[str, dict[str, Any]]] | None = None  # since a hello that has no welcome yet
        self.dead_at = -math.inf
        self.epoch = 0
        self.why_down = "not connected yet"
        self.down_since: float | None = asyncio.get_running_loop().time()

    @property
    def up(self) -> bool:
        return self._welcomed

    @property
    def down_s(self) -> float:
        return 0.0 if self.down_since is None else asyncio.get_running_loop().time() - self.down_since

    def send(self, kind: str, **fields: Any) -> bool:
        """Send if the connection is up; what must not be lost is presented again in the next hello.

        What comes up between a hello and its welcome was not in that hello: it is sent with the welcome.
        """
        if self._channel is None or not self._welcomed:
            if self._unsaid is None:
                return False
            self._unsaid.append((kind, fields))
            return True
        self._channel.send({"v": wire.show(self._version), "type": kind, "epoch": self.epoch, **fields})
        return True

    def drop(self, why: str) -> None:
        """Give up on a connection that is open but silent."""
        if self._channel is not None:
            self._channel.abort(why)

    async def run(self) -> None:
        """Connect, and reconnect for ever; raises Refused when the coordinator will not have us."""
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            for address in self._addresses():
                why = await self._session(address)
                if self._welcomed:
                    attempt = 0
                    self._on_down(why)
                self._welcomed, self._unsaid = False, None
                self.why_down = f"{wire.show_address(*address)}: {why}"
                if self.down_since is None:
                    self.down_since = loop.time()
            if attempt:
                await asyncio.sleep(random.uniform(0.1, 0.2))
            attempt += 1

    async def _session(self, address: Address) -> str:
        """One connection from start to end; returns why it ended."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[str] = loop.create_future()
        greeting: asyncio.Future[None] = loop.create_future()
        refusal: list[Refused] = []

        def frame_came(channel: Channel, frame: Frame) -> None:
            if frame["type"] == "error":
                refusal.append(Refused(str(frame.get("code")), str(frame.get("message"))))
                channel.close()
            elif frame["type"] == "challenge":
                try:
                    self._answer(channel, frame)
                except wire.WireError as error:
                    refusal.append(Refused(error.code, str(error)))
                    raise
            else:
                self._follow(frame, greeting)

        def ended(channel: Channel, why: str) -> None:
            if channel.peer_died:
                self.dead_at = loop.time()
            if not over.done():
                over.set_result(why)

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, channel = await loop.create_connection(lambda: Channel(frame_came, ended), *address)
        except TimeoutError:
            return "connecting timed out"
        except OSError as error:
            if isinstance(error, ConnectionError) or getattr(error, "errno", None) == socket.EAI_NONAME:
                self.dead_at = loop.time()
            return _why(error)
        self._channel = channel
        try:
            waits: set[asyncio.Future[Any]] = {over, greeting}
            await asyncio.wait(waits, timeout=WELCOME_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not greeting.done() and not over.done():
                channel.abort("no welcome in time")
            why = await over
        finally:
            channel.close()
        if refusal and refusal[0].code not in _PASSING:
            raise refusal[0]
        return str(refusal[0]) if refusal else why

    def _answer(self, channel: Channel, challenge: Frame) -> None:
        wire.agree(challenge.get("low"), challenge.get("high"), self._version)
        hello = {
            "v": wire.show(self._version),
            "type": "hello",
            "low": wire.show((self._version[0], 0)),
            "high": wire.show(self._version),
            "kind": self._kind,
            "run_id": self._run_id,
            **self._hello(channel.local_host),
        }
        if self._token:
            hello["proof"] = wire.proof(self._token, str(challenge.get("nonce")), self._run_id, self._kind)
        channel.send(hello)
        self._unsaid = []

    def _follow(self, frame: Frame, greeting: asyncio.Future[None]) -> None:
        self.epoch = max(self.epoch, int(frame.get("epoch") or 0))
        if not greeting.done():
            greeting.set_result(None)
        if frame["type"] == "welcome":
            self._welcomed = True
            self.down_since = None
        self._on_frame(frame)
        if self._welcomed and self._unsaid is not None:
            unsaid, self._unsaid = self._unsaid, None
            for kind, fields in unsaid:
                self.send(kind, **fields)


def _why(error: OSError) -> str:
    """asyncio puts the address into the text; the caller knows it already."""
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno).lower()


async def ask(
    addresses: list[Address], run_id: RunId, question: str, *, token: str | None, timeout_s: float = 5.0, **fields: Any
) -> dict[str, Any]:
    """One question about a run, as `muster world` does it. Raises Refused, or TimeoutError when there is nobody."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[dict[str, Any]] = loop.create_future()

    def heard(frame: Frame) -> None:
        if frame["type"] == "welcome":
            link.send("ask", ask=question, seq=1, **fields)
        elif frame["type"] == "answer" and not answer.done():
            answer.set_result(frame["view"])

    link = Link(lambda: addresses, run_id, "control", token=token, hello=lambda local: {}, on_frame=heard)
    task = loop.create_task(link.run())
    waits: set[asyncio.Future[Any]] = {task, answer}
    deadline = loop.time() + timeout_s
    try:
        while not answer.done():
            await asyncio.wait(waits, timeout=ASK_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            if not answer.done() and (link.dead_at > 0 or loop.time() > deadline):
                raise TimeoutError(f"no answer from {link.why_down}")
        return answer.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Refused):
            await task
