"""A real etcd, kube-apiserver and kube-controller-manager on loopback: what does a Kubernetes cluster really say?

Nodes and Pods that do something are the business of `kubelet.py`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.fleet import free_port
from tests.kube import binaries, certificates
from tests.kube.api import MERGE, Api, Json, Refused
from tests.kube.background import Background
from tests.kube.guard import Guard, kill_marked
from tests.kube.scheduler import Scheduler

START_S = 60.0
ADMIN = "admin"
NOBODY = "nobody"  # known to the cluster, may do nothing

_CONTROLLERS = (
    "garbagecollector,namespace,nodelifecycle,podgc,endpoint,endpointslice,endpointslicemirroring,serviceaccount,"
    "deployment,replicaset,job,clusterrole-aggregation,pvc-protection"
)


class Cluster:
    """Ready when made. All its processes carry `mark`, and end with this one."""

    USERS: ClassVar[Mapping[str, str]] = {ADMIN: "system:masters", NOBODY: ""}  # name → group
    ADDRESSES: ClassVar[Sequence[str]] = ("127.0.0.1",)  # where its API may be asked
    CONTROLLERS: ClassVar[str] = _CONTROLLERS
    # Nothing mounts volumes here: a Pod would wait for its account's token.
    # As some distributions have it: whoever sets an owner must be allowed to hold up the owner's removal.
    ADMISSION: ClassVar[Sequence[str]] = (
        "--disable-admission-plugins=ServiceAccount",
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
    )
    FLAGS: ClassVar[Sequence[str]] = (
        "--bind-address=127.0.0.1",
        "--endpoint-reconciler-type=none",
    )  # of the API server

    def __init__(self, folder: Path, *, node_grace_s: int = 5, eviction_s: int = 1) -> None:
        """A node is unreachable after `node_grace_s` without a heartbeat; its Pods are deleted `eviction_s` later."""
        self.folder = folder
        self.programs = binaries.find()
        self.mark = f"MUSTER_TEST_CLUSTER={secrets.token_hex(8)}"
        self.token = secrets.token_hex(16)
        self._node_grace_s, self._eviction_s = node_grace_s, eviction_s
        self._tokens = {user: self.token if user == ADMIN else secrets.token_hex(16) for user in self.USERS}
        self._etcd_port, self._peer_port, self._port = free_port(), free_port(), free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self.pki = certificates.make(folder / "pki", self.ADDRESSES)
        self.ca = self.pki.ca
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._guard = Guard(self.mark)
        self.background = Background()
        self.aio = self.background.call(self._connect())
        self._scheduler: Scheduler | None = None
        self._closers: list[Callable[[], None]] = []
        self.tls = ssl.create_default_context(cafile=str(self.ca))
        try:
            self._start_etcd()
            self.start_apiserver()
            self.start_controllers()
        except BaseException:
            self.close()
            raise

    # Asking

    def api(
        self, method: str, path: str, body: Json | None = None, *, kind: str = "application/json", **query: str
    ) -> Json:
        """One request as admin; raises Refused."""
        return self.background.call(self.aio.request(method, path, body, kind=kind, **query))

    def serves(self, group: str) -> list[str]:
        """Return the versions of a group of the API that this server has."""
        found = self.get(f"/apis/{group}") or {}
        return [version["version"] for version in found.get("versions") or []]

    @property
    def version(self) -> tuple[int, int]:
        """The server's, as in 1.36."""
        found = self.api("GET", "/version")
        return int(found["major"]), int(found["minor"].rstrip("+"))

    def slices(self, namespace: str) -> str:
        """Return the path of the EndpointSlices of a namespace, in the version that this server has."""
        group = "discovery.k8s.io"
        version = "v1" if "v1" in self.serves(group) else "v1beta1"
        return f"/apis/{group}/{version}/namespaces/{namespace}/endpointslices"

    def get(self, path: str) -> Json | None:
        """None when there is no such object."""
        try:
            return self.api("GET", path)
        except Refused as refused:
            if refused.code == 404:
                return None
            raise

    def patch(self, path: str, body: Json, kind: str = MERGE) -> Json:
        return self.api("PATCH", path, body, kind=kind)

    def until(
        self, path: str, look: Callable[[Json | None], Any], what: str = "", timeout_s: float = 20.0
    ) -> Json | None:
        """The object at `path` once `look` is content with it; `look` sees None while there is none."""
        seen: list[Json | None] = []
        try:
            return self.background.call(self._until(path, look, seen), timeout_s)
        except TimeoutError:
            last = json.dumps(seen[-1], indent=1) if seen else "nothing"
            raise AssertionError(f"not in {timeout_s:g} s: {what or path}; last seen: {last}") from None

    async def _until(self, path: str, look: Callable[[Json | None], Any], seen: list[Json | None]) -> Json | None:
        parent, _, name = path.rpartition("/")
        async for kind, item in self.aio.follow(parent, fieldSelector=f"metadata.name={name}"):
            found = item["items"] if kind == "LISTED" else [item] if kind != "DELETED" else []
            now = found[0] if found else None
            seen.append(now)
            if look(now):
                return now
        raise AssertionError("unreachable")

    def kubectl(
        self, *words: str, input: str | None = None, user: str = ADMIN, check: bool = True, timeout_s: float = 30.0
    ) -> subprocess.CompletedProcess[str]:
        """`check`: a refusal fails the test with what kubectl said."""
        done = subprocess.run(
            [self.programs.kubectl, *words],
            input=input,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.env(user),
        )
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def kubectl_minor(self) -> int:
        """Which 1.N kubectl is."""
        shown = json.loads(self.kubectl("version", "--client", "-o", "json").stdout)
        return int(shown["clientVersion"]["minor"].rstrip("+"))

    def env(self, user: str = ADMIN) -> dict[str, str]:
        """For a program that speaks with this cluster and must not outlive it."""
        name, _, value = self.mark.partition("=")
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig(user)), "HOME": str(self.folder), name: value}

    # Users

    def kubeconfig(self, user: str = ADMIN, *, url: str | None = None, namespace: str = "default") -> Path:
        """`admin`, `nobody`, or `system:serviceaccount:NAMESPACE:NAME`; `url` when it asks through a proxy."""
        cluster: Json = {"server": url or self.url}
        if cluster["server"].startswith("https:"):
            cluster["certificate-authority-data"] = base64.b64encode(self.ca.read_bytes()).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.token_of(user)}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": namespace}}],
            "current-context": "test",
        }
        text = json.dumps(config)
        place = self.folder / "kubeconfigs" / f"{abs(hash(text)):x}.json"
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            new = place.with_suffix(".new")
            new.write_text(text)
            new.rename(place)
        return place

    def token_of(self, user: str) -> str:
        """A service account gets a token that the cluster signed; it is made when there is none."""
        if user not in self._tokens:
            namespace, name = user.removeprefix("system:serviceaccount:").split(":")
            self._create("/api/v1/namespaces", {"metadata": {"name": namespace}})
            accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
            self._create(accounts, {"metadata": {"name": name}})
            asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
            self._tokens[user] = self.api("POST", f"{accounts}/{name}/token", asked)["status"]["token"]
        return self._tokens[user]

    def _create(self, path: str, body: Json) -> None:
        try:
            self.api("POST", path, body)
        except Refused as refused:
            if refused.reason != "AlreadyExists":
                raise

    def new_namespace(self, prefix: str = "t") -> str:
        return str(
            self.api("POST", "/api/v1/namespaces", {"metadata": {"generateName": f"{prefix}-"}})["metadata"]["name"]
        )

    def drop_namespace(self, name: str) -> None:
        """It goes while others go on."""
        with contextlib.suppress(Refused):
            self.api("DELETE", f"/api/v1/namespaces/{name}")

    # Faults

    def start_apiserver(self) -> None:
        """On the same port and the same data as before; returns when it serves."""
        tokens = self.folder / "tokens.csv"
        tokens.write_text(
            "".join(f"{self._tokens[user]},{user},{user},{group}\n" for user, group in self.USERS.items())
        )
        self._start("apiserver", *self._apiserver(self._port))
        self._ready("apiserver", f"{self.url}/readyz")

    @contextlib.contextmanager
    def another_apiserver(self, *flags: str) -> Iterator[str]:
        """A second one on the same data, with other flags; its address."""
        port = free_port()
        self._start("another", *self._apiserver(port), *flags)
        try:
            self._ready("another", f"https://127.0.0.1:{port}/readyz")
            yield f"https://127.0.0.1:{port}"
        finally:
            self._stop("another", signal.SIGKILL)

    def _apiserver(self, port: int) -> list[str]:
        return [
            self.programs.apiserver,
            f"--etcd-servers={self.etcd_url}",
            "--advertise-address=10.77.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={self.pki.certificate}",
            f"--tls-private-key-file={self.pki.key}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.pki.account_key}",
            f"--service-account-signing-key-file={self.pki.account_key}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            f"--default-not-ready-toleration-seconds={self._eviction_s}",
            f"--default-unreachable-toleration-seconds={self._eviction_s}",
            "--profiling=false",
            "--etcd-compaction-interval=0",
            *self.ADMISSION,
            *self.FLAGS,
        ]

    def stop_apiserver(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._stop("apiserver", number)

    def restart_apiserver(self) -> None:
        self.stop_apiserver()
        self.start_apiserver()

    def start_controllers(self) -> None:
        self._start(
            "controllers",
            self.programs.controllers,
            f"--kubeconfig={self.kubeconfig()}",
            "--leader-elect=false",
            *binaries.no_insecure_port(self.programs.controllers),
            "--secure-port=0",
            f"--controllers={self.CONTROLLERS}",
            f"--service-account-private-key-file={self.pki.account_key}",
            f"--root-ca-file={self.ca}",
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={self._node_grace_s}s",
            "--node-startup-grace-period=10s",
            "--node-eviction-rate=100",
            "--secondary-node-eviction-rate=100",
            "--unhealthy-zone-threshold=1",
            "--kube-api-qps=1000",
            "--kube-api-burst=1000",
        )

    def restart_controllers(self) -> None:
        """The garbage collector looks for new kinds every 30 s only; after a restart it knows them all."""
        self._stop("controllers", signal.SIGKILL)
        self.start_controllers()

    def compact_etcd(self) -> int:
        """Forget all history. Returns the revision that is the oldest now.

        The API server still answers watches from its own memory; `forget_history` empties that as well.
        """
        key = base64.b64encode(b"/bump").decode()
        put = self._etcd("/v3/kv/put", {"key": key, "value": key})
        revision = int(put["header"]["revision"])
        self._etcd("/v3/kv/compaction", {"revision": str(revision), "physical": True})
        return revision

    def forget_history(self) -> None:
        """A watch from any version known until now is answered with 410."""
        self.stop_apiserver()
        self.compact_etcd()
        self.start_apiserver()

    def log(self, name: str) -> str:
        """What `etcd`, `apiserver` or `controllers` wrote."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def memory(self, name: str) -> int:
        """Resident bytes."""
        pages = Path(f"/proc/{self._running[name].pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def scheduler(self) -> None:
        """Places Pods from now on, once for all."""
        if self._scheduler is None:
            self._scheduler = Scheduler(self)
            self.at_close(self._scheduler.close)

    # Ending

    def at_close(self, closer: Callable[[], None]) -> None:
        self._closers.append(closer)

    def close(self) -> None:
        for closer in reversed(self._closers):
            closer()
        self.background.call(self.aio.close())
        self.background.close()
        for name in ("controllers", "another", "apiserver", "etcd"):
            self._stop(name, signal.SIGKILL)
        gone = kill_marked(self.mark)
        self._guard.close()
        assert gone, f"processes of the cluster are left: {self.mark}"

    # Processes

    @property
    def etcd_url(self) -> str:
        return f"http://127.0.0.1:{self._etcd_port}"

    async def _connect(self) -> Api:
        return Api(self.url, self.token, str(self.ca))

    def _start_etcd(self) -> None:
        peer = f"http://127.0.0.1:{self._peer_port}"
        self._start(
            "etcd",
            self.programs.etcd,
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={self.etcd_url}",
            f"--advertise-client-urls={self.etcd_url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        self._ready("etcd", f"{self.etcd_url}/health")

    def _start(self, name: str, *argv: str) -> None:
        mark, _, value = self.mark.partition("=")
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "GOGC": "50", mark: value}
        with open(self.folder / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                argv, env=env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _stop(self, name: str, number: signal.Signals) -> None:
        if process := self._running.pop(name, None):
            process.send_signal(number)
            process.wait(30)

    def _ready(self, name: str, url: str) -> None:
        deadline = time.monotonic() + START_S
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self.token}"})
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5, context=self.tls):
                return
            if self._running[name].poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{name} does not serve:\n{self.log(name)[-4000:]}")
            time.sleep(0.05)

    def _etcd(self, path: str, body: Json) -> Json:
        request = urllib.request.Request(self.etcd_url + path, json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: Json = json.load(answer)
        return found
