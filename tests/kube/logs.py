"""Plays the kubelet's log endpoint, which the API server asks for `kubectl logs`."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from tests.kube.certificates import Pki
from tests.kube.containers import Log


class LogServer:
    def __init__(self, pki: Pki, find: Callable[[str, str], Log | None]) -> None:
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(pki.certificate, pki.key)
        self._find = find
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ssl.SSLError):
            request = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0].decode()
            gone = asyncio.create_task(reader.read())
            answer = asyncio.create_task(self._answer(request.split()[1], writer))
            await asyncio.wait([gone, answer], return_when=asyncio.FIRST_COMPLETED)
            for one in (gone, answer):
                one.cancel()
            await asyncio.gather(gone, answer, return_exceptions=True)
        writer.close()
        self._serving.discard(task)

    async def _answer(self, target: str, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(target)
        words = url.path.strip("/").split("/")
        log = self._find(words[1], words[2]) if len(words) == 4 and words[0] == "containerLogs" else None
        if log is None:
            writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\nno such container\n")
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n")
        await self._lines(log, {name: values[0] for name, values in parse_qs(url.query).items()}, writer)

    async def _lines(self, log: Log, asked: dict[str, str], writer: asyncio.StreamWriter) -> None:
        """The connection's end is the end of the log."""
        since = asked.get("sinceTime", "")
        chosen = [index for index, (when, _) in enumerate(log.lines) if when[:19] >= since[:19]]
        if "tailLines" in asked:
            chosen = chosen[max(0, len(chosen) - int(asked["tailLines"])) :]
        at = chosen[0] if chosen else len(log.lines)
        while True:
            for when, line in log.lines[at:]:
                writer.write(f"{when} ".encode() * (asked.get("timestamps") == "true") + line)
            at = len(log.lines)
            await writer.drain()
            if log.ended or asked.get("follow") != "true":
                return
            await log.news()
