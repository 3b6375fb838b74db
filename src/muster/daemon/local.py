"""A control plane on one machine: objects in a file under its home, workers as processes beside it.

Started again, it listens on the same addresses where they are free; workers read where it is from `coordinator.addr`
whenever they connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from muster import errors
from muster.backends import records
from muster.backends.local import processes
from muster.backends.local.backend import LocalBackend
from muster.control.loop import ALIVE_EVERY_S, ALIVE_KEY, ALIVE_KIND
from muster.daemon.direction import Listens
from muster.daemon.options import Options, etcd_address
from muster.files import write_private
from muster.mesh.serving import KeyServer
from muster.ports import Clock, Filter, Keys, Store
from muster.store.sqlite import SqliteStore
from muster.world import wire

log = logging.getLogger("muster.daemon")

FOREIGN_EDITS_EVERY_S = 1.0  # how often the database is checked for edits that went around the API


class LocalSite:
    name = "local"
    alive_every_s: float | None = ALIVE_EVERY_S
    lossy = True
    step_writes_per_s = 200.0

    def __init__(self, options: Options, clock: Clock) -> None:
        self._options = options
        self._home = options.home
        self._clock = clock
        self._keys: KeyServer | None = None
        self._mesh_endpoint = ""

    async def open(self) -> SqliteStore:
        path = self._home / "muster.db"
        living = processes.agents(self._home / "coordinator.addr")
        if living and not self._options.forget and not (path.exists() and path.stat().st_size):
            raise _lost(path, living)  # before a new one is made, which would stand in the way of the old one
        self._store = SqliteStore.open(path, synchronous=self._options.synchronous)
        strangers = unknown(living, self._store)
        if strangers and not self._options.forget:
            await self._store.close()
            raise _lost(path, strangers)
        if strangers:
            log.warning("given up: %s", ", ".join(name for _, name in strangers))
        return self._store

    async def keys(self) -> Keys:
        """Where workers learn how their mesh is: in an etcd, or here on the port of the last time, if it is free."""
        if self._options.etcd is not None:
            from muster.mesh.etcd import EtcdKeys

            self._mesh_endpoint = etcd_address(self._options.etcd)
            return EtcdKeys(f"http://{self._mesh_endpoint}")
        path = self._home / "mesh.addr"
        try:
            _, port = wire.parse_address(path.read_text().split()[0])
            self._keys = KeyServer(port=port)
            address = await self._keys.start()
        except (OSError, ValueError, IndexError):
            self._keys = KeyServer()
            address = await self._keys.start()
        write_private(path, address + "\n")
        self._mesh_endpoint = address
        return self._keys.keys

    async def backend(self) -> LocalBackend:
        self._backend = LocalBackend(self._home, self._store, self._clock)
        self._backend.mesh_endpoint = self._mesh_endpoint
        return self._backend

    async def adopt(self) -> int:
        self._end_given_up()
        kept = self._store.record(ALIVE_KIND, ALIVE_KEY)
        return await self._backend.adopt(datetime.fromisoformat(str(kept["at"])) if kept else None)

    def _end_given_up(self) -> None:
        """Workers of no training believe nobody who cannot prove to know their run's token, and nobody can any more."""
        trainings = {stored.uid for stored in self._store.page(Filter()).items}
        for uid, name in processes.agents(self._home / "coordinator.addr"):
            pid = None if uid in trainings else processes.find("--run-id", uid, "--name", name)
            if pid is not None:
                log.warning("%s belongs to no training: told to leave", name)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    async def listen(self, coordinator: Listens) -> None:
        path = self._home / "coordinator.addr"
        try:
            host, port = wire.parse_address(path.read_text().split()[0])
        except (OSError, ValueError, IndexError):
            host, port = "127.0.0.1", 0
        try:
            address = await coordinator.start(host, port)
        except OSError as error:
            log.warning("the coordinator's old port %d is taken (%s): choosing another", port, error.strerror)
            address = await coordinator.start("127.0.0.1", 0)
        write_private(path, wire.show_address(*address) + "\n")

    def token(self) -> str | None:
        return None

    async def serving(self, port: int) -> None:
        pass

    async def maintain(self) -> str:
        """Take up what was edited around the API, for ever."""
        while True:
            await asyncio.sleep(FOREIGN_EDITS_EVERY_S)
            try:
                await self._store.refresh()
            except errors.Unavailable as error:
                log.warning("the database cannot be read: %s", error)

    async def close(self) -> None:
        if self._keys is not None:
            await self._keys.stop()


def unknown(living: Sequence[tuple[str, str]], store: Store) -> list[tuple[str, str]]:
    """Workers that run and that the store has never heard of: each is written down before it is started.

    One whose training is gone was left behind by somebody who removed that; unless there is no training at all.
    """
    trainings = {stored.uid for stored in store.page(Filter()).items}
    started = store.records(records.KIND)
    known = {uid for uid, name in living if f"{uid}/{name}" in started} if trainings else set()
    return [(uid, name) for uid, name in living if uid not in trainings | known]


def _lost(path: Path, living: Sequence[tuple[str, str]]) -> errors.MusterError:
    names = [name for _, name in living]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    what = "does not know them" if path.exists() and path.stat().st_size else "is missing or empty"
    return errors.MusterError(
        f"workers run here ({shown}), but {path} {what}: it was lost or replaced. They go on without a control plane. "
        "Put the right file back and type muster server start; or give them up, with what they "
        "have done since their last checkpoint: muster server start --forget"
    )
