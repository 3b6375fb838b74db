"""A server over a real socket, on the test's own event loop, with a store in memory and a backend that pretends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from muster.ports import LogQuery, Stored, Write
from muster.server.app import App, Services, build
from muster.server.audit import Audit
from muster.server.auth import Role, Tokens
from muster.server.protocol import Protocol
from muster.server.quotas import Quotas
from muster.server.serving import ApiServer
from muster.types.training import Key, Phase, Training, Uid
from muster.types.worker import Capacity, Worker
from tests.clocks import HandClock
from tests.memory_store import MemoryStore

TRAININGS = "/v1/namespaces/default/trainings"
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
BOUND_S = 10.0  # no test waits longer for anything
SECRET = "hunter2-correct-horse"


@dataclass
class Pretender:
    """A backend without processes: it says what it was given to say."""

    lines: list[bytes] = field(default_factory=list)
    asked: list[LogQuery] = field(default_factory=list)
    planned: list[Training] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)
    patience: timedelta = timedelta(seconds=90)
    gpus: int | None = 8

    def workers(self, uid: Uid) -> Sequence[Worker]:
        return (Worker("w-0", uid, "here", NOON),)

    def capacity(self) -> Capacity | None:
        return None if self.gpus is None else Capacity(self.gpus)

    def plan(self, training: Training) -> Mapping[str, Any]:
        self.planned.append(training)
        return {"workers": training.spec.world_size.target + training.spec.spares, "env": dict(training.spec.env)}

    async def start(self, training: Training, name: str, gpus: tuple[int, ...], token: str) -> Worker:
        raise AssertionError("the API starts nothing")

    async def kill(self, training: Training, worker: str, rank: int | None) -> int:
        raise NotImplementedError

    async def stop(self, uid: Uid, name: str, *, why: str, kill: bool = False) -> None:
        raise AssertionError("the API stops nothing")

    async def logs(self, uid: Uid, query: LogQuery, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        self.asked.append(query)
        shown = 0
        while True:
            while shown < len(self.lines):
                yield self.lines[shown]
                shown += 1
            if not query.follow or ended():
                return
            self.more.clear()
            await self.more.wait()

    async def log_bytes_taken(self, uid: Uid) -> int | None:
        return sum(len(line) for line in self.lines)

    async def forget(self, uid: Uid) -> None:
        raise AssertionError("the API forgets nothing")


@dataclass
class House:
    app: App
    url: str
    services: Services
    store: MemoryStore
    backend: Pretender
    home: Path
    client: httpx2.AsyncClient  # with an admin's token
    connections: set[Any]
    server: ApiServer
    clients: list[httpx2.AsyncClient] = field(default_factory=list)

    def as_role(self, role: Role, *namespaces: str) -> httpx2.AsyncClient:
        """A client with a token of its own."""
        name = f"{role}-{len(self.clients)}"
        return self.with_token(self.services.tokens.create(name, role, namespaces or ("*",)))

    def with_token(self, token: str | None) -> httpx2.AsyncClient:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        made = httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=BOUND_S)
        self.clients.append(made)
        return made

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def submit(self, name: str = "demo", **spec: Any) -> dict[str, Any]:
        answer = await self.client.post(TRAININGS, json=a_body(name, **spec))
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    async def settle(self, name: str, phase: Phase, **more: Any) -> Stored:
        """What the control loop would write."""
        stored = self.store.get(Key("default", name))
        assert stored is not None
        status = replace(stored.training.status, phase=phase, **more)
        written = await self.store.write(Write(put=replace(stored.training, status=status)))
        assert written is not None
        return written


def a_body(name: str = "demo", namespace: str | None = None, labels: Any = None, **spec: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if namespace is not None:
        metadata["namespace"] = namespace
    if labels is not None:
        metadata["labels"] = labels
    spec.setdefault("worldSize", {"min": 1, "target": 2, "max": 4})
    return {"metadata": metadata, "spec": {"command": ["true"], **spec}}


class _Server(ApiServer):
    """Starts and ends by events instead of looking ten times a second: a suite has hundreds of these."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self.over = asyncio.Event()

    async def main_loop(self) -> None:
        await self.over.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@asynccontextmanager
async def serving(home: Path, *, keep_changes: int = 5000, **more: Any) -> AsyncIterator[House]:
    clock = HandClock(NOON)
    store = MemoryStore(keep_changes=keep_changes, clock=clock)
    tokens, backend = Tokens(home), Pretender()
    more.setdefault("quotas", Quotas(home / "quotas.json"))
    more.setdefault("audit", Audit(home))
    services = Services(store, {"local": backend}, tokens, clock, "0.0-test", clock.now(), **more)
    app = build(services)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(app, http=Protocol, ws="none", log_level="critical", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve([listening]))
    await asyncio.wait_for(server.up.wait(), BOUND_S)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    client = httpx2.AsyncClient(base_url=url, timeout=BOUND_S)
    client.headers["Authorization"] = f"Bearer {tokens.create('root', 'admin')}"
    house = House(app, url, services, store, backend, home, client, server.server_state.connections, server)
    try:
        yield house
    finally:
        for one in (client, *house.clients):
            await one.aclose()
        await store.close()  # lets streams end
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while server.server_state.connections:
                    await asyncio.sleep(0)
        server.over.set()
        await asyncio.wait_for(task, BOUND_S)
        listening.close()


def in_house(home: Path, test: Callable[[House], Awaitable[None]], **more: Any) -> None:
    """Run a test against a server of its own."""

    async def run() -> None:
        async with serving(home, **more) as house:
            await test(house)

    asyncio.run(run())


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    """The error in an answer, which must have the one form that errors have."""
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"code", "message", "hint", "details", "requestId"}
    assert body["error"]["requestId"] == answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    return dict(body["error"])


class Frames:
    """Server-sent events of one response, read one by one."""

    def __init__(self, answer: httpx2.Response) -> None:
        self._lines = answer.aiter_lines()

    async def next(self) -> dict[str, str]:
        """The next event or comment, as its fields; a comment is under ''."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(BOUND_S):
            async for line in self._lines:
                if line:
                    name, _, value = line.partition(":")
                    fields[name] = value.strip()
                elif fields:
                    return fields
        raise EOFError

    async def change(self) -> tuple[str, str, dict[str, Any]]:
        """Id, type and object of the next change; comments are skipped."""
        while "data" not in (fields := await self.next()):
            pass
        data = json.loads(fields["data"])
        return fields.get("id", ""), fields["event"], data.get("object", data)
