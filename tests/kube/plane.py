"""A control plane on a real cluster, for tests: replicas as processes, the Service in front of them, a client."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import muster
from muster import DistributedTraining, WorldSize
from muster.kube import crd, manifests
from tests.fleet import PROBE, Fleet, Process, eventually
from tests.kube.api import Json
from tests.kube.cluster import ADMIN, Cluster
from tests.kube.network import new_address
from tests.kube.service_proxy import ServiceProxy

PORTS = ("api", "coordinator", "mesh")


class KubePlane(Fleet):
    """Installed in a namespace of its own; trainings go to another. Replicas are told apart by their addresses."""

    def __init__(self, folder: Path, cluster: Cluster, namespace: str) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.namespace = namespace
        self.own = cluster.new_namespace("muster")
        self.replicas: dict[str, Process] = {}
        self._client: muster.Client | None = None
        install(cluster, self.own)
        self.proxy = ServiceProxy(cluster, self.own, "muster", dict.fromkeys(PORTS, 0))

    def serve(
        self,
        name: str = "one",
        *options: str,
        user: str = ADMIN,
        url: str | None = None,
        wait: bool = True,
        direct: bool = False,
    ) -> Process:
        """Start a replica, or start it again; returns when it serves, or, without `wait`, at once.

        `direct`: workers speak with it and not with a Service that relays.
        """
        address = new_address()
        config = self.cluster.kubeconfig(user, url=url, namespace=self.own)
        words = ["--home", str(self.folder / f"home-{name}"), "--store", "kube", "--backend", "kube"]
        words += [
            "--listen",
            f"{address}:{self.proxy.ports['api']}",
            "--insecure",
            "--namespace",
            self.own,
            "--identity",
            name,
        ]
        words += ["--address", address, "--advertise", address if direct else self.proxy.host, "--image", "muster:test"]
        words += ["--coordinator-port", str(self.proxy.ports["coordinator"])]
        words += ["--mesh-port", str(self.proxy.ports["mesh"]), *options]
        replica = self.start(sys.executable, "-m", "muster.daemon", *words, KUBECONFIG=str(config))
        self.replicas[name] = replica
        if wait:
            replica.expect(r"muster serves on (\S+)")
        return replica

    def crash(self, name: str = "one") -> None:
        self.replicas[name].kill()
        self.replicas[name].wait()

    @property
    def token(self) -> str:
        secret = self.cluster.get(f"/api/v1/namespaces/{self.own}/secrets/muster-token")
        assert secret is not None
        return base64.b64decode(secret["data"]["token"]).decode()

    @property
    def client(self) -> muster.Client:
        """Of whoever leads."""
        if self._client is None:
            url = f"http://{self.proxy.address('api')}"
            self._client = muster.Client(url=url, token=self.token, namespace=self.namespace)
        return self._client

    def train(
        self, name: str = "demo", *words: str, world: tuple[int, int, int] = (2, 2, 4), **spec: Any
    ) -> DistributedTraining:
        """Submit probes that wait until `go`, or do what the words say."""
        return self.client.train(name=name, world_size=WorldSize(*world), **self.program(*words, **spec))

    def program(self, *words: str, **spec: Any) -> dict[str, Any]:
        if not {"script", "module", "command"} & spec.keys():
            spec |= {"script": PROBE, "args": [str(self.notes), *(words or ("wait",))]}
        return {"working_dir": str(self.folder), **spec}

    def manifest(self, name: str = "demo", *words: str, world: tuple[int, int, int] = (2, 2, 4), **spec: Any) -> str:
        """What a user would write for `kubectl apply`."""
        least, target, most = world
        given: Json = {
            "script": PROBE,
            "args": [str(self.notes), *(words or ("wait",))],
            "workingDir": str(self.folder),
        }
        given["worldSize"] = {"min": least, "target": target, "max": most}
        about = {"name": name, "namespace": self.namespace}
        return json.dumps(
            {"apiVersion": "muster.dev/v1alpha1", "kind": "Training", "metadata": about, "spec": {**given, **spec}}
        )

    def kubectl(self, *words: str, input: str | None = None, check: bool = True) -> str:
        done = self.cluster.kubectl("-n", self.namespace, *words, input=input, check=check)
        return done.stdout if check else done.stdout + done.stderr

    def muster(self, *words: str) -> Process:
        """The command line, against whoever leads."""
        url = f"http://{self.proxy.address('api')}"
        program = str(Path(sys.executable).parent / "muster")
        return self.start(program, *words, MUSTER_URL=url, MUSTER_TOKEN=self.token, MUSTER_NAMESPACE=self.namespace)

    def said(self, *words: str) -> str:
        """What the command line prints."""
        command = self.muster(*words)
        assert command.wait() == 0, f"muster {' '.join(words)}:\n{command.text}"
        return command.text

    # What is there

    def object(self, name: str = "demo") -> Json | None:
        return self.cluster.get(f"/apis/muster.dev/v1alpha1/namespaces/{self.namespace}/trainings/{name}")

    def pods(self, name: str = "demo") -> dict[str, Json]:
        """Name → Pod, of one training."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        found = self.cluster.api("GET", path, labelSelector=f"muster.dev/training={name}")["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def running(self, name: str = "demo") -> list[str]:
        return sorted(
            pod for pod, found in self.pods(name).items() if found["status"].get("phase") in ("Pending", "Running")
        )

    def no_worker_left(self) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        ended = ("Succeeded", "Failed")

        def left() -> list[str]:
            pods = self.cluster.api("GET", path)["items"]
            return [pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") not in ended]

        eventually(lambda: not left(), "no Pod runs", 15)

    def phase(self, phase: str, name: str = "demo", timeout_s: float = 30.0) -> Json:
        """Wait until kubectl would show that phase."""
        path = f"/apis/muster.dev/v1alpha1/namespaces/{self.namespace}/trainings/{name}"
        found = self.cluster.until(
            path, lambda item: item and (item.get("status") or {}).get("phase") == phase, phase, timeout_s
        )
        assert found is not None
        return found

    def gone(self, name: str = "demo", timeout_s: float = 30.0) -> None:
        path = f"/apis/muster.dev/v1alpha1/namespaces/{self.namespace}/trainings/{name}"
        self.cluster.until(path, lambda item: item is None, f"{name} is gone", timeout_s)
        eventually(lambda: not self.pods(name), "its Pods are gone", timeout_s)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        super().close()
        self.proxy.close()
        self._clear()
        self.cluster.drop_namespace(self.own)

    def _clear(self) -> None:
        """Nobody is left to take finalizers away, so that the namespace could go."""
        group = f"/apis/muster.dev/v1alpha1/namespaces/{self.namespace}/trainings"
        for path in (group, f"/api/v1/namespaces/{self.namespace}/pods"):
            for item in self.cluster.api("GET", path)["items"]:
                place = f"{path}/{item['metadata']['name']}"
                if item["metadata"].get("finalizers") and self.cluster.get(place) is not None:
                    self.cluster.patch(place, {"metadata": {"finalizers": None}})
            self.cluster.api("DELETE", path)


def install(cluster: Cluster, namespace: str) -> None:
    """What `muster kube install` renders, but for the Deployment: replicas are processes here."""
    wanted = [
        item for item in manifests.render(manifests.InstallOptions(namespace=namespace)) if item["kind"] != "Deployment"
    ]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": wanted})
    name = crd.custom_resource_definition()["metadata"]["name"]
    first = cluster.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}") is None
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=text)
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=20s")
    if first:
        cluster.restart_controllers()  # the garbage collector knows the new kind then
