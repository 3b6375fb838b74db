"""Probing agent of one host: answers its peers' probes, and probes the peers that a publisher names.

It runs as `python -m muster.mesh probe`, in any image with Python. Standard library only. One port takes both the
probes of peers and the publishers. A publisher proves the shared token before it may name a peer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

from muster import listening
from muster.background import Tasks
from muster.listening import Door
from muster.mesh import lines
from muster.mesh.lines import BrokenTalk, SignedLines
from muster.mesh.probe import Path, Prober, Row

log = logging.getLogger("muster.mesh")

MOST_CONNECTIONS = 1024
_FORGET = (BrokenTalk, OSError, TimeoutError)


class ProbeAgent:
    """An agent that listens from `start`, which returns its addresses, until `stop`.

    With a name it obeys only orders for that node.
    """

    def __init__(self, host: str, port: int, *, secret: str, name: str = "") -> None:
        self._host, self._port = host, port
        self._secret = secret
        self._name = name
        self._doors: list[Door] = []
        self._talks = Tasks()
        self._sessions: dict[str, Session] = {}

    async def start(self) -> list[Path]:
        sockets = await listening.bound(self._host, self._port)
        self._doors = [Door(one, self._admit, name="the probing agent") for one in sockets]
        return [one.getsockname()[:2] for one in sockets]

    async def stop(self) -> None:
        for door in self._doors:
            door.close()
        self._talks.cancel()
        await self._talks.finish()

    def _admit(self, connection: socket.socket, _: str) -> None:
        if len(self._talks) >= MOST_CONNECTIONS:
            connection.close()
            return
        self._talks.start(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection, limit=lines.MOST_LINE)
        try:
            line = await lines.read_line(reader, lines.LINE_S)
            hello = lines.as_object(line)
            if hello.get("muster") != "observe":
                self._answer_probe(str(hello.get("to")), line, writer)
                return
            talk = await lines.answer(hello, reader, writer, self._secret.encode())
            order = await talk.receive(lines.LINE_S)
            name, peers = self._read(order)
            if self._name and name != self._name:
                await talk.send({"refused": f"the agent there is that of {self._name}"})
                return
            await self._observe(name, peers, talk)
        except _FORGET as why:
            log.debug("a connection ended: %s", why)
        finally:
            writer.close()

    def _answer_probe(self, name: str, line: bytes, writer: asyncio.StreamWriter) -> None:
        session = self._sessions.get(name)
        proof = session.prober.answer(line) if session is not None else None
        if proof is not None:
            writer.write(proof)

    @staticmethod
    def _read(order: dict[str, Any]) -> tuple[str, dict[str, list[Path]]]:
        name, peers = order.get("name"), order.get("peers")
        if not lines.is_name(name) or not isinstance(peers, dict) or len(peers) > lines.MOST_NODES:
            raise BrokenTalk("the order has no name, or no peers, or too many")
        paths: dict[str, list[Path]] = {}
        for peer, path in peers.items():
            match path:
                case [str(host), int(port)] if lines.is_name(peer) and 0 < port < 65536:
                    paths[peer] = [(host, port)]
                case _:
                    raise BrokenTalk("the order has a peer without an address")
        return str(name), paths

    async def _observe(self, name: str, peers: dict[str, list[Path]], talk: SignedLines) -> None:
        """Probe the peers and report the results, until the publisher leaves or another publisher takes its place."""
        before = self._sessions.get(name)
        session = Session(self._secret, name, talk)
        self._sessions[name] = session
        if before is not None:
            before.end()
        log.info("probing %d nodes as %s", len(peers) - (name in peers), name)
        try:
            session.prober.follow(peers)
            await session.report()
        finally:
            session.prober.close()
            if self._sessions.get(name) is session:
                del self._sessions[name]
            log.info("no longer probing as %s", name)


class Session:
    """The order of a publisher, as long as its connection lasts."""

    def __init__(self, secret: str, name: str, talk: SignedLines) -> None:
        self._talk = talk
        self._rows: list[Row] = []
        self._news = asyncio.Event()
        self._ended = False
        self.prober = Prober(secret, name, self._found)

    def end(self) -> None:
        self._ended = True
        self._news.set()

    def _found(self, rows: list[Row]) -> None:
        latest = {row[0]: row for row in [*self._rows, *rows]}
        self._rows = list(latest.values())
        self._news.set()

    async def report(self) -> None:
        # The publisher sends nothing more, so this read returns when the connection ends.
        leaving = asyncio.create_task(self._talk.reader.read(1))
        leaving.add_done_callback(lambda _: self.end())
        try:
            while not self._ended:
                self._news.clear()
                rows, self._rows = self._rows, []
                await self._talk.send({"rows": rows})
                try:
                    async with asyncio.timeout(lines.BEAT_S):
                        await self._news.wait()
                except TimeoutError:
                    continue
        finally:
            leaving.cancel()


async def serve(host: str, port: int, *, secret: str, name: str) -> None:
    """Run an agent until it is cancelled."""
    agent = ProbeAgent(host, port, secret=secret, name=name)
    try:
        for where in await agent.start():
            shown = f"[{where[0]}]:{where[1]}" if ":" in where[0] else f"{where[0]}:{where[1]}"
            print(f"mesh-probe: {time.strftime('%H:%M:%S')} listening on {shown}", flush=True)
        await asyncio.Event().wait()
    finally:
        await agent.stop()
