"""How does a process of torchrun take part in a run? It keeps a member on a thread beside torch's own, and a guard."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from muster.core.member.orders import AwaitSaves, Beat, CheckOwnHealth, Exit, Notify, Order, StartRanks, StopRanks
from muster.core.member.state import MemberState
from muster.node import system
from muster.node.fencing import FILE_VARIABLE, LeaseFile
from muster.node.guard import Posting, Word, line, word
from muster.node.torchrun_guard import MARK
from muster.types.frames import FailedFrame
from muster.types.world import Place, RunOutcome, Settings
from muster.world.membership import MemberIdentity, Membership


class TorchrunMember:
    """Membership on a thread of its own; the main thread waits on a condition, which signals can interrupt.

    Torch starts and ends ranks. So an order to start them only makes a place known, and an order to stop them asks
    torch to leave its round; that it has done so is known when it comes for the next one.
    """

    def __init__(self, identity: MemberIdentity) -> None:
        self._identity = identity
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="muster", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._membership: Membership | None = None
        self._stopping: asyncio.Event | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._guard_socket: socket.socket | None = None
        self._lease_file = LeaseFile()
        self._ranks_over = False  # torch has none any more, and will start no other
        self.must_leave = threading.Event()
        self.place: Place | None = None
        self.stopped_for = -1
        self.ended: Exit | None = None

    @property
    def outcome(self) -> RunOutcome | None:
        return self._membership.state.at.outcome if self._membership else None

    @property
    def late(self) -> bool:
        return self._membership is not None and self._membership.state.late

    @property
    def farewell(self) -> bool:
        return self._membership is not None and self._membership.state.farewell

    @property
    def farewell_s(self) -> float:
        return self._membership.state.at.settings.farewell_s if self._membership else 0.0

    @property
    def why_down(self) -> str:
        return self._membership.connection.why_down if self._membership else "not started"

    def start(self) -> None:
        os.environ[FILE_VARIABLE] = self._lease_file.path  # torch's ranks inherit the environment
        self._start_guard()
        self._thread.start()

    def wait(self, look: Callable[[], bool], timeout_s: float, *, for_ever_once_joined: bool = False) -> None:
        """Until `look` is true, or the time is up. A signal's exception comes through."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not look():
                joined = self._membership is not None and self._membership.state.at.joined
                if time.monotonic() > deadline and not (joined and for_ever_once_joined):
                    return
                self._changed.wait(0.2)

    def news(self, after: int) -> bool:
        placed = self.place is not None and self.place.number > after
        return bool(placed or self.outcome or self.ended)

    # From the main thread

    def confirm_stop(self, number: int) -> None:
        """Torch has ended the ranks of that round."""
        with self._changed:
            self.stopped_for = max(self.stopped_for, number)
            self.must_leave.clear()
        self._tell(lambda state, now: state.held.cleared(number, now))

    def finished(self, number: int) -> None:
        self._tell(lambda state, now: state.held.finished(number, now))

    def failed(self, frame: FailedFrame) -> None:
        if (membership := self._membership) is not None:
            self._on_loop(lambda: membership.connection.send(frame))

    def ranks_over(self, number: int) -> None:
        """This node is done: nothing is left to be stopped."""
        self._ranks_over = True
        if self.outcome is not None:
            self._tell(lambda state, now: state.held.cleared(number, now))

    def take_listener(self) -> socket.socket | None:
        return self._membership.take_listener() if self._membership else None

    def leave(self) -> None:
        if self._loop is not None and self._stopping is not None:
            self._on_loop(self._stopping.set)
            self._thread.join(2.0)
        if self._guard_socket is not None:
            self._tell_guard(Word(release=True))
            self._guard_socket.close()

    def _tell(self, event: Callable[[MemberState, float], list[Order]]) -> None:
        if (membership := self._membership) is not None:
            self._on_loop(lambda: membership.handle(event(membership.state, membership.now)))

    def _on_loop(self, act: Callable[[], Any]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act)

    # On the thread

    def _run(self) -> None:
        asyncio.run(self._take_part())

    async def _take_part(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        mine = self._identity
        # How long to wait for a coordinator is for the main thread to say.
        settings, now = Settings.parse(mine.settings), self._loop.time()
        state = MemberState(mine.member_id, mine.run_id, settings, now, join_timeout_s=math.inf)
        self._membership = Membership(mine, state, self._carry_out, on_frame=lambda frame: self._notify())
        member = self._loop.create_task(self._membership.run())
        await self._stopping.wait()
        await asyncio.sleep(0.01)  # let what was just sent leave
        member.cancel()
        self._membership.close()

    def _notify(self) -> None:
        """Whoever waits looks again, after what just came has been dealt with."""
        assert self._loop is not None
        self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _carry_out(self, order: Order) -> None:
        match order:
            case StartRanks(place=place):
                with self._changed:
                    self.must_leave.clear()
                    self.place = place
                self._tell(lambda state, now: state.held.up(place.number, now))
            case Notify(round=number):
                self._tell(lambda state, now: state.held.noticed(number, 0, now))
            case AwaitSaves(round=number):
                self._tell(lambda state, now: state.held.saves_over(number, now))
            case StopRanks(round=number) if self._ranks_over:
                if self.outcome is None:
                    self.must_leave.set()
                self._tell(lambda state, now: state.held.cleared(number, now))
            case StopRanks():
                self.must_leave.set()
            case Beat():
                assert self._membership is not None
                self._lease_file.publish(order.fence, order.until - order.lease_s)
                self._tell_guard(word(order, self._membership.addresses()))
            case CheckOwnHealth():
                self._tell(lambda state, now: state.checked(None, now))
            case Exit():
                with self._changed:
                    self.ended = order
                self.must_leave.set()
        self._notify()

    # The guard: ranks of torchrun are not below it, so it knows them by a mark in their environment

    def _start_guard(self) -> None:
        mine = self._identity
        self._guard_socket, end = socket.socketpair()
        command = [sys.executable, "-m", "muster.node.torchrun_guard", str(end.fileno()), mine.member_id]
        env = {key: value for key, value in os.environ.items() if key != MARK}
        with system.deaf_children():
            self._guard = subprocess.Popen(command, pass_fds=(end.fileno(),), env=env, start_new_session=True)
        end.close()
        self._guard_socket.setblocking(False)
        lease_s = Settings.parse(mine.settings).lease_s
        self._tell_guard(Posting(mine.run_id, mine.member_id, mine.name, lease_s, tuple(mine.addresses())))

    def _tell_guard(self, told: Posting | Word) -> None:
        if self._guard_socket is None:
            return
        try:
            self._guard_socket.send(line(told))
        except OSError:
            return  # without a guard the coordinator goes by the clock
