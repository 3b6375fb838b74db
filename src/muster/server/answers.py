"""How does an answer leave? Bytes at once, or a stream that ends with its reader.

A stream holds one chunk at a time: a reader that stops reading stops its producer, and is dropped after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from muster.errors import MusterError, to_wire
from muster.ports import Stored

T = TypeVar("T")

SEND_TIMEOUT_S = 30.0


def as_json(data: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(data).encode(), status, headers, "application/json")


def as_object(stored: Stored, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A training as anyone may see it; its version doubles as the tag for If-Match."""
    return Response(stored.shown, status, {"ETag": f'"{stored.version}"', **(headers or {})}, "application/json")


def as_error(error: MusterError, request_id: str, status: int, headers: Mapping[str, str]) -> Response:
    return as_json(to_wire(error, request_id), status, headers)


def as_warning(text: str) -> bytes:
    """A header that every client of ours shows its user, whatever the answer is."""
    shown = "".join(char if " " <= char <= "~" and char not in '"\\' else "?" for char in text)
    return f'299 muster "{shown}"'.encode()


class StreamedAnswer(Response):
    """Chunks as they come, until they end or nobody listens."""

    def __init__(self, chunks: AsyncIterator[bytes], media_type: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(None, 200, headers, media_type)
        if "Content-Length" not in (headers or {}):
            del self.headers["content-length"]  # nobody knows it yet
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["muster.stream"] = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await _close(self._chunks)
            await send({"type": "http.response.body", "body": b""})
            return
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, gone):
                task.cancel()
            done = await asyncio.gather(pump, gone, return_exceptions=True)
        if isinstance(done[0], TimeoutError):
            await scope["muster.abort"]()
        elif isinstance(done[0], Exception):
            raise done[0]

    async def _pump(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                if chunk:
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await _close(self._chunks)


async def while_asked(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What it comes to. Whoever leaves before that takes it along: nobody would hear the answer."""
    doing, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)
    if doing.cancelled():
        raise ClientDisconnect
    return doing.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _close(chunks: AsyncIterator[bytes]) -> None:
    close: Any = getattr(chunks, "aclose", None)
    if close is not None:
        with contextlib.suppress(RuntimeError):  # still running: its task was cancelled and closes it itself
            await close()
