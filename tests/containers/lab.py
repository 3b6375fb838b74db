"""A whole Kubernetes on one machine, with real nodes: who plays which part?

API server, controllers, scheduler, kube-proxy, kubelets, containerd and runc are the real ones; the DNS is `names.py`.
Pods have addresses of their own, service accounts have tokens, kubelets may do what the Node authorizer allows, and
every Pod has to pass a PodSecurityPolicy with the rules of Pod Security "restricted", which 1.20 does not have yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

from tests.containers import cgroups, images, network
from tests.containers.janitor import Janitor
from tests.containers.names import Names
from tests.containers.node import Node
from tests.kube import binaries
from tests.kube.api import Json
from tests.kube.cluster import ADMIN, NOBODY, Cluster

PROGRAMS = ("kubelet", "kube-scheduler", "kube-proxy")
TOOLS = ("containerd", "runc", "ctr", "iptables", "unshare")
NODES = (1, 2)
READY_S = 90.0

_SCHEDULER, _PROXY = "system:kube-scheduler", "system:kube-proxy"
_RESTRICTED = "restricted"
_VOLUMES = ["configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret"]


class Lab(Cluster):
    """Two nodes, Ready when made."""

    USERS: ClassVar[Mapping[str, str]] = {
        ADMIN: "system:masters",
        NOBODY: "",
        _SCHEDULER: "",
        _PROXY: "",
        **{f"system:node:node-{number}": "system:nodes" for number in NODES},
    }
    ADDRESSES: ClassVar[Sequence[str]] = ("127.0.0.1", network.HOST, network.API_SERVICE)
    CONTROLLERS: ClassVar[str] = ",".join(
        (
            Cluster.CONTROLLERS,
            "serviceaccount-token,root-ca-cert-publisher,persistentvolume-binder,pvc-protection,pv-protection,disruption",
        )
    )
    ADMISSION: ClassVar[Sequence[str]] = (
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement,NodeRestriction,PodSecurityPolicy",
    )
    FLAGS: ClassVar[Sequence[str]] = (
        "--bind-address=0.0.0.0",
        f"--advertise-address={network.HOST}",
        "--authorization-mode=Node",
    )

    def __init__(self, folder: Path) -> None:
        self.nodes: dict[str, Node] = {}
        self.group = f"muster-{folder.name}"
        super().__init__(folder, node_grace_s=8, eviction_s=2)
        self._janitor = Janitor(self.mark, self.group, folder)
        try:
            self._restrict()
            self.at_close(Names(self, network.HOST).close)
            self._start_scheduler()
            self._start_proxy()
            for number in NODES:
                self._add(number)
            self.until_ready(*self.nodes)
        except BaseException:
            self.close()
            raise

    # Nodes

    def until_ready(self, *names: str) -> None:
        """Until they take Pods."""
        for name in names:
            try:
                self.until(f"/api/v1/nodes/{name}", is_ready, f"{name} is ready", READY_S)
            except AssertionError as problem:
                raise AssertionError(f"{problem}\n{self.nodes[name].logs()}") from None

    def until_lost(self, name: str) -> None:
        self.until(f"/api/v1/nodes/{name}", lambda it: not is_ready(it), f"{name} is lost", READY_S)

    def heal(self) -> None:
        """All nodes alive, and open for Pods."""
        for name, node in self.nodes.items():
            if not node.alive:
                node.revive()
            self.kubectl("uncordon", name, check=False)
        self.until_ready(*self.nodes)

    def processes(self, pod: Json) -> list[int]:
        """Of its containers, as this machine numbers them; what holds its network is not among them."""
        (tree,) = (tree for tree in cgroups.trees() if tree.name == "memory")
        (place,) = (tree / self.group / pod["spec"]["nodeName"]).glob(f"kubepods/**/pod{pod['metadata']['uid']}")
        ids = [one["containerID"].rpartition("/")[2] for one in pod["status"]["containerStatuses"]]
        return [int(pid) for one in ids for pid in (place / one / "cgroup.procs").read_text().split()]

    def _add(self, number: int) -> None:
        name = f"node-{number}"
        config = self.kubeconfig(f"system:node:{name}", url=self.inner_url)
        self.nodes[name] = Node(self.folder / name, number, config, self.group, self.env())

    @property
    def inner_url(self) -> str:
        """Of the API server, for nodes."""
        return self.url.replace("127.0.0.1", network.HOST)

    # Parts

    def _start_scheduler(self) -> None:
        program, config = binaries.built("kube-scheduler"), self.kubeconfig(_SCHEDULER)
        self._start(
            "scheduler",
            program,
            f"--kubeconfig={config}",
            "--leader-elect=false",
            "--secure-port=0",
            *binaries.no_insecure_port(program),
        )

    def _start_proxy(self) -> None:
        """One for all nodes, which share the network that it sees to. It leaves the machine's own limits alone."""
        self._start(
            "proxy",
            binaries.built("kube-proxy"),
            f"--kubeconfig={self.kubeconfig(_PROXY)}",
            "--proxy-mode=iptables",
            f"--cluster-cidr={network.PODS}",
            f"--bind-address={network.HOST}",
            "--hostname-override=node-1",
            "--iptables-min-sync-period=0s",
            "--conntrack-max-per-core=0",
            "--conntrack-min=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        )

    def _restrict(self) -> None:
        self.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": _policy()}))

    def close(self) -> None:
        super().close()
        if hasattr(self, "_janitor"):
            self._janitor.close()


def _policy() -> list[Json]:
    rbac = {"apiGroup": "rbac.authorization.k8s.io"}
    notes = {"seccomp.security.alpha.kubernetes.io/allowedProfileNames": "runtime/default"}
    within = {"rule": "MustRunAs", "ranges": [{"min": 1, "max": 65535}]}
    spec = {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "requiredDropCapabilities": ["ALL"],
        "volumes": _VOLUMES,
        "runAsUser": {"rule": "MustRunAsNonRoot"},
        "seLinux": {"rule": "RunAsAny"},
        "supplementalGroups": within,
        "fsGroup": within,
    }
    return [
        {
            "apiVersion": "policy/v1beta1",
            "kind": "PodSecurityPolicy",
            "metadata": {"name": _RESTRICTED, "annotations": notes},
            "spec": spec,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": _RESTRICTED},
            "rules": [
                {
                    "apiGroups": ["policy"],
                    "resources": ["podsecuritypolicies"],
                    "verbs": ["use"],
                    "resourceNames": [_RESTRICTED],
                }
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": _RESTRICTED},
            "roleRef": {**rbac, "kind": "ClusterRole", "name": _RESTRICTED},
            "subjects": [{**rbac, "kind": "Group", "name": "system:authenticated"}],
        },
    ]


def is_ready(node: Json | None) -> bool:
    conditions = (node or {}).get("status", {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def open_lab() -> Lab:
    """In a new network; raises NotFound where something of it is missing."""
    binaries.find()
    for name in PROGRAMS:
        binaries.built(name)
    images.template()
    network.isolate()
    return Lab(Path(mkdtemp(prefix="lab-", dir=images.cache())))


if __name__ == "__main__":  # to look around in: kubectl gets the path of the kubeconfig
    began = time.monotonic()
    lab = open_lab()
    try:
        print(f"ready after {time.monotonic() - began:.1f} s; KUBECONFIG={lab.kubeconfig()}", flush=True)
        print(lab.kubectl("get", "nodes", "-o", "wide").stdout, flush=True)
        input("Enter ends it\n")
    finally:
        lab.close()
