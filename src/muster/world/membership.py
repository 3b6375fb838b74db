"""Being a member: the connection, the lease, and what is presented when the connection has to be made anew.

Used by the agent and by torchrun's backend; each says what it runs through `present` and obeys frames in `on_frame`.
The lease counts from the moment at which we *sent* the renewal that was answered, so it ends here no later than the
coordinator believes. When it ends without the coordinator having been found dead, `on_silent` must end the ranks.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from muster.mesh import probe
from muster.types.world import MemberId, Path, RunId, Settings
from muster.world import wire
from muster.world.connection import Address, Link
from muster.world.wire import Frame

RENEW_S = 0.7  # at least that often, however long the lease: steps travel with it


@dataclass(frozen=True)
class Identity:
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


class Membership:
    def __init__(
        self,
        identity: Identity,
        *,
        on_frame: Callable[[Frame], None],
        on_silent: Callable[[], Awaitable[None]],
        present: Callable[[], dict[str, Any]],
        steps: Callable[[], list[list[float]]] = list,
        on_beat: Callable[[], None] = lambda: None,
        on_down: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._identity = identity
        self._on_frame = on_frame
        self._on_silent = on_silent
        self._present = present
        self._steps = steps
        self._on_beat = on_beat
        self._listener: socket.socket | None = None
        self._prober: probe.Prober | None = None
        self._paths: list[Path] = []
        self._addr = identity.local_addr or ""
        self._lease_from = time.monotonic()
        self._hello_sent = 0.0
        self._renew_sent: float | None = None
        self.settings = Settings.parse(identity.settings)
        self.record: dict[str, Any] | None = None
        self.joined = False
        self.unfit = ""  # what the health check says, if it failed
        self.link = Link(
            identity.addresses,
            identity.run_id,
            "agent",
            token=identity.token,
            hello=self._hello,
            on_frame=self._hear,
            on_down=on_down,
        )

    def send(self, kind: str, **fields: Any) -> bool:
        return self.link.send(kind, **fields)

    @property
    def lease_over(self) -> bool:
        return time.monotonic() >= max(self._lease_from, self.link.dead_at) + self.settings.lease_s

    async def run(self) -> None:
        """Stay a member for ever; raises `client.Refused` when the coordinator will not have us."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.link.run())
            group.create_task(self._renew())
            group.create_task(self._watch_silence())

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
        if self._listener is not None:
            self._listener.close()
        if self._prober is not None:
            self._prober.close()

    # Reaching the others

    def _open_to_probes(self) -> None:
        """The run has a gate: say where we can be reached. It costs nothing where there is none."""
        mine = self._identity
        if self._prober is not None or self.settings.gate_timeout_s is None:
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
        self.send("listens", paths=self._paths)

    def _found(self, rows: list[probe.Row]) -> None:
        self.send("reached", peers=rows)  # what is lost is asked for again after a reconnect

    # Talking

    def _hello(self, local_host: str) -> dict[str, Any]:
        mine = self._identity
        self._addr = mine.local_addr or local_host
        self._hello_sent = time.monotonic()
        member = {
            "member_id": mine.member_id,
            "name": mine.name,
            "addr": self._addr,
            "procs": mine.procs,
            "infra_rank": mine.infra_rank,
            "domain": mine.domain,
            "version": wire.show(wire.VERSION),
            "store_port": self.store_port(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "launcher": mine.launcher,
            "checks_health": mine.checks_health,
            "unfit": self.unfit,
            "paths": self._paths,
        }
        known = {"epoch": self.link.epoch, "record": self.record, "store_port": self.store_port()}
        return {"member": member, "settings": mine.settings, "present": known | self._present()}

    def _hear(self, frame: Frame) -> None:
        match frame["type"]:
            case "welcome":
                if settings := frame.get("settings"):
                    self.settings = Settings.parse(settings)
                self._lease_from = max(self._lease_from, self._hello_sent)
                self._renew_sent = None
                self.joined = True
                self._open_to_probes()
            case "renewed":
                if self._renew_sent is not None:
                    self._lease_from = max(self._lease_from, self._renew_sent)
                    self._renew_sent = None
            case "release" | "record":
                self.record = frame["record"]
            case "reach" if self._prober is not None:
                peers = {str(peer): [(str(host), int(port)) for host, port in where] for peer, where in frame["peers"]}
                if frame.get("gone") is None:
                    self._prober.follow(peers)
                else:
                    self._prober.change(peers, frame["gone"])
        self._on_frame(frame)

    async def _renew(self) -> None:
        while True:
            self._on_beat()
            if self.link.up:
                if self._renew_sent is None:
                    self._renew_sent = time.monotonic()
                number = self.record["round"] if self.record else None
                self.link.send("renew", round=number, steps=self._steps())
            await asyncio.sleep(min(RENEW_S, self.settings.lease_s / 3))

    async def _watch_silence(self) -> None:
        while True:
            now = time.monotonic()
            deadline = max(self._lease_from, self.link.dead_at) + self.settings.lease_s
            if now < deadline:
                await asyncio.sleep(deadline - now)
                continue
            await self._on_silent()
            self.link.drop("silent for a lease")
            await asyncio.sleep(self.settings.lease_s / 3)


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
