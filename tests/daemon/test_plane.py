"""A control plane in this process: real files and sockets, and a backend whose workers are names only."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from muster import __version__
from muster.daemon import plane
from muster.daemon.local import LocalSite
from muster.daemon.options import Options
from muster.daemon.plane import ControlPlane
from muster.types.frames import AskFrame
from muster.types.training import Training, Uid
from muster.types.worker import Worker
from muster.types.world import RunId
from muster.world import wire
from muster.world.connection import CoordinatorRefused, ask
from tests.server.house import NOON, TRAININGS, Pretender, a_body

BOUND_S = 20.0


class Names(Pretender):
    """Workers that were asked for: each is there, and does nothing. They outlive the control plane."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: Callable[[Uid], None] = lambda uid: None
        self.there: dict[Uid, list[Worker]] = {}
        self.tokens: dict[str, str] = {}

    def workers(self, uid: Uid) -> Sequence[Worker]:
        return tuple(self.there.get(uid, ()))

    async def start(self, training: Training, name: str, gpus: tuple[int, ...], token: str) -> Worker:
        worker = Worker(name, training.uid, "here", NOON, gpus)
        self.there.setdefault(training.uid, []).append(worker)
        self.tokens[name] = token
        return worker

    async def close(self) -> None:
        pass


class Site(LocalSite):
    names: Names

    async def backend(self) -> Any:
        return self.names

    async def adopt(self) -> int:
        return sum(map(len, self.names.there.values()))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """The backend of every control plane that is started here."""
    for name in ("MUSTER_POOL_GPUS", "MUSTER_POOL_GPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    made = Names()
    monkeypatch.setattr(Site, "names", made, raising=False)
    monkeypatch.setattr(plane, "site_of", Site)
    return made


def serving(home: Path, test: Callable[[ControlPlane, httpx2.AsyncClient], Awaitable[None]], **options: Any) -> None:
    """Start one, run a test against it with its own token, and stop it."""

    async def run() -> None:
        made = ControlPlane(Options(home, **options))
        async with asyncio.timeout(BOUND_S):
            url = await made.start()
            headers = {"Authorization": f"Bearer {(home / 'token').read_text().strip()}"}
            try:
                async with httpx2.AsyncClient(base_url=url, headers=headers) as client:
                    await test(made, client)
            finally:
                await made.stop()

    asyncio.run(run())


async def submitted(client: httpx2.AsyncClient, names: Names, workers: int = 2) -> str:
    """The uid of a training whose workers were asked for."""
    size = {"min": 1, "target": workers, "max": workers}
    answer = await client.post(TRAININGS, json=a_body(worldSize=size))
    assert answer.status_code == 201, answer.text
    uid = str(answer.json()["metadata"]["uid"])
    while len(names.workers(Uid(uid))) < workers:
        await asyncio.sleep(0.001)
    return uid


def test_it_says_where_it_serves_and_lets_its_user_in(tmp_path: Path, names: Names) -> None:
    async def test(made: ControlPlane, client: httpx2.AsyncClient) -> None:
        shown = json.loads((tmp_path / "server.json").read_text())
        assert (shown["url"], shown["pid"], shown["version"]) == (made.url, os.getpid(), __version__)
        assert (await client.get(TRAININGS)).json()["items"] == []
        assert (await client.get("/v1/pools/default")).status_code == 404
        assert (await httpx2.AsyncClient(base_url=made.url).get(TRAININGS)).status_code == 401

    serving(tmp_path, test)


def test_a_training_that_is_stored_gets_workers_and_a_run_of_its_own(tmp_path: Path, names: Names) -> None:
    async def test(made: ControlPlane, client: httpx2.AsyncClient) -> None:
        run = RunId(await submitted(client, names))
        assert sorted(names.tokens) == ["demo-0", "demo-1"]
        [token] = set(names.tokens.values())
        where = wire.parse_address((tmp_path / "coordinator.addr").read_text().strip())
        view = await ask([where], run, AskFrame(ask="show"), token=token)
        assert (view["run_id"], view["state"]) == (run, "forming")
        with pytest.raises(CoordinatorRefused, match="token"):
            await ask([where], run, AskFrame(ask="show"), token="another")

    serving(tmp_path, test)


def test_started_again_it_is_where_it_was_and_goes_on(tmp_path: Path, names: Names) -> None:
    urls: list[str] = []

    async def first(made: ControlPlane, client: httpx2.AsyncClient) -> None:
        urls.append(made.url)
        await submitted(client, names)

    async def second(made: ControlPlane, client: httpx2.AsyncClient) -> None:
        assert [made.url] == urls
        [found] = (await client.get(TRAININGS)).json()["items"]
        assert found["metadata"]["name"] == "demo"
        await client.patch(f"{TRAININGS}/demo", json={"spec": {"worldSize": {"target": 3, "max": 3}}})
        while len(names.tokens) < 3:
            await asyncio.sleep(0.001)
        assert sorted(names.tokens) == ["demo-0", "demo-1", "demo-2"], "those that it had are not started again"

    serving(tmp_path, first)
    serving(tmp_path, second)


def test_an_address_of_the_last_time_that_is_taken_is_given_up(tmp_path: Path, names: Names) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        old = f"http://127.0.0.1:{taken.getsockname()[1]}"
        (tmp_path / "server.json").write_text(json.dumps({"url": old}))

        async def test(made: ControlPlane, client: httpx2.AsyncClient) -> None:
            assert made.url != old and (await client.get("/healthz")).status_code == 200

        serving(tmp_path, test)


@pytest.mark.parametrize("left", ["", "{}", "[]", '{"url": 3}', '{"url": "http://example.com:80"}'])
def test_what_is_left_in_server_json_cannot_keep_it_from_serving(tmp_path: Path, names: Names, left: str) -> None:
    (tmp_path / "server.json").write_text(left)

    async def test(made: ControlPlane, client: httpx2.AsyncClient) -> None:
        assert made.url.startswith("http://127.0.0.1:")

    serving(tmp_path, test)


def test_rates_that_cannot_be_read_cost_the_costs_only(
    tmp_path: Path, names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rates.json").write_text("[")

    async def test(made: ControlPlane, client: httpx2.AsyncClient) -> None:
        assert (await client.get("/v1/usage")).status_code == 200

    serving(tmp_path, test)
    assert "rates.json cannot be used, usage has no cost" in caplog.text


def test_gpus_that_the_environment_names_are_a_pool(
    tmp_path: Path, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_POOL_GPUS", "4,5,6,7")
    monkeypatch.setenv("MUSTER_POOL_GPUS_PER_NODE", "2")

    async def test(made: ControlPlane, client: httpx2.AsyncClient) -> None:
        pool = (await client.get("/v1/pools/default")).json()
        assert (pool["gpus"], pool["gpusPerNode"], pool["devices"]) == (4, 2, ["4", "5", "6", "7"])

    serving(tmp_path, test)


# As a program


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # the suite's own logging stays
    return lambda: capsys.readouterr().err


def test_a_second_one_for_the_same_home_is_refused(tmp_path: Path, said: Callable[[], str]) -> None:
    with open(tmp_path / "daemon.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert plane.run(Options(tmp_path)) == 1
    assert said() == f"muster server: another control plane serves {tmp_path}; see muster server status\n"


def test_what_cannot_work_is_one_line(tmp_path: Path, said: Callable[[], str]) -> None:
    assert plane.run(Options(tmp_path, listen="0.0.0.0:80")) == 1
    assert plane.run(Options(tmp_path / "file" / "home", listen="nowhere")) == 1
    (tmp_path / "file").touch()
    assert plane.run(Options(tmp_path / "file" / "home")) == 1
    lines = said().splitlines()
    assert len(lines) == 3 and all(line.startswith("muster server: ") for line in lines)


def test_an_address_that_is_taken_is_named(tmp_path: Path, names: Names, said: Callable[[], str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert plane.run(Options(tmp_path, listen=address)) == 1
    assert said() == f"muster server: cannot serve on {address}: Address already in use\n"
