"""A control plane that plays a script, over real sockets.

A script says what happens when the SDK looks: each long poll takes the next step, so a training changes exactly when
the test wants it to, and nothing depends on the speed of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from muster.errors import MusterError, NotFound, to_wire
from muster.files import place
from muster.types import codec
from muster.types.event import Event
from muster.types.training import Condition, Metadata, Phase, RankExit, Spec, Status, Training, WorldSize, WorldStatus
from muster.types.usage import Usage

PATIENCE_S = 10.0  # no test waits longer than that for anything


class Dropped(Exception):
    """The connection ends here, without an answer."""


@dataclass(frozen=True)
class Asked:
    """One request, as it arrived."""

    method: str
    path: str
    params: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Episode:
    """One answer of a stream: what is sent, and whether it then ends as it should or breaks off."""

    text: str
    breaks: bool = False
    status: int = 200
    before: Callable[[], None] = lambda: None


Step = Callable[[], None]


def a_training(
    name: str = "demo", size: tuple[int, int, int] = (2, 2, 4), ready: int = 2, phase: Phase = "ready"
) -> Training:
    """A training that has settled: the status is about the present generation."""
    least, target, most = size
    return settled(
        Training(
            Metadata(name, uid=f"uid-{name}", generation=1, resource_version="1"),
            Spec(script="/train.py", world_size=WorldSize(least, target, most)),
            Status(phase=phase),
        ),
        ready,
    )


def settled(training: Training, ready: int | None = None) -> Training:
    """The training after a reconcile that formed a world of `ready` workers; all of its target, if not said."""
    size = training.spec.world_size
    there = size.target if ready is None else ready
    generation = training.generation
    condition = Condition("TargetReached", "True" if there == size.target else "False", observed_generation=generation)
    status = replace(
        training.status,
        observed_generation=generation,
        conditions=(condition,),
        world_size=WorldStatus(there, size.target, size.min, size.max, there < size.min),
    )
    return replace(training, status=status)


def scaled(training: Training, target: int) -> Training:
    """The training after somebody wrote another target; nobody has acted on it yet."""
    size = replace(training.spec.world_size, target=target)
    metadata = replace(training.metadata, generation=training.generation + 1)
    return replace(training, metadata=metadata, spec=replace(training.spec, world_size=size))


def ended(training: Training, phase: Phase, *exits: RankExit) -> Training:
    world = replace(training.status.world_size, ready=0)
    return replace(training, status=replace(training.status, phase=phase, world_size=world, rank_exits=exits))


@dataclass
class Plane:
    """What the control plane holds, and what happens when somebody looks."""

    trainings: dict[str, Training] = field(default_factory=dict)
    version: int = 1
    asked: list[Asked] = field(default_factory=list)
    on_poll: deque[Step] = field(default_factory=deque)
    on_get: deque[Step] = field(default_factory=deque)
    on_write: deque[Step] = field(default_factory=deque)
    on_events: deque[Step] = field(default_factory=deque)
    journal: list[Event] = field(default_factory=lambda: [Event("Created", "it was created", id=1)])
    streams: dict[str, deque[Episode]] = field(default_factory=dict)
    token: str | None = None
    pages: int = 500
    place: str = field(default_factory=place)  # whose files it sees
    news: threading.Condition = field(default_factory=threading.Condition)
    closing: threading.Event = field(default_factory=threading.Event)

    def put(self, training: Training) -> Training:
        with self.news:
            self.version += 1
            metadata = replace(training.metadata, resource_version=str(self.version))
            made = self.trainings[training.metadata.name] = replace(training, metadata=metadata)
            self.news.notify_all()
        return made

    def change(self, how: Callable[[Training], Training], name: str = "demo") -> None:
        self.put(how(self.trainings[name]))

    def remove(self, name: str = "demo") -> None:
        with self.news:
            self.version += 1
            del self.trainings[name]
            self.news.notify_all()

    def play(self, stream: str, *episodes: Episode) -> None:
        """What the next requests for logs, or to watch, get; after the last one they hang."""
        self.streams.setdefault(stream, deque()).extend(episodes)

    def looks(self) -> list[Asked]:
        return [one for one in self.asked if one.method == "GET" and one.path.endswith("/trainings/demo")]

    def writes(self) -> list[Asked]:
        return [one for one in self.asked if one.method != "GET"]

    # Answers

    def answer(self, asked: Asked) -> tuple[int, Any]:
        parts = asked.path.strip("/").split("/")
        match asked.method, parts:
            case "GET", ["healthz"]:
                return 200, {}
            case "GET", ["v1", "whoami"]:
                return 200, {"name": "me", "role": "admin", "place": self.place}
            case "GET", ["v1", "usage"]:
                return 200, {"items": [codec.to_wire(Usage("default", "demo", gpu_seconds=2.0))]}
            case "GET", ["v1", "namespaces", _, "trainings"]:
                return 200, self._page(asked.params)
            case "POST", ["v1", "namespaces", _, "trainings"]:
                return self._create(asked.body)
            case method, ["v1", "namespaces", _, "trainings", name, *rest]:
                return self._about(asked, method, name, rest)
        return 404, {}

    def _about(self, asked: Asked, method: str, name: str, rest: list[str]) -> tuple[int, Any]:
        if method == "GET" and not rest:
            return 200, self._look(name, asked.params).to_wire()
        training = self._found(name)
        if method == "GET":
            return 200, self._read(training, rest[0])
        if self.on_write:
            self.on_write.popleft()()
        if rest == ["scale"]:
            return 202, self.put(scaled(training, asked.body["target"])).to_wire()
        if method == "PATCH":
            return 200, self._patch(training, asked.body).to_wire()
        return 202, training.to_wire()

    def _look(self, name: str, params: dict[str, str]) -> Training:
        if "resourceVersion" not in params:
            if self.on_get:
                self.on_get.popleft()()
            return self._found(name)
        if self.on_poll:
            self.on_poll.popleft()()
            return self._found(name)
        known = int(params["resourceVersion"])
        with self.news:
            self.news.wait_for(lambda: self._found(name).version > known, float(params["timeoutSeconds"]))
        return self._found(name)

    def _found(self, name: str) -> Training:
        if name not in self.trainings:
            raise NotFound(f"there is no training {name!r}")
        return self.trainings[name]

    def _page(self, params: dict[str, str]) -> dict[str, Any]:
        start = int(params.get("continue", "0"))
        chosen = [one for one in self.trainings.values() if params.get("phase") in (None, one.status.phase)]
        end = start + self.pages
        metadata = {"resourceVersion": str(self.version), "continue": str(end) if end < len(chosen) else ""}
        return {"items": [one.to_wire() for one in chosen[start:end]], "metadata": metadata}

    def _create(self, body: Any) -> tuple[int, Any]:
        sent = Training.from_wire(body, strict=True)
        metadata = replace(sent.metadata, uid=f"uid-{sent.metadata.name}", generation=1)
        made = self.put(replace(sent, metadata=metadata))
        if self.on_write:
            self.on_write.popleft()()
        return 201, made.to_wire()

    def _patch(self, training: Training, body: Any) -> Training:
        wire = training.to_wire()
        wire["spec"] = {key: value for key, value in {**wire["spec"], **body["spec"]}.items() if value is not None}
        return self.put(Training.from_wire(wire))

    def _read(self, training: Training, what: str) -> Any:
        if what == "events":
            if self.on_events:
                self.on_events.popleft()()
            return {"items": [codec.to_wire(event) for event in self.journal]}
        if what == "metrics":
            points = [[1, 100.0, 0.5], [None, 101.0, 0.25]]
            worker = {"name": "demo-0", "cpuPercent": 93.1, "memoryBytes": 123, "gpuPercent": None, "at": 101.0}
            return {"series": [{"name": "loss", "points": points}], "workers": [worker], "newer": True}
        if what == "usage":
            return codec.to_wire(Usage("default", training.metadata.name, worker_seconds=1.5))
        return {"summary": "it is ready", "details": ["2 of 2 workers are ready"]}


class House:
    """The process that serves a plane. It can die, and come back on another port."""

    def __init__(self, plane: Plane, home: Path | None = None) -> None:
        self.plane = plane
        self._home = home
        self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _start(self) -> None:
        self._server = _Listener(self.plane)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        if self._home is not None:
            context = {"pid": os.getpid(), "url": self.url, "version": "0", "startedAt": "2026-01-01T00:00:00Z"}
            (self._home / "server.json").write_text(json.dumps(context))

    def die(self) -> None:
        self._server.server_close()
        self._server.shutdown()
        self._thread.join(PATIENCE_S)
        self._server.cut()

    def move(self) -> None:
        """Die, and serve the same from another port; the old one stays taken until the new one is open."""
        before = self._server
        thread = self._thread
        self._start()
        before.server_close()
        before.shutdown()
        thread.join(PATIENCE_S)
        before.cut()

    def close(self) -> None:
        self.plane.closing.set()
        self.die()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, plane: Plane) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.plane = plane
        self.connections: set[socket.socket] = set()

    def cut(self) -> None:
        for one in list(self.connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def _serve(self) -> None:
        plane, parts = self.server.plane, urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, parts.path, dict(parse_qsl(parts.query)), headers, body)
        if parts.path != "/healthz":
            plane.asked.append(asked)
        try:
            known = plane.token is None or parts.path == "/healthz"
            if not known and headers.get("authorization") != f"Bearer {plane.token}":
                return self._send(401, {"error": {"code": "unauthenticated", "message": "who are you?"}})
            if (last := parts.path.rpartition("/")[2]) in plane.streams:
                return self._stream(plane.streams[last])
            self._send(*plane.answer(asked))
        except MusterError as error:
            self._send(type(error).status, to_wire(error, "r-1"))
        except Dropped:
            self.close_connection = True

    do_GET = do_POST = do_PATCH = do_DELETE = _serve

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, episodes: deque[Episode]) -> None:
        if not episodes:
            self.server.plane.closing.wait(PATIENCE_S)
            raise Dropped
        episode = episodes.popleft()
        episode.before()
        if episode.status != 200:
            return self._send(episode.status, json.loads(episode.text))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        data = episode.text.encode()
        for start in range(0, len(data), 7):  # small chunks: lines must survive being cut anywhere
            piece = data[start : start + 7]
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        if episode.breaks:
            raise Dropped
        self.wfile.write(b"0\r\n\r\n")


class Caller:
    """Calls a method, or its twin: every test runs both ways and must come to the same end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def call(self, target: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.kind == "sync":
            return getattr(target, method)(*args, **kwargs)
        return asyncio.run(self._call(target, method, args, kwargs))

    async def _call(self, target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await getattr(target, f"{method}_async")(*args, **kwargs)

    def take(self, count: int, target: Any, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The first `count` things that it gives."""
        if self.kind == "sync":
            items: Iterator[Any] = getattr(target, method)(*args, **kwargs)
            return list(islice(items, count))
        return asyncio.run(self._take(count, getattr(target, f"{method}_async")(*args, **kwargs)))

    async def _take(self, count: int, items: Any) -> list[Any]:
        taken: list[Any] = []
        async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(items):
            async for item in items:
                taken.append(item)
                if len(taken) == count:
                    break
        return taken


def frames(changes: Iterable[tuple[str, Training]]) -> str:
    """Changes as server-sent events, with a heartbeat between them."""
    made = []
    for kind, training in changes:
        data = json.dumps({"type": kind, "object": training.to_wire()})
        made.append(f": heartbeat\n\nid: {training.version}\nevent: {kind}\ndata: {data}\n\n")
    return "".join(made)
