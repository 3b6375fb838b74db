"""The coordinator on virtual time: does with a `RunProtocol` what `world.service` does, and can die and come back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

from muster.core.succession import electorate
from muster.core.succession.state import Succession
from muster.core.world import records
from muster.core.world.run import Decision, Run
from muster.types.frames import (
    AskFrame,
    ChallengeFrame,
    ErrorFrame,
    Frame,
    HelloFrame,
    MovedFrame,
    RenewFrame,
    RunRecord,
    WelcomeFrame,
)
from muster.types.run_event import Kind, RunEvent
from muster.types.world import Elector, Electorate, MemberId, RunId, Settings
from muster.world.joining import is_direct
from muster.world.posts import put_off_s
from muster.world.protocol import RunProtocol
from muster.world.wire import encode
from tests.simulator.clock import Process, VirtualClock
from tests.simulator.network import COORDINATOR, Cable, Item, Network, frame_of
from tests.simulator.post import SimulatedPost

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

    @property
    def peer(self) -> str:
        return self._line.machine

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

    peer = "asker"

    def __init__(self) -> None:
        self.answers: list[Frame] = []

    def send_raw(self, data: bytes) -> None:
        self.answers.append(frame_of(data))

    def refuse(self, code: str, message: str) -> None:
        self.answers.append(ErrorFrame(code=code, message=message))


class SimulatedCoordinator:
    """`saved` is the state file: it outlives the process, unless it is lost with it.

    With `succession` it has a post, and leads only while it is elected; with a `host` that is an agent's process, which
    opens no runs.
    """

    def __init__(
        self,
        clock: VirtualClock,
        network: Network,
        settings: Settings | None = None,
        *,
        succession: bool = False,
        machine: str = COORDINATOR,
        host: Process | None = None,
        beside: MemberId | None = None,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._succession = succession
        self._host = host
        self._rng = Random(f"{machine} {len(network.listeners)}")
        self.network = network
        self.machine = machine
        self.beside = beside
        self.post: SimulatedPost | None = None
        self.address = (machine, 29400 + len(network.listeners))
        network.listeners[self.address] = self
        self.process = host or Process(clock)
        self.saved: RunRecord | None = None
        self.wall = 1.7e9
        self.clock_name = f"the clock of {machine}"
        self.lives = 0
        self.died_at = -math.inf
        self.on_event: Callable[[RunEvent], None] | None = None
        self.on_decision: Callable[[Run, Decision, Run], None] | None = None
        self.on_saved: Callable[[RunRecord], None] | None = None
        self.on_opened: Callable[[], None] | None = None
        self.on_said: Callable[[SimulatedCoordinator, bytes], None] | None = None
        self.settle_s = 0.0  # how long what comes is gathered before it is decided upon, as a busy service does
        self.crash_mid_send: int | None = None  # die after that many frames of the next record that is kept
        self._ports: list[Port] = []
        self._greeted: set[int] = set()
        self._keeping: set[int] = set()
        self._lifelines: dict[Port, MemberId] = {}
        self._proved: set[MemberId] = set()
        self.leading: RunProtocol | None = None
        self._put_off_until: float | None = None
        self._touched, self._wakes = False, 0
        self._expected = clock.now + BEAT_S
        if host is None:
            self.start()
        else:
            self.process.after(BEAT_S, self._beat)

    @property
    def protocol(self) -> RunProtocol:
        assert self.leading is not None
        return self.leading

    # Life and death

    def start(self) -> None:
        self.process = Process(self._clock)
        self.lives += 1
        self._ports, self._greeted, self._keeping = [], set(), set()
        self._lifelines, self._proved = {}, set()
        self._touched, self._wakes = False, 0
        self._expected = self._clock.now + BEAT_S
        self.leading = self.post = None
        self.process.after(BEAT_S, self._beat)
        if self.saved is None and not self._succession:
            self._serve(RunProtocol(RUN, settings=self._settings, clock=self.clock_name))
        elif self.saved is not None:
            record = records.read(records.write(self.saved))
            if self._succession:
                self._return_to(record)
            else:
                self._serve(RunProtocol.from_record(RUN, record, self._clock.now, clock=self.clock_name))

    def _serve(self, protocol: RunProtocol) -> None:
        self.leading = protocol
        protocol.at.on_event = self.on_event
        protocol.on_decision = self.on_decision
        self._touch()

    # Taking part, as `world.posts` does it

    def _me(self) -> Elector:
        return Elector(MemberId(f"c{self.lives}"), f"the coordinator on {self.machine}", self.address)

    def _return_to(self, record: RunRecord) -> None:
        known = electorate.everyone(record.electorate.groups)
        me = next((one for one in known if one.post == self.address), None) or self._me()
        state = Succession(me, record.settings.lease_s, self._clock.now, record)
        self.post = SimulatedPost(self, state, self._rng, None)
        self.post.start()

    def follow(self, me: Elector, lease_s: float, followed: Callable[[Elector], None]) -> None:
        self.post = SimulatedPost(self, Succession(me, lease_s, self._clock.now), self._rng, followed)

    def lead(self, record: RunRecord) -> None:
        protocol = RunProtocol.from_record(RUN, record, self._clock.now, clock=self.clock_name)
        protocol.at.electorate, protocol.at.unsaved = record.electorate, False
        protocol.take_over(self._lifelines.items(), self._proved, self._clock.now)
        self._keeping -= {id(port) for port in self._lifelines}
        self._lifelines = {}
        self._serve(protocol)

    def step_down(self, why: str) -> None:
        protocol, self.leading = self.leading, None
        assert self.post is not None
        for port in [port for port in self._ports if id(port) in self._greeted and id(port) not in self._keeping]:
            port.send_raw(encode(self.post.moved()))
            port.close()
            self._ports.remove(port)
        if protocol is not None:
            self.say(f"steps down: {why}")

    def say(self, text: str) -> None:
        if self.on_event is not None:
            self.on_event(RunEvent(self._clock.now, Kind.LOST, f"{self.machine}: {text}", None))

    def announce(self, electorate: Electorate) -> None:
        if self.leading is not None:
            self.leading.at.announce(electorate)
            self._flush()

    def remember(self, record: RunRecord) -> None:
        if self._host is None:
            self.saved = record
        if self.on_saved is not None:
            self.on_saved(record)

    def speak(self) -> None:
        if self.leading is not None:
            self._flush()
            self._widen()

    def _widen(self) -> None:
        post, run = self.post, self.leading.run if self.leading is not None else None
        if post is None or not post.leads or run is None or run.outcome is not None or run.recovery_until is not None:
            return
        if self._is_put_off(put_off_s(run)):
            return
        mine = {self.beside, post.state.me.member_id}
        able = [
            (Elector(one.member_id, one.name, one.post), one.host)
            for one in sorted(run.members.values(), key=lambda one: (one.joined_at, one.member_id))
            if one.post is not None and one.member_id not in mine
        ]
        assert self.leading is not None
        post.do(post.state.widen(self.machine, able, self._clock.now, self.leading.at.known))

    def _is_put_off(self, for_s: float) -> bool:
        """As `world.posts` does it."""
        now = self._clock.now
        if not for_s:
            self._put_off_until = None
            return False
        if self._put_off_until is None or self._put_off_until > now + for_s:
            self._put_off_until = now + for_s
            self.process.after(for_s, self.speak)
        return now < self._put_off_until

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def connected(self) -> int:
        return self.leading.connected if self.leading is not None else 0

    def crash(self, *, keep_record: bool = True, lose_sent: bool = False) -> None:
        if not keep_record:
            self.saved = None
        self.process.end()
        self.died_at = self._clock.now
        self.leading = self.leading if not self._succession else None
        for port in self._ports:
            port.vanish(lose_sent)
        if self.post is not None:
            self.post.close()

    def power_off(self) -> None:
        """Nobody is told."""
        self.process.end()
        self.died_at = self._clock.now
        self.leading = None
        if self.post is not None:
            self.post.vanish()

    def accept(self, line: Cable) -> None:
        """A connection is made even while the process is stopped; it speaks when it goes on."""
        self.process.read(self._admit, line)

    def _admit(self, line: Cable) -> None:
        self._ports.append(Port(self, line))

    # Hearing

    def hear(self, port: Port, item: Item) -> None:
        now = self._clock.now
        if port not in self._ports:
            return
        if not item:
            port.close()
            self._greeted.discard(id(port))
            self._keeping.discard(id(port))
            if (member_id := self._lifelines.pop(port, None)) is not None and item is None:
                self._proved.add(member_id)
            self._ports.remove(port)
            if self.leading is not None:
                self.leading.part(port, now, clean=item is None)
                self._touch()
            return
        frame = frame_of(item)
        if id(port) in self._keeping:
            assert self.post is not None
            if (answer := self.post.asked(frame)) is not None:
                port.send_raw(encode(answer))
        elif id(port) not in self._greeted:
            self._greeted.add(id(port))
            assert isinstance(frame, HelloFrame)
            self._greet(port, frame)
        elif self.leading is not None:
            self.leading.hear(port, frame, now)
            if not isinstance(frame, RenewFrame):
                self._touch()
            elif self.leading.at.outbox:
                self._flush()

    def _greet(self, port: Port, hello: HelloFrame) -> None:
        if self.post is not None and self.post.leads:
            self.post.do(self.post.state.outranked(hello.present.electorate.term, self._clock.now))
        if hello.kind == "keep" or (hello.kind == "lifeline" and self.leading is None and self._succession):
            if self.post is None:
                port.refuse("closing", "no run here")
                return
            self._keeping.add(id(port))
            if hello.kind == "lifeline" and hello.member is not None and is_direct(hello, port):
                self._lifelines[port] = hello.member.member_id
            port.send_raw(encode(WelcomeFrame()))
            return
        unopened = self.leading is None or (self._succession and self.leading.run is None)
        if unopened and not self._opened(port, hello):
            return
        assert self.leading is not None
        self.leading.greet(port, hello, self._clock.now)
        if hello.kind == "lifeline":
            self._flush()
        else:
            self._touch()

    def _opened(self, port: Port, hello: HelloFrame) -> bool:
        shown = hello.present.electorate
        if self.post is not None:
            moved = self.post.moved()
        elif hello.present.outcome is None and electorate.can_succeed(shown):
            moved = MovedFrame(posts=tuple(one.post for one in electorate.everyone(shown.groups)))
        elif self._host is not None:
            port.refuse("closing", "no run here yet")
            return False
        else:
            if self.leading is None:
                self._serve(RunProtocol(RUN, settings=self._settings, clock=self.clock_name))
            me = self._me()
            self.protocol.at.electorate = Electorate(shown.term + 1, me, ((me,),))
            return True
        port.send_raw(encode(moved))
        port.close()
        return False

    def ask(self, question: AskFrame) -> Frame:
        """What `muster world` does: one question over a control connection, one answer."""
        asker = Asker()
        now = self._clock.now
        if self.leading is None:
            return ErrorFrame(code="moved")
        self.protocol.greet(asker, HelloFrame(kind="control"), now)
        self.protocol.hear(asker, question, now)
        self._touch()
        self._flush()
        if self.leading is not None:  # else it has just found that it leads no more
            self.leading.part(asker, now)
        return asker.answers[-1] if asker.answers else ErrorFrame(code="lost")

    # Settling

    def settle_soon(self) -> None:
        """Something was ordered from outside."""
        self._touch()

    def _touch(self) -> None:
        if not self._touched:
            self._touched = True
            self.process.after(self.settle_s, self._settle)

    def _settle(self) -> None:
        self._touched = False
        if self.leading is None:
            return
        wake_at = self.leading.settle(self._clock.now)
        self._flush()
        self._widen()
        if self.leading is not None and self.leading.opens_next(self._clock.now):
            self._open_next(self.leading)
            return
        self._wakes += 1
        if self.alive and wake_at < math.inf:
            self.process.after(wake_at - self._clock.now, self._woken, self._wakes)

    def _open_next(self, protocol: RunProtocol) -> None:
        """Open the next run in the same way as `world.service`."""
        if self._host is not None:
            protocol.send_away_held()
            return
        first = Electorate()
        if self.post is not None:
            if not self.post.state.may_speak(self._clock.now):
                return
            me = replace(self._me(), member_id=MemberId(f"c{self.lives}.{self._clock.now}"))
            first = Electorate(self.post.state.ballot.promised + 1, me, ((me,),))
        if (following := protocol.next_run(first, self._clock.now)) is None:
            return
        if self.post is not None:
            self.post.close()
            self.post = None
        if self.on_opened is not None:
            self.on_opened()
        self._serve(following)

    def _woken(self, number: int) -> None:
        if number == self._wakes:
            self._touch()

    def _flush(self) -> None:
        if self.leading is None:
            return
        at = self.leading.at
        kept, at.unsaved = at.unsaved, False
        if kept or (self._succession and self.post is None and at.run is not None):
            kept = True
            self._keep_record(self.leading.orders.record(self.wall + self._clock.now))
        if self.post is not None and not self.post.state.may_speak(self._clock.now):
            return
        if self.on_said is not None:
            for _, data in at.outbox:
                self.on_said(self, data)
        outbox, at.outbox = at.outbox, []
        for sent, (peer, data) in enumerate(outbox):
            if kept and self.crash_mid_send == sent:
                self.crash_mid_send = None
                self.crash()
                return
            peer.send_raw(data)

    def _keep_record(self, record: RunRecord) -> None:
        if not self._succession:
            self.remember(record)
        elif self.post is not None:
            self.remember(self.post.state.write(record, self._clock.now))
            self.post.start()
        else:
            first = self.protocol.at.electorate
            assert first.leader is not None
            state = Succession(first.leader, record.settings.lease_s, self._clock.now)
            self.post = SimulatedPost(self, state, self._rng, None)
            self.remember(state.lead_anew(record, self._clock.now, first.term))
            self.post.start()

    def _beat(self) -> None:
        late = self._clock.now - self._expected
        self._expected = self._clock.now + BEAT_S
        if self.leading is not None:
            if late > BEAT_S:
                self.leading.stood_still(late)
            self.leading.probe_lost()
            if self.leading.at.outbox:
                self._flush()
            if self.leading is not None and self.leading.opens_next(self._clock.now):
                self._touch()
        self.process.after(BEAT_S, self._beat)
