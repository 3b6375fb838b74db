"""A rendezvous handler for stock torchrun: membership in a thread, torch's questions answered from it.

Torch asks three things: `next_rendezvous` (give me a place; entering it confirms that the old ranks are gone),
`num_nodes_waiting` (must I leave my round?), and `shutdown` (this node is done; the exception in flight says how).
The restart budget is torch's own, per agent. docs/torchrun.md lists what torchrun cannot be told.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)

from muster import files, run_token
from muster.core.member.state import ended_late
from muster.node import launch, torch_version
from muster.node.standalone import IDLE_S, PRIVATE_IDLE_S, CannotStart, Standalone
from muster.node.torchrun_guard import MARK
from muster.node.torchrun_member import TorchrunMember
from muster.types.frames import FailedFrame, report
from muster.types.world import MemberId, OutcomeState, Place, RankEnd, RunId, Settings
from muster.world import wire
from muster.world.connection import Address
from muster.world.membership import MemberIdentity

STORE_LOOK_S = 0.01  # how often a blocked store operation looks whether its round is still on
STORE_CONNECT_S = 5.0
JOIN_TIMEOUT_S = 60.0
_OWN_KEYS = {"name", "infra_rank", "domain", "join_timeout_s", "standalone", "timeout", "launch_id"}


class MusterRendezvous(RendezvousHandler):
    def __init__(self, params: RendezvousParameters) -> None:
        if refusal := torch_version.refusal():
            raise ImportError(refusal)
        self._params = params
        self._identity, self._join_timeout_s = _read(params)
        self._member = TorchrunMember(self._identity)
        self._server: TCPStore | None = None
        self._place: Place | None = None
        self._started = False

    def get_backend(self) -> str:
        return "muster"

    def get_run_id(self) -> str:
        return str(self._params.run_id)

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._member.outcome is not None

    def set_closed(self) -> None:
        """Nothing to do: an outcome is reported by `shutdown`, and only the coordinator ends a run."""

    def num_nodes_waiting(self) -> int:
        return int(self._member.must_leave.is_set())

    def next_rendezvous(self) -> RendezvousInfo:
        if not self._started:
            self._started = True
            os.environ[MARK] = self._identity.member_id
            self._member.start()
        elif self._place is not None:
            self._server = None
            self._member.confirm_stop(self._place.number)
        while True:
            place = self._await_place()
            store = self._open_store(place)
            if store is not None:
                self._place = place
                return RendezvousInfo(
                    store,
                    place.seat.rank,
                    place.world_size,
                    RendezvousStoreInfo(place.round.store_addr, place.round.store_port),
                )
            self._server = None
            self._member.confirm_stop(place.number)

    def _await_place(self) -> Place:
        """Block until a round has a place for us. An end of the run ends this process, or raises."""
        member = self._member
        after = member.stopped_for
        member.wait(lambda: member.news(after), self._join_timeout_s, for_ever_once_joined=True)
        if (outcome := member.outcome) is not None:
            if outcome.state is OutcomeState.SUCCEEDED:
                message = ended_late(outcome) if member.late else f"{outcome.state}: {outcome.message}"
                print(f"muster[{self._identity.name}] {message}", file=sys.stderr, flush=True)
                member.leave()
                raise SystemExit(0)
            message = f"the run {outcome.state}: {outcome.message}"
            raise RendezvousClosedError(ended_late(outcome) if member.late else message)
        if member.ended is not None:
            if member.ended.code == 0:
                # torch 2.13 turns RendezvousGracefulExitError into exit code 1, so this is how a spare leaves in peace.
                raise SystemExit(0)
            raise RendezvousStateError(member.ended.why)
        if member.place is None or member.place.number <= after:
            raise RendezvousConnectionError(
                f"no muster coordinator ({member.why_down}); gave up after {self._join_timeout_s:g} s"
            )
        return member.place

    def _open_store(self, place: Place) -> Store | None:
        """The round's store, served here if we have rank 0; None when the round ended before it was open."""
        addr, port = place.round.store_addr, place.round.store_port
        if place.hosts_store and (listener := self._member.take_listener()) is not None:
            self._server = TCPStore(
                addr, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        while not self._member.must_leave.is_set():
            try:
                limit = timedelta(seconds=STORE_CONNECT_S)
                client = TCPStore(addr, port, is_master=False, wait_for_workers=False, timeout=limit)
            except DistStoreError:
                continue
            except RuntimeError:
                # Refused: its server died with its node; the recall is on its way.
                self._member.must_leave.wait(STORE_LOOK_S)
                continue
            return RoundStore(client, self._member.must_leave)
        return None

    def shutdown(self) -> bool:
        """Called when this node is done. No exception in flight: its ranks succeeded."""
        error = sys.exc_info()[1]
        member, place = self._member, self._place
        if place is not None and error is None and not member.must_leave.is_set():
            member.finished(place.number)
            member.ranks_over(place.number)
            member.wait(lambda: member.farewell or member.must_leave.is_set(), member.farewell_s)
        elif isinstance(error, ChildFailedError) and member.outcome is None:
            ends = _failures(error, self._identity.name)
            told = "; ".join(f"rank {end.rank}: {end.reason}" for end in ends) or "a rank failed"
            number = place.number if place is not None else -1
            exits = tuple(report(end, 0.0) for end in ends)
            member.ranks_over(number)
            member.failed(FailedFrame(round=number, message=f"torchrun gave up: {told}", exits=exits))
            member.wait(lambda: member.outcome is not None, member.farewell_s)
        member.leave()
        self._server = None
        return True


class RoundStore(Store):
    """A store that does not keep torch waiting for a round that is over.

    Torch has no way to go back from the middle of a rendezvous, so a read of a round that was called back gets a
    made-up answer: the ranks that torch then starts are stopped at its next look at `num_nodes_waiting`. A wait in
    the exit barrier raises instead, which torch expects.
    """

    timeout: timedelta  # of the base class, which torch's type stubs do not show

    def __init__(self, inner: Any, over: threading.Event) -> None:
        super().__init__()
        self._inner = inner
        self._over = over

    def set(self, key: str, value: Any) -> None:
        self._unless_over(lambda: self._inner.set(key, value))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._unless_over(lambda: self._inner.multi_set(keys, values))

    def add(self, key: str, amount: int) -> int:
        return int(self._unless_over(lambda: self._inner.add(key, amount)) or 0)

    def get(self, key: str) -> bytes:
        found = self._present([key], self.timeout) and self._unless_over(lambda: self._inner.get(key))
        return found or json.dumps([0, 1, 0, 1]).encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if self._present(keys, self.timeout):
            found = self._unless_over(lambda: self._inner.multi_get(keys))
            if found:
                return list(found)
        return [self._made_up_role() for _ in keys]

    def check(self, keys: list[str]) -> bool:
        return bool(self._unless_over(lambda: self._inner.check(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if not self._present(keys, timeout or self.timeout):
            raise DistStoreError("this round was called back")

    def _present(self, keys: list[str], timeout: timedelta) -> bool:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if self._over.wait(STORE_LOOK_S):
                return False
            if time.monotonic() > deadline:
                raise DistStoreError(f"wait timed out after {timeout} for {keys}")
        return True

    def _unless_over(self, act: Any) -> Any:
        try:
            return act()
        except RuntimeError:
            # The server went with its node. That is a recall for everyone, and it will be here in a moment.
            if self._over.wait(STORE_CONNECT_S):
                return None
            raise

    def _made_up_role(self) -> bytes:
        from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo

        return bytes(_RoleInstanceInfo("default", 0, 1).serialize())


def _read(params: RendezvousParameters) -> tuple[MemberIdentity, float]:
    """`--rdzv-conf` takes the settings of the run and this worker's name, infra_rank and domain."""
    config = {key: value for key, value in params.config.items() if value is not None}
    known = set(Settings.__dataclass_fields__) | _OWN_KEYS
    if unknown := sorted(set(config) - known):
        raise ValueError(f"--rdzv-conf: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    given = {key: config[key] for key in Settings.__dataclass_fields__ if key in config}
    parsed = Settings.parse({"min": params.min_nodes, "max": params.max_nodes} | given)
    if problems := parsed.problems():
        raise ValueError(f"--nnodes and --rdzv-conf: {'; '.join(problems)}")
    join_timeout_s = float(config.get("join_timeout_s") or JOIN_TIMEOUT_S)
    member_id = MemberId(secrets.token_hex(6))
    brings = str(config.get("standalone", "")).lower() in ("1", "true", "yes")
    addresses = _addresses(params, member_id, brings=brings)
    infra = config.get("infra_rank")
    identity = MemberIdentity(
        addresses=lambda: addresses,
        run_id=RunId(params.run_id),
        member_id=member_id,
        name=str(config.get("name") or f"{socket.gethostname()}-{os.getpid()}"),
        settings={key: getattr(parsed, key) for key in ("min", "max", *given)},
        token=_token(addresses, join_timeout_s),
        infra_rank=int(infra) if infra is not None else None,
        domain=config.get("domain"),
        local_addr=params.local_addr,
        launcher="torchrun",
        launch=launch.identity(config.get("launch_id") or os.environ.get(launch.VARIABLE), os.environ),
    )
    return identity, join_timeout_s


def _addresses(params: RendezvousParameters, me: MemberId, *, brings: bool) -> list[Address]:
    """Where the coordinator is. `--rdzv-conf standalone=true`: this node brings it, unless one is there already."""
    if params.endpoint:
        addresses = [wire.parse_address(part) for part in params.endpoint.split(",")]
        return _start_coordinator(*addresses[0], me, private=False) or addresses if brings else addresses
    if params.max_nodes > 1:
        raise ValueError("several nodes need --rdzv-endpoint=HOST:PORT, and one of them --rdzv-conf standalone=true")
    found = _start_coordinator("127.0.0.1", 0, me, private=True)
    if not found:
        raise RendezvousConnectionError("no coordinator could be started here")
    return found


def _start_coordinator(host: str, port: int, beside: MemberId, *, private: bool) -> list[Address]:
    """Nothing if there is one already; joining will tell whether it is a coordinator."""
    started = Standalone.here(host, port, idle_s=PRIVATE_IDLE_S if private else IDLE_S, private=private)
    started.beside = beside
    try:
        started.start()
    except CannotStart:
        return []
    return started.addresses


def _token(addresses: list[Address], timeout_s: float) -> str | None:
    """What the user gave, or what is kept on this machine. Our guard and torch's ranks have it from the environment."""
    try:
        token = run_token.given() or run_token.await_found(files.home(), lambda: addresses, timeout_s)
    except TimeoutError as error:
        raise RendezvousConnectionError(f"no muster coordinator ({error}); gave up after {timeout_s:g} s") from None
    except run_token.AnotherUsersPort as error:
        raise RendezvousConnectionError(str(error)) from None
    if token is not None:
        os.environ[run_token.VARIABLE] = token
    return token


def _failures(error: ChildFailedError, worker: str) -> list[RankEnd]:
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    return [RankEnd.from_status(int(rank), failure.exitcode, worker=worker) for rank, failure in failures]
