"""Plays kube-proxy for one Service: which address does a new connection go to?"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterable, Mapping
from functools import partial

from tests.kube.api import Json
from tests.kube.cluster import Cluster
from tests.kube.network import new_address

LOOK_S = 0.05

Target = tuple[str, int]


class ServiceProxy:
    """A proxy on `host` that sends each new connection to the address in the Service's current EndpointSlices.

    Ports are known by their names in the slices (`""` where there is none). Where nobody listens a connection is
    refused, as it is by a real one, which takes none itself; only the first that finds it so is reset.
    """

    def __init__(
        self, cluster: Cluster, namespace: str, name: str, ports: Mapping[str, int], host: str | None = None
    ) -> None:
        """`ports`: name → where to listen, 0 for any. `host`: an address of its own unless given."""
        self.host = host or new_address()
        self.ports: dict[str, int] = {}
        self._cluster = cluster
        self._path = cluster.slices(namespace)
        self._name = name
        self._targets: dict[str, list[Target]] = {}
        self._changed = asyncio.Event()
        self._servers: dict[str, asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        cluster.background.call(self._start(ports))

    def address(self, port: str = "") -> str:
        return f"{self.host}:{self.ports[port]}"

    def until_ready(self, port: str = "", timeout_s: float = 20.0) -> None:
        """Until there is somewhere to go, and the way there is open."""
        self._cluster.background.call(self._until(port), timeout_s)

    def close(self) -> None:
        self._cluster.background.call(self._end())

    async def _start(self, ports: Mapping[str, int]) -> None:
        for name, wanted in ports.items():
            await self._listen(name, wanted)
        self._tasks.add(asyncio.create_task(self._follow()))

    async def _listen(self, port: str, wanted: int) -> None:
        server = await asyncio.start_server(partial(self._relay, port), self.host, wanted)
        self.ports[port], self._servers[port] = server.sockets[0].getsockname()[1], server
        self._changed.set()

    async def _end(self) -> None:
        for server in self._servers.values():
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _until(self, port: str) -> None:
        while not (self._targets.get(port) and self._servers[port].is_serving()):
            self._changed.clear()
            await self._changed.wait()

    async def _follow(self) -> None:
        slices: dict[str, Json] = {}
        chosen = f"kubernetes.io/service-name={self._name}"
        async for kind, item in self._cluster.aio.follow(self._path, labelSelector=chosen):
            if kind == "LISTED":
                slices = {one["metadata"]["name"]: one for one in item["items"]}
            elif kind == "DELETED":
                slices.pop(item["metadata"]["name"], None)
            else:
                slices[item["metadata"]["name"]] = item
            self._targets = targets(slices.values())
            self._changed.set()

    def _refuse(self, port: str) -> None:
        """Until somebody listens there."""
        if self._servers[port].is_serving():
            self._servers[port].close()
            self._tasks.add(asyncio.create_task(self._return(port)))

    async def _return(self, port: str) -> None:
        while not await _listens(self._targets.get(port)):
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
        await self._listen(port, self.ports[port])

    async def _relay(self, port: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            found = self._targets.get(port)
            if not found:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(*found[0])
        except (OSError, asyncio.CancelledError):
            _reset(writer)
            self._refuse(port)
            return
        ways = [asyncio.create_task(_pump(reader, far_writer)), asyncio.create_task(_pump(far_reader, writer))]
        try:
            await asyncio.gather(*ways)
        except asyncio.CancelledError:
            pass  # the proxy ends; whoever made the connection need not hear of it
        finally:
            for way in ways:
                way.cancel()
            far_writer.close()
            writer.close()


def targets(slices: Iterable[Json]) -> dict[str, list[Target]]:
    """Ready addresses by the name of the port."""
    found: dict[str, list[Target]] = {}
    for one in slices:
        ready = [place for place in one.get("endpoints") or [] if place["conditions"].get("ready", True)]
        for port in one.get("ports") or []:
            places = [(address, port["port"]) for place in ready for address in place["addresses"]]
            found.setdefault(port.get("name") or "", []).extend(places)
    return found


async def _listens(targets: list[Target] | None) -> bool:
    try:
        _, writer = await asyncio.open_connection(*(targets or [])[0])
    except (OSError, IndexError):
        return False
    _reset(writer)
    return True


def _reset(writer: asyncio.StreamWriter) -> None:
    """As from a port where nobody listens: an error, not an end."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()  # broken on one side, it is on the other
