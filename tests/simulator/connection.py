"""A simulated connection to the coordinator: what `world.connection` does, on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from muster.types.frames import ChallengeFrame, ErrorFrame, Frame, HelloFrame, WelcomeFrame
from muster.world.connection import CONNECT_TIMEOUT_S, PASSING, WELCOME_TIMEOUT_S
from muster.world.wire import encode
from tests.simulator.clock import Process
from tests.simulator.coordinator import RUN, SimulatedCoordinator
from tests.simulator.network import Cable, Item, Network, frame_of


class SimulatedConnection:
    def __init__(
        self,
        process: Process,
        network: Network,
        coordinator: SimulatedCoordinator,
        machine: str,
        rng: Random,
        *,
        kind: str,
        hello: Callable[[], HelloFrame],
        on_frame: Callable[[Frame], None],
        on_refused: Callable[[str, str], None],
        on_down: Callable[[str], None] = lambda why: None,
        on_dead: Callable[[], None] = lambda: None,
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
        self._on_down = on_down
        self._on_dead = on_dead
        self._line: Cable | None = None
        self._session = 0
        self._attempt = 0
        self._greeted = False
        self.up = False
        self.epoch = 0

    # Outwards

    def send(self, frame: Frame) -> bool:
        if self._line is None or not self.up:
            return False
        self._line.up.send(encode(frame, epoch=self.epoch))
        return True

    def drop(self) -> None:
        """Give up on a connection that is open but silent."""
        if self._line is not None:
            self._hang_up()
            self._process.after(0.0, self._over, self._session, "dropped")

    def close(self) -> None:
        """The process ends."""
        self._session += 1
        self._hang_up()

    def vanish(self) -> None:
        """The machine lost its power: nothing more is sent or read."""
        self._session += 1
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
        self._session += 1
        number = self._session
        self._greeted = False
        if not self._network.reaches(self._machine):
            self._process.after(CONNECT_TIMEOUT_S, self._over, number, "connecting timed out")
        else:
            self._process.after(self._network.delay(), self._knock, number)

    def _knock(self, number: int) -> None:
        if number != self._session:
            return
        if not self._network.reaches(self._machine):
            self._process.after(CONNECT_TIMEOUT_S, self._over, number, "connecting timed out")
        elif not self._coordinator.alive:
            self._on_dead()
            self._over(number, "connection refused")
        else:
            self._line = line = Cable(self._network, self._machine)
            line.down.sink = lambda item: self._process.read(self._arrives, number, item)
            self._coordinator.accept(line)
            self._process.after(WELCOME_TIMEOUT_S, self._expect_welcome, number)

    def _expect_welcome(self, number: int) -> None:
        if number == self._session and not self._greeted:
            self.drop()

    def _over(self, number: int, why: str) -> None:
        """A session, or an attempt at one, has ended: try again, at once if it was a good one."""
        if number != self._session:
            return
        self._line = None
        if self.up:
            self._attempt = 0
        self.up = False
        self._session += 1
        self._on_down(why)
        wait = self._rng.uniform(0.1, 0.2) if self._attempt else 0.0
        self._attempt += 1
        self._process.after(wait, self._again, self._session)

    def _again(self, number: int) -> None:
        if number == self._session:
            self.connect()

    # Inwards

    def _arrives(self, number: int, item: Item) -> None:
        if number != self._session or self._line is None:
            return
        if item is None:
            self._on_dead()
            self._line.down.sink = None
            self._over(number, "the connection closed")
            return
        match frame := frame_of(item):
            case ChallengeFrame():
                hello = replace(self._hello(), low="1.0", high="1.0", kind=self._kind, run_id=RUN)
                self._line.up.send(encode(hello))
            case ErrorFrame(code=code, message=message):
                self._refused(number, code, message)
            case _:
                self._follow(frame)

    def _refused(self, number: int, code: str, message: str) -> None:
        self._hang_up()
        self._on_dead()
        if code in PASSING:
            self._over(number, message)
        else:
            self.close()
            self.up = False
            self._on_refused(code, message)

    def _follow(self, frame: Frame) -> None:
        self.epoch = max(self.epoch, frame.epoch or 0)
        self._greeted = True
        if isinstance(frame, WelcomeFrame):
            self.up = True
        self._on_frame(frame)
