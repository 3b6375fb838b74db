"""How is a flow carried out, over real sockets and on a real clock?

Two drivers, one synchronous and one asynchronous, do the same few things: send a request, read a line, pause, look
for the server. They decide nothing. The HTTP client is imported when the first request is sent, so that importing
muster stays cheap, and its exceptions are turned into `Lost` here. A connection without TLS is used only after its
other end was found to be trusted (`peers`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from muster.errors import Unavailable
from muster.sdk import find, peers
from muster.sdk.effects import Emit, Flow, HttpRequest, Locate, Lost, NextLine, Now, Pause, Response
from muster.sdk.find import Search, Server
from muster.sdk.peers import Unproved

if TYPE_CHECKING:
    import asyncio

    import httpx2

T = TypeVar("T")
log = logging.getLogger("muster.sdk")

CONNECT_S = 5.0
_NUMBER = re.compile(r"\[Errno -?\d+\] ")  # what follows it says the same in words


class Link:
    """Where the control plane is, as last found. Shared by all that speak through one client."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self._server: Server | None = None
        self._lock = threading.Lock()
        self.answered = False  # somebody has been there
        self.warning = ""  # what the control plane said last of itself
        self._warned: set[str] = set()

    @property
    def server(self) -> Server | None:
        return self._server

    def locate(self, within_s: float = find.START_S) -> Server:
        with self._lock:
            self._server = find.find(self.search, within_s, again=self._server is not None)
            return self._server

    def hear(self, headers: Mapping[str, str]) -> None:
        """Somebody has answered. What is wrong with the control plane itself is said once, whatever was asked."""
        self.answered = True
        told = headers.get("warning", "")
        self.warning = told.partition('"')[2].rstrip('"') or told
        if told and told not in self._warned:
            self._warned.add(told)
            log.warning("warning: %s", self.warning)

    def relocate(self, within_s: float) -> Lost | None:
        try:
            self.locate(within_s)
        except Unavailable as why:
            return Lost(why.message, hint=why.hint, stopped=why.code == find.STOPPED)
        return None


def _settings(url: str, ca: str | None) -> dict[str, Any]:
    """How to connect to that address: proxies are for other machines, certificates for TLS."""
    import httpx2

    parts = urlsplit(url)
    host = parts.hostname or ""
    with contextlib.suppress(ValueError):
        host = "localhost" if ipaddress.ip_address(host).is_loopback else host
    verify: Any = False  # without TLS there is nothing to verify, and loading certificates takes a while
    if parts.scheme == "https":
        import ssl

        verify = ssl.create_default_context(cafile=ca) if ca else True
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
    return {"trust_env": host != "localhost", "verify": verify, "limits": limits}


def _arguments(server: Server, request: HttpRequest, prove: Callable[..., Any]) -> dict[str, Any]:
    """A request as the HTTP client wants it."""
    import httpx2

    headers = dict(request.headers)
    if server.token:
        headers["Authorization"] = f"Bearer {server.token}"
    timeout = httpx2.Timeout(request.timeout_s, connect=CONNECT_S)
    made = {"method": request.method, "url": server.url + request.path, "headers": headers, "timeout": timeout}
    if not (server.insecure or urlsplit(server.url).scheme == "https"):
        made["extensions"] = {"trace": prove}
    if request.params:
        made["params"] = dict(request.params)
    if request.content is not None:
        made["content"] = request.content
    return made if request.json is None else made | {"json": request.json}


_CONNECTED = "connection.connect_tcp.complete"  # what the HTTP client tells before it writes anything


def _prove(event: str, info: Mapping[str, Any]) -> None:
    if event == _CONNECTED:
        made = info["return_value"]
        try:
            peers.check(made.get_extra_info("socket"))
        except Unproved:
            made.close()
            raise


async def _prove_async(event: str, info: Mapping[str, Any]) -> None:
    if event == _CONNECTED:
        made = info["return_value"]
        try:
            peers.check(made.get_extra_info("socket"))
        except Unproved:
            await made.aclose()
            raise


def _lost(error: httpx2.TransportError | Unproved, link: Link) -> Lost:
    import httpx2

    if isinstance(error, Unproved):
        return Lost(str(error), sent=False, known=link.answered, hint=error.hint)
    unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
    said = _NUMBER.sub("", str(error)) or type(error).__name__
    return Lost(said, sent=not unsent, known=link.answered)


class _Lines:
    """Bytes in, whole lines out. Only a newline ends a line: a progress bar's carriage returns stay inside it."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._ready: list[str] = []

    def add(self, chunk: bytes) -> None:
        *whole, rest = chunk.split(b"\n")
        if whole:
            whole[0] = b"".join([*self._rest, whole[0]])
            self._ready[:0] = [line.decode(errors="replace").removesuffix("\r") for line in reversed(whole)]
            self._rest = []
        if rest:
            self._rest.append(rest)

    def pop(self, *, at_end: bool = False) -> str | None:
        if not self._ready and at_end and self._rest:
            self.add(b"\n")
        return self._ready.pop() if self._ready else None


# Synchronous -------------------------------------------------------------------------------------


class SyncDriver:
    """Carries flows out in the calling thread. Several threads may share it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._clients: dict[str, httpx2.Client] = {}
        self._lock = threading.Lock()

    def run(self, flow: Flow[T]) -> T:
        """The flow's result."""
        with contextlib.closing(flow), _SyncRun(self, self._link) as run:
            answer: Any = None
            while True:
                try:
                    effect = flow.send(answer)
                except StopIteration as done:
                    result: T = done.value
                    return result
                answer = run.perform(effect)

    def iterate(self, flow: Flow[None]) -> Generator[Any, None, None]:
        """What the flow emits, as it comes."""
        with contextlib.closing(flow), _SyncRun(self, self._link) as run:
            answer: Any = None
            while True:
                try:
                    effect = flow.send(answer)
                except StopIteration:
                    return
                if isinstance(effect, Emit):
                    answer = None
                    yield effect.value
                else:
                    answer = run.perform(effect)

    def client(self, server: Server) -> httpx2.Client:
        """One pool per address: another thread may still be reading from where the server was before."""
        import httpx2

        with self._lock:
            if server.url not in self._clients:
                self._clients[server.url] = httpx2.Client(**_settings(server.url, server.ca))
            return self._clients[server.url]

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()


class _SyncRun:
    """One flow under way, and the stream that it has open."""

    def __init__(self, driver: SyncDriver, link: Link) -> None:
        self._driver = driver
        self._link = link
        self._stream = contextlib.ExitStack()
        self._chunks: Iterator[bytes] = iter(())
        self._lines = _Lines()

    def __enter__(self) -> _SyncRun:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()

    def perform(self, effect: object) -> object:
        match effect:
            case HttpRequest():
                return self._send(effect)
            case NextLine():
                return self._next_line()
            case Now():
                return time.monotonic()
            case Pause(seconds):
                time.sleep(seconds)
                return None
            case Locate(within_s):
                return self._link.relocate(within_s)
        raise AssertionError(f"a flow cannot ask for {effect!r} here")

    def _send(self, request: HttpRequest) -> Response | Lost:
        import httpx2

        server = self._link.server or self._link.locate()
        client = self._driver.client(server)
        self._stream.close()
        try:
            opened = self._stream.enter_context(client.stream(**_arguments(server, request, _prove)))
            streamed = request.stream and opened.status_code < 400
            if not streamed:
                opened.read()
                self._stream.close()
        except (httpx2.TransportError, Unproved) as error:
            self._stream.close()
            return _lost(error, self._link)
        if streamed:
            self._chunks, self._lines = opened.iter_bytes(), _Lines()
        self._link.hear(opened.headers)
        return Response(opened.status_code, b"" if streamed else opened.content, opened.headers)

    def _next_line(self) -> str | Lost | None:
        import httpx2

        try:
            while (line := self._lines.pop()) is None:
                chunk = next(self._chunks, None)
                if chunk is None:
                    return self._lines.pop(at_end=True)
                self._lines.add(chunk)
        except httpx2.TransportError as error:
            return _lost(error, self._link)
        return line


# Asynchronous ------------------------------------------------------------------------------------


class AsyncDriver:
    """Carries flows out on the running event loop; each loop has its own connections."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, httpx2.AsyncClient]] = (
            weakref.WeakKeyDictionary()
        )

    async def run(self, flow: Flow[T]) -> T:
        """The flow's result."""
        with contextlib.closing(flow):
            async with _AsyncRun(self, self._link) as run:
                answer: Any = None
                while True:
                    try:
                        effect = flow.send(answer)
                    except StopIteration as done:
                        result: T = done.value
                        return result
                    answer = await run.perform(effect)

    async def iterate(self, flow: Flow[None]) -> AsyncGenerator[Any, None]:
        """What the flow emits, as it comes."""
        with contextlib.closing(flow):
            async with _AsyncRun(self, self._link) as run:
                answer: Any = None
                while True:
                    try:
                        effect = flow.send(answer)
                    except StopIteration:
                        return
                    if isinstance(effect, Emit):
                        answer = None
                        yield effect.value
                    else:
                        answer = await run.perform(effect)

    def client(self, server: Server) -> httpx2.AsyncClient:
        import asyncio

        import httpx2

        clients = self._clients.setdefault(asyncio.get_running_loop(), {})
        if server.url not in clients:
            clients[server.url] = httpx2.AsyncClient(**_settings(server.url, server.ca))
        return clients[server.url]

    async def close(self) -> None:
        """Close the connections of the running loop; those of a loop that has ended are gone with it."""
        import asyncio

        for client in self._clients.pop(asyncio.get_running_loop(), {}).values():
            await client.aclose()


class _AsyncRun:
    """One flow under way, and the stream that it has open."""

    def __init__(self, driver: AsyncDriver, link: Link) -> None:
        self._driver = driver
        self._link = link
        self._stream = contextlib.AsyncExitStack()
        self._chunks: AsyncIterator[bytes] | None = None
        self._lines = _Lines()

    async def __aenter__(self) -> _AsyncRun:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stream.aclose()

    async def perform(self, effect: object) -> object:
        import asyncio

        match effect:
            case HttpRequest():
                return await self._send(effect)
            case NextLine():
                return await self._next_line()
            case Now():
                return time.monotonic()
            case Pause(seconds):
                await asyncio.sleep(seconds)
                return None
            case Locate(within_s):
                return await asyncio.to_thread(self._link.relocate, within_s)
        raise AssertionError(f"a flow cannot ask for {effect!r} here")

    async def _send(self, request: HttpRequest) -> Response | Lost:
        import asyncio

        import httpx2

        server = self._link.server
        if server is None:
            server = await asyncio.to_thread(self._link.locate)
        client = self._driver.client(server)
        await self._stream.aclose()
        try:
            told = _arguments(server, request, _prove_async)
            opened = await self._stream.enter_async_context(client.stream(**told))
            streamed = request.stream and opened.status_code < 400
            if not streamed:
                await opened.aread()
                await self._stream.aclose()
        except (httpx2.TransportError, Unproved) as error:
            await self._stream.aclose()
            return _lost(error, self._link)
        if streamed:
            self._chunks, self._lines = opened.aiter_bytes(), _Lines()
        self._link.hear(opened.headers)
        return Response(opened.status_code, b"" if streamed else opened.content, opened.headers)

    async def _next_line(self) -> str | Lost | None:
        import httpx2

        assert self._chunks is not None, "NextLine comes after a request with stream=True"
        try:
            while (line := self._lines.pop()) is None:
                chunk = await anext(self._chunks, None)
                if chunk is None:
                    return self._lines.pop(at_end=True)
                self._lines.add(chunk)
        except httpx2.TransportError as error:
            return _lost(error, self._link)
        return line
