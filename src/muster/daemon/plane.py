"""The control plane's parts, from the start to the stop: one event loop, and one beside it for the coordinator.

Everything that must outlive it is its site's to keep. Started again, it finds its workers and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from muster import __version__, descriptors, errors, mounts
from muster.backends.local import gpus
from muster.background import Tasks
from muster.clock import SystemClock
from muster.control.curves import CurveKeeper
from muster.control.loop import ALIVE_KEY, ALIVE_KIND, RUN_KIND, Loop
from muster.control.packages import PackageTidier
from muster.control.publish import Publisher
from muster.core import keeping
from muster.core.training.metering import Rates, read_rates
from muster.core.training.pacing import most_at_once
from muster.core.training.reconcile import settings_of
from muster.core.training.status import in_effect
from muster.daemon import options as told
from muster.daemon.direction import Direction, Listens
from muster.daemon.local import LocalSite
from muster.daemon.options import Options
from muster.daemon.rounds import TrainingRounds
from muster.files import own_folder, place, private_folder, read_text, write_private
from muster.home_lock import HomeLock
from muster.ports import Backend, Clock, Filter, Keys, Packages, Store
from muster.sdk import launch_record
from muster.sdk.home import forget_elsewhere, mark_stopped, process_of
from muster.types.codec import Invalid, show_time
from muster.types.frames import MetricsFrame
from muster.types.run_event import Kind, RunEvent
from muster.types.training import TERMINAL, Uid
from muster.world import wire
from muster.world.service import collect_seldom

if TYPE_CHECKING:
    import uvicorn

    from muster.sharing.service import PoolService

log = logging.getLogger("muster.daemon")

DEFAULT_POOL = "default"
HOME_CHECK_S = 1.0  # how often the home is looked for at its path
REPLACED = 75  # another control plane acts: start again, and stand by
SWITCH_S = 0.0005  # the coordinator's thread waits no longer than this for a busy API, each time it is woken
DRAIN_S = 1.0  # how long open requests may take to end at a stop


class SiteBackend(Backend, Protocol):
    """A backend, as whoever starts and stops it sees it."""

    changed: Callable[[Uid], None]

    async def close(self) -> None: ...


class Site(Protocol):
    """Where a control plane lives: who keeps its objects, who runs its workers, and how those reach it.

    It is asked in this order.
    """

    name: str  # of its backend
    alive_every_s: float | None  # how often word is left of being alive
    step_writes_per_s: float  # how often steps alone are written, over all trainings
    curve_bytes_per_s: float  # of curves that are written, over all trainings
    lossy: bool  # a lazy write may be lost with the machine

    async def open(self) -> Store: ...

    async def keys(self) -> Keys: ...

    async def backend(self) -> SiteBackend: ...

    async def packages(self) -> Packages:
        """Where code that is sent is kept."""

    async def adopt(self) -> int:
        """Take over workers that a control plane before this one started; how many still run."""

    async def listen(self, coordinator: Listens) -> None: ...

    def token(self) -> str | None:
        """The API's first user's, where it is not for us to make one."""

    async def serving(self, port: int) -> None:
        """The API can be reached."""

    async def maintain(self) -> str:
        """What has to be done all the time. Returns why this control plane must end, if it must."""

    async def close(self) -> None: ...


def site_of(options: Options, clock: Clock) -> Site:
    if options.backend == "local":
        return LocalSite(options, clock)
    from muster.daemon.kube import KubeSite

    return KubeSite(options, clock)


class ControlPlane:
    """All parts of one process. `start` returns when it serves, `stop` when everything is stored."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._home = options.home
        self._clock = SystemClock()
        self._started_at = self._clock.now()
        self._tasks = Tasks()
        self._http: uvicorn.Server | None = None
        self._serving: asyncio.Task[Any] | None = None
        self._pools: dict[str, PoolService] = {}
        self._pooled: dict[str, int] = {}
        self._false_alarms = 0
        self.url = ""

    async def start(self) -> str:
        self._site = site = site_of(self._options, self._clock)
        self._store = store = await site.open()
        self._clock.resume(keeping.last_alive(store.record(ALIVE_KIND, ALIVE_KEY)), moves=not site.lossy)
        self._direction = Direction(store, self)
        worlds = self._direction.worlds
        publisher = Publisher(store, await site.keys())
        self._backend = await site.backend()
        backends = {site.name: self._backend}
        self._loop = Loop(
            store,
            backends,
            worlds,
            self._clock,
            publisher=publisher,
            delay_s=self._options.reconcile_delay_s,
            alive_every_s=site.alive_every_s,
            step_writes_per_s=site.step_writes_per_s,
            most_starts={site.name: most_at_once(len(os.sched_getaffinity(0)))} if site.name == "local" else None,
        )
        self._curves = CurveKeeper(store, worlds, self._clock, bytes_per_s=site.curve_bytes_per_s)
        self._packages = await site.packages()
        adopted = await site.adopt()
        self._backend.changed = self._workers_changed
        for stored in store.page(Filter()).items:
            # A worker that comes back before its run is known here would be sent away.
            known = stored.phase in TERMINAL or store.record(RUN_KIND, stored.uid) is not None
            if not known and any(worker.alive for worker in self._backend.workers(stored.uid)):
                spec = in_effect(stored.training)
                worlds.open(stored.uid, settings_of(spec), spec.world_size.target)
        await site.listen(self._direction)
        await self._start_pools(os.environ, TrainingRounds(store, worlds, backends, self._loop.key_of))
        self._loop.start()
        self._curves.start()
        self._tidier = PackageTidier(store, self._packages, self._clock)
        self._tidier.start()
        store.subscribe(lambda change: self._training_changed(change.stored.uid))
        await site.serving(await self._start_http(backends))
        log.info("serving on %s, %d workers adopted", self.url, adopted)
        return self.url

    async def until_replaced(self) -> str:
        """Go on until this control plane must end; says why."""
        return await self._site.maintain()

    async def _start_pools(self, env: Mapping[str, str], rounds: TrainingRounds) -> None:
        """All GPUs of this machine, for trainings and pipelines; of a cluster as many as were given to us."""
        local = self._site.name == "local"
        counted = () if local else self._granted(gpus.counted(env))
        devices = gpus.visible(env) if local else counted or gpus.pooled(env)
        if gpus.pooled(env):
            more = f"the pool has {len(devices)} GPUs" if local or counted else "the pool has only these"
            log.warning("MUSTER_POOL_GPUS is understood for the last time: %s", more)
        if not devices:
            return
        from muster.sharing import families
        from muster.sharing.journal import boot_id
        from muster.sharing.service import PoolService
        from muster.sharing.store_journal import StoreJournal
        from muster.types.sharing import Pool

        os.environ.pop(families.MARK, None)  # a pipeline may have started this process, which is not of its family
        pool = Pool(len(devices), told.gpus_per_node(env, len(devices)))
        old = self._home / "pools" / DEFAULT_POOL / "journal"
        journal = StoreJournal(self._store, DEFAULT_POOL, boot=boot_id() if self._site.lossy else "", file_of_0_1=old)
        service = PoolService(
            DEFAULT_POOL,
            pool,
            journal,
            devices=devices,
            rounds=rounds,
            workers=self._workers_by_gpu,
            metered=lambda: self._clock.steady().timestamp(),
        )
        await service.start()
        self._pools[DEFAULT_POOL] = service
        if local or counted:
            self._loop.use_pool(self._site.name, service.scheduler.trainings, counted=not local)
            self._pooled[self._site.name] = pool.gpus

    def _granted(self, counted: tuple[str, ...]) -> tuple[str, ...]:
        """What the cluster has granted to workers that run is the pool's, also if that is more than was said."""
        uids = [one.uid for one in self._store.page(Filter()).items if one.phase not in TERMINAL]
        used = sum(len(worker.gpus) for uid in uids for worker in self._backend.workers(uid) if worker.alive)
        if not counted or used <= len(counted):
            return counted
        log.warning("workers have %d GPUs, MUSTER_GPUS says %d: the pool has those that they have", used, len(counted))
        return tuple(map(str, range(used)))

    def _workers_by_gpu(self, training: str) -> dict[int, str]:
        """Of its workers that live."""
        there = self._loop.workers(Uid(training), self._site.name)
        return {gpu: worker.name for worker in there if worker.alive for gpu in worker.gpus}

    async def _start_http(self, backends: Mapping[str, Backend]) -> int:
        # The web framework is imported after the coordinator listens: workers need not wait for it.
        import uvicorn

        from muster.server.app import build
        from muster.server.audit import Audit, AuditSize
        from muster.server.auth import Tokens, ensure_embedded
        from muster.server.protocol import Protocol
        from muster.server.quotas import Quotas
        from muster.server.sealing import PageSeal
        from muster.server.services import Services
        from muster.server.serving import ApiServer

        token = ensure_embedded(self._home, self._site.token())
        services = Services(
            store=self._store,
            backends=backends,
            tokens=Tokens(self._home),
            clock=self._clock,
            version=__version__,
            started_at=self._started_at,
            gauges=lambda: {
                "muster_reconciles_total": self._loop.handled,
                "muster_false_alarms_total": self._false_alarms,
            },
            rates=_rates(self._home / "rates.json"),
            quotas=Quotas(self._home / "quotas.json"),
            audit=Audit(self._home, AuditSize.told(os.environ), echo=self._site.name == "kube"),
            seal=PageSeal(token.encode()),  # the same after a restart, and for all replicas
            pools=self._pools,
            pooled=self._pooled,
            packages=self._packages,
            incoming=_emptied(self._home / "incoming"),
            measured=self._curves,
            place=place() if self._site.name == "local" else "",
        )
        options = self._options
        listener = _listen(options.listen, self._home / "server.json")
        config = uvicorn.Config(
            build(services),
            http=Protocol,
            ws="none",
            log_level="error",  # what strangers send is not worth a line each
            access_log=False,
            lifespan="off",
            ssl_certfile=str(options.tls_cert) if options.tls_cert else None,
            ssl_keyfile=str(options.tls_key) if options.tls_key else None,
            timeout_graceful_shutdown=int(DRAIN_S),
            server_header=False,
        )
        self._http = ApiServer(config)
        self._serving = self._tasks.start(self._http.serve(sockets=[listener]))
        while not self._http.started:
            await asyncio.sleep(0.001)
        host, port = listener.getsockname()[:2]
        reachable = "localhost" if host in ("0.0.0.0", "::") else host
        self.url = f"{'https' if options.tls_cert else 'http'}://{wire.show_address(reachable, port)}"
        shown: dict[str, Any] = {"pid": os.getpid(), "url": self.url, "version": __version__}
        shown["startedAt"] = show_time(self._started_at)
        shown["process"] = process_of(os.getpid())  # whoever has this pid later is not us
        shown["host"] = socket.gethostname()  # for the users of a home that several machines share
        if options.tls_cert:
            shown["ca"] = str(options.tls_cert.absolute())  # clients on this machine need not be told what to trust
        write_private(self._home / "server.json", json.dumps(shown) + "\n")
        if self._site.name == "local":
            self._record_launch()
        mark_stopped(self._home, False)
        return int(port)

    def _record_launch(self) -> None:
        """Let agents start this control plane again; one in the foreground has a supervisor that does."""
        launch_record.remove(self._home)
        if self._options.ready_fd is not None:
            try:
                launch_record.write(self._home)
            except OSError as error:
                log.warning("no agent can start this control plane again: %s", error)

    async def stop(self) -> None:
        """End everything but the workers. Whoever asked for it does not want it to come back by itself."""
        launch_record.remove(self._home)
        if self._http is not None:
            self._http.should_exit = True
        for pool in self._pools.values():
            await pool.stop()
        await self._loop.stop()
        await self._curves.stop()
        await self._tidier.stop()
        await self._backend.close()
        await self._direction.stop()
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=DRAIN_S + 1.0)
        self._tasks.cancel()
        await self._tasks.finish()
        await self._store.close()
        await self._site.close()

    # What the coordinator and the backend tell

    def run_changed(self, uid: Uid) -> None:
        self._loop.run_changed(uid)
        self._training_changed(uid)

    def run_told(self, uid: Uid, event: RunEvent) -> None:
        self._false_alarms += event.kind is Kind.FALSE_ALARM
        if (entry := event.journaled()) is not None:
            self._loop.note(uid, entry)

    def run_measured(self, uid: Uid, worker: str, told: MetricsFrame) -> None:
        self._curves.measured(uid, worker, told)

    def withdraw(self, uid: Uid) -> asyncio.Task[None] | None:
        return self._loop.withdraw(uid)

    def _workers_changed(self, uid: Uid) -> None:
        self._loop.workers_changed(uid)
        self._training_changed(uid)

    def _training_changed(self, uid: Uid) -> None:
        """What a pipeline held that ran as a rank of it may be free now."""
        for pool in self._pools.values():
            pool.tenants.training_changed(uid)


def _emptied(folder: Path) -> Path:
    """Of what was coming when the control plane before this one ended."""
    private_folder(folder)
    for left in folder.iterdir():
        with contextlib.suppress(OSError):
            left.unlink()
    return folder


def _rates(path: Path) -> Rates | None:
    """What usage costs, if somebody has written it down."""
    try:
        return read_rates(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, Invalid) as error:
        log.warning("%s cannot be used, usage has no cost: %s", path, error)
        return None


def _listen(wanted: str | None, known: Path) -> socket.socket:
    """A socket on the address asked for; without one on that of the last time, or any other if it is taken."""
    if wanted is not None:
        return _bound(*wire.parse_address(wanted))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        last = urlsplit(json.loads(read_text(known))["url"])
        if last.hostname and last.port and wire.is_loopback(last.hostname):
            return _bound(last.hostname, last.port)
    return _bound("127.0.0.1", 0)


def _bound(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


async def _serve(options: Options, ready: Callable[[str], None], lock: HomeLock) -> int:
    """Until told to stop, or replaced by another control plane; returns an exit code."""
    loop = asyncio.get_running_loop()
    stopped = loop.create_future()
    plane = ControlPlane(options)
    starting = loop.create_task(plane.start())

    def stop() -> None:
        if not starting.done():
            starting.cancel()  # it stands by, or waits for somebody who does not answer: nothing is begun
        if not stopped.done():
            stopped.set_result("")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        url = await starting
        collect_seldom()  # every training that was stored: on a busy machine to look at them took 1.5 s
        ready(url)
    except asyncio.CancelledError:
        return 0
    reasons = {loop.create_task(plane.until_replaced()), loop.create_task(_until_home_is_lost(options.home, lock))}
    ended, _ = await asyncio.wait({stopped, *reasons}, return_when=asyncio.FIRST_COMPLETED)
    for reason in reasons:
        if reason in ended:
            log.error("this control plane ends: %s", reason.result())
            os._exit(REPLACED)  # nothing of what it knows may be written any more
        reason.cancel()
    await plane.stop()
    return 0


async def _until_home_is_lost(home: Path, lock: HomeLock) -> str:
    """Wait until the home has another path, or its lock is gone; return the reason."""
    while await asyncio.to_thread(lock.is_ours):
        await asyncio.sleep(HOME_CHECK_S)
    return f"its home {home}, or the lock in it, was moved or removed; the next start adopts trainings that run"


def run(options: Options) -> int:
    """Serve until told to stop; returns an exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells of every request
    if missing := [name for name in ("starlette", "uvicorn", "httptools") if importlib.util.find_spec(name) is None]:
        return _refuse(f"{', '.join(missing)} is not installed: {errors.how_to_install('server')}")
    try:
        told.check(options)
        if options.backend == "local":
            own_folder(options.home)  # who writes tokens.json there is an admin
        else:  # a Pod's own folder, which is the group's as Kubernetes makes it
            options.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = HomeLock(options.home)
        forget_elsewhere(options.home)
    except BlockingIOError:
        return _refuse(f"another control plane serves {options.home}; see muster server status")
    except (OSError, ValueError) as error:
        return _refuse(str(error))

    if kind := mounts.network_type(options.home):
        log.warning(
            "%s is on a network file system (%s): the database uses a rollback journal there", options.home, kind
        )
    sys.setswitchinterval(SWITCH_S)
    before, now = descriptors.raise_limit()
    if now != before:
        log.info("this process may open %d files instead of %d; its workers may open %d", now, before, before)

    def ready(url: str) -> None:
        if options.ready_fd is None:
            print(f"muster serves on {url}", flush=True)
            return
        os.write(options.ready_fd, f"{url}\n".encode())
        os.close(options.ready_fd)

    try:
        return asyncio.run(_serve(options, ready, lock))
    except OSError as error:
        what = error.filename or f"cannot serve on {options.listen or '127.0.0.1'}"
        return _refuse(f"{what}: {error.strerror or error}")
    except errors.MusterError as error:
        return _refuse(f"{error.message}{f' ({error.hint})' if error.hint else ''}")


def _warn_of_network(home: Path) -> None:
    if kind := mounts.network_type(home):
        log.warning("%s is on a network file system (%s): the database has a rollback journal, no WAL", home, kind)


def _refuse(message: str) -> int:
    print(f"muster server: {message}", file=sys.stderr)
    return 1
