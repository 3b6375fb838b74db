"""Each worker is a `muster-node` process in its own session with its own log directory.

A worker is written down before it is started and again when its pid is known, so that a control plane that dies in
between finds it: by pid and start time, or by the run and name on its command line. The journal's WorkerStarted and
WorkerExited are written here, in the same transactions, which is what usage is counted from.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from muster import errors, trimming
from muster.backends import orders, records
from muster.backends.local import gpus as devices
from muster.backends.local import (
    interpreters,
    killing,
    log_files,
    log_keeping,
    logs,
    presence,
    processes,
    render,
    storage,
)
from muster.background import Tasks
from muster.clock import boot_id
from muster.core.keeping import WorkerRecord
from muster.core.training.reconcile import USAGE_ERROR
from muster.ports import Clock, LogQuery, Store, Write
from muster.types.event import Event
from muster.types.training import Key, Training, Uid
from muster.types.worker import SHORTAGE, Capacity, Worker
from muster.types.world import HELD_VARIABLE

log = logging.getLogger("muster.local")

LOOK_S = 0.1
_WRONG_ORDER = (ValueError, FileNotFoundError, NotADirectoryError, PermissionError)
LAST_WORDS_S = 1.0
GROUP_LEFT_S = 10.0  # how long the last of a worker's processes may take to leave its memory group


class LocalBackend:
    patience = timedelta(seconds=90)  # a worker gives up by itself when it cannot join for a minute

    def __init__(
        self,
        home: Path,
        store: Store,
        clock: Clock,
        *,
        changed: Callable[[Uid], None] = lambda uid: None,
    ) -> None:
        self._home = home
        self._store = store
        self._clock = clock
        self.changed = changed
        self.mesh_endpoint = ""  # where workers ask how their mesh is
        self.log_bytes: int | None = None  # what is kept of each rank's logs, where its training names no size
        self._devices = devices.visible(os.environ)
        self._node = socket.gethostname()
        self._boot = boot_id()
        self._workers: dict[Uid, dict[str, Worker]] = {}
        self._keys: dict[Uid, Key] = {}
        self._handles: dict[tuple[Uid, str], processes.ProcessHandle] = {}
        self._children: dict[tuple[Uid, str], subprocess.Popen[bytes]] = {}
        self._presence = presence.Presence(home / "held", self._nobody_left)
        self._taken: dict[int, str] = {}
        self._tasks = Tasks()
        self._trimming: asyncio.Task[None] | None = None

    # What is there

    def workers(self, uid: Uid) -> Sequence[Worker]:
        return tuple(self._workers.get(uid, {}).values())

    def capacity(self) -> Capacity:
        return Capacity(len(self._devices), dict(self._taken))

    def alive(self) -> int:
        return len(self._handles)

    def plan(self, training: Training) -> Mapping[str, Any]:
        each = training.spec.resources.gpus
        shown = self._order(orders.shown(training), f"{training.metadata.name}-0", tuple(range(each)), "***")
        return {
            "workers": training.spec.world_size.target + training.spec.spares,
            "command": list(shown.argv),
            "workingDir": shown.cwd,
            "gpusPerWorker": each,
            "gpusHere": len(self._devices),
            "logDir": str(shown.log_dir),
        }

    # Adoption

    async def adopt(self, last_alive: datetime | None) -> int:
        """Take over workers that a control plane before us started; returns how many still run."""
        found = 0
        for kept in records.oldest_first(self._store):
            worker, key = records.read(kept)
            worker = replace(worker, gpus=self._numbers(kept))
            self._keys[worker.uid] = key
            # A pipe tells nothing of processes on another machine.
            cleared = kept.boot == self._boot and self._presence.find(worker.uid, worker.name)
            self._workers.setdefault(worker.uid, {})[worker.name] = worker = replace(worker, cleared=cleared)
            if not worker.alive:
                continue
            handle = self._find(worker, kept)
            if handle is None:
                at = last_alive if last_alive is not None and last_alive > worker.started_at else worker.started_at
                await self._ended(worker.uid, worker.name, at, None, "it was gone when the control plane came back")
                continue
            found += 1
            self._watch(replace(worker, pid=handle.pid), handle)
            if not worker.pid:
                await self._note(self._workers[worker.uid][worker.name])
        return found

    def _numbers(self, kept: WorkerRecord) -> tuple[int, ...]:
        """The places of its GPUs among those that there are now: what the control plane sees may be other ones."""
        if kept.devices:
            return tuple(self._devices.index(one) for one in kept.devices if one in self._devices)
        first = len(devices.pooled(os.environ))  # which trainings could not have
        return tuple(index + first for index in kept.gpus)

    def _find(self, worker: Worker, kept: WorkerRecord) -> processes.ProcessHandle | None:
        pid, ticks = worker.pid, kept.ticks
        if not pid:
            pid, ticks = processes.find("--run-id", worker.uid, "--name", worker.name) or 0, None
        if not pid or (ticks is not None and kept.boot != self._boot):
            return None
        try:
            return processes.ProcessHandle(pid, ticks)
        except (ProcessLookupError, PermissionError):
            return None

    # Starting

    async def start(self, training: Training, name: str, gpus: tuple[int, ...], token: str) -> Worker:
        worker = Worker(name, training.uid, self._node, self._clock.steady(), gpus)
        self._keys[training.uid] = training.key
        self._workers.setdefault(training.uid, {})[name] = worker
        for index in gpus:
            self._taken[index] = name
        shown = f" with GPUs {', '.join(self._devices[index] for index in gpus)}" if gpus else ""
        begun = records.started(worker, training.key, self._clock, shown=shown)
        try:
            await self._note(worker, begun, durable=True)
        except (errors.MusterError, asyncio.CancelledError):
            self._release(worker)
            del self._workers[training.uid][name]
            raise
        try:
            await interpreters.check(training.spec.interpreter)
            child = self._spawn(training, worker, token)
        except (OSError, ValueError) as error:
            why = f"cannot be started: {error}"
            code = USAGE_ERROR if isinstance(error, _WRONG_ORDER) else SHORTAGE
            return await self._ended(worker.uid, worker.name, self._clock.steady(), code, why, last_words=why)
        self._children[(training.uid, name)] = child
        worker = self._watch(replace(worker, pid=child.pid), processes.ProcessHandle(child.pid, None))
        await self._note(worker)
        return worker

    def _order(self, training: Training, name: str, gpus: tuple[int, ...], token: str) -> render.Order:
        known = tuple(self._devices[index] for index in gpus if index < len(self._devices))
        return render.order(
            training,
            name,
            gpus=known if self._devices else None,
            token=token,
            coordinator_file=self._home / "coordinator.addr",
            logs=self._home / "logs",
            inherited=os.environ,
            mesh_endpoint=self.mesh_endpoint,
            log_bytes=self.log_bytes,
            packages=self._home / "packages",
            work=self._home / "work",
            cache=self._home / "cache",
            domain=os.environ.get("MUSTER_DOMAIN") or self._node,
            storage=storage.folders(self._home, training),
        )

    def _spawn(self, training: Training, worker: Worker, token: str) -> subprocess.Popen[bytes]:
        order = self._order(training, worker.name, worker.gpus, token)
        if not os.path.isdir(order.cwd):
            raise ValueError(f"its working directory {order.cwd} does not exist")
        storage.provide(self._home, training)
        order.log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if order.memory_bytes is not None:
            group = processes.MemoryGroup(f"{worker.uid}-{worker.name}")
            if group.limit(order.memory_bytes):
                order = replace(order, argv=group.entering(order.argv))
            else:
                log.warning("%s: no memory limit can be set on this machine", worker.name)
        return self._spawn_holding(worker, order)

    def _spawn_holding(self, worker: Worker, order: render.Order) -> subprocess.Popen[bytes]:
        """With its end of the pipe that tells when nothing of it is left."""
        held = self._presence.begin(worker.uid, worker.name)
        env, hand_on = ({**order.env, HELD_VARIABLE: str(held)}, (held,)) if held is not None else (order.env, ())
        try:
            return processes.spawn(order.argv, env, order.cwd, order.log_dir / "worker.log", hand_on)
        finally:
            for end in hand_on:
                os.close(end)

    # Ending

    async def stop(self, uid: Uid, name: str, *, why: str, kill: bool = False) -> None:
        handle = self._handles.get((uid, name))
        worker = self._workers.get(uid, {}).get(name)
        if handle is None or worker is None or (worker.stopping and not kill):
            return
        self._workers[uid][name] = replace(worker, stopping=True, why_ended=why)
        handle.signal(signal.SIGKILL if kill else signal.SIGTERM)

    async def kill(self, training: Training, worker: str, rank: int | None) -> int:
        handle = self._handles.get((training.uid, worker))
        return 0 if handle is None else await asyncio.to_thread(killing.kill, handle.pid, rank)

    def _watch(self, worker: Worker, handle: processes.ProcessHandle) -> Worker:
        """Be told when it ends, whoever its parent is."""
        self._workers[worker.uid][worker.name] = worker
        self._handles[(worker.uid, worker.name)] = handle
        for index in worker.gpus:
            self._taken[index] = worker.name
        loop = asyncio.get_running_loop()
        loop.add_reader(handle.fd, self._gone, worker.uid, worker.name)
        return worker

    def _gone(self, uid: Uid, name: str) -> None:
        handle = self._handles.pop((uid, name))
        asyncio.get_running_loop().remove_reader(handle.fd)
        handle.close()
        child = self._children.pop((uid, name), None)
        code = child.wait() if child is not None else None
        worker = self._workers[uid][name]
        why = worker.why_ended or (f"exit code {code}" if code is not None else "it ended")
        self._tasks.start(self._end(uid, name, code, why))

    def _nobody_left(self, uid: Uid, name: str) -> None:
        """Of that worker runs nothing any more, neither a rank nor what one forked."""
        if (worker := self._workers.get(uid, {}).get(name)) is not None:
            self._workers[uid][name] = replace(worker, cleared=True)
            if not worker.alive:
                self.changed(uid)

    async def _remove_group(self, worker: Worker) -> None:
        """Its guard may still be in it for a moment."""
        group = processes.MemoryGroup(f"{worker.uid}-{worker.name}")
        until = self._clock.monotonic() + GROUP_LEFT_S
        while not group.remove() and self._clock.monotonic() < until:
            await asyncio.sleep(LOOK_S)

    async def _end(self, uid: Uid, name: str, code: int | None, why: str) -> None:
        words = "" if code in (0, None) else await self._last_words(self._workers[uid][name])
        try:
            await self._ended(uid, name, self._clock.steady(), code, why, last_words=words)
        finally:
            self.changed(uid)

    async def _ended(
        self, uid: Uid, name: str, at: datetime, code: int | None, why: str, *, last_words: str = ""
    ) -> Worker:
        worker = self._workers[uid][name]
        over = replace(worker, ended_at=at, exit_code=code, why_ended=why, last_words=last_words)
        self._workers[uid][name] = over
        self._release(worker)
        self._tasks.start(self._remove_group(worker))
        event = records.exited(over, self._keys[worker.uid], self._clock, self._store)
        await self._note(over, event)
        return over

    def _release(self, worker: Worker) -> None:
        for index in worker.gpus:
            if self._taken.get(index) == worker.name:
                del self._taken[index]

    async def _last_words(self, worker: Worker) -> str:
        """A disk that does not answer must not keep an end from being told."""
        root = self._home / "logs" / worker.uid
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                said = await asyncio.to_thread(log_files.last_words, root, worker.name, records.LAST_WORDS)
        except TimeoutError:
            return ""
        return records.last_words(said.decode(errors="replace"))

    # Writing down

    async def _note(self, worker: Worker, *events: Event, durable: bool = False) -> None:
        key, ticks = self._keys[worker.uid], processes.start_ticks(worker.pid) if worker.pid and worker.alive else None
        named = tuple(self._devices[index] for index in worker.gpus if index < len(self._devices))
        process = {"ticks": ticks, "boot": self._boot, "devices": named}
        await records.write(self._store, worker, key, *events, durable=durable, **process)

    async def forget(self, uid: Uid) -> None:
        gone = self._workers.pop(uid, {})
        key = self._keys.pop(uid, None)
        if key is not None and (stored := self._store.get(key)) is not None and stored.uid == uid:
            await asyncio.to_thread(storage.remove, self._home, key, stored.training.spec.storage)
        if gone:
            await self._store.write(Write(records=records.removals(uid, gone), lazy=True))
        self._presence.forget(uid)
        for folder in ("logs", "work"):
            await asyncio.to_thread(shutil.rmtree, self._home / folder / uid, ignore_errors=True)

    # Logs

    def logs(self, uid: Uid, query: LogQuery, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        return logs.read(self._home / "logs" / uid, query, ended)

    async def log_bytes_taken(self, uid: Uid) -> int | None:
        return await asyncio.to_thread(trimming.taken, self._home / "logs" / uid)

    def keep_logs_small(self) -> None:
        """From now on."""
        work = log_keeping.keep_small(self._home, list(self._workers), self._writing, self._log_limit)
        self._trimming = asyncio.get_running_loop().create_task(work)

    def _writing(self) -> set[Uid]:
        return {uid for uid, _ in self._handles}

    def _log_limit(self, uid: Uid) -> int:
        key = self._keys.get(uid)
        stored = self._store.get(key) if key is not None else None
        asked = stored.training.spec.log_bytes if stored is not None and stored.uid == uid else None
        usual = trimming.USUAL if self.log_bytes is None else self.log_bytes
        return usual if asked is None else asked

    async def close(self) -> None:
        """Let go of everything without ending anything."""
        if self._trimming is not None:
            self._trimming.cancel()
        loop = asyncio.get_running_loop()
        for handle in self._handles.values():
            loop.remove_reader(handle.fd)
            handle.close()
        self._handles.clear()
        self._presence.close()
        for child in self._children.values():
            child.returncode = 0  # they go on without us: nobody is to wait for them
        self._children.clear()
