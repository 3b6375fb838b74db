"""The control plane as `muster kube install` puts it into the lab: who leads, and what became of a training?"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.containers import images
from tests.containers.lab import Lab
from tests.fleet import eventually
from tests.kube.api import Json

HOME = "muster"
LEADS_S = 90.0
COUNT = "/src/programs/count.py"
_SLICE = f"/apis/discovery.k8s.io/v1beta1/namespaces/{HOME}/endpointslices/muster-ipv4"


class Installation:
    """Two replicas in Pods, one of which leads."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.install()

    def install(self) -> None:
        """Returns when it serves."""
        said = self.muster("kube", "install", "--image", images.MUSTER, "--worker-image", images.TORCH)
        assert "deployment/muster created" in said
        self.lab.restart_controllers()  # the garbage collector knows the new kind then
        self.until_serving()

    def muster(self, *words: str, code: int = 0, folder: Path | None = None, **env: str) -> str:
        """What the command line says, from outside of the cluster."""
        argv = [sys.executable, "-m", "muster.cli.main", *words]
        made = self.lab.env() | env
        done = subprocess.run(argv, env=made, cwd=folder, capture_output=True, text=True, timeout=240)
        said = done.stdout + done.stderr
        assert done.returncode == code, f"muster {' '.join(words)}: {done.returncode} {said}"
        return said

    def as_admin(self, *words: str, folder: Path, code: int = 0) -> str:
        """What the command line says to a user with the admin's token, who speaks to whoever leads."""
        secret = self.lab.api("GET", f"/api/v1/namespaces/{HOME}/secrets/muster-token")
        token = base64.b64decode(secret["data"]["token"]).decode()
        where = {"MUSTER_URL": f"http://{self.address()}:8470", "MUSTER_TOKEN": token, "MUSTER_INSECURE": "1"}
        where |= {"MUSTER_HOME": str(folder.parent / "mine"), "PYTHONPATH": os.pathsep.join(sys.path)}
        return self.muster(*words, code=code, folder=folder, **where)

    # Who leads

    def until_serving(self, replicas: int = 2) -> None:
        """Until so many run, and one of them leads."""
        path = f"/apis/apps/v1/namespaces/{HOME}/deployments/muster"
        try:
            self.lab.until(path, lambda it: it and it["status"].get("readyReplicas") == replicas, "it runs", LEADS_S)
            self.until_led()
        except AssertionError as problem:
            raise AssertionError(f"{problem}\n{self.story()}") from None

    def spread(self) -> None:
        """One replica on each node, as after an installation: after the loss of a node both are on the other."""
        while len({pod["spec"]["nodeName"] for pod in self.replicas().values()}) < 2:
            follower = next(name for name in self.replicas() if name != self.leader())
            self.lab.kubectl("-n", HOME, "delete", "pod", follower)
            self.until_serving()

    def until_led(self, by_other_than: str = "") -> str:
        """The Pod behind the Service, which is not the one at that address."""
        self.lab.until(_SLICE, lambda it: led(it) not in ("", by_other_than), "somebody leads", LEADS_S)
        return self.leader()

    def leader(self) -> str:
        where = self.address()
        return next(name for name, pod in self.replicas().items() if pod["status"].get("podIP") == where)

    def address(self) -> str:
        """Of who leads."""
        return led(self.lab.get(_SLICE))

    def replicas(self) -> dict[str, Json]:
        return self.pods(HOME, "app.kubernetes.io/component=control-plane")

    def pods(self, namespace: str, selector: str) -> dict[str, Json]:
        found = self.lab.api("GET", f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def story(self) -> str:
        """For a test that fails."""
        words = [["get", "pods,endpoints", "-A", "-o", "wide"], ["-n", HOME, "describe", "pods"]]
        words.append(["-n", HOME, "logs", "-l", "app.kubernetes.io/name=muster", "--tail=60", "--prefix"])
        return "\n".join(done.stdout + done.stderr for done in (self.lab.kubectl(*one, check=False) for one in words))


def led(endpoint_slice: Json | None) -> str:
    """By which address; nothing: nobody leads."""
    places = [address for one in (endpoint_slice or {}).get("endpoints") or [] for address in one["addresses"]]
    return places[0] if places else ""


def furthest(status: Json) -> int:
    """The step of whoever is ahead."""
    return max((one.get("step") or 0 for one in status.get("ranks") or []), default=0)


class Trained:
    """One training, by its name, in a namespace."""

    def __init__(self, installed: Installation, namespace: str, name: str = "demo") -> None:
        self.installed, self.lab = installed, installed.lab
        self.namespace, self.name = namespace, name
        self.path = f"/apis/muster.dev/v1alpha1/namespaces/{namespace}/trainings/{name}"

    def submit(self, *command: str, world: tuple[int, int, int] = (2, 2, 4), **spec: Any) -> Trained:
        """By kubectl; `command` is what ranks run."""
        least, target, most = world
        given = {"command": list(command), "worldSize": {"min": least, "target": target, "max": most}, **spec}
        about = {"name": self.name, "namespace": self.namespace}
        body = {"apiVersion": "muster.dev/v1alpha1", "kind": "Training", "metadata": about, "spec": given}
        self.kubectl("apply", "-f", "-", input=json.dumps(body))
        return self

    def counting(self, steps: int = 100_000, **spec: Any) -> Trained:
        return self.submit("python", COUNT, str(steps), **spec)

    def kubectl(self, *words: str, **more: Any) -> str:
        return self.lab.kubectl("-n", self.namespace, *words, **more).stdout

    def until(self, look: Any, what: str, timeout_s: float = 90.0) -> Json:
        """Once `look` is content with its status."""
        try:
            found = self.lab.until(self.path, lambda it: it and look(it.get("status") or {}), what, timeout_s)
        except AssertionError as problem:
            raise AssertionError(f"{problem}\n{self.story()}") from None
        assert found is not None
        status: Json = found["status"]
        return status

    def until_phase(self, phase: str, timeout_s: float = 90.0) -> Json:
        return self.until(lambda status: status.get("phase") == phase, f"it is {phase}", timeout_s)

    def until_step(self, step: int, after_round: int = -1, timeout_s: float = 90.0) -> Json:
        """All ranks of a round after that one are at that step, or further."""

        def there(status: Json) -> bool:
            ranks = status.get("ranks") or []
            new = (
                status.get("round", -1) > after_round and status["worldSize"]["ready"] == status["worldSize"]["target"]
            )
            return bool(new and ranks and all((one.get("step") or 0) >= step for one in ranks))

        return self.until(there, f"step {step} after round {after_round}", timeout_s)

    def pods(self) -> dict[str, Json]:
        return self.installed.pods(self.namespace, f"muster.dev/training={self.name}")

    def until_event(self, *words: str, timeout_s: float = 60.0) -> str:
        """One whose line in `kubectl describe` has all these words."""
        seen: list[str] = []

        def look() -> bool:
            events = self.lab.api("GET", f"/api/v1/namespaces/{self.namespace}/events")["items"]
            own = [one for one in events if one["involvedObject"].get("name") == self.name]
            seen[:] = [f"{one['type']} {one['reason']} {one['message']}" for one in own]
            return any(all(word in line for word in words) for line in seen)

        try:
            eventually(look, f"an event with {words}", timeout_s)
        except AssertionError:
            raise AssertionError(f"no event with {words} in {seen}\n{self.story()}") from None
        return next(line for line in seen if all(word in line for word in words))

    def story(self) -> str:
        asked = (("get", "pods", "-o", "wide"), ("describe", "training", self.name))
        told = [self.lab.kubectl("-n", self.namespace, *words, check=False) for words in asked]
        for name in self.pods():
            told.append(self.lab.kubectl("-n", self.namespace, "logs", name, "--tail=20", check=False))
        return "\n".join(one.stdout + one.stderr for one in told) + self.installed.story()
