"""Plays a kubelet: a Pod that names this Node becomes a local process, with an address, a log and an end."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import sysconfig
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.fleet import eventually
from tests.kube import logs, pods
from tests.kube.api import MERGE, STRATEGIC, Json, Refused
from tests.kube.cluster import Cluster
from tests.kube.containers import Container, End, Log, Pretended
from tests.kube.guard import kill_marked, marked, signal_marked
from tests.kube.network import new_address
from tests.kube.nodes import node_status

HEARTBEAT_S = 1.0
_AGAIN_S = 0.3


@dataclass
class _Held:
    """A Pod on this node."""

    pod: Json
    ip: str
    folder: Path
    log: Log = field(default_factory=Log)
    container: Container | Pretended | None = None
    evicted: str = ""
    gone: bool = False
    life: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None


class TestKubelet:
    """Runs when made, with its Node Ready; several may run at once.

    One container for each Pod; image, user, volumes and probes are ignored, but an image `missing:…` cannot be pulled,
    and a variable that names an empty volume names the Pod's folder. A Pod with a service account finds credentials in
    KUBECONFIG.
    """

    __test__ = False

    def __init__(
        self,
        cluster: Cluster,
        node: str = "node-1",
        *,
        cpu: int = 64,
        memory: str = "64Gi",
        pods: int = 200,
        gpus: int = 0,
        labels: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        pretend: bool = False,
        inside: tuple[str, ...] = (),
        ip: str = "",
    ) -> None:
        """`env` is what a Pod's image would set; a Pod's own comes on top. `pretend`: Pods run, but nothing does.

        `inside` goes in front of a Pod's command, which runs on another machine then, with its address `ip`.
        """
        self.cluster = cluster
        self.node = node
        self._api = cluster.aio
        self._room = {"cpu": str(cpu), "memory": memory, "pods": str(pods), "nvidia.com/gpu": str(gpus)}
        self._labels = {"kubernetes.io/hostname": node, **(labels or {})}
        self._env = env or {}
        self._pretend = pretend
        self._inside = inside
        self._ip = ip
        self._held: dict[str, _Held] = {}
        self._here = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._problems: list[BaseException] = []
        self._folder = cluster.folder / "pods"
        self.mark = f"MUSTER_TEST_NODE={secrets.token_hex(8)}"
        self._logs = logs.LogServer(cluster.pki, self._log_of)
        self._closed = False
        cluster.scheduler()
        self._call(self._start())

    # What tests do

    def processes(self) -> dict[str, int]:
        """`namespace/name` → pid of the main process of each Pod that runs."""
        held = list(self._held.values())
        return {pods.key_of(one.pod): one.container.pid for one in held if one.container and one.container.alive}

    def kill(self, pod: str, number: int = signal.SIGKILL) -> None:
        """The main process; `pod` is its name, or `namespace/name`."""
        self._signal(self._running(pod), number)

    def oom(self, pod: str) -> None:
        """As when the kernel ends it for its memory limit."""
        container = self._running(pod)
        container.killed_for_memory = True
        self._signal(container, signal.SIGKILL)

    def evict(self, pod: str, message: str = "The node was low on resource: memory. ") -> None:
        """As when the node runs short."""
        held = self._find(pod)
        container = self._running(pod)
        held.evicted = message
        self._signal(container, signal.SIGKILL)

    def vanish(self, processes: Literal["kill", "freeze", "keep"] = "kill") -> None:
        """No heartbeat, no report and no log any more; its processes are killed, stopped or go on.

        While no other node is alive the cluster believes that the fault is its own, and deletes no Pod.
        """
        self._call(self._vanish(processes))

    def come_back(self) -> None:
        """Heartbeats again; what ended meanwhile is told."""
        self._call(self._return())

    def no_process_left(self, timeout_s: float = 10.0) -> None:
        """Fails when a Pod's process, or one that it started, is still there after that time."""
        eventually(lambda: not marked(self.mark), f"no process of a Pod left, but {self.processes()}", timeout_s)

    def close(self) -> None:
        """All its Pods and its Node go, whatever state they are in."""
        if not self._closed:
            self._closed = True
            self._call(self._end())
            kill_marked(self.mark)
            assert not self._problems, f"the kubelet stumbled: {self._problems}"

    def _signal(self, container: Container | Pretended, number: int) -> None:
        async def send() -> None:
            container.signal(number)

        self._call(send())

    # Finding

    def _call(self, work: Coroutine[Any, Any, None], timeout_s: float = 60.0) -> None:
        self.cluster.background.call(work, timeout_s)

    def _find(self, pod: str) -> _Held:
        for held in list(self._held.values()):
            if pod in (held.pod["metadata"]["name"], pods.key_of(held.pod)):
                return held
        raise AssertionError(f"no Pod {pod} on {self.node}")

    def _running(self, pod: str) -> Container | Pretended:
        container = self._find(pod).container
        assert container and container.alive, f"{pod} does not run"
        return container

    def _log_of(self, namespace: str, name: str) -> Log | None:
        if not self._here.is_set():
            return None
        for held in self._held.values():
            if pods.key_of(held.pod) == f"{namespace}/{name}":
                return held.log
        return None

    # The node

    async def _start(self) -> None:
        await self._logs.start()
        path = "/api/v1/nodes"
        await self._api.insist("DELETE", f"{path}/{self.node}")
        await self._api.insist("POST", path, {"metadata": {"name": self.node, "labels": self._labels}})
        await self._report_node()
        self._here.set()
        self._work(self._beat())
        self._work(self._follow())

    async def _report_node(self) -> None:
        status = node_status(self._room, self._logs.port)
        await self._api.insist("PATCH", f"/api/v1/nodes/{self.node}/status", {"status": status}, kind=STRATEGIC)

    async def _beat(self) -> None:
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        lease: Json = {
            "metadata": {"name": self.node},
            "spec": {"holderIdentity": self.node, "leaseDurationSeconds": 40},
        }
        await self._api.insist("DELETE", f"{path}/{self.node}")
        await self._api.insist("POST", path, lease)
        while True:
            await self._here.wait()
            renewed = {"spec": {"renewTime": pods.stamp().replace("Z", ".000000Z")}}
            await self._api.insist("PATCH", f"{path}/{self.node}", renewed, kind=MERGE)
            await self._report_node()  # the cluster may have given it up while nobody could be told
            await asyncio.sleep(HEARTBEAT_S)

    async def _vanish(self, processes: str) -> None:
        self._here.clear()
        if processes == "kill":
            kill_marked(self.mark)
        elif processes == "freeze":
            signal_marked(self.mark, signal.SIGSTOP)

    async def _return(self) -> None:
        signal_marked(self.mark, signal.SIGCONT)
        self._here.set()
        await self._report_node()
        for held in list(self._held.values()):
            if held.gone:
                self._drop(held.pod["metadata"]["uid"])
            else:
                self._see(held.pod)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for held in self._held.values():
            await self._forget(held.pod)
        await self._api.insist("DELETE", f"/api/v1/nodes/{self.node}")
        await self._logs.close()

    def _work(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._worked)
        return task

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()):
            self._problems.append(problem)

    async def _forget(self, pod: Json) -> None:
        await self._api.insist("PATCH", pods.path_of(pod), {"metadata": {"finalizers": None}}, kind=MERGE)
        await self._api.insist("DELETE", pods.path_of(pod), gracePeriodSeconds="0")

    # Pods

    async def _follow(self) -> None:
        async for kind, item in self._api.follow("/api/v1/pods", fieldSelector=f"spec.nodeName={self.node}"):
            if kind == "LISTED":
                there = {pod["metadata"]["uid"] for pod in item["items"]}
                for uid in self._held.keys() - there:
                    self._drop(uid)
                for pod in item["items"]:
                    self._see(pod)
            elif kind == "DELETED":
                self._drop(item["metadata"]["uid"])
            else:
                self._see(item)

    def _drop(self, uid: str) -> None:
        """The object is gone: so is its process, and its log."""
        held = self._held.get(uid)
        if held is None:
            return
        held.gone = True
        if self._here.is_set():
            del self._held[uid]
            if held.container:
                held.container.signal(signal.SIGKILL)
            elif held.life:
                held.life.cancel()

    def _see(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        held = self._held.get(uid)
        if held is None:
            held = self._held[uid] = _Held(pod, self._ip or new_address(), self._folder / uid)
        held.pod = pod
        if not self._here.is_set():
            return
        if pod["metadata"].get("deletionTimestamp"):
            if held.ending is None:
                held.ending = self._work(self._terminate(held))
            elif held.container and pod["metadata"].get("deletionGracePeriodSeconds") == 0:
                held.container.signal(signal.SIGKILL)
        elif held.life is None and pod["status"].get("phase") not in pods.ENDED:
            held.life = self._work(self._live(held))

    async def _live(self, held: _Held) -> None:
        """Start it, tell, wait, tell; again while its policy says so."""
        restarts, last = 0, None
        while True:
            started = pods.stamp()
            try:
                held.container = await self._launch(held)
            except OSError as problem:
                ended = pods.terminated(128, "StartError", started, f"failed to create containerd task: {problem}")
                await self._tell(held, "Failed", ended)
                held.log.end()
                return
            ending = asyncio.create_task(held.container.end(held.log))
            running = {"running": {"startedAt": started}}
            try:
                await self._tell(held, "Running", running, restarts=restarts, last=last)
                end = await ending
            finally:
                ending.cancel()
            state = _ended(end, started, _last_words(held))
            if not _again(held, end):
                held.log.end()
                await self._tell(held, "Failed" if end.code or held.evicted else "Succeeded", state, restarts=restarts)
                return
            restarts, last = restarts + 1, state
            await self._tell(held, "Running", pods.waiting("CrashLoopBackOff"), restarts=restarts, last=last)
            await asyncio.sleep(min(_AGAIN_S * restarts, 5.0))

    async def _launch(self, held: _Held) -> Container | Pretended:
        """Waits, with a reason in the status, for what a container cannot start without."""
        if self._pretend:
            return Pretended()
        told = None
        while True:
            problem, env = await self._prepare(held.pod, held.ip)
            if problem is None:
                break
            if problem != told:
                await self._tell(held, "Pending", problem)
                told = problem
            await asyncio.sleep(_AGAIN_S)
        container = held.pod["spec"]["containers"][0]
        held.folder.mkdir(parents=True, exist_ok=True)
        cwd = Path(container.get("workingDir") or held.folder)
        env |= dict.fromkeys((name for name in env if env[name] in pods.scratch(held.pod)), str(held.folder))
        limit = container.get("resources", {}).get("limits", {}).get("memory")
        return Container(
            (*self._inside, *pods.command(container, env)),
            self._base(held) | env,
            cwd,
            f"MUSTER_TEST_POD={held.pod['metadata']['uid']}",
            int(pods.quantity(limit)) if limit else 0,
        )

    def _base(self, held: _Held) -> dict[str, str]:
        """What an image and the kubelet set."""
        marks = dict(mark.split("=") for mark in (self.cluster.mark, self.mark))
        programs = f"{sysconfig.get_path('scripts')}:{Path(sys.executable).parent}"
        return {
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(held.folder),
            "LANG": "C.UTF-8",
            "HOSTNAME": held.pod["metadata"]["name"],
            **self._env,
            **marks,
        }

    async def _prepare(self, pod: Json, ip: str) -> tuple[Json | None, dict[str, str]]:
        """What it waits for, or its environment."""
        container = pod["spec"]["containers"][0]
        if container["image"].startswith("missing"):
            return pods.waiting("ImagePullBackOff", f'Back-off pulling image "{container["image"]}"'), {}
        if not container.get("command") and not container.get("args"):
            return pods.waiting("CreateContainerError", "no command specified"), {}
        found = {}
        for name in sorted(pods.secrets_of(container)):
            secret = await self._api.insist("GET", f"/api/v1/namespaces/{pod['metadata']['namespace']}/secrets/{name}")
            if secret is None:
                return pods.waiting("CreateContainerConfigError", f'secret "{name}" not found'), {}
            found[name] = pods.decoded(secret)
        try:
            env = pods.environment(pod, found, ip)
        except KeyError as key:
            return pods.waiting("CreateContainerConfigError", f"couldn't find key {key} in Secret"), {}
        return None, await self._account(pod) | env

    async def _account(self, pod: Json) -> dict[str, str]:
        account = pod["spec"].get("serviceAccountName", "default")
        if account == "default":
            return {}
        user = f"system:serviceaccount:{pod['metadata']['namespace']}:{account}"
        loop = asyncio.get_running_loop()
        return {"KUBECONFIG": str(await loop.run_in_executor(None, self.cluster.kubeconfig, user))}

    async def _terminate(self, held: _Held) -> None:
        """SIGTERM, patience, SIGKILL; told, and only then gone. A finalizer may keep the object."""
        container = held.container
        if container and held.life:
            container.signal(signal.SIGTERM)
            grace = held.pod["metadata"].get("deletionGracePeriodSeconds", 30)
            await asyncio.wait([held.life], timeout=grace)
            container.signal(signal.SIGKILL)
            await asyncio.wait([held.life])
        elif held.life:
            held.life.cancel()
        await self._here.wait()
        if held.pod["metadata"].get("deletionGracePeriodSeconds") != 0:
            only = {"preconditions": {"uid": held.pod["metadata"]["uid"]}, "gracePeriodSeconds": 0}
            await self._write("DELETE", pods.path_of(held.pod), only)

    async def _tell(self, held: _Held, phase: str, state: Json, restarts: int = 0, last: Json | None = None) -> None:
        ip = held.ip if phase != "Pending" else ""
        status = pods.status(held.pod, phase, state, ip=ip, restarts=restarts, last=last)
        status["startTime"] = held.pod["status"].get("startTime") or pods.stamp()
        if held.evicted and phase == "Failed":
            status |= {"reason": "Evicted", "message": held.evicted}
        await self._here.wait()
        body = {"metadata": {"uid": held.pod["metadata"]["uid"]}, "status": status}
        await self._write("PATCH", f"{pods.path_of(held.pod)}/status", body, kind=STRATEGIC)

    async def _write(self, method: str, path: str, body: Json, **query: str) -> None:
        """A conflict means that another Pod has this name now."""
        try:
            await self._api.insist(method, path, body, **query)
        except Refused as refused:
            if refused.code != 409:
                raise


def _again(held: _Held, end: End) -> bool:
    policy = held.pod["spec"].get("restartPolicy", "Always")
    if held.evicted or held.gone or held.pod["metadata"].get("deletionTimestamp") or policy == "Never":
        return False
    return policy == "Always" or end.code != 0


def _ended(end: End, started: str, last_words: str) -> Json:
    reason = "OOMKilled" if end.oom else "Error" if end.code else "Completed"
    code = 137 if end.oom and not end.code else end.code
    return pods.terminated(code, reason, started, last_words if code else "")


def _last_words(held: _Held) -> str:
    """The end of the log, where a Pod asks for that in place of a message."""
    container = held.pod["spec"]["containers"][0]  # what runs beside it is not run here
    if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
        return ""
    return b"".join(line for _, line in held.log.lines[-80:])[-2048:].decode(errors="replace")
