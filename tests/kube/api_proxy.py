"""A reverse proxy before the API server, with faults on demand: what does a client do when the server misbehaves?

With the cluster's certificate; the client's token goes through and watches stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

import httpx2

from tests.kube.cluster import Cluster

_KEPT: tuple[str, ...] = ("authorization", "content-type", "accept", "user-agent")
_WRITES = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True)
class Call:
    """One request as it was answered; a watch is noted when it begins."""

    method: str
    path: str
    query: str
    status: int

    @property
    def watch(self) -> bool:
        return parse_qs(self.query).get("watch", ["0"])[0] in ("1", "true")


@dataclass(frozen=True)
class _Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    def call(self, status: int) -> Call:
        url = urlsplit(self.target)
        return Call(self.method, url.path, url.query, status)


class ApiProxy:
    """`delay_s` holds back every request; `conflict_every` = 2 answers each second write with 409 (0: none)."""

    def __init__(self, cluster: Cluster) -> None:
        self.calls: list[Call] = []
        self.delay_s = 0.0
        self.conflict_every = 0
        self.refusing = False
        self._cluster = cluster
        self._writes = 0
        self._planned: list[tuple[int, Callable[[Call], bool]]] = []
        self._lost: list[Callable[[Call], bool]] = []
        self._expire_next = 0
        self._expired: Counter[str] = Counter()
        self._watching: dict[asyncio.Task[None], asyncio.Event] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        cluster.background.call(self._start())
        assert self._server is not None
        self.url: str = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    # Faults

    def cut(self) -> None:
        """Breaks all connections; new ones are served."""
        self._cluster.background.call(self._cut())

    def refuse(self, refusing: bool = True) -> None:
        """Breaks all connections, and each new one until told otherwise."""
        self.refusing = refusing
        if refusing:
            self.cut()

    def answer(self, status: int, times: int = 1, when: Callable[[Call], bool] = lambda call: True) -> None:
        """The next requests that `when` picks get this status from here."""
        self._planned += [(status, when)] * times

    def lose(self, times: int = 1, when: Callable[[Call], bool] = lambda call: True) -> None:
        """The next requests that `when` picks are carried out, but their connections break instead of an answer."""
        self._lost += [when] * times

    @property
    def lost_all(self) -> bool:
        return not self._lost

    def expire_watches(self, coming: int = 0) -> None:
        """Open watches end with a 410 ERROR event, and so do the next `coming` ones of each collection."""
        self._expire_next, self._expired = coming, Counter()
        self._cluster.background.call(self._expire())

    def count(self, method: str = "", part: str = "") -> int:
        """How many calls of that method had this in their path."""
        return sum(call.method == (method or call.method) and part in call.path for call in list(self.calls))

    def close(self) -> None:
        self._cluster.background.call(self._end())

    # Serving

    async def _start(self) -> None:
        self._client = httpx2.AsyncClient(
            base_url=self._cluster.url,
            verify=self._cluster.tls,
            timeout=httpx2.Timeout(30.0, read=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=50),
            trust_env=False,
        )
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self._cluster.pki.certificate, self._cluster.pki.key)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)

    async def _end(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._cut()
        await self._client.aclose()

    async def _cut(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _expire(self) -> None:
        for expired in self._watching.values():
            expired.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while not self.refusing:
                    await self._one(await _read(reader), reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._serving.discard(task)
            writer.close()

    async def _one(self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.delay_s)
        if status := self._fault(request):
            self.calls.append(request.call(status))
            said = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "code": status,
                "reason": _REASONS[status],
            }
            await _write(writer, status, json.dumps(said | {"message": "by the test's proxy"}).encode())
            return
        try:
            async with self._client.stream(
                request.method, request.target, content=request.body, headers=request.headers
            ) as answer:
                call = request.call(answer.status_code)
                self.calls.append(call)
                if self._loses(call):
                    await answer.aread()
                    raise ConnectionResetError
                if call.watch and answer.is_success:
                    await self._watch(call, answer, reader, writer)
                else:
                    kind = answer.headers.get("content-type", "application/json")
                    await _write(writer, answer.status_code, await answer.aread(), kind)
        except httpx2.TransportError:
            # As the client would see it: no answer.
            raise ConnectionResetError from None

    def _loses(self, call: Call) -> bool:
        for when in self._lost:
            if when(call):
                self._lost.remove(when)
                return True
        return False

    def _fault(self, request: _Request) -> int:
        call = request.call(0)
        for planned in self._planned:
            if planned[1](call):
                self._planned.remove(planned)
                return planned[0]
        if call.method in _WRITES and self.conflict_every:
            self._writes += 1
            return 409 if self._writes % self.conflict_every == 0 else 0
        return 0

    async def _watch(
        self, call: Call, answer: httpx2.Response, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Until the server ends it, the client goes, or it is to expire."""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        await writer.drain()
        expired = asyncio.Event()
        if self._expired[call.path] < self._expire_next:
            self._expired[call.path] += 1
            expired.set()
        pump = asyncio.create_task(_relay(answer.aiter_lines(), writer))
        self._watching[pump] = expired
        others = [asyncio.create_task(expired.wait()), asyncio.create_task(reader.read(1))]
        try:
            await asyncio.wait([pump, *others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._watching[pump]
            for task in (pump, *others):
                task.cancel()
            await asyncio.gather(pump, *others, return_exceptions=True)
        if expired.is_set():
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            writer.write(_chunk(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n"))
        writer.write(_chunk(b""))
        await writer.drain()
        raise ConnectionResetError("told the client that this connection ends")


_REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


async def _read(reader: asyncio.StreamReader) -> _Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = dict(line.split(": ", 1) for line in lines if line)
    sent = {name.lower(): value for name, value in headers.items()}
    if sent.get("transfer-encoding") == "chunked":
        body = b"".join([part async for part in _chunks(reader)])
    else:
        body = await reader.readexactly(int(sent.get("content-length", 0)))
    return _Request(method, target, {name: sent[name] for name in _KEPT if name in sent}, body)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")


async def _write(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} Answer\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def _relay(lines: AsyncIterator[str], writer: asyncio.StreamWriter) -> None:
    async for line in lines:
        writer.write(_chunk(line.encode() + b"\n"))
        await writer.drain()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
