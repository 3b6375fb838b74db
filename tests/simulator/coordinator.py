"""The coordinator on virtual time: does with a `RunProtocol` what `world.service` does, and can die and come back."""

from __future__ import annotations

import math
from collections.abc import Callable

from muster.core.world import records
from muster.core.world.run import Decision, Run
from muster.types.frames import AskFrame, ChallengeFrame, ErrorFrame, Frame, HelloFrame, RenewFrame, RunRecord
from muster.types.run_event import RunEvent
from muster.types.world import RunId, Settings
from muster.world.protocol import RunProtocol
from muster.world.wire import encode
from tests.simulator.clock import Process, VirtualClock
from tests.simulator.network import Cable, Item, frame_of

BEAT_S = 0.25
RUN = RunId("run")


class Port:
    """The coordinator's end of one connection."""

    def __init__(self, coordinator: SimulatedCoordinator, line: Cable) -> None:
        self._coordinator = coordinator
        self._line = line
        self._open = True
        line.up.sink = self._arrives
        self.send_raw(encode(ChallengeFrame(low="1.0", high="1.0")))

    def _arrives(self, item: Item) -> None:
        self._coordinator.process.read(self._coordinator.hear, self, item)

    def send_raw(self, data: bytes) -> None:
        if self._open:
            self._line.down.send(data)

    def refuse(self, code: str, message: str) -> None:
        self.send_raw(encode(ErrorFrame(code=code, message=message)))
        self.close()
        self._coordinator.process.after(0.0, self._coordinator.hear, self, None)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._line.up.sink = None
            self._line.down.send(None)

    def vanish(self, lose_sent: bool) -> None:
        if lose_sent:
            self._line.down.lose_all()
        self.close()


class Asker:
    """A control connection that lasts for one question."""

    def __init__(self) -> None:
        self.answers: list[Frame] = []

    def send_raw(self, data: bytes) -> None:
        self.answers.append(frame_of(data))

    def refuse(self, code: str, message: str) -> None:
        self.answers.append(ErrorFrame(code=code, message=message))


class SimulatedCoordinator:
    """`saved` is the state file: it outlives the process, unless it is lost with it."""

    def __init__(self, clock: VirtualClock, settings: Settings | None = None) -> None:
        self._clock = clock
        self._settings = settings
        self.process = Process(clock)
        self.saved: RunRecord | None = None
        self.wall = 1.7e9
        self.lives = 0
        self.died_at = -math.inf
        self.on_event: Callable[[RunEvent], None] | None = None
        self.on_decision: Callable[[Run, Decision, Run], None] | None = None
        self.on_saved: Callable[[RunRecord], None] | None = None
        self.crash_mid_send: int | None = None  # die after that many frames of the next record that is kept
        self._ports: list[Port] = []
        self._greeted: set[int] = set()
        self.start()

    # Life and death

    def start(self) -> None:
        self.process = Process(self._clock)
        self.lives += 1
        self._ports, self._greeted = [], set()
        self._touched, self._wakes = False, 0
        self._expected = self._clock.now + BEAT_S
        if self.saved is None:
            self.protocol = RunProtocol(RUN, settings=self._settings)
        else:
            self.protocol = RunProtocol.from_record(RUN, records.read(records.write(self.saved)), self._clock.now)
        self.protocol.at.on_event = self.on_event
        self.protocol.on_decision = self.on_decision
        self.process.after(BEAT_S, self._beat)
        self._touch()

    @property
    def alive(self) -> bool:
        return self.process.alive

    def crash(self, *, keep_record: bool = True, lose_sent: bool = False) -> None:
        if not keep_record:
            self.saved = None
        self.process.end()
        self.died_at = self._clock.now
        for port in self._ports:
            port.vanish(lose_sent)

    def accept(self, line: Cable) -> None:
        """A connection is made even while the process is stopped; it speaks when it goes on."""
        self.process.read(self._admit, line)

    def _admit(self, line: Cable) -> None:
        self._ports.append(Port(self, line))

    # Hearing

    def hear(self, port: Port, item: Item) -> None:
        now = self._clock.now
        if item is None:
            port.close()
            self._greeted.discard(id(port))
            self.protocol.part(port, now)
            if port in self._ports:
                self._ports.remove(port)
            self._touch()
            return
        frame = frame_of(item)
        if id(port) not in self._greeted:
            self._greeted.add(id(port))
            assert isinstance(frame, HelloFrame)
            self.protocol.greet(port, frame, now)
            self._touch()
            return
        self.protocol.hear(port, frame, now)
        if not isinstance(frame, RenewFrame):
            self._touch()
        elif self.protocol.at.outbox:
            self._flush()

    def ask(self, question: AskFrame) -> Frame:
        """What `muster world` does: one question over a control connection, one answer."""
        asker = Asker()
        now = self._clock.now
        self.protocol.greet(asker, HelloFrame(kind="control"), now)
        self.protocol.hear(asker, question, now)
        self._touch()
        self._flush()
        self.protocol.part(asker, now)
        return asker.answers[-1] if asker.answers else ErrorFrame(code="lost")

    # Settling

    def _touch(self) -> None:
        if not self._touched:
            self._touched = True
            self.process.after(0.0, self._settle)

    def _settle(self) -> None:
        self._touched = False
        wake_at = self.protocol.settle(self._clock.now)
        self._flush()
        self._wakes += 1
        if self.alive and wake_at < math.inf:
            self.process.after(wake_at - self._clock.now, self._woken, self._wakes)

    def _woken(self, number: int) -> None:
        if number == self._wakes:
            self._touch()

    def _flush(self) -> None:
        at = self.protocol.at
        kept, at.unsaved = at.unsaved, False
        if kept:
            self.saved = self.protocol.orders.record(self.wall + self._clock.now)
            if self.on_saved is not None:
                self.on_saved(self.saved)
        outbox, at.outbox = at.outbox, []
        for sent, (peer, data) in enumerate(outbox):
            if kept and self.crash_mid_send == sent:
                self.crash_mid_send = None
                self.crash()
                return
            peer.send_raw(data)

    def _beat(self) -> None:
        late = self._clock.now - self._expected
        self._expected = self._clock.now + BEAT_S
        if late > BEAT_S:
            self.protocol.stood_still(late)
        self.protocol.probe_lost()
        if self.protocol.at.outbox:
            self._flush()
        self.process.after(BEAT_S, self._beat)
