"""Many simulated agents in one process against a real coordinator: joins, losses, and the cost of doing nothing.

A simulated agent says hello as one of 0.1 does, renews its lease, confirms recalls at once, and parses as little as it
can: what is measured is the coordinator, on the same two cores.
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial

from muster.core.member.state import RENEW_S
from muster.types.world import LARGE, Settings
from muster.world import wire
from muster.world.connection import PAUSE_S

LEASE_S = Settings().lease_s


@dataclass
class Seen:
    form_s: float = 0.0
    closed_s: float = 0.0  # some are killed: the kernel closes their connections, nobody says anything
    told_s: float = 0.0  # some are killed, and their guards say that nothing is left
    silent_s: float = 0.0  # some are cut off: their connections stay open, nothing comes any more
    idle_up: float = 0.0
    idle_down: float = 0.0


@dataclass
class _Swarm:
    rounds: dict[int, int] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)  # how many have been released into each round
    sent: int = 0
    received: int = 0
    returning: set[asyncio.Task[None]] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class _Bee(asyncio.Protocol):
    def __init__(self, swarm: _Swarm, index: int, settings: dict[str, object], token: str, at: tuple[str, int]) -> None:
        self._swarm = swarm
        self._at = at
        self._token = token
        self._index = index
        self._settings = settings
        self._buffer = bytearray()
        self._round = -1
        self.transport: asyncio.Transport | None = None
        self.cut_off = False
        self._known = False  # it is let in
        self._renew = wire.pack({"v": "1.0", "type": "renew", "epoch": 1, "round": None, "steps": []})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if not self._known:  # there was no room for so many at once: a real agent comes again, too
            self._swarm.returning.add(asyncio.get_running_loop().create_task(self._return()))

    async def _return(self) -> None:
        self._buffer.clear()
        await asyncio.sleep(random.uniform(*PAUSE_S))
        await self.come()

    async def come(self) -> None:
        await asyncio.get_running_loop().create_connection(partial(_itself, self), *self._at)

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
            member: dict[str, object] = {"member_id": f"m{self._index}", "name": f"w{self._index}", "store_port": 1}
            member["takes_outline"] = True
            proof = wire.proof(self._token, nonce, "swarm", "agent")
            hello: dict[str, object] = {"type": "hello", "v": "1.0", "low": "1.0", "high": "1.0", "kind": "agent"}
            self._send(hello | {"run_id": "swarm", "proof": proof, "member": member, "settings": self._settings})
        elif b'"type":"welcome"' in head:
            self._known = True
        elif b'"type":"release"' in head:
            self._round = _number(head)
            self._swarm.rounds[self._index] = self._round
            self._swarm.counts[self._round] += 1
            self._swarm.news.set()
        elif b'"type":"recall"' in head:
            self._send({"v": "1.0", "type": "stopped", "epoch": 1, "round": self._round, "store_port": 1})

    def _send(self, frame: dict[str, object]) -> None:
        if self.transport is not None:
            self._swarm.sent += 1
            self.transport.write(wire.pack(frame))

    def renew(self) -> None:
        if self.transport is not None and self._known and not self.cut_off:
            self._swarm.sent += 1
            self.transport.write(self._renew)


class _BeeGuard(asyncio.Protocol):
    """Says hello, and at its agent's death that nothing is left."""

    def __init__(self, index: int, token: str) -> None:
        self._index = index
        self._token = token
        self._transport: asyncio.Transport | None = None
        self.known = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if b'"type":"challenge"' in data:
            nonce = data.split(b'"nonce":"')[1].split(b'"')[0].decode()
            hello: dict[str, object] = {"type": "hello", "v": "1.0", "low": "1.0", "high": "1.0", "kind": "guard"}
            hello |= {"run_id": "swarm", "proof": wire.proof(self._token, nonce, "swarm", "guard")}
            self.send(hello | {"member": {"member_id": f"m{self._index}", "name": f"w{self._index}"}})
        elif b'"type":"welcome"' in data:
            self.known.set()

    def send(self, frame: dict[str, object]) -> None:
        assert self._transport is not None
        self._transport.write(wire.pack(frame))


def _itself(bee: _Bee) -> _Bee:
    return bee


def _the_guard(guard: _BeeGuard) -> _BeeGuard:
    return guard


def _number(head: bytes) -> int:
    return int(head.split(b'"round":')[1].split(b",")[0])


async def _run(
    host: str, port: int, token: str, members: int, target: int, spares: int, lose: int, idle_s: float, lease_s: float
) -> Seen:
    loop = asyncio.get_running_loop()
    swarm, seen = _Swarm(), Seen()
    settings: dict[str, object] = {"min": target, "max": target, "spares": spares, "lease_s": lease_s}
    settings["last_call_s"] = 60.0
    bees = [_Bee(swarm, index, settings, token, (host, port)) for index in range(members)]
    renewing = loop.create_task(_keep_renewing(bees, lease_s))
    begun = time.monotonic()
    for start in range(0, members, 200):
        await asyncio.gather(*(bee.come() for bee in bees[start : start + 200]))
    await _released(swarm, 0, target)
    seen.form_s = time.monotonic() - begun
    await asyncio.sleep(min(lease_s, LEASE_S))
    sent, received = swarm.sent, swarm.received
    await asyncio.sleep(idle_s)
    seen.idle_up = (swarm.sent - sent) / idle_s / members
    seen.idle_down = (swarm.received - received) / idle_s / members
    doomed = _spread(swarm, lose)
    guards = [_BeeGuard(index, token) for index in doomed]
    for guard in guards:
        await loop.create_connection(partial(_the_guard, guard), host, port)
    await asyncio.gather(*(guard.known.wait() for guard in guards))
    told = _lose(swarm, bees, doomed, target, round_after=1, silently=False)
    for guard in guards:
        guard.send({"v": "1.0", "type": "gone", "epoch": 1, "round": 0})
    seen.told_s = await told
    if lease_s == LEASE_S:
        seen.closed_s = await _lose(swarm, bees, _spread(swarm, lose), target, round_after=2, silently=False)
        seen.silent_s = await _lose(swarm, bees, _spread(swarm, lose), target, round_after=3, silently=True)
    renewing.cancel()
    for bee in bees:
        if bee.transport is not None:
            bee.transport.abort()  # the next swarm needs the descriptors
    await asyncio.sleep(0)
    return seen


def _spread(swarm: _Swarm, count: int) -> list[int]:
    """Some of the active, from everywhere in the world."""
    active = sorted(swarm.rounds)
    return active[:: len(active) // count][:count]


def _lose(
    swarm: _Swarm, bees: list[_Bee], doomed: list[int], target: int, *, round_after: int, silently: bool
) -> Coroutine[None, None, float]:
    """Take some of the active away; seconds until all of the next round are released."""
    begun = time.monotonic()
    for index in doomed:
        swarm.rounds.pop(index)
        transport = bees[index].transport
        assert transport is not None
        if silently:
            bees[index].cut_off = True
        else:
            transport.abort()
    return _since(begun, _released(swarm, round_after, target))


async def _since(begun: float, until: Coroutine[None, None, None]) -> float:
    await until
    return time.monotonic() - begun


async def _released(swarm: _Swarm, number: int, count: int) -> None:
    while swarm.counts[number] < count:
        swarm.news.clear()
        await asyncio.wait_for(swarm.news.wait(), 60)


async def _keep_renewing(bees: list[_Bee], lease_s: float) -> None:
    """Spread over the interval, as real agents are."""
    pause = lease_s / 3 if len(bees) > LARGE else min(lease_s / 3, RENEW_S)
    while True:
        begun = time.monotonic()
        for start in range(0, len(bees), 50):
            for bee in bees[start : start + 50]:
                bee.renew()
            await asyncio.sleep(max(0.0, begun + pause * (start + 50) / len(bees) - time.monotonic()))


def run(
    host: str,
    port: int,
    token: str,
    *,
    members: int,
    target: int,
    spares: int,
    lose: int,
    idle_s: float,
    lease_s: float = LEASE_S,
) -> Seen:
    """With another lease than the usual one nobody is lost in a way that has to wait for it."""
    return asyncio.run(_run(host, port, token, members, target, spares, lose, idle_s, lease_s))
