"""The control plane as a process: store, coordinator, control loop, local backend and HTTP API on one event loop.

    python -m muster.daemon --home DIR

Everything that must outlive it is under its home. Started again, it serves on the same addresses where they are
free, finds its workers and goes on; workers read where it is from `coordinator.addr` whenever they connect.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from muster import __version__, errors
from muster.backends.local import gpus
from muster.backends.local.backend import LocalBackend
from muster.control.loop import ALIVE_KEY, ALIVE_KIND, RUN_KIND, TOKEN_KIND, Loop
from muster.control.publish import Publisher
from muster.coordinator import wire
from muster.coordinator.desk import Happening
from muster.coordinator.direct import DirectedWorlds
from muster.coordinator.service import Coordinator
from muster.core.metering import Rates, read_rates
from muster.core.reconcile import settings_of
from muster.mesh.serving import KeyServer
from muster.ports import Filter, Keys, Record, Write, insist
from muster.store.sqlite import SqliteStore
from muster.types.codec import Invalid, show_time
from muster.types.event import Event
from muster.types.training import TERMINAL, Uid
from muster.types.world import RunId

if TYPE_CHECKING:
    import uvicorn

    from muster.sharing.service import PoolService

log = logging.getLogger("muster.daemon")

FOREIGN_EDITS_EVERY_S = 1.0  # how often the database is checked for edits that went around the API
DEFAULT_POOL = "default"  # the pool of MUSTER_POOL_GPUS
ETCD_PORT = 2379
DRAIN_S = 1.0  # how long open requests may take to end at a stop

# What the coordinator tells of a run, as the journal calls it.
_STORIES = {
    "joined": ("WorkerJoined", "Normal"),
    "left": ("WorkerLeft", "Normal"),
    "lost": ("WorkerLost", "Warning"),
    "leaving": ("WorkerLeaving", "Normal"),
    "dismissed": ("WorkerDismissed", "Normal"),
    "parked": ("WorkerParked", "Warning"),
    "kept-out": ("WorkerKeptOut", "Warning"),
    "unfit": ("WorkerUnfit", "Warning"),
    "refused": ("WorkerRefused", "Warning"),
    "gone": ("RanksGone", "Normal"),
    "release": ("RoundReleased", "Normal"),
    "recall": ("RoundRecalled", "Normal"),
    "exit": ("RankFailed", "Warning"),
    "target": ("TargetChanged", "Normal"),
    "recovered": ("RoundRecovered", "Normal"),
    "mesh-converging": ("MeshConverging", "Normal"),
    "mesh-ready": ("MeshReady", "Normal"),
    "mesh-degraded": ("DegradedMesh", "Warning"),
}


class WallClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return monotonic()


@dataclass(frozen=True)
class Options:
    home: Path
    listen: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    ready_fd: int | None = None
    etcd: str | None = None
    reconcile_delay_s: float = 0.0
    synchronous: Literal["FULL", "NORMAL"] = "FULL"


class _KeptRuns:
    """The coordinator's records, in the store."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._writes: set[asyncio.Task[Any]] = set()

    def records(self) -> Mapping[RunId, dict[str, Any]]:
        return {RunId(uid): dict(kept) for uid, kept in self._store.records(RUN_KIND).items()}

    def save(self, run_id: RunId, record: dict[str, Any]) -> None:
        self._write(Record(RUN_KIND, run_id, record))

    def forget(self, run_id: RunId) -> None:
        self._write(Record(RUN_KIND, run_id, None))

    def _write(self, record: Record) -> None:
        task = asyncio.get_running_loop().create_task(insist(self._store, Write(records=(record,), lazy=True)))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def settle(self) -> None:
        await asyncio.gather(*self._writes, return_exceptions=True)


class ControlPlane:
    """All parts of one process. `start` returns when it serves, `stop` when everything is on disk."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._home = options.home
        self._clock = WallClock()
        self._started_at = self._clock.now()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._http: uvicorn.Server | None = None
        self._serving: asyncio.Task[Any] | None = None
        self._pools: dict[str, PoolService] = {}
        self._keys: KeyServer | None = None
        self.url = ""

    async def start(self) -> str:
        home, clock = self._home, self._clock
        self._store = store = SqliteStore.open(home / "muster.db", synchronous=self._options.synchronous)
        self._runs = _KeptRuns(store)
        self._backend = LocalBackend(home, store, clock)
        self._coordinator = Coordinator(state=self._runs, director=self, on_story=self._tell)
        worlds = DirectedWorlds(self._coordinator)
        backends = {"local": self._backend}
        publisher = Publisher(store, await self._start_keys())
        self._loop = Loop(store, backends, worlds, clock, publisher=publisher, delay_s=self._options.reconcile_delay_s)
        kept = store.record(ALIVE_KIND, ALIVE_KEY)
        adopted = await self._backend.adopt(datetime.fromisoformat(str(kept["at"])) if kept else None)
        self._backend.changed = self._loop.workers_changed
        for stored in store.page(Filter()).items:
            # A worker that comes back before its run is known here would be sent away.
            known = stored.phase in TERMINAL or store.record(RUN_KIND, stored.uid) is not None
            if not known and any(worker.alive for worker in self._backend.workers(stored.uid)):
                worlds.open(stored.uid, settings_of(stored.training.spec), stored.training.spec.world_size.target)
        await self._start_coordinator()
        self._loop.start()
        await self._start_pools(os.environ)
        await self._start_http(backends)
        self._keep(self._look_for_foreign_edits())
        log.info("serving on %s, %d workers adopted", self.url, adopted)
        return self.url

    async def _start_coordinator(self) -> None:
        path = self._home / "coordinator.addr"
        try:
            host, port = wire.parse_address(path.read_text().split()[0])
        except (OSError, ValueError, IndexError):
            host, port = "127.0.0.1", 0
        try:
            address = await self._coordinator.start(host, port)
        except OSError as error:
            log.warning("the coordinator's old port %d is taken (%s): choosing another", port, error.strerror)
            address = await self._coordinator.start("127.0.0.1", 0)
        _write_file(path, wire.show_address(*address) + "\n")

    async def _start_keys(self) -> Keys:
        """Where workers learn how their mesh is: in an etcd, or here on the port of the last time, if it is free."""
        if self._options.etcd is not None:
            from muster.mesh.etcd import EtcdKeys

            self._backend.mesh_endpoint = _etcd_address(self._options.etcd)
            return EtcdKeys(f"http://{self._backend.mesh_endpoint}")
        path = self._home / "mesh.addr"
        try:
            _, port = wire.parse_address(path.read_text().split()[0])
            self._keys = KeyServer(port=port)
            address = await self._keys.start()
        except (OSError, ValueError, IndexError):
            self._keys = KeyServer()
            address = await self._keys.start()
        _write_file(path, address + "\n")
        self._backend.mesh_endpoint = address
        return self._keys.keys

    async def _start_pools(self, env: Mapping[str, str]) -> None:
        """GPUs that several pipelines share, where the environment names some."""
        devices = gpus.pooled(env)
        if not devices:
            return
        from muster.sharing.service import PoolService
        from muster.types.sharing import Pool

        pool = Pool(len(devices), _gpus_per_node(env, len(devices)))
        journal = self._home / "pools" / DEFAULT_POOL / "journal"
        service = PoolService(DEFAULT_POOL, pool, journal, devices=devices)
        await service.start()
        self._pools[DEFAULT_POOL] = service

    async def _start_http(self, backends: Mapping[str, LocalBackend]) -> None:
        # The web framework is imported after the coordinator listens: workers need not wait for it.
        import uvicorn

        from muster.server.app import build
        from muster.server.auth import Tokens, ensure_embedded
        from muster.server.protocol import Protocol
        from muster.server.quotas import Quotas
        from muster.server.services import Services

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # signals are this process's business

        ensure_embedded(self._home)
        services = Services(
            store=self._store,
            backends=backends,
            tokens=Tokens(self._home),
            clock=self._clock,
            version=__version__,
            started_at=self._started_at,
            gauges=lambda: {"muster_reconciles_total": self._loop.handled},
            rates=_rates(self._home / "rates.json"),
            quotas=Quotas(self._home / "quotas.json"),
            pools=self._pools,
        )
        options = self._options
        listener = _listen(options.listen, self._home / "server.json")
        config = uvicorn.Config(
            build(services),
            http=Protocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
            backlog=4096,
            ssl_certfile=str(options.tls_cert) if options.tls_cert else None,
            ssl_keyfile=str(options.tls_key) if options.tls_key else None,
            timeout_graceful_shutdown=int(DRAIN_S),
            server_header=False,
        )
        self._http = Server(config)
        self._serving = self._keep(self._http.serve(sockets=[listener]))
        while not self._http.started:
            await asyncio.sleep(0.001)
        host, port = listener.getsockname()[:2]
        reachable = "localhost" if host in ("0.0.0.0", "::") else host
        self.url = f"{'https' if options.tls_cert else 'http'}://{wire.show_address(reachable, port)}"
        shown: dict[str, Any] = {"pid": os.getpid(), "url": self.url, "version": __version__}
        shown["startedAt"] = show_time(self._started_at)
        if options.tls_cert:
            shown["ca"] = str(options.tls_cert.absolute())  # clients on this machine need not be told what to trust
        _write_file(self._home / "server.json", json.dumps(shown) + "\n")

    async def stop(self) -> None:
        """End everything but the workers."""
        if self._http is not None:
            self._http.should_exit = True
        for pool in self._pools.values():
            await pool.stop()
        await self._loop.stop()
        self._backend.close()
        await self._coordinator.stop()
        if self._keys is not None:
            await self._keys.stop()
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=DRAIN_S + 1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runs.settle()
        await self._store.close()

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _look_for_foreign_edits(self) -> None:
        while True:
            await asyncio.sleep(FOREIGN_EDITS_EVERY_S)
            try:
                await self._store.refresh()
            except errors.Unavailable as error:
                log.warning("the database cannot be read: %s", error)

    # What the coordinator tells

    def token_of(self, run_id: RunId) -> str | None:
        kept = self._store.record(TOKEN_KIND, run_id)
        return str(kept["token"]) if kept else None

    def settled(self, run_id: RunId) -> None:
        self._loop.run_changed(Uid(run_id))

    def before_release(self, run_id: RunId) -> asyncio.Task[None] | None:
        return self._loop.withdraw(Uid(run_id))

    def _tell(self, run_id: RunId, line: Happening) -> None:
        if (shown := _STORIES.get(line.kind)) is not None:
            reason, kind = shown
            self._loop.story(Uid(run_id), Event(reason, line.text, kind, round=line.round))  # type: ignore[arg-type]


def _gpus_per_node(env: Mapping[str, str], count: int) -> int:
    told = env.get("MUSTER_POOL_GPUS_PER_NODE", "").strip() or str(count)
    if not told.isdigit() or not 1 <= int(told) <= count:
        raise ValueError(f"MUSTER_POOL_GPUS_PER_NODE must be a number from 1 to {count}, not {told!r}")
    return int(told)


def _etcd_address(url: str) -> str:
    """HOST:PORT of an etcd. Workers that wait for their mesh speak to it in clear and without a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
        plain = parts.scheme == "http" and parts.hostname and "@" not in parts.netloc and parts.path in ("", "/")
    except ValueError:  # a port that is none
        plain = False
    if not plain or parts.query or parts.fragment or port == 0:
        shown = f"…{url[url.rindex('@') :]}" if "@" in url else url  # without its password
        raise ValueError(f"--etcd {shown!r} is not http://HOST:PORT, which is how workers ask it")
    return wire.show_address(str(parts.hostname), port or ETCD_PORT)


def _rates(path: Path) -> Rates | None:
    """What usage costs, if somebody has written it down."""
    try:
        return read_rates(path.read_text())
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
        last = urlsplit(json.loads(known.read_text())["url"])
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


def _write_file(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    with open(draft, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
    os.replace(draft, path)


async def _serve(options: Options, ready: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    plane = ControlPlane(options)
    ready(await plane.start())
    await over.wait()
    await plane.stop()


def run(options: Options) -> int:
    """Serve until told to stop; returns an exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if missing := [name for name in ("fastapi", "uvicorn", "httptools") if importlib.util.find_spec(name) is None]:
        return _refuse(f"{', '.join(missing)} is not installed: pip install 'muster-train[server]'")
    try:
        _check(options)
        options.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(options.home / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return _refuse(f"another control plane serves {options.home}; see muster server status")

    def ready(url: str) -> None:
        if options.ready_fd is None:
            print(f"muster serves on {url}", flush=True)
            return
        os.write(options.ready_fd, f"{url}\n".encode())
        os.close(options.ready_fd)

    try:
        asyncio.run(_serve(options, ready))
    except OSError as error:
        return _refuse(f"cannot serve on {options.listen or '127.0.0.1'}: {error.strerror or error}")
    except errors.MusterError as error:
        return _refuse(f"{error.message}{f' ({error.hint})' if error.hint else ''}")
    return 0


def _check(options: Options) -> None:
    from muster.server.auth import check_listen

    if devices := gpus.pooled(os.environ):
        _gpus_per_node(os.environ, len(devices))
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ValueError("--tls-cert and --tls-key belong together: give both")
    for path in (options.tls_cert, options.tls_key):
        if path is not None and not os.access(path, os.R_OK):
            raise ValueError(f"{path} cannot be read")
    if options.etcd is not None:
        _etcd_address(options.etcd)
    if options.listen is not None:
        host, _ = wire.parse_address(options.listen)
        check_listen(host, tls=options.tls_cert is not None, insecure=options.insecure)


def _refuse(message: str) -> int:
    print(f"muster server: {message}", file=sys.stderr)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m muster.daemon", description="muster's control plane")
    parser.add_argument("--home", type=Path, required=True, help="where everything is kept")
    parser.add_argument("--listen", metavar="HOST:PORT", help="where the HTTP API listens (a loopback port)")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE")
    parser.add_argument("--tls-key", type=Path, metavar="FILE")
    parser.add_argument("--insecure", action="store_true", help="listen beyond loopback without TLS")
    parser.add_argument("--etcd", metavar="URL", help="keep the mesh's keys there (http://HOST:2379), not here")
    parser.add_argument("--ready-fd", type=int, help="write the URL there once it serves")
    parser.add_argument("--reconcile-delay-s", type=float, default=0.0, help="for tests: look at everything that late")
    parser.add_argument(
        "--synchronous", choices=["FULL", "NORMAL"], default="FULL", help="how a commit reaches the disk"
    )
    return run(Options(**vars(parser.parse_args())))


if __name__ == "__main__":
    sys.exit(main())
