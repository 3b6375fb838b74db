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
from muster.daemon.local import LocalSite
from muster.daemon.options import Options
from muster.world.service import Coordinator

BOUND_S = 20.0


def at_site(home: Path, test: Callable[[LocalSite], Awaitable[None]], **options: bool) -> None:
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
