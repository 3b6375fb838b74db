"""A control plane in a cluster: objects in the Kubernetes API, workers as Pods, one of several replicas acting.

A replica that does not lead answers `/healthz` and nothing else. The one that leads writes its address into the
EndpointSlice of the Service, so that workers and clients find it under one name. What it needs under its home it gets
from the cluster: a new Pod starts from nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from typing import TYPE_CHECKING

from muster.daemon.kube_tokens import TokenSecret
from muster.daemon.options import API_PORT, Options, etcd_address, identity_of, worker_user
from muster.kube import leader_slice
from muster.kube.client import KubeApi
from muster.kube.lease import Leadership
from muster.mesh.serving import KeyServer
from muster.ports import Clock, Keys, until_answered
from muster.store.kube import KubeStore
from muster.store.kube_packages import KubePackages
from muster.world import wire

if TYPE_CHECKING:
    from muster.backends.kube.backend import KubeBackend
    from muster.daemon.direction import Listens

log = logging.getLogger("muster.daemon")

SERVICE = "muster"
ANY = "0.0.0.0"


class KubeSite:
    name = "kube"
    alive_every_s: float | None = 60.0  # that it lives the Lease says; this is for how much time has gone by
    lossy = False
    step_writes_per_s = 20.0  # what an API server can well bear beside everything else
    curve_bytes_per_s = float(2 << 10)

    def __init__(self, options: Options, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._lease_api = KubeApi.connect()
        self._namespace = options.namespace or self._lease_api.namespace or "default"
        self._identity = identity_of(options)
        self._leadership = Leadership(self._lease_api, self._namespace, self._identity)
        self._api = KubeApi.connect(guard=self._leadership.check)
        self._keys: KeyServer | None = None
        self._queueing: asyncio.Task[None] | None = None
        self._mesh_endpoint = ""
        self._tokens = TokenSecret(self._api, self._namespace, options.home)

    @property
    def _host(self) -> str:
        """Where workers find whoever leads."""
        return self._options.advertise or f"{SERVICE}.{self._namespace}.svc"

    def _api_url(self, port: int | None = None) -> str:
        """Where they find its API, which has their code."""
        _, asked = wire.parse_address(self._options.listen or f"{ANY}:{API_PORT}")
        scheme = "https" if self._options.tls_cert is not None else "http"
        return f"{scheme}://{wire.show_address(self._host, port or asked or API_PORT)}"

    async def open(self) -> KubeStore:
        """Stand by until this replica leads, then read everything."""
        async with _Health(self._options):
            await self._leadership.acquire()
        log.info("%s leads", self._identity)
        self._holding = asyncio.get_running_loop().create_task(self._leadership.hold())
        name = f"{self._identity}/{secrets.token_hex(4)}"  # another process under the same name is another writer
        self._store = await until_answered(
            "the cluster", lambda: KubeStore.open(self._api, self._namespace, name, clock=self._clock)
        )
        await until_answered("the cluster", self._tokens.read)
        self._following = asyncio.get_running_loop().create_task(self._tokens.follow())
        return self._store

    async def keys(self) -> Keys:
        if self._options.etcd is not None:
            from muster.mesh.etcd import EtcdKeys

            self._mesh_endpoint = etcd_address(self._options.etcd)
            return EtcdKeys(f"http://{self._mesh_endpoint}")
        # Workers read; only this process writes, so the token for writing is nobody's.
        self._keys = KeyServer(self._options.address or ANY, self._options.mesh_port, token=secrets.token_urlsafe(24))
        await self._keys.start()
        self._mesh_endpoint = wire.show_address(self._host, self._options.mesh_port)
        return self._keys.keys

    async def backend(self) -> KubeBackend:
        from muster.backends.kube.backend import KubeBackend
        from muster.backends.kube.queues import Queues

        coordinator = wire.show_address(self._host, self._options.coordinator_port)
        self._backend = KubeBackend(
            self._api,
            self._store,
            self._clock,
            coordinator=coordinator,
            mesh_endpoint=self._mesh_endpoint,
            image=self._options.image,
            agent_image=self._options.agent_image,
            user=worker_user(self._options.worker_user),
            api_url=self._api_url(),
            home=self._namespace,
        )
        await until_answered("the cluster", self._backend.start_watching)
        self._queues = Queues(
            self._api, self._store, self._clock, pod=self._backend.orders.pod, alive=self._backend.alive_of
        )
        self._backend.orders.place = self._queues.place
        await until_answered("the cluster", self._queues.open)
        return self._backend

    async def packages(self) -> KubePackages:
        kept = KubePackages(self._api, self._namespace, self._options.home / "packages")
        await until_answered("the cluster", kept.open)
        return kept

    async def adopt(self) -> int:
        return await self._backend.adopt()

    async def listen(self, coordinator: Listens) -> None:
        await coordinator.start(self._options.address or ANY, self._options.coordinator_port)

    def token(self) -> str | None:
        return self._tokens.token

    async def serving(self, port: int) -> None:
        """Tell the Service where the API, the coordinator and the keys are now."""
        self._backend.orders.api_url = self._api_url(port)
        self._queueing = asyncio.get_running_loop().create_task(self._queues.run())
        if self._options.address is None:
            return
        ports = {"api": port, "coordinator": self._options.coordinator_port, "mesh": self._options.mesh_port}
        address = self._options.address

        async def publish() -> None:
            await leader_slice.publish(self._api, self._namespace, SERVICE, address, ports)

        await until_answered("the cluster", publish)

    async def maintain(self) -> str:
        """Until another control plane may act."""
        fenced = asyncio.ensure_future(self._store.until_fenced())
        done, _ = await asyncio.wait({self._holding, fenced}, return_when=asyncio.FIRST_COMPLETED)
        fenced.cancel()
        return str(done.pop().result())

    async def close(self) -> None:
        for task in (self._holding, self._following, self._queueing):
            if task is not None:
                task.cancel()
        await self._leadership.release()
        if self._keys is not None:
            await self._keys.stop()
        await self._api.close()
        await self._lease_api.close()


class _Health:
    """Answers on the API's port while nothing else does."""

    def __init__(self, options: Options) -> None:
        self._host, self._port = wire.parse_address(options.listen or f"{ANY}:{API_PORT}")
        self._server: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None
        if options.tls_cert is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(options.tls_cert, options.tls_key)

    async def __aenter__(self) -> None:
        if self._port:
            self._server = await asyncio.start_server(self._answer, self._host, self._port, ssl=self._tls)

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5.0):
                head = await reader.readuntil(b"\r\n\r\n")
            well = head.split(b" ", 2)[1] == b"/healthz"
            line, body = ("200 OK", "standing by\n") if well else ("503 Service Unavailable", "another replica leads\n")
            writer.write(f"HTTP/1.1 {line}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError):
            pass
        finally:
            writer.close()
