"""Being a member: drives `core.member` over a connection, for the agent and for torchrun's handler.

What has to do with ranks is handed on as orders; what has to do with the coordinator and with peers is done here: the
connection, the socket for the next round's store, and probes.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from muster.core.member.orders import Drop, Listen, Order, ReachPeers, Renew, Say, Send
from muster.core.member.state import MemberState
from muster.core.succession import electorate
from muster.mesh import probe
from muster.types.frames import (
    Frame,
    HelloFrame,
    Introduction,
    ListensFrame,
    PostFrame,
    ReachedFrame,
    RenewFrame,
    StoppedFrame,
    WelcomeFrame,
)
from muster.types.world import Elector, Electorate, MemberId, Path, RunId
from muster.world import wire
from muster.world.connection import Address, Connection, CoordinatorRefused
from muster.world.standby import Standby, place_beside


@dataclass(frozen=True)
class MemberIdentity:
    """Who joins, and with which settings (only those that the user gave)."""

    addresses: Callable[[], list[Address]]
    run_id: RunId
    member_id: MemberId
    name: str
    settings: dict[str, object]
    procs: int = 1
    token: str | None = None
    infra_rank: int | None = None
    domain: str | None = None
    local_addr: str | None = None
    probe_addr: str | None = None  # where its ranks will be reached, if not at its address: see `probe.own_path`
    launcher: str = "node"
    checks_health: bool = False
    launch: str = ""  # the identity of its launch, if there is one
    is_directed_here: bool = False  # by a control plane on this machine, which nobody succeeds while it lives


class Membership:
    """`carry_out` gets the orders that are not dealt with here; `handle` takes what the state answers.

    `news` is what a renewal of the lease brings along.
    """

    def __init__(
        self,
        identity: MemberIdentity,
        state: MemberState,
        carry_out: Callable[[Order], None],
        *,
        news: Callable[[], RenewFrame] = RenewFrame,
        on_frame: Callable[[Frame], None] = lambda frame: None,
        on_post: Callable[[Address], None] = lambda address: None,
        on_down: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = state
        self._identity = identity
        self._carry_out = carry_out
        self._news = news
        self._on_frame = on_frame
        self._on_post = on_post
        self._on_down = on_down
        self._loop = asyncio.get_running_loop()
        self._orders: deque[Order] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._listener: socket.socket | None = None
        self._prober: probe.Prober | None = None
        self._paths: list[Path] = []
        self._addr = identity.local_addr or ""
        self._standby: Standby | None = None
        self.connection = Connection(
            self.addresses,
            identity.run_id,
            "agent",
            token=identity.token,
            hello=self._hello,
            on_frame=self._hear,
            on_down=self._lost,
            on_dead=lambda: state.found_dead(self.now),
            on_gone=self._leader_gone,
        )

    @property
    def addr(self) -> str:
        """Where others reach this machine."""
        return self._addr or "127.0.0.1"

    @property
    def now(self) -> float:
        return self._loop.time()

    def addresses(self) -> list[Address]:
        """Where a coordinator may be: whoever leads, where the user said, and wherever somebody knows who leads."""
        known = self.state.at.electorate
        posts = [one.post for one in electorate.everyone(known.groups) if one.member_id != self._identity.member_id]
        leader = [known.leader.post] if known.leader is not None else []
        mine = [(self._addr, self._standby.port)] if self._standby is not None and self._standby.leads else []
        return list(dict.fromkeys([*mine, *leader, *self._identity.addresses(), *posts]))

    async def run(self) -> None:
        """Stay a member until it is refused."""
        self.handle(self.state.tick(self.now))
        try:
            await self.connection.run()
        except CoordinatorRefused as refused:
            ours = refused.code == "unproved"  # it is we who will not have it
            self.handle(self.state.refused(f"{'' if ours else 'refused by the coordinator: '}{refused}", self.now))

    def handle(self, orders: Iterable[Order]) -> None:
        """Carry out orders one after the other, also those that come up meanwhile."""
        self._orders += orders
        if self._busy:
            return
        self._busy = True
        try:
            while self._orders:
                self._do(self._orders.popleft())
        finally:
            self._busy = False
        self._set_timer()

    def _lost(self, why: str) -> None:
        self.handle(self.state.down(why, self.now))
        self._on_down()

    def _set_timer(self) -> None:
        """A timer that comes too early does no harm; one that comes too late would."""
        due = self.state.wake_at
        if self._timer is None or self._timer.cancelled() or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.handle(self.state.tick(self.now))

    def _do(self, order: Order) -> None:
        match order:
            case Send(frame=StoppedFrame() as frame):
                self.connection.send(replace(frame, store_port=self.store_port()))
            case Send(frame=frame):
                self.connection.send(frame)
            case Renew(round=number):
                sent_at = self.now
                self.connection.send(replace(self._news(), round=number))
                if self._identity.is_directed_here and self.connection.has_delivered():
                    self.state.delivered(sent_at)
            case Drop(why=why):
                self.connection.drop(why)
            case Listen():
                self._open_to_probes()
            case ReachPeers(peers=peers, gone=gone):
                self._reach(dict(peers), gone)
            case _:
                self._carry_out(order)

    # A place for the next round's store

    def store_port(self) -> int:
        """The port that we already listen on, in case the next round's store is ours."""
        if self._listener is None and self._addr:
            self._listener = _listen(self._addr)
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    def take_listener(self) -> socket.socket | None:
        """The listening socket, for the store; the next round will get another."""
        listener, self._listener = self._listener, None
        return listener

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._prober is not None:
            self._prober.close()
        if self._standby is not None:
            self._standby.close()

    # Going on with the run, if its coordinator is lost

    def _stand_by(self, known: Electorate) -> None:
        if self._standby is None and known.leader is not None:
            mine, place = self._identity, place_beside(known.leader.post, self._addr)
            self._standby = Standby(
                mine.run_id, mine.token, place, self._ready, lambda text: self._carry_out(Say(text))
            )

    def _ready(self, standby: Standby) -> None:
        """It listens: from now on we can be an elector."""
        mine = self._identity
        me = Elector(mine.member_id, mine.name, (self._addr, standby.port))
        self._on_post(me.post)
        standby.take_part(me, self.state.at.settings.lease_s, self.connection.seek, lambda: self.state.at.electorate)
        self.connection.send(PostFrame(path=me.post))

    def _leader_gone(self) -> None:
        known = self.state.at.electorate
        if self._standby is not None and known.leader is not None:
            self._standby.leader_gone(known.term)

    async def see_off(self) -> None:
        """One who leads tells all others how the run ended before it goes itself."""
        if self._standby is not None:
            await self._standby.see_off(self.state.at.settings.farewell_s)

    # Reaching the others

    def _open_to_probes(self) -> None:
        """The run has a gate: say where we can be reached. It costs nothing where there is none."""
        mine = self._identity
        if self._prober is not None:
            return
        self._prober = probe.Prober(mine.token or mine.run_id, mine.member_id, self._found)
        overlay = [probe.own_path(mine.probe_addr, mine.name)] if mine.probe_addr else []
        for host, port in [*overlay, (self._addr, 0)]:
            try:
                # A name is bound nowhere: to ask what it means could take longer than a lease.
                listener = _listen(host if probe.is_numeric(host) else "0.0.0.0", port)
            except OSError:  # only a port that was asked for can be taken: somebody else answers there
                self._paths.append((host, port))
                continue
            self._prober.serve(listener)
            self._paths.append((host, int(listener.getsockname()[1])))
        self.connection.send(ListensFrame(paths=tuple(self._paths)))

    def _reach(self, peers: dict[MemberId, tuple[Path, ...]], gone: tuple[MemberId, ...] | None) -> None:
        if self._prober is None:
            return
        where = {str(member_id): list(paths) for member_id, paths in peers.items()}
        if gone is None:
            self._prober.follow(where)
        else:
            self._prober.change(where, list(gone))

    def _found(self, rows: list[probe.Row]) -> None:
        # What is lost is asked for again after a reconnect.
        self.connection.send(ReachedFrame(peers=tuple((MemberId(peer), rtt, why) for peer, rtt, why in rows)))

    # Talking

    def _hello(self, local_host: str) -> HelloFrame:
        mine = self._identity
        self._addr = mine.local_addr or local_host
        member = Introduction(
            member_id=mine.member_id,
            name=mine.name,
            addr=self._addr,
            procs=mine.procs,
            infra_rank=mine.infra_rank,
            domain=mine.domain,
            version=wire.show(wire.VERSION),
            store_port=self.store_port(),
            host=socket.gethostname(),
            pid=os.getpid(),
            launcher=mine.launcher,
            checks_health=mine.checks_health,
            unfit=self.state.unfit,
            paths=tuple(self._paths),
            post=(self._addr, self._standby.port) if self._standby is not None and self._standby.port else None,
            takes_outline=True,
            takes_notice=mine.launcher == "node",
            launch=mine.launch,
        )
        present = replace(self.state.hello(self.now), epoch=self.connection.epoch, store_port=self.store_port())
        return HelloFrame(member=member, settings=mine.settings, present=present)

    def _hear(self, frame: Frame) -> None:
        if isinstance(frame, WelcomeFrame):
            self._stand_by(frame.electorate)
        self._on_frame(frame)
        self.handle(self.state.heard(frame, self.now))


def _listen(addr: str, port: int = 0) -> socket.socket:
    """A socket, on a port that the kernel picks; only loopback addresses are bound as such, others may be mapped."""
    host = addr if wire.is_loopback(addr) else ("::" if ":" in addr else "0.0.0.0")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, port))
    except OSError:
        if port:
            listener.close()
            raise
        listener.bind(("", 0))
    listener.listen(4096)
    return listener
