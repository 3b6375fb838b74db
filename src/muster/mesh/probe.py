"""Can this worker reach its peers, and they it? Standard library only: it runs inside the agent.

A probe is one TCP connection with one line each way. The asker names itself, whom it wants and a nonce; whoever is
meant answers with a proof of the run's secret over all three. A foreign server on that port cannot, and neither can
another worker. A peer has one path or two: the way that ranks will use and, behind an overlay, the plain one as relay.
Only the first counts as reached; that the relay works is told as the reason why ranks would be slow.

A peer that was reached stays so until it has failed twice in a row; it is tried again every `AGAIN_S`, so that a
round which forms after a loss finds its pairs known. A peer that was not is tried ever more slowly (`RETRY`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import random
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.background import Tasks
from muster.backoff import Backoff
from muster.mesh.calls import ATTEMPT_S, Attempt, Visit, proof
from muster.types import address

Path = tuple[str, int]
Row = tuple[str, float | None, str]  # peer, round trip in seconds or None, why not

AGAIN_S = 15.0  # between two looks at a peer that was reached
RETRY = Backoff(0.1, 1.0)
GATHER_S = 0.1  # while more is being found out, it is told together
MOST_AT_ONCE = 32  # attempts under way, of each prober
MOST_VISITORS = 512


@dataclass
class _Peer:
    paths: tuple[Path, ...]
    rtt: float | None = None
    why: str = ""
    known: bool = False
    busy: bool = False
    failures: int = 0
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class Prober:
    """One member's part: it answers its peers' probes and probes them, and tells what it finds."""

    def __init__(self, secret: str, me: str, on_found: Callable[[list[Row]], None]) -> None:
        self._secret = secret.encode()
        self._me = me
        self._on_found = on_found
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._visits: dict[int, Visit] = {}
        self._peers: dict[str, _Peer] = {}
        self._queue: deque[str] = deque()
        self._attempts: set[Attempt] = set()
        self._resolving = Tasks()
        self._news: dict[str, None] = {}
        self._telling: asyncio.TimerHandle | None = None

    def serve(self, listener: socket.socket) -> None:
        """Answer probes that come to that socket."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def follow(self, peers: Mapping[str, Sequence[Path]]) -> None:
        """Probe these from now on, and nobody else. What is known of them already is told again."""
        self.change(peers, [name for name in self._peers if name not in peers])

    def change(self, peers: Mapping[str, Sequence[Path]], gone: Iterable[str]) -> None:
        """Probe these, too, and no longer those."""
        for name in gone:
            self._drop(name)
        for name, paths in peers.items():
            if name == self._me or not paths:
                continue
            known = self._peers.get(name)
            if known is None or known.paths != tuple(paths):
                self._drop(name)
                self._peers[name] = _Peer(tuple(paths))
                self._queue.append(name)
            elif known.known:
                self._tell(name)
        self._pump()

    def close(self) -> None:
        for name in list(self._peers):
            self._drop(name)
        for attempt in list(self._attempts):
            attempt.end()
        self._resolving.cancel()
        for visit in list(self._visits.values()):
            visit.end()
        while self._listeners:
            listener = self._listeners.pop()
            self._loop.remove_reader(listener.fileno())
            listener.close()
        if self._telling is not None:
            self._telling.cancel()

    # Asking

    def _drop(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None and peer.timer is not None:
            peer.timer.cancel()

    def _pump(self) -> None:
        while self._queue and len(self._attempts) + len(self._resolving) < MOST_AT_ONCE:
            name = self._queue.popleft()
            if (peer := self._peers.get(name)) is not None and not peer.busy:
                peer.busy = True
                self._try(name, peer, 0, "")
        if self._news and not self._queue and not self._attempts and not self._resolving:
            self._tell_all()

    def _try(self, name: str, peer: _Peer, index: int, why: str) -> None:
        host, port = peer.paths[index]

        def done(rtt: float | None, found: str) -> None:
            current = self._peers.get(name) is peer  # else it is another one by now, or nobody's business
            if current and rtt is None and index + 1 < len(peer.paths):
                self._try(name, peer, index + 1, found)
                return
            if current:
                relayed = rtt is not None and index > 0
                told = f"only over the relay: {why}" if relayed else why or found
                self._found(name, peer, None if index else rtt, told)
            self._pump()

        def begin(family: int, target: Any) -> None:
            nonce = secrets.token_hex(8)
            hello = json.dumps({"muster": "probe", "from": self._me, "to": name, "nonce": nonce}).encode() + b"\n"
            attempt = Attempt(self._loop, hello, proof(self._secret, self._me, name, nonce), self._attempts, done)
            attempt.begin(family, target)

        if (family := _family(host)) is not None:
            begin(family, (host, port))
            return
        self._resolving.start(self._resolve(host, port, begin, done))

    async def _resolve(
        self, host: str, port: int, begin: Callable[[int, Any], None], done: Callable[[float | None, str], None]
    ) -> None:
        try:
            async with asyncio.timeout(ATTEMPT_S):
                family, _, _, _, target = (await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        except TimeoutError:
            done(None, f"{host} is not resolved in time")
        except OSError as error:
            done(None, f"{host}: {error.strerror or error}")
        else:
            begin(family, target)

    def _found(self, name: str, peer: _Peer, rtt: float | None, why: str) -> None:
        peer.busy = False
        was_open = peer.known and peer.rtt is not None
        peer.failures = 0 if rtt is not None else peer.failures + 1
        if rtt is not None or not was_open or peer.failures > 1:
            news = not peer.known or (rtt is None) != (peer.rtt is None) or (rtt is None and why != peer.why)
            peer.known, peer.rtt, peer.why = True, rtt, "" if rtt is not None else why
            if news:
                self._tell(name)
        wait = AGAIN_S * random.uniform(0.8, 1.2) if rtt is not None else RETRY.after(peer.failures)
        peer.timer = self._loop.call_later(wait, self._again, name)

    def _again(self, name: str) -> None:
        self._queue.append(name)
        self._pump()

    def _tell(self, name: str) -> None:
        self._news[name] = None
        if self._telling is None:
            self._telling = self._loop.call_later(GATHER_S, self._tell_all)

    def _tell_all(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        self._telling = None
        news, self._news = self._news, {}
        rows: list[Row] = [
            (name, None if peer.rtt is None else round(peer.rtt, 6), peer.why)
            for name in news
            if (peer := self._peers.get(name)) is not None and peer.known
        ]
        if rows:
            self._on_found(rows)

    # Answering

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                visitor, _ = listener.accept()
            except OSError:
                return  # nobody more, or no descriptor for them; they try again
            visitor.setblocking(False)
            if len(self._visits) >= MOST_VISITORS:
                visitor.close()
                continue
            Visit(self._loop, visitor, self.answer, self._visits).begin()

    def answer(self, line: bytes) -> bytes | None:
        """Return the proof that a probe reached this member; None if the probe is for another member."""
        try:
            hello = json.loads(line)
            if hello["muster"] != "probe" or hello["to"] != self._me:
                return None
            return proof(self._secret, str(hello["from"]), self._me, str(hello["nonce"])) + b"\n"
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


# Where we are ------------------------------------------------------------------------------------


def own_path(told: str, worker: str) -> Path:
    """Where a `mesh.probeAddress` has this worker reached; port 0 where any will do.

    Without an address of ours in a network that it names, the network's own is given: nobody answers there.
    """
    meant = address.read(told.replace("{worker}", worker))
    if isinstance(meant, tuple):
        return meant
    return str(_address_in(meant) or meant.network_address), 0


def is_numeric(host: str) -> bool:
    return _family(host) is not None


def _address_in(network: address.Network) -> str | None:
    """Our address in that network: the one from which we would speak to it."""
    family = socket.AF_INET6 if network.version == 6 else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect((str(network[min(1, network.num_addresses - 1)]), 9))  # sends nothing
        mine = str(asking.getsockname()[0])
        if ipaddress.ip_address(mine) in network:
            return mine
    return None


def _family(host: str) -> int | None:
    """Of a numeric address; a name has to be asked about, which may take its time."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return family
    return None
