"""Every change as it happens, as server-sent events.

A watcher is a position in the store's history, not a queue: one that does not read costs one frame and, after a
while, its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from muster.core.training.edits import refused
from muster.errors import Compacted, MusterError, to_wire
from muster.ports import Filter, StoreChange
from muster.server.answers import StreamedAnswer
from muster.server.calls import MOST, Call, read_selector
from muster.server.describe import Answer, Header, Operation
from muster.server.routes.objects import ABOUT_SELECTOR, SELECTOR
from muster.types import codec
from muster.types.codec import Problem, limited
from muster.types.event import Event
from muster.types.training import DNS_LABEL

HEARTBEAT_S = 10.0
EVENT_STREAM = "text/event-stream"
_FIRST_LOOK_S = 0.25  # how long the store may take to say that the history asked for is gone


@dataclass(frozen=True)
class WatchQuery:
    """Without a version: from now on."""

    resource_version: int | None = limited(None, ge=0, le=MOST)
    namespace: str | None = limited(None, pattern=DNS_LABEL, max_length=63, about="is not a namespace")
    label_selector: str = limited("", pattern=SELECTOR, max_length=2048, about=ABOUT_SELECTOR)
    events: bool = False  # entries of the journal too, from now on


async def watch_trainings(call: Call) -> Response:
    query = call.query(WatchQuery)
    if query.namespace is not None:
        call.identity.must_read(query.namespace)
    store = call.services.store
    since = _last_seen(call)
    if since is None:
        since = query.resource_version if query.resource_version is not None else store.version
    if since > store.version:
        raise Compacted(
            f"version {since} is not of this store, which is at {store.version}", hint="list, then watch from there"
        )
    headers = {"X-Accel-Buffering": "no"}
    if call.request.method == "HEAD":
        return Response(headers=headers, media_type=EVENT_STREAM)
    changes = aiter(store.changes(since, Filter(query.namespace, None, read_selector(query.label_selector))))
    first = asyncio.ensure_future(anext(changes))
    if since < store.version:
        await asyncio.wait({first}, timeout=_FIRST_LOOK_S)
    if first.done() and isinstance(error := first.exception(), MusterError):
        raise error
    call.request.scope["muster.last_words"] = _error_frame
    told = _merged(call, changes, first, query, store.last_event)
    return StreamedAnswer(_frames(call, told, first), EVENT_STREAM, headers)


def _last_seen(call: Call) -> int | None:
    """What a reader that comes back has seen; it wins over the address, which is as old as the first attempt."""
    given = call.header("last-event-id")
    if given is None or given == "":
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 15):
        raise refused([Problem("Last-Event-ID", "must be a version")], "the request")
    return int(given)


async def _merged(
    call: Call, changes: AsyncIterator[StoreChange], first: asyncio.Future[StoreChange], query: WatchQuery, seen: int
) -> AsyncGenerator[bytes, None]:
    """A frame for each change and each entry that the caller may see, and an empty one when there was none for long.

    Entries after `seen`: what the journal had before the caller heard that it is being watched.
    """
    store, waiting = call.services.store, first
    entries = asyncio.ensure_future(store.more_events(seen)) if query.events else None
    clock = asyncio.get_running_loop().time
    said_at = clock()
    try:
        while True:
            awaited: set[asyncio.Future[Any]] = {waiting} if entries is None else {waiting, entries}
            done, _ = await asyncio.wait(awaited, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
            if not done or clock() > said_at + HEARTBEAT_S:  # what others do is no word for this one
                said_at = clock()
                yield b""
            if waiting in done:
                if isinstance(waiting.exception(), StopAsyncIteration):  # the store closes: there will be no more
                    return
                change = waiting.result()
                waiting = asyncio.ensure_future(anext(changes))
                if call.identity.sees(change.stored.key.namespace):
                    yield frame(change)
            if entries is not None and entries in done:
                found = entries.result()
                seen = found[-1].id if found else seen
                entries = asyncio.ensure_future(store.more_events(seen)) if found else None
                for entry in found:
                    if query.namespace in (None, entry.namespace) and call.identity.sees(entry.namespace):
                        yield _entry_frame(entry)
    finally:
        ending: list[asyncio.Future[Any]] = [waiting] if entries is None else [waiting, entries]
        for one in ending:
            one.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        close: Any = getattr(changes, "aclose", None)
        if close is not None:
            with contextlib.suppress(RuntimeError):
                await close()


async def _frames(call: Call, found: AsyncGenerator[bytes, None], first: asyncio.Future[Any]) -> AsyncIterator[bytes]:
    call.services.meter.watchers += 1
    try:
        yield b": watching\n\n"
        async for told in found:
            yield told or b": heartbeat\n\n"
    except MusterError as error:
        yield _error_frame(error)
    finally:
        call.services.meter.watchers -= 1
        first.cancel()  # if `found` was never begun, nobody else ends it
        await found.aclose()


def _error_frame(error: MusterError) -> bytes:
    """The answer has begun, so the error comes as an event: the reader lists again, or signs in again."""
    return b"event: error\ndata: " + json.dumps(to_wire(error, "")).encode() + b"\n\n"


@functools.lru_cache(maxsize=256)
def frame(change: StoreChange) -> bytes:
    """One change on the wire; made once for all who watch."""
    head = f'id: {change.version}\nevent: {change.type}\ndata: {{"type": "{change.type}", "object": '
    return head.encode() + change.stored.shown + b"}\n\n"


def _entry_frame(entry: Event) -> bytes:
    """It has no id: a reader that comes back asks for the entries that it missed."""
    return b"event: EVENT\ndata: " + json.dumps({"type": "EVENT", "object": codec.to_wire(entry)}).encode() + b"\n\n"


OPERATIONS = (
    Operation(
        "GET",
        "/v1/watch",
        watch_trainings,
        "Follow changes",
        {200: Answer("Changes as server-sent events; heartbeats.", "ServerSentEvent", EVENT_STREAM)},
        (403, 410, 422),
        WatchQuery,
        headers=(Header("Last-Event-ID", "Go on after this version.", "[0-9]{0,15}"),),
    ),
)
