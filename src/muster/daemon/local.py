"""A control plane on one machine: objects in a file under its home, workers as processes beside it.

Started again, it listens on the same addresses where they are free; workers read where it is from `coordinator.addr`
whenever they connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from datetime import timedelta

from muster import errors
from muster.backends import records
from muster.backends.local import gpus, processes
from muster.backends.local.backend import LocalBackend
from muster.clock import boot_id
from muster.control.loop import ALIVE_EVERY_S, ALIVE_KEY, ALIVE_KIND
from muster.core import home as rules
from muster.core import keeping
from muster.core.home import FileState, Found
from muster.daemon import home, output
from muster.daemon.direction import Listens
from muster.daemon.options import Options, etcd_address
from muster.files import read_text, write_private
from muster.mesh.serving import KeyServer
from muster.ports import Clock, Filter, Keys, Record, Write
from muster.store import room
from muster.store.packages import PackageFolder
from muster.store.reached import Reached
from muster.store.sqlite import SqliteStore
from muster.types.codec import to_wire
from muster.types.training import Uid
from muster.types.worker import Worker
from muster.world import wire

log = logging.getLogger("muster.daemon")

RESERVE = "reserve"
FOREIGN_EDITS_EVERY_S = 1.0  # how often the database is checked for edits that went around the API
JOURNAL_LOOKS = 60  # as many of these looks are between two at the size of the journal


class LocalSite:
    name = "local"
    alive_every_s: float | None = ALIVE_EVERY_S
    lossy = True
    step_writes_per_s = 200.0
    curve_bytes_per_s = float(1 << 20)

    def __init__(self, options: Options, clock: Clock) -> None:
        self._options = options
        self._home = options.home
        self._clock = clock
        self._keys: KeyServer | None = None
        self._mesh_endpoint = ""

    async def open(self) -> SqliteStore:
        processes.MemoryGroup.leave()
        room.give_up(self._home / RESERVE)  # what is written at a start needs room, too
        found = home.look(self._home) if self._options.forget else home.checked(self._home)
        if self._options.forget:
            self._forget(found)
        identity = home.identity_of(found)
        self._store = SqliteStore.open(
            self._home / home.DATABASE,
            synchronous=self._options.synchronous,
            home=identity,
            reached=Reached(self._home / home.REACHED, boot_id()),
        )
        home.settle(self._home, identity, found, forget=self._options.forget)
        await self._store.refresh()
        return self._store

    def _forget(self, found: Found) -> None:
        """Take what is there for all that there is. The database is kept beside as it was found."""
        if what := rules.loss(found):
            aside = home.set_aside(self._home, "forget", copy=found.kept.state is FileState.READABLE)
            kept = f"; what was there is kept in {aside}" if aside is not None else ""
            log.warning("accepted: %s%s", what, kept)
        if found.strangers:
            log.warning("given up: %s", ", ".join(name for _, name in found.strangers))

    async def keys(self) -> Keys:
        """Where workers learn how their mesh is: in an etcd, or here on the port of the last time, if it is free."""
        if self._options.etcd is not None:
            from muster.mesh.etcd import EtcdKeys

            self._mesh_endpoint = etcd_address(self._options.etcd)
            return EtcdKeys(f"http://{self._mesh_endpoint}")
        path = self._home / "mesh.addr"
        try:
            _, port = wire.parse_address(read_text(path).split()[0])
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
        self._backend.log_bytes = self._options.log_limit
        return self._backend

    async def packages(self) -> PackageFolder:
        return PackageFolder(self._home / "packages")

    async def adopt(self) -> int:
        self._end_given_up()
        await self._write_down_unwritten()
        kept = keeping.last_alive(self._store.record(ALIVE_KIND, ALIVE_KEY))
        found = await self._backend.adopt(kept.moment if kept is not None else None)
        self._backend.keep_logs_small()
        return found

    def _end_given_up(self) -> None:
        """Workers of no training believe nobody who cannot prove to know their run's token, and nobody can any more."""
        trainings = {stored.uid for stored in self._store.page(Filter()).items}
        for uid, name in processes.agents(self._home / "coordinator.addr"):
            pid = None if uid in trainings else processes.find("--run-id", uid, "--name", name)
            if pid is not None:
                log.warning("%s belongs to no training: told to leave", name)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    async def _write_down_unwritten(self) -> None:
        """Workers of trainings that we know, started after the copy of the database that was put back was made."""
        keys = {stored.uid: stored.key for stored in self._store.page(Filter()).items}
        written = self._store.records(records.KIND)
        for uid, name in processes.agents(self._home / "coordinator.addr"):
            key, pid = keys.get(Uid(uid)), processes.find("--run-id", uid, "--name", name)
            if key is None or pid is None or f"{uid}/{name}" in written:
                continue
            age = timedelta(seconds=processes.age_s(pid))
            shown = processes.environment(pid).get("CUDA_VISIBLE_DEVICES", "").split(",")
            held = tuple(index for index, device in enumerate(gpus.visible(os.environ)) if device in shown)
            worker = Worker(name, Uid(uid), socket.gethostname(), self._clock.steady() - age, held)
            log.warning("%s runs and was not written down: it is adopted", name)
            began = records.started(worker, key, self._clock)
            await records.write(self._store, worker, key, began, boot=boot_id())

    async def listen(self, coordinator: Listens) -> None:
        path = self._home / "coordinator.addr"
        try:
            host, port = wire.parse_address(read_text(path).split()[0])
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
        """Take up what was edited around the API, and keep the journal small, for ever."""
        looks = itertools.count()
        while True:
            await asyncio.sleep(FOREIGN_EDITS_EVERY_S)
            output.keep_short(self._home / "daemon.log")
            with contextlib.suppress(errors.Unavailable):  # the store has said so
                await self._look_after_it()
                if next(looks) % JOURNAL_LOOKS == 0:
                    await self._store.trim_events(self._options.journal, self._clock.steady())

    async def _look_after_it(self) -> None:
        await self._store.refresh()
        trouble = self._store.trouble
        if trouble is None:
            await asyncio.to_thread(room.make, self._home / RESERVE)
        elif trouble.stuck:  # an empty transaction does not tell whether anything can be written again
            alive = Record(ALIVE_KIND, ALIVE_KEY, to_wire(self._clock.mark()))
            await self._store.write(Write(records=(alive,), lazy=True))

    async def close(self) -> None:
        if self._keys is not None:
            await self._keys.stop()
