"""Many simulated agents in one process against a real coordinator: joins, losses, and the cost of doing nothing.

A simulated agent says hello as one of 0.1 does, renews its lease, confirms recalls at once, and parses as little as it
can: what is measured is the coordinator, on the same two cores.
"""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import dataclass, field
from functools import partial

from muster.world import wire

LEASE_S = 2.0


@dataclass
class Seen:
    form_s: float = 0.0
    closed_s: float = 0.0  # some are killed: the kernel closes their connections, nobody says anything
    silent_s: float = 0.0  # some are cut off: their connections stay open, nothing comes any more
    idle_up: float = 0.0
    idle_down: float = 0.0


@dataclass
class _Swarm:
    rounds: dict[int, int] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)


class _Bee(asyncio.Protocol):
    def __init__(self, swarm: _Swarm, index: int, settings: dict[str, object], token: str) -> None:
        self._swarm = swarm
        self._token = token
        self._index = index
        self._settings = settings
        self._buffer = bytearray()
        self._round = -1
        self.transport: asyncio.Transport | None = None
        self.cut_off = False
        self._renew = wire.pack({"v": "1.0", "type": "renew", "epoch": 1, "round": None, "steps": []})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from(">I", self._buffer)
            if len(self._buffer) < 4 + length:
                return
            head = bytes(self._buffer[4 : 4 + min(length, 240)])
            del self._buffer[: 4 + length]
            self._swarm.received += 1
            if not self.cut_off:
                self._take(head)

    def _take(self, head: bytes) -> None:
        if b'"type":"challenge"' in head:
            nonce = head.split(b'"nonce":"')[1].split(b'"')[0].decode()
            member = {"member_id": f"m{self._index}", "name": f"w{self._index}", "store_port": 1}
            proof = wire.proof(self._token, nonce, "swarm", "agent")
            hello: dict[str, object] = {"type": "hello", "v": "1.0", "low": "1.0", "high": "1.0", "kind": "agent"}
            self._send(hello | {"run_id": "swarm", "proof": proof, "member": member, "settings": self._settings})
        elif b'"type":"release"' in head:
            self._round = _number(head)
            self._swarm.rounds[self._index] = self._round
            self._swarm.news.set()
        elif b'"type":"recall"' in head:
            self._send({"v": "1.0", "type": "stopped", "epoch": 1, "round": self._round, "store_port": 1})

    def _send(self, frame: dict[str, object]) -> None:
        if self.transport is not None:
            self._swarm.sent += 1
            self.transport.write(wire.pack(frame))

    def renew(self) -> None:
        if self.transport is not None and not self.cut_off:
            self._swarm.sent += 1
            self.transport.write(self._renew)


def _itself(bee: _Bee) -> _Bee:
    return bee


def _number(head: bytes) -> int:
    return int(head.split(b'"round":')[1].split(b",")[0])


async def _run(
    host: str, port: int, token: str, members: int, target: int, spares: int, lose: int, idle_s: float
) -> Seen:
    loop = asyncio.get_running_loop()
    swarm, seen = _Swarm(), Seen()
    settings: dict[str, object] = {"min": target, "max": target, "spares": spares, "lease_s": LEASE_S}
    settings["last_call_s"] = 60.0
    bees = [_Bee(swarm, index, settings, token) for index in range(members)]
    begun = time.monotonic()
    for start in range(0, members, 200):
        group = bees[start : start + 200]
        await asyncio.gather(*(loop.create_connection(partial(_itself, bee), host, port) for bee in group))
    await _released(swarm, 0, target)
    seen.form_s = time.monotonic() - begun
    renewing = loop.create_task(_keep_renewing(bees))
    await asyncio.sleep(LEASE_S)
    sent, received = swarm.sent, swarm.received
    await asyncio.sleep(idle_s)
    seen.idle_up = (swarm.sent - sent) / idle_s / members
    seen.idle_down = (swarm.received - received) / idle_s / members
    seen.closed_s = await _lose(swarm, bees, lose, target, round_after=1, silently=False)
    seen.silent_s = await _lose(swarm, bees, lose, target, round_after=2, silently=True)
    renewing.cancel()
    return seen


async def _lose(swarm: _Swarm, bees: list[_Bee], count: int, target: int, *, round_after: int, silently: bool) -> float:
    """Take some of the active away; seconds until all of the next round are released."""
    active = sorted(swarm.rounds)
    begun = time.monotonic()
    for index in active[:: len(active) // count][:count]:
        swarm.rounds.pop(index)
        transport = bees[index].transport
        assert transport is not None
        if silently:
            bees[index].cut_off = True
        else:
            transport.abort()
    await _released(swarm, round_after, target)
    return time.monotonic() - begun


async def _released(swarm: _Swarm, number: int, count: int) -> None:
    while sum(value >= number for value in swarm.rounds.values()) < count:
        swarm.news.clear()
        await asyncio.wait_for(swarm.news.wait(), 30)


async def _keep_renewing(bees: list[_Bee]) -> None:
    """Spread over the interval, as real agents are."""
    pause = LEASE_S / 3
    while True:
        begun = time.monotonic()
        for start in range(0, len(bees), 50):
            for bee in bees[start : start + 50]:
                bee.renew()
            await asyncio.sleep(max(0.0, begun + pause * (start + 50) / len(bees) - time.monotonic()))


def run(host: str, port: int, token: str, *, members: int, target: int, spares: int, lose: int, idle_s: float) -> Seen:
    return asyncio.run(_run(host, port, token, members, target, spares, lose, idle_s))
