"""A member's end of its connection: what `world.connection.Link` does, on virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

from muster.sim.clock import Process
from muster.sim.coordinator import SimulatedCoordinator
from muster.sim.network import Item, Line, Network, frame_of
from muster.world.wire import VERSION, Frame, encode, show

CONNECT_TIMEOUT_S = 1.0
WELCOME_TIMEOUT_S = 5.0
_PASSING = frozenset({"lost", "timeout", "closing"})


@lru_cache(maxsize=256)
def _plain(kind: str, epoch: int, number: int | None) -> bytes:
    """The frames that are sent most carry nothing else."""
    return encode({"v": show(VERSION), "type": kind, "epoch": epoch, "round": number})


class Link:
    def __init__(
        self,
        process: Process,
        network: Network,
        coordinator: SimulatedCoordinator,
        machine: str,
        rng: Random,
        *,
        kind: str,
        hello: Callable[[], dict[str, Any]],
        on_frame: Callable[[Frame], None],
        on_refused: Callable[[str, str], None],
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._process = process
        self._network = network
        self._coordinator = coordinator
        self._machine = machine
        self._rng = rng
        self._kind = kind
        self._hello = hello
        self._on_frame = on_frame
        self._on_refused = on_refused
        self._on_failed = on_failed
        self._line: Line | None = None
        self.session = 0
        self._attempt = 0
        self._greeted = False
        self.up = False
        self.epoch = 0
        self.dead_at = -math.inf
        self.down_since: float | None = process.clock.now

    # Outwards

    def send(self, kind: str, **fields: Any) -> bool:
        if self._line is None or not self.up:
            return False
        self._line.up.send(encode({"v": show(VERSION), "type": kind, "epoch": self.epoch, **fields}))
        return True

    def send_plain(self, kind: str, number: int | None) -> bool:
        if self._line is None or not self.up:
            return False
        self._line.up.send(_plain(kind, self.epoch, number))
        return True

    def drop(self) -> None:
        """Give up on a connection that is open but silent."""
        if self._line is not None:
            self._hang_up()
            self._process.after(0.0, self._over, self.session)

    def close(self) -> None:
        """The process ends."""
        self.session += 1
        self._hang_up()

    def vanish(self) -> None:
        """The machine lost its power: nothing more is sent or read."""
        self.session += 1
        if self._line is not None:
            self._line.down.sink = None
        self._line, self.up = None, False

    def reset(self, *, half: bool) -> None:
        """Something between the two ends it, for both or for us alone."""
        if (line := self._line) is not None:
            if not half:
                line.up.send(None)
            if line.down.sink is not None:
                line.down.sink(None)

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.down.sink = None
            line.up.send(None)

    # Connecting

    def connect(self) -> None:
        self.session += 1
        number = self.session
        self._greeted = False
        if not self._network.reaches(self._machine):
            self._process.after(CONNECT_TIMEOUT_S, self._over, number)
        else:
            self._process.after(self._network.delay(), self._knock, number)

    def _knock(self, number: int) -> None:
        if number != self.session:
            return
        if not self._network.reaches(self._machine):
            self._process.after(CONNECT_TIMEOUT_S, self._over, number)
        elif not self._coordinator.alive:
            self.dead_at = self._process.clock.now
            self._over(number)
        else:
            self._line = line = Line(self._network, self._machine)
            line.down.sink = lambda item: self._process.read(self._arrives, number, item)
            self._coordinator.accept(line)
            self._process.after(WELCOME_TIMEOUT_S, self._expect_welcome, number)

    def _expect_welcome(self, number: int) -> None:
        if number == self.session and not self._greeted:
            self.drop()

    def _over(self, number: int) -> None:
        """A session, or an attempt at one, has ended: try again, at once if it was a good one."""
        if number != self.session:
            return
        self._line = None
        if self.up:
            self._attempt = 0
        self.up = False
        if self.down_since is None:
            self.down_since = self._process.clock.now
        self._on_failed()
        wait = self._rng.uniform(0.1, 0.2) if self._attempt else 0.0
        self._attempt += 1
        self.session += 1
        self._process.after(wait, self._again, self.session)

    def _again(self, number: int) -> None:
        if number == self.session:
            self.connect()

    # Inwards

    def _arrives(self, number: int, item: Item) -> None:
        if number != self.session or self._line is None:
            return
        if item is None:
            self.dead_at = self._process.clock.now
            self._line.down.sink = None
            self._over(number)
            return
        frame = frame_of(item)
        if frame["type"] == "challenge":
            self._answer()
        elif frame["type"] == "error":
            self._refused(number, str(frame.get("code")), str(frame.get("message")))
        else:
            self._follow(frame)

    def _answer(self) -> None:
        assert self._line is not None
        hello = {"v": show(VERSION), "type": "hello", "kind": self._kind, "run_id": "run", **self._hello()}
        self._line.up.send(encode(hello))

    def _refused(self, number: int, code: str, message: str) -> None:
        self._hang_up()
        self.dead_at = self._process.clock.now
        if code in _PASSING:
            self._over(number)
        else:
            self.close()
            self.up = False
            self._on_refused(code, message)

    def _follow(self, frame: Frame) -> None:
        self.epoch = max(self.epoch, int(frame.get("epoch") or 0))
        self._greeted = True
        if frame["type"] == "welcome":
            self.up = True
            self.down_since = None
        self._on_frame(frame)
