"""The coordinator on virtual time: does with a `Desk` what `coordinator.service` does, and can die and come back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from muster.coordinator.desk import Desk, Happening
from muster.coordinator.wire import VERSION, Frame, encode, show
from muster.core.roll import Decision, Roll
from muster.sim.clock import Clock, Process
from muster.sim.network import Item, Line, frame_of
from muster.types.world import RunId, Settings

BEAT_S = 0.25
RUN = RunId("run")


class Port:
    """The coordinator's end of one connection."""

    def __init__(self, house: House, line: Line) -> None:
        self._house = house
        self._line = line
        self._open = True
        line.up.sink = self._arrives
        self.send_raw(encode({"v": show(VERSION), "type": "challenge"}))

    def _arrives(self, item: Item) -> None:
        self._house.process.read(self._house.hear, self, item)

    def send_raw(self, data: bytes) -> None:
        if self._open:
            self._line.down.send(data)

    def refuse(self, code: str, message: str) -> None:
        self.send_raw(encode({"v": show(VERSION), "type": "error", "code": code, "message": message}))
        self.close()
        self._house.process.after(0.0, self._house.hear, self, None)

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
        self.answers.append(json.loads(data[4:]))

    def refuse(self, code: str, message: str) -> None:
        self.answers.append({"type": "error", "code": code, "message": message})


class House:
    """`saved` is the state file: it outlives the process, unless it is lost with it."""

    def __init__(self, clock: Clock, settings: Settings | None = None) -> None:
        self._clock = clock
        self._settings = settings
        self.process = Process(clock)
        self.saved: dict[str, Any] | None = None
        self.wall = 1.7e9
        self.lives = 0
        self.on_story: Callable[[Happening], None] | None = None
        self.on_decision: Callable[[Roll, Decision, Roll], None] | None = None
        self.on_saved: Callable[[dict[str, Any]], None] | None = None
        self.crash_mid_send: int | None = None  # die after that many frames of the next record that is kept
        self._ports: list[Port] = []
        self._desk_of: set[int] = set()
        self.start()

    # Life and death

    def start(self) -> None:
        self.process = Process(self._clock)
        self.lives += 1
        self._ports, self._desk_of = [], set()
        self._touched, self._wakes = False, 0
        self._expected = self._clock.now + BEAT_S
        if self.saved is None:
            self.desk = Desk(RUN, settings=self._settings)
        else:
            self.desk = Desk.from_record(RUN, json.loads(json.dumps(self.saved)), self._clock.now)
        self.desk.on_story = self.on_story
        self.desk.on_decision = self.on_decision
        self.process.after(BEAT_S, self._beat)
        self._touch()

    @property
    def alive(self) -> bool:
        return self.process.alive

    def crash(self, *, keep_record: bool = True, lose_sent: bool = False) -> None:
        if not keep_record:
            self.saved = None
        self.process.end()
        for port in self._ports:
            port.vanish(lose_sent)

    def accept(self, line: Line) -> None:
        """A connection is made even while the process is stopped; it speaks when it goes on."""
        self.process.read(self._admit, line)

    def _admit(self, line: Line) -> None:
        self._ports.append(Port(self, line))

    # Hearing

    def hear(self, port: Port, item: Item) -> None:
        now = self._clock.now
        if item is None:
            port.close()
            self._desk_of.discard(id(port))
            self.desk.part(port, now)
            if port in self._ports:
                self._ports.remove(port)
            self._touch()
            return
        frame = frame_of(item)
        if id(port) not in self._desk_of:
            self._desk_of.add(id(port))
            self.desk.greet(port, frame, now)
            self._touch()
            return
        self.desk.hear(port, frame, now)
        if frame["type"] != "renew":
            self._touch()
        elif self.desk.outbox:
            self._flush()

    def ask(self, question: str, **fields: Any) -> Frame:
        """What `muster world` does: one question over a control connection, one answer."""
        asker = Asker()
        now = self._clock.now
        self.desk.greet(asker, {"type": "hello", "kind": "control"}, now)
        self.desk.hear(asker, {"type": "ask", "ask": question, "seq": 1, **fields}, now)
        self._touch()
        self._flush()
        self.desk.part(asker, now)
        return asker.answers[-1] if asker.answers else {"type": "lost"}

    # Settling

    def _touch(self) -> None:
        if not self._touched:
            self._touched = True
            self.process.after(0.0, self._settle)

    def _settle(self) -> None:
        self._touched = False
        wake_at = self.desk.settle(self._clock.now)
        self._flush()
        self._wakes += 1
        if self.alive and wake_at < math.inf:
            self.process.after(wake_at - self._clock.now, self._woken, self._wakes)

    def _woken(self, number: int) -> None:
        if number == self._wakes:
            self._touch()

    def _flush(self) -> None:
        kept = self.desk.unsaved
        if kept:
            self.desk.unsaved = False
            self.desk.stamp_outcome(self.wall + self._clock.now)
            self.saved = self.desk.record()
            if self.on_saved is not None:
                self.on_saved(self.saved)
        outbox, self.desk.outbox = self.desk.outbox, []
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
            self.desk.stood_still(late)
        self.desk.probe_lost()
        if self.desk.outbox:
            self._flush()
        self.process.after(BEAT_S, self._beat)
