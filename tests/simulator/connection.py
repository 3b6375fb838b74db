"""A simulated connection to the coordinator: what `world.connection` does, on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from muster.types.frames import ChallengeFrame, ErrorFrame, Frame, HelloFrame, MovedFrame, WelcomeFrame
from muster.world.connection import CONNECT_TIMEOUT_S, MOST_HOPS, PASSING, WELCOME_TIMEOUT_S
from muster.world.opening import TURNED_AWAY
from muster.world.wire import encode
from tests.simulator.clock import Process
from tests.simulator.coordinator import RUN, SimulatedCoordinator
from tests.simulator.network import Cable, Item, Network, frame_of


class SimulatedConnection:
    def __init__(
        self,
        process: Process,
        network: Network,
        places: Callable[[], list[SimulatedCoordinator]],
        machine: str,
        rng: Random,
        *,
        kind: str,
        hello: Callable[[], HelloFrame],
        on_frame: Callable[[Frame], None],
        on_refused: Callable[[str, str], None],
        on_down: Callable[[str], None] = lambda why: None,
        on_dead: Callable[[], None] = lambda: None,
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        self._process = process
        self._network = network
        self._places = places
        self._left: list[SimulatedCoordinator] = []  # to be tried before there is a pause
        self._target: SimulatedCoordinator | None = None
        self.home: SimulatedCoordinator | None = None
        self._silent: SimulatedCoordinator | None = None
        self._told: list[SimulatedCoordinator] = []
        self._hops = 0
        self._on_gone = on_gone
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
        self._silent = self.home
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

    def break_off(self) -> None:
        """As `reset`, for both; and what was under way is lost."""
        if (line := self._line) is not None:
            line.up.lose_all()
            line.down.lose_all()
            self.reset(half=False)

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.down.sink = None
            line.up.send(None)

    # Connecting

    def seek(self, place: SimulatedCoordinator) -> None:
        """Somebody leads there: do not wait for anybody else."""
        if place in self._told or (self._line is not None and place is self._target):
            return
        self._told = [place]
        if not self.up:
            self._hang_up()
            self.connect()

    def connect(self) -> None:
        """Where it is said to be, then where it last was, then elsewhere."""
        found = dict.fromkeys([*self._told, *self._places()])
        silent = self._silent if self._silent is self.home else None
        rest = [one for one in found if one not in self._told]
        self._left = self._told + sorted(rest, key=lambda one: (one is silent, one is not self.home))
        self._try_next()

    def _try_next(self) -> None:
        self._session += 1
        number = self._session
        self._greeted = False
        self._target = self._left.pop(0)
        if not self._network.reaches(self._machine, self._target.machine):
            self._process.after(CONNECT_TIMEOUT_S, self._over, number, "connecting timed out")
        else:
            self._process.after(self._network.delay(), self._knock, number)

    def _knock(self, number: int) -> None:
        target = self._target
        if number != self._session or target is None:
            return
        if not self._network.reaches(self._machine, target.machine):
            self._process.after(CONNECT_TIMEOUT_S, self._over, number, "connecting timed out")
        elif not target.alive:
            self._found_dead()
            self._over(number, "connection refused")
        else:
            self._line = line = Cable(self._network, self._machine, target.machine)
            line.up.repeats = line.down.repeats = self._kind == "keep"
            line.down.sink = lambda item: self._process.read(self._arrives, number, item)
            target.accept(line)
            self._process.after(WELCOME_TIMEOUT_S, self._expect_welcome, number)

    def _expect_welcome(self, number: int) -> None:
        if number == self._session and not self._greeted:
            self.drop()

    def _over(self, number: int, why: str) -> None:
        """A session, or an attempt at one, has ended: try again, at once if it was a good one."""
        if number != self._session:
            return
        self._line = None
        was_up, self.up = self.up, False
        if was_up:
            self._attempt = self._hops = 0
        self._session += 1
        self._on_down(why)
        if not was_up and self._left:
            self._told = [one for one in self._told if one is not self._target]
            self._try_next()
            return
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
            self._line.down.sink = None
            self._line = None
            self._found_dead()
            if self._target is not None and not self._target.alive and self._greeted:
                self._on_gone()
            self._over(number, "the connection closed")
            return
        match frame := frame_of(item):
            case ChallengeFrame():
                hello = replace(self._hello(), low="1.0", high="1.0", kind=self._kind, run_id=RUN)
                self._line.up.send(encode(hello))
            case ErrorFrame(code=code, message=message):
                self._refused(number, code, message)
            case MovedFrame(posts=posts):
                self._moved(number, posts)
            case _:
                self._follow(frame)

    def _found_dead(self) -> None:
        if self.home is None or self._target is self.home:
            self._on_dead()

    def _moved(self, number: int, posts: tuple[tuple[str, int], ...]) -> None:
        """Somebody else leads. Go there at once, but not round in circles."""
        self._hang_up()
        there = [self._network.listeners[post] for post in posts if post in self._network.listeners]
        self._told = [one for one in there if one is not self._target]
        self._hops += 1
        self._left = []
        if self._told and self._hops <= MOST_HOPS:
            self._attempt = 0
        self._over(number, "moved")

    def _refused(self, number: int, code: str, message: str) -> None:
        self._hang_up()
        if code not in TURNED_AWAY:
            self._found_dead()
        if code in PASSING:
            self._over(number, message)
        else:
            self.close()
            self.up = False
            self._on_refused(code, message)

    def _follow(self, frame: Frame) -> None:
        self.epoch = max(self.epoch, frame.epoch or 0)
        self._greeted = True
        self.home, self._silent = self._target, None
        if isinstance(frame, WelcomeFrame):
            self.up = True
        self._on_frame(frame)
