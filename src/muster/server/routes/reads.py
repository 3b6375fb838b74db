"""What a training said, what happened to it, what it used, and why it is where it is."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from starlette.responses import Response

from muster.core import curves
from muster.core.sharing import usage
from muster.core.training import explain, log_lines, metering, outputs
from muster.core.training.admission import backend_of
from muster.core.training.edits import refused
from muster.errors import NotFound, Unavailable
from muster.ports import Backend, LogQuery, Stored
from muster.server.answers import StreamedAnswer, as_json, while_asked
from muster.server.calls import MOST, UID_HEADER, Call, no_training
from muster.server.describe import Answer, Operation
from muster.server.routes.objects import TRAINING
from muster.types.codec import Problem, limited, to_wire
from muster.types.event import Event
from muster.types.training import API_VERSION, DNS_LABEL, TERMINAL, Key, Training, Uid
from muster.types.usage import Usage

TEXT = "text/plain"
_MOST_FOUND = 1 << 24  # bytes of lines that are kept until the last is found
_TOGETHER = 2_000  # lines that are found before others get a turn
_TELLING = 200  # entries that an explanation is looked for in: it names the newest few, and is asked for often
LOOK_BACK = 20_000  # entries of the journal, for who asks about all trainings


@dataclass(frozen=True)
class LogsQuery:
    rank: int | None = limited(None, ge=0, le=10_000_000)
    round: int | None = limited(None, ge=0, le=MOST)
    tail: int | None = limited(None, ge=0, le=MOST)
    follow: bool = False
    search: str = limited("", max_length=1000)  # in any case; with `tail`, the last lines that have it
    markers: bool = False
    timestamps: bool = False


@dataclass(frozen=True)
class EventsQuery:
    """With a limit: the newest of those that were asked for."""

    after: int = limited(0, ge=0, le=MOST)
    since: datetime | None = None
    before: int | None = limited(None, ge=0, le=MOST)
    limit: int | None = limited(None, ge=1, le=MOST)


_ALL = EventsQuery()


@dataclass(frozen=True)
class AllEventsQuery:
    after: int = limited(0, ge=0, le=MOST)
    namespace: str | None = limited(None, pattern=DNS_LABEL, max_length=63, about="is not a name")
    limit: int = limited(500, ge=1, le=5000)


@dataclass(frozen=True)
class UsageQuery:
    since: datetime | None = None
    by: Literal["training", "namespace"] = "training"


@dataclass(frozen=True)
class MetricsQuery:
    names: str = limited("", max_length=64 * 65, about="Only these curves, with commas between them.")
    after: float | None = limited(None, ge=0, about="Only points after that time, in seconds since 1970.")


# Logs --------------------------------------------------------------------------------------------


async def get_logs(call: Call) -> Response:
    key = call.readable()
    query = call.query(LogsQuery)
    if query.search and query.follow:
        raise refused([Problem("search", "finds what was written: it cannot be followed")], "the request")
    stored = call.found(key)
    _refuse(outputs.why_never(stored.training, query.rank), key)
    if stored.phase == "pending" and not query.follow:
        note = {"X-Muster-Note": "pending"}
        return Response(f"{_still_pending(stored.training)}\n", headers=note, media_type=TEXT)
    served = call.services.backends
    backend = served.get(backend_of(stored.training.spec, served))
    if backend is None:
        raise Unavailable(f"backend {stored.training.spec.backend!r} of training {key.name!r} is not served here")
    if call.request.method == "HEAD":
        return Response(media_type=TEXT)
    asked = LogQuery(query.rank, query.round, query.tail, query.follow, query.markers, query.timestamps)
    lines = _found(call, stored, backend, query) if query.search else _lines(call, stored, backend, asked)
    if query.follow:
        return StreamedAnswer(lines, TEXT, {"X-Accel-Buffering": "no"})
    first = await while_asked(call.request.receive, _first(lines))  # what goes wrong before it has an answer of its own
    if not first and query.tail != 0 and not query.search:
        _refuse(outputs.why_none(call.found(key).training, query.rank, query.round), key)
    return StreamedAnswer(_begun(first, lines), TEXT, {"X-Accel-Buffering": "no"})


def _refuse(why: str | None, key: Key) -> None:
    if why is not None:
        raise NotFound(why, hint=f"`muster describe {key.name}` shows its rounds and ranks")


async def _first(lines: AsyncGenerator[bytes, None]) -> bytes:
    """It may be long in coming: what is looked for can be at the end of a long log, or nowhere."""
    return await anext(lines, b"")


async def _begun(first: bytes, lines: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(lines):
        yield first
        async for chunk in lines:
            yield chunk


def _still_pending(training: Training) -> str:
    """Why there is nothing to read yet, in the reconciler's words."""
    said = [one.message for one in training.status.conditions if one.status == "False" and one.message]
    why = f": {said[0]}" if said else ""
    return f"training {training.metadata.name!r} is pending, so no rank has written anything{why}"


async def _lines(call: Call, stored: Stored, backend: Backend, query: LogQuery) -> AsyncGenerator[bytes, None]:
    store, key, uid = call.services.store, stored.key, stored.uid
    now: Stored | None = stored
    while now is not None and now.uid == uid and now.phase == "pending":
        before = now.version
        now = await store.newer(key, before, None)
        if now is not None and now.version == before:  # without a timeout, only a store that closes says that
            return
    if now is None or now.uid != uid:
        return
    # Closed with its reader, and not when somebody collects what is left of it.
    async with aclosing(backend.logs(uid, query, _ended(call, key, uid))) as chunks:
        async for chunk in chunks:
            yield chunk


async def _found(call: Call, stored: Stored, backend: Backend, query: LogsQuery) -> AsyncGenerator[bytes, None]:
    """The lines that have some text: each as it is found, or the last of them once all was looked through."""
    text = query.search.encode(errors="replace").lower()
    newest = None if query.tail is None else log_lines.Newest(query.tail, _MOST_FOUND)
    asked = LogQuery(rank=query.rank, round=query.round, timestamps=query.timestamps)
    async with aclosing(_lines(call, stored, backend, asked)) as chunks:
        async for chunk in chunks:
            found = log_lines.matching(chunk, text, timestamps=query.timestamps)
            while some := list(itertools.islice(found, _TOGETHER)):
                if newest is not None:
                    newest.take(some)
                else:
                    yield b"".join(some)
                await asyncio.sleep(0)
    if newest is not None:
        yield b"".join(newest.lines)


def _ended(call: Call, key: Key, uid: Uid) -> Callable[[], bool]:
    def ended() -> bool:
        stored = call.services.store.get(key)
        return stored is None or stored.uid != uid or stored.phase in TERMINAL

    return ended


# Journal -----------------------------------------------------------------------------------------


async def get_events(call: Call) -> Response:
    key = call.readable()
    query = call.query(EventsQuery)
    events = await _journal(call, key, query)
    if (since := query.since) is not None:
        events = [event for event in events if event.at is None or event.at >= since]
    return await asyncio.to_thread(_listed, events)  # a long journal must not hold up everyone else


def _listed(events: list[Event]) -> Response:
    return as_json({"apiVersion": API_VERSION, "kind": "EventList", "items": [to_wire(event) for event in events]})


async def list_events(call: Call) -> Response:
    """The newest of all that the token may see. How far back is looked is bounded: a journal can have a million."""
    query = call.query(AllEventsQuery)
    store, identity = call.services.store, call.identity
    if query.namespace is not None:
        identity.must_read(query.namespace)
        spaces: tuple[str | None, ...] = (query.namespace,)
    else:
        spaces = (None,) if identity.sees_all else identity.namespaces
    after = max(query.after, store.last_event - LOOK_BACK)
    read = functools.partial(store.events, after=after, most=query.limit)
    found = [event for space in spaces for event in await read(namespace=space)]
    newest = sorted(found, key=lambda event: event.id)[-query.limit :]
    return await asyncio.to_thread(_listed, newest)


async def _journal(call: Call, key: Key, query: EventsQuery = _ALL) -> list[Event]:
    """Entries about the training of that name; about those that had it before, once there is none."""
    store = call.services.store
    stored = store.get(key)
    meant = call.header(UID_HEADER) or (stored.uid if stored is not None else None)
    read = functools.partial(store.events, namespace=key.namespace, training=key.name, uid=meant)
    events = await read(after=query.after, before=query.before, most=query.limit)
    # Nothing new about a training that is gone is an answer; nothing at all means that there never was one.
    known = bool(events) or (stored is not None and stored.uid == meant) or bool(await read(most=1))
    if not known:
        raise no_training(key)
    return events


async def get_metrics(call: Call) -> Response:
    key = call.readable()
    query = call.query(MetricsQuery)
    uid, measured = call.found(key).uid, call.services.measured
    if measured is None:
        return as_json({"series": [], "workers": []})
    names = [name for name in query.names.split(",") if name]
    series = curves.shown(measured.curves(uid), names, query.after)
    return as_json({"series": series, "workers": curves.used(measured.workers(uid))})


async def explain_training(call: Call) -> Response:
    key = call.readable()
    training = call.found(key).training.masked()
    events = await _journal(call, key, EventsQuery(limit=_TELLING))
    clock = call.services.clock
    lent = "; ".join(filter(None, (pool.returning(training.uid) for pool in call.services.pools.values())))
    return as_json(to_wire(explain.explain(training, events, clock.now(), clock.steady(), lent=lent)))


async def get_usage(call: Call) -> Response:
    key = call.readable()
    now = call.services.clock.steady()
    events = await _journal(call, key)
    found = metering.totals(metering.intervals(events, now), now=now, by="training", rates=call.services.rates)
    uid = events[-1].uid if events else call.found(key).uid
    last = next((one for one in found if one.uid == uid), Usage(key.namespace, key.name, uid))
    last = replace(last, log_bytes=await _log_bytes(call, key, uid), journal_bytes=await _size(events))
    pipelines = _of_pipelines(call, {uid: (key.namespace, key.name)}, None, every=False)
    return _usages(usage.added([last], pipelines, _gpu_cost(call), by_namespace=False))


def _of_pipelines(call: Call, owners: usage.Owners, since: datetime | None, *, every: bool) -> list[Usage]:
    """What pipelines of these trainings had of pools; with those of no training if `every` one may be told."""
    begin = None if since is None else since.timestamp()
    return [
        row
        for pool in call.services.pools.values()
        for row in usage.rows(pool.scheduler.used(), owners, pool.scheduler.metered(), since=begin, every=every)
    ]


def _gpu_cost(call: Call) -> usage.Cost | None:
    rates = call.services.rates
    return None if rates is None else lambda gpu_seconds: rates.cost(0.0, gpu_seconds)


async def _log_bytes(call: Call, key: Key, uid: str) -> int | None:
    stored, served = call.services.store.get(key), call.services.backends
    if stored is None or stored.uid != uid:
        return None  # they went with it
    backend = served.get(backend_of(stored.training.spec, served))
    return await backend.log_bytes_taken(stored.uid) if backend is not None else None


async def _size(events: list[Event]) -> int:
    return await asyncio.to_thread(lambda: sum(len(json.dumps(to_wire(event))) for event in events))


async def list_usage(call: Call) -> Response:
    query = call.query(UsageQuery)
    services, identity = call.services, call.identity
    spaces = (None,) if identity.sees_all else identity.namespaces
    events = [event for space in spaces for event in await services.store.events(namespace=space)]
    now = services.clock.steady()
    # "For the last hour" is said by the time of day, as it is now.
    since = None if query.since is None else query.since + (now - services.clock.now())

    # Who may see a training's entries may see what its pipelines used.
    owners = {event.uid: (event.namespace, event.training) for event in events if event.uid}
    pipelines = _of_pipelines(call, owners, since, every=identity.sees_all)

    def fold() -> list[Usage]:
        found = metering.totals(
            metering.intervals(events, now), now=now, since=since, by=query.by, rates=services.rates
        )
        return usage.added(found, pipelines, _gpu_cost(call), by_namespace=query.by == "namespace")

    return _usages(await asyncio.to_thread(fold))  # a long journal must not hold up everyone else


def _usages(found: list[Usage]) -> Response:
    return as_json({"apiVersion": API_VERSION, "kind": "UsageList", "items": [to_wire(one) for one in found]})


_LOGS = Answer("What ranks wrote; of a pending training, why there is nothing yet.", media_type=TEXT)
_REFUSALS = (403, 404, 422)

OPERATIONS = (
    Operation("GET", f"{TRAINING}/logs", get_logs, "Read or follow logs", {200: _LOGS}, _REFUSALS, LogsQuery),
    Operation(
        "GET",
        f"{TRAINING}/events",
        get_events,
        "What happened, oldest first; with a limit the newest",
        {200: Answer("Entries of the journal.", "EventList")},
        _REFUSALS,
        EventsQuery,
    ),
    Operation(
        "GET",
        f"{TRAINING}/metrics",
        get_metrics,
        "How it learns, and what its workers use",
        {200: Answer("Curves, and what each worker has said last.", "Metrics")},
        _REFUSALS,
        MetricsQuery,
    ),
    Operation(
        "GET", f"{TRAINING}/usage", get_usage, "What it used", {200: Answer("One sum.", "UsageList")}, (403, 404)
    ),
    Operation(
        "GET",
        f"{TRAINING}/explain",
        explain_training,
        "Why it is where it is",
        {200: Answer("A sentence, and what leads to it.", "Explanation")},
        (403, 404),
    ),
    Operation(
        "GET",
        "/v1/events",
        list_events,
        "What happened lately to all that the token may see, oldest first",
        {200: Answer("Entries of the journal.", "EventList")},
        (403, 422),
        AllEventsQuery,
    ),
    Operation(
        "GET",
        "/v1/usage",
        list_usage,
        "What all that the token may see used",
        {200: Answer("Sums, by training or namespace.", "UsageList")},
        (422,),
        UsageQuery,
    ),
)
