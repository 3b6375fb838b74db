"""Under which address is a name of the cluster found? A DNS server as small as the lab needs: A records over UDP.

`SERVICE.NAMESPACE.svc.cluster.local` is the Service's own address, or those of its Pods where it is headless, and
`POD.SERVICE.NAMESPACE.svc.cluster.local` that of one Pod. Everything else does not exist.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from tests.kube.api import Json
from tests.kube.cluster import Cluster

DOMAIN = "cluster.local"
_TTL_S = 1
_A, _IN = 1, 1
_NO_SUCH_NAME = 3

Key = tuple[str, str]  # namespace, name


class Names(asyncio.DatagramProtocol):
    """Answers from when it is made."""

    def __init__(self, cluster: Cluster, host: str) -> None:
        self._cluster = cluster
        self._services: dict[Key, Json] = {}
        self._endpoints: dict[Key, Json] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._transport: asyncio.DatagramTransport | None = None
        cluster.background.call(self._start(host))

    def close(self) -> None:
        self._cluster.background.call(self._end())

    async def _start(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, (host, 53))
        self._tasks = [
            asyncio.create_task(self._follow("services", self._services)),
            asyncio.create_task(self._follow("endpoints", self._endpoints)),
        ]

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._transport is not None:
            self._transport.close()

    async def _follow(self, kind: str, known: dict[Key, Json]) -> None:
        async for change, item in self._cluster.aio.follow(f"/api/v1/{kind}"):
            if change == "LISTED":
                known.clear()
                known.update({_key(one): one for one in item["items"]})
            elif change == "DELETED":
                known.pop(_key(item), None)
            else:
                known[_key(item)] = item

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        name, kind, question = asked(data)
        found = addresses(name, self._services, self._endpoints)
        self._transport.sendto(answer(data, question, found, kind), addr)


def addresses(name: str, services: dict[Key, Json], endpoints: dict[Key, Json]) -> list[str] | None:
    """None: there is no such name."""
    words = name.lower().removesuffix(".").removesuffix(f".{DOMAIN}").split(".")
    if words[-1] != "svc" or len(words) not in (3, 4):
        return None
    key = (words[-2], words[-3])
    if key not in services:
        return None
    own = services[key]["spec"].get("clusterIP")
    if len(words) == 3 and own != "None":
        return [own]
    subsets = endpoints.get(key, {}).get("subsets") or []
    places = [
        place for one in subsets for place in [*(one.get("addresses") or []), *(one.get("notReadyAddresses") or [])]
    ]
    if len(words) == 4:
        places = [place for place in places if place.get("hostname") == words[0]]
    return [place["ip"] for place in places] or None


def asked(data: bytes) -> tuple[str, int, bytes]:
    """The name, the kind of record, and the question as it came."""
    labels, at = [], 12
    while length := data[at]:
        labels.append(data[at + 1 : at + 1 + length].decode("ascii", "replace"))
        at += 1 + length
    (kind,) = struct.unpack_from("!H", data, at + 1)
    return ".".join(labels), kind, data[12 : at + 5]


def answer(data: bytes, question: bytes, found: list[str] | None, kind: int) -> bytes:
    records = (found or []) if kind == _A else []
    flags = 0x8580 | (_NO_SUCH_NAME if found is None else 0)
    head = struct.pack("!2sHHHHH", data[:2], flags, 1, len(records), 0, 0)
    body = b"".join(struct.pack("!HHHIH", 0xC00C, _A, _IN, _TTL_S, 4) + socket.inet_aton(one) for one in records)
    return head + question + body


def _key(item: Json) -> Key:
    return item["metadata"]["namespace"], item["metadata"]["name"]
