"""One side's connection to a coordinator: find it, prove the token, and come back when it is lost.

A coordinator can be *dead* (the connection was closed or refused: somebody answered, and it was not running) or
*silent* (nothing comes back at all). Only silence is dangerous: on the other side of a partition the world may go
on without us. `on_dead` is called each time it is found dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from muster.types.frames import AnswerFrame, AskFrame, ChallengeFrame, ErrorFrame, Frame, HelloFrame, WelcomeFrame
from muster.types.world import RunId
from muster.world import wire
from muster.world.wire import Channel, Version

Address = tuple[str, int]

CONNECT_TIMEOUT_S = 1.0
WELCOME_TIMEOUT_S = 5.0
ASK_LOOK_S = 0.25

# Errors after which saying hello again can help.
PASSING = frozenset({"lost", "timeout", "closing"})


class CoordinatorRefused(Exception):
    """The coordinator answered, and its answer is no."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


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
        version: Version = wire.VERSION,
    ) -> None:
        self._addresses = addresses
        self._run_id = run_id
        self._kind = kind
        self._token = token
        self._hello = hello
        self._on_frame = on_frame
        self._on_down = on_down
        self._on_dead = on_dead
        self._version = version
        self._channel: Channel | None = None
        self.epoch = 0
        self.up = False
        self.why_down = "not connected yet"

    def send(self, frame: Frame) -> bool:
        """Send if the connection is up."""
        if self._channel is None or not self.up:
            return False
        self._channel.send(frame, epoch=self.epoch)
        return True

    def drop(self, why: str) -> None:
        """Give up on a connection that is open but silent."""
        if self._channel is not None:
            self._channel.abort(why)

    async def run(self) -> None:
        """Connect, and reconnect for ever; raises CoordinatorRefused when the coordinator will not have us."""
        attempt = 0
        while True:
            for address in self._addresses():
                why = await self._session(address)
                if self.up:
                    attempt = 0
                self.up = False
                self.why_down = f"{wire.show_address(*address)}: {why}"
                self._on_down(self.why_down)
            if attempt:
                await asyncio.sleep(random.uniform(0.1, 0.2))
            attempt += 1

    async def _session(self, address: Address) -> str:
        """One connection from start to end; returns why it ended."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[str] = loop.create_future()
        greeting: asyncio.Future[None] = loop.create_future()
        refusal: list[CoordinatorRefused] = []

        def frame_came(channel: Channel, frame: Frame) -> None:
            if isinstance(frame, ErrorFrame) and frame.seq is None:
                refusal.append(CoordinatorRefused(frame.code, frame.message))
                channel.close()
            elif isinstance(frame, ChallengeFrame):
                try:
                    self._answer(channel, frame)
                except wire.WireError as error:
                    refusal.append(CoordinatorRefused(error.code, str(error)))
                    raise
            else:
                self._follow(frame, greeting)

        def ended(channel: Channel, why: str) -> None:
            if channel.peer_died:
                self._on_dead()
            if not over.done():
                over.set_result(why)

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, channel = await loop.create_connection(lambda: Channel(frame_came, ended), *address)
        except TimeoutError:
            return "connecting timed out"
        except OSError as error:
            if isinstance(error, ConnectionError) or getattr(error, "errno", None) == socket.EAI_NONAME:
                self._on_dead()
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
        if refusal and refusal[0].code not in PASSING:
            raise refusal[0]
        return str(refusal[0]) if refusal else why

    def _answer(self, channel: Channel, challenge: ChallengeFrame) -> None:
        wire.agree(challenge.low, challenge.high, self._version)
        low, high = wire.show((self._version[0], 0)), wire.show(self._version)
        proof = wire.proof(self._token, challenge.nonce, self._run_id, self._kind) if self._token else ""
        hello = self._hello(channel.local_host)
        channel.send(replace(hello, v=high, low=low, high=high, kind=self._kind, run_id=self._run_id, proof=proof))

    def _follow(self, frame: Frame, greeting: asyncio.Future[None]) -> None:
        self.epoch = max(self.epoch, frame.epoch or 0)
        if not greeting.done():
            greeting.set_result(None)
        if isinstance(frame, WelcomeFrame):
            self.up = True
        self._on_frame(frame)


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
