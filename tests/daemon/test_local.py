"""Where a control plane on one machine keeps its things, and what it finds there when it is started again."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from muster import errors, files
from muster.backends.local import processes
from muster.clock import SystemClock
from muster.daemon import local
from muster.daemon.local import LocalSite
from muster.daemon.options import Options, check, read
from muster.ports import Write
from muster.types.event import Event
from muster.world.service import Coordinator

BOUND_S = 20.0


def at_site(home: Path, test: Callable[[LocalSite], Awaitable[None]], **options: int) -> None:
    async def run() -> None:
        site = LocalSite(Options(home, **options), SystemClock())  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(BOUND_S):
                await test(site)
        finally:
            await site.close()

    asyncio.run(run())


def test_the_coordinator_listens_where_it_did_and_elsewhere_if_that_is_taken(tmp_path: Path) -> None:
    told = tmp_path / "coordinator.addr"

    async def listen(site: LocalSite) -> None:
        coordinator = Coordinator()
        await site.listen(coordinator)
        await coordinator.stop()

    at_site(tmp_path, listen)
    first = told.read_text()
    at_site(tmp_path, listen)
    assert told.read_text() == first
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", int(first.rpartition(":")[2])))
        taken.listen()
        at_site(tmp_path, listen)
        assert told.read_text() != first
    told.write_text("what is this")
    at_site(tmp_path, listen)
    assert told.read_text().startswith("127.0.0.1:")


def test_the_keys_of_the_mesh_are_served_where_they_were(tmp_path: Path) -> None:
    async def keys(site: LocalSite) -> None:
        await site.keys()

    at_site(tmp_path, keys)
    first = (tmp_path / "mesh.addr").read_text()
    at_site(tmp_path, keys)
    assert (tmp_path / "mesh.addr").read_text() == first
    (tmp_path / "mesh.addr").write_text("\n")
    at_site(tmp_path, keys)
    assert (tmp_path / "mesh.addr").read_text().startswith("127.0.0.1:")


@pytest.mark.parametrize("there", [False, True])
def test_a_database_that_is_missing_or_empty_is_not_served_while_workers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(processes, "agents", lambda _: [("uid", f"demo-{n}") for n in range(10)])
    if there:
        (tmp_path / "muster.db").touch()

    async def refused(site: LocalSite) -> None:
        with pytest.raises(errors.MusterError, match=r"demo-0, .*demo-7 and 2 more.*is missing or empty.*--forget"):
            await site.open()

    at_site(tmp_path, refused)
    assert (tmp_path / "muster.db").exists() == there, "nothing may stand in the way of the right file"


def test_workers_can_be_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "agents", lambda _: [("uid", "demo-0")])

    async def opened(site: LocalSite) -> None:
        await (await site.open()).close()

    at_site(tmp_path, opened, forget=True)
    assert (tmp_path / "muster.db").stat().st_size

    async def refused(site: LocalSite) -> None:
        with pytest.raises(errors.MusterError, match=r"workers run here \(demo-0\), but .* does not know them"):
            await site.open()

    at_site(tmp_path, refused)


def test_a_file_is_replaced_at_once_and_is_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    path.write_text("old")
    with path.open() as reader:
        files.write_private(path, "new")
        assert reader.read() == "old", "whoever reads has one or the other"
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_the_journal_is_kept_as_small_as_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "FOREIGN_EDITS_EVERY_S", 0.01)

    async def maintain(site: LocalSite) -> None:
        store = await site.open()
        one = Event("RoundReleased", namespace="default", training="demo", uid="u")
        await store.write(Write(events=[one] * 500))
        task = asyncio.create_task(site.maintain())
        while len(found := await store.events()) > 100:
            await asyncio.sleep(0.01)
        task.cancel()
        assert found[0].message.startswith("401 older entries were dropped")
        await store.close()

    at_site(tmp_path, maintain, events_per_training=100)


@pytest.mark.parametrize("words", [["--events", "7"], ["--events-per-training", "-1"], ["--events", "many"]])
def test_a_size_of_the_journal_that_cannot_be_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(["--home", "/nowhere", *words])
    assert "must be a number from 100 on, or 0" in capsys.readouterr().err


def test_sizes_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_EVENTS", "5000")
    monkeypatch.setenv("MUSTER_LOG_BYTES", "200M")
    found = read(["--home", "/nowhere", "--events-per-training", "0"])
    assert (found.journal.all, found.journal.each, found.log_limit) == (5000, 0, 200_000_000)
    with pytest.raises(ValueError, match="--log-bytes"):
        check(Options(Path("/nowhere"), log_bytes="12"))
