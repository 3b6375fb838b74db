"""The coordinator as a process: connections and time on one side, one protocol per run on the other.

It decides nothing. Reports that arrive together are settled together, once per turn of the event loop, so a
thousand members that join at once cost one decision. A record is kept before anything that follows from it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from muster import descriptors, listening
from muster.clock import boot_id
from muster.core import crowding
from muster.core.world import records
from muster.listening import Door
from muster.types import frames
from muster.types.frames import Frame, HelloFrame, HoldsFrame, MetricsFrame, MovedFrame, RenewFrame, RunRecord
from muster.types.run_event import RunEvent
from muster.types.world import MemberId, RunId, Settings
from muster.world import wire
from muster.world.outgoing import Director, Keeps, Outgoing
from muster.world.posts import Posts
from muster.world.protocol import RunProtocol
from muster.world.strangers import Strangers
from muster.world.wire import Channel

log = logging.getLogger("muster.coordinator")

BEAT_S = 0.25
COLLECT_AFTER = (5_000, 10, 20)
RESTS, LONGEST_REST_S = 5.0, 0.05  # after a pass, in its own length: what comes waits for the next one together
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError)


class Coordinator:
    """Serves any number of runs on one address."""

    def __init__(
        self,
        *,
        token: str | None = None,
        state: Keeps | None = None,
        outcome_ttl_s: float = 600.0,
        on_event: Callable[[RunId, RunEvent], None] | None = None,
        on_metrics: Callable[[RunId, str, MetricsFrame], None] | None = None,
        director: Director | None = None,
        beside: MemberId | None = None,
        opens_runs: bool = True,
    ) -> None:
        """With a `director` runs are opened and ended by it alone; members cannot bring their own.

        `beside` is the member that is lost with this process, if there is one. One that opens no runs leads only those
        in which it takes part.
        """
        self._token = token
        self._state = state
        self._outcome_ttl_s = outcome_ttl_s
        self._on_event = on_event
        self._on_metrics = on_metrics
        self._director = director
        self._opens_runs = opens_runs
        self._clock = boot_id()  # the loop's clock counts from the boot of this machine
        self._protocols: dict[RunId, RunProtocol] = {}
        self._protocol_of: dict[Channel, RunProtocol] = {}
        self._strangers = Strangers(self._token_of, open_to_all=director is None and not token)
        self.posts = Posts(token, self._lead, self._step_down, beside)
        self._outgoing = Outgoing(self.posts, self._protocols, state, director)
        self._timers: dict[RunId, asyncio.TimerHandle] = {}
        self._passes = _Passes(self._settle)
        self._read = _Read(self.touch)
        self._stopping = False  # what closes now is closed by us, and nobody is lost by it
        self._doors: list[Door] = []
        self._most = descriptors.limit() * 3 // 4  # connections of members, if several runs want them
        self._beat = _Beat(self._look_after_all)
        self.busy_at = 0.0
        self.someone_left = asyncio.Event()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, take over what the state file holds, and return the address that members should use."""
        loop = asyncio.get_running_loop()
        self.busy_at = loop.time()
        if port == 0:
            # Of a name with several addresses only one can get the port that we are about to learn.
            host = str((await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0][4][0])
        sockets = await listening.bound(host, port)
        name = str(sockets[0].getsockname()[0]), int(sockets[0].getsockname()[1])
        self.posts.address = listening.reachable(name[0]), name[1]
        for run_id, kept in (self._state.records() if self._state is not None else {}).items():
            try:
                self._take_up(run_id, records.read(kept))
            except ValueError as error:
                log.warning("the kept record of run %s cannot be used (%r)", run_id, error)
        self._doors += [Door(one, self._admit, name="the coordinator") for one in sockets]
        if self._opens_runs:
            frames.prepare()
            self._beat.start()
        for protocol in self._protocols.values():
            self.touch(protocol)
        return name

    def _take_up(self, run_id: RunId, record: RunRecord) -> None:
        if self._director is None:
            self.posts.return_to(run_id, record)
            return
        now = asyncio.get_running_loop().time()
        restored = RunProtocol.from_record(run_id, record, now, directed=True, clock=self._clock)
        self._protocols[run_id] = self._listened(restored)

    async def stop(self) -> None:
        self.shut()
        await self._beat.end()

    def shut(self) -> None:
        """Say nothing more to anybody."""
        self._stopping = True
        for door in self._doors:
            door.close()
        self._beat.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self.posts.close()
        self._strangers.close()
        for channel in list(self._protocol_of):
            channel.close()

    def open_run(self, run_id: RunId, settings: Settings) -> RunProtocol:
        """A run that is directed from outside; agents carry no settings."""
        protocol = self._protocols.get(run_id)
        if protocol is None:
            opened = RunProtocol(run_id, settings=settings, directed=True, clock=self._clock)
            protocol = self._protocols[run_id] = self._listened(opened)
            protocol.at.unsaved = True
        self.touch(protocol)
        return protocol

    def protocol(self, run_id: RunId) -> RunProtocol | None:
        return self._protocols.get(run_id)

    def close_run(self, run_id: RunId) -> None:
        """Forget a run; whoever still speaks of it is refused."""
        protocol = self._protocols.pop(run_id, None)
        if protocol is None:
            return
        self._drop_timer(run_id)
        self._passes.forget(run_id)
        self._read.forget(run_id)
        for channel in [channel for channel, its in self._protocol_of.items() if its is protocol]:
            channel.close()
        if self._state is not None:
            self._state.forget(run_id)

    @property
    def connected(self) -> int:
        return sum(protocol.connected for protocol in self._protocols.values())

    @property
    def all_ended(self) -> bool:
        return bool(self._protocols) and all(protocol.at.ended_at is not None for protocol in self._protocols.values())

    def _listened(self, protocol: RunProtocol) -> RunProtocol:
        protocol.at.is_settled = lambda announced: self.posts.is_settled(protocol.run_id, announced)
        if (listen := self._on_event) is not None:
            protocol.at.on_event = lambda event: listen(protocol.run_id, event)
        if (take := self._on_metrics) is not None:
            protocol.at.on_metrics = lambda worker, frame: take(protocol.run_id, worker, frame)
        return protocol

    # Connections

    def _admit(self, taken: socket.socket, _: str) -> None:
        self._strangers.arrive(taken, self._hear, self._ended)

    def _hear(self, channel: Channel, frame: Frame) -> None:
        try:
            if self.posts.hear(channel, frame):
                return
            if (protocol := self._protocol_of.get(channel)) is not None:
                protocol.hear(channel, frame, asyncio.get_running_loop().time())
                if not isinstance(frame, RenewFrame | HoldsFrame | MetricsFrame) or protocol.news:
                    protocol.news = False
                    self.touch(protocol)
                elif protocol.at.outbox:
                    self._outgoing.flush(protocol)
                    protocol.show()
            elif channel in self._strangers and (hello := self._strangers.hear(channel, frame)) is not None:
                self._greet(channel, hello)
        except _MALFORMED as error:
            level = logging.WARNING if channel in self._protocol_of else logging.DEBUG  # no stranger may fill the log
            log.log(level, "malformed frame from %s: %s", channel.peer, error)
            channel.refuse("garbage", f"a frame could not be understood: {error}")

    def _greet(self, channel: Channel, hello: HelloFrame) -> None:
        run_id = RunId(hello.run_id)
        self._check_room(run_id)
        protocol = self._protocols.get(run_id)
        if protocol is None or not protocol.is_of_earlier_run(hello):  # the electorate in that hello is not this run's
            if (moved := self.posts.led_elsewhere(run_id, hello)) is not None:
                _send_away(channel, moved)
                return
            self.posts.outranked(run_id, hello)
            protocol = self._protocols.get(run_id)
        if hello.kind == "keep" or (hello.kind == "lifeline" and protocol is None):
            self.posts.come(channel, hello)
            return
        if protocol is None and self._opens_runs and (ended := self.posts.take_back(run_id)) is not None:
            self._lead(run_id, ended)
            protocol = self._protocols[run_id]
        if (protocol is None or protocol.run is None) and self._director is None:
            if (moved := self.posts.moved(run_id, hello)) is not None:
                _send_away(channel, moved)
                return
            protocol = self._protocols[run_id] = self._opened(run_id, hello)
        elif protocol is None:
            raise wire.no_run(run_id)
        self._protocol_of[channel] = protocol
        protocol.greet(channel, hello, asyncio.get_running_loop().time())
        if protocol.run is None and not protocol.connected:
            del self._protocols[run_id]
        if hello.kind == "lifeline":
            self._outgoing.flush(protocol)  # every member makes one, and nothing is to be decided for it
        else:
            self.touch(protocol)

    def _opened(self, run_id: RunId, hello: HelloFrame) -> RunProtocol:
        """Perhaps by a guard, before its agent has said what the run is."""
        if hello.kind == "control" or not self._opens_runs:
            raise wire.no_run(run_id)
        protocol = self._protocols.get(run_id) or self._listened(RunProtocol(run_id, clock=self._clock))
        protocol.at.electorate = self.posts.first(hello.present.electorate.term + 1)
        return protocol

    def _check_room(self, run_id: RunId) -> None:
        """A run, or whoever has its token, must not take all connections from the others."""
        if len(self._protocol_of) >= self._most and crowding.is_greediest(
            run_id, (protocol.run_id for protocol in self._protocol_of.values())
        ):
            raise wire.WireError(*wire.NO_ROOM)

    def _token_of(self, run_id: RunId) -> str | None:
        """A directed run has a token before it has workers: until that is known, nobody can have anything to say."""
        return (self._token if self._director is None else self._director.token_of(run_id)) or None

    def _ended(self, channel: Channel, why: str) -> None:
        self._strangers.forget(channel)
        self.posts.ended(channel)
        if self._stopping:
            return
        protocol = self._protocol_of.pop(channel, None)
        if protocol is not None:
            protocol.part(channel, asyncio.get_running_loop().time(), clean=channel.ended_cleanly)
            self.touch(protocol)
            self.someone_left.set()

    # Settling

    def touch(self, protocol: RunProtocol) -> None:
        self._passes.touch(protocol)

    def _settle(self, protocol: RunProtocol) -> None:
        if self._protocols.get(protocol.run_id) is not protocol:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now >= protocol.wake_at:  # a lease may be over, but not by what was not listened to
            if self._read.until < protocol.wake_at:
                self._read.everything_for(protocol)
                return
            now = self._read.until
        wake_at = protocol.settle(now)
        self._outgoing.flush(protocol)
        protocol.show()
        self.posts.widen(protocol)
        self._drop_timer(protocol.run_id)
        if wake_at < math.inf:
            self._timers[protocol.run_id] = loop.call_at(wake_at, self.touch, protocol)
        if self._director is not None:
            self._director.settled(protocol.run_id)
        elif protocol.opens_next(now):
            self._open_next(protocol, now)

    def _open_next(self, protocol: RunProtocol, now: float) -> None:
        """Begin the next run for a new launch, under the run id of a run that has ended here."""
        if not self._opens_runs:
            protocol.send_away_held()
            return
        run_id, post = protocol.run_id, self.posts.get(protocol.run_id)
        if post is not None and not post.may_speak():
            return  # the outcome is not certain yet; `_look_after` tries again
        following = protocol.next_run(self.posts.following(run_id, protocol.at.electorate.term), now)
        if following is None:
            return
        self.posts.forget(run_id)
        self._passes.forget(run_id)
        self._read.forget(run_id)
        self._protocols[run_id] = following
        following_peers = {id(peer) for peer in following.peers}
        for channel in [channel for channel in self._protocol_of if id(channel) in following_peers]:
            self._protocol_of[channel] = following
        self.touch(following)

    def _look_after_all(self, late: float, now: float) -> None:
        """Keep probing guards, and forget what is old."""
        for protocol in list(self._protocols.values()):
            try:
                self._look_after(protocol, late, now)
            except Exception:  # time goes on for the others
                log.exception("run %s: cannot be looked after", protocol.run_id)
        if self.connected:
            self.busy_at = now

    def _look_after(self, protocol: RunProtocol, late: float, now: float) -> None:
        if late > BEAT_S:
            protocol.stood_still(late)
        protocol.probe_lost()
        self._outgoing.flush(protocol)
        if protocol.opens_next(now):
            self.touch(protocol)
        self._forget_old(protocol, now)

    def _drop_timer(self, run_id: RunId) -> None:
        if (timer := self._timers.pop(run_id, None)) is not None:
            timer.cancel()

    def _forget_old(self, protocol: RunProtocol, now: float) -> None:
        if (
            self._director is not None
            or protocol.at.ended_at is None
            or now - protocol.at.ended_at < self._outcome_ttl_s
            or protocol.connected
        ):
            return
        del self._protocols[protocol.run_id]
        self.posts.forget(protocol.run_id)
        self._drop_timer(protocol.run_id)
        if self._state is not None:
            self._state.forget(protocol.run_id)

    # Leading, and no longer

    def _lead(self, run_id: RunId, record: RunRecord) -> None:
        now = asyncio.get_running_loop().time()
        protocol = self._listened(RunProtocol.from_record(run_id, record, now, clock=self._clock))
        protocol.at.electorate = record.electorate
        protocol.at.unsaved = False  # it was written before
        self._protocols[run_id] = protocol
        self._protocol_of |= dict.fromkeys(self.posts.hand_over(protocol), protocol)
        self._beat.start()
        self.touch(protocol)

    def _step_down(self, run_id: RunId, why: str, moved: MovedFrame) -> None:
        protocol = self._protocols.pop(run_id, None)
        self._drop_timer(run_id)
        self._passes.forget(run_id)
        self._read.forget(run_id)
        for channel in [channel for channel, its in self._protocol_of.items() if its is protocol]:
            del self._protocol_of[channel]
            _send_away(channel, moved)


def _send_away(channel: Channel, moved: MovedFrame) -> None:
    channel.send(moved)
    channel.close()


class _Passes:
    """Settles the runs of which something was heard, all together.

    In a world of thousands each pass takes milliseconds, and thousands may join at once: a pass for a handful of them
    each time would take most of a core, so there is a rest after each.
    """

    def __init__(self, settle: Callable[[RunProtocol], None]) -> None:
        self._settle = settle
        self._dirty: dict[RunId, RunProtocol] = {}
        self._due = False
        self._not_before = 0.0

    def touch(self, protocol: RunProtocol) -> None:
        self._dirty[protocol.run_id] = protocol
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_at(self._not_before, self._settle_all)

    def forget(self, run_id: RunId) -> None:
        self._dirty.pop(run_id, None)

    def _settle_all(self) -> None:
        self._due = False
        dirty, self._dirty = self._dirty, {}
        loop = asyncio.get_running_loop()
        began = loop.time()
        for protocol in dirty.values():
            try:
                self._settle(protocol)
            except Exception:  # the top of this loop: one run's trouble is its own
                log.exception("run %s: cannot be settled", protocol.run_id)
        ended = loop.time()
        self._not_before = ended + min(LONGEST_REST_S, RESTS * (ended - began))


class _Beat:
    """Comes regularly, and tells how late it was: this process itself may have stood still."""

    def __init__(self, then: Callable[[float, float], None]) -> None:
        self._then = then
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep_time())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def end(self) -> None:
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_time(self) -> None:
        loop = asyncio.get_running_loop()
        expected = loop.time() + BEAT_S
        while True:
            await asyncio.sleep(max(0.0, expected - loop.time()))
            late = loop.time() - expected
            expected = loop.time() + BEAT_S
            self._then(late, loop.time())


class _Read:
    """Up to when has everything been read that had arrived?

    A turn of the loop that takes long must not be taken for the silence of those who spoke meanwhile. Sockets are
    looked at between two turns, and read in the second.
    """

    def __init__(self, then: Callable[[RunProtocol], None]) -> None:
        self.until = -math.inf
        self._then = then
        self._waiting: dict[RunId, RunProtocol] = {}
        self._due = False

    def everything_for(self, protocol: RunProtocol) -> None:
        if not self._due:
            self._due, loop = True, asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._done, loop.time())
        self._waiting[protocol.run_id] = protocol

    def forget(self, run_id: RunId) -> None:
        self._waiting.pop(run_id, None)

    def _done(self, at: float) -> None:
        self.until, self._due = at, False
        waiting, self._waiting = self._waiting, {}
        for protocol in waiting.values():
            self._then(protocol)


def collect_seldom() -> None:
    """A full collection of garbage holds up all who are served: seldom, and without what is there from the start."""
    gc.set_threshold(*COLLECT_AFTER)
    gc.freeze()


async def serve(
    coordinator: Coordinator,
    host: str,
    port: int,
    *,
    idle_s: float | None,
    leave_when_ended: bool = False,
    on_ready: Callable[[str, int], None],
) -> bool:
    """Run until told to stop or, with `idle_s`, until nobody has been connected for that long; True if that was it."""
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        coordinator.someone_left.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    address = await coordinator.start(host, port)
    collect_seldom()
    on_ready(*address)
    while not stopped:
        coordinator.someone_left.clear()
        if idle_s is not None and not coordinator.connected:
            idle = loop.time() - coordinator.busy_at
            if idle >= idle_s or (leave_when_ended and coordinator.all_ended):
                break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(coordinator.someone_left.wait(), None if idle_s is None else BEAT_S)
    await coordinator.stop()
    return not stopped


def default_state_path(home: Path, host: str, port: int) -> Path:
    return home / "coordinators" / f"{host.replace(':', '_')}-{port}.json"
