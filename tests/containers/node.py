"""One real node: how do containerd, runc and a kubelet run side by side with another, and die all at once?

A node is one process in namespaces of its own (`node.sh`); whatever runs on it, containers included, ends with that
process. Its disk is a folder, which outlives it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.containers import cgroups, images, network
from tests.containers.names import DOMAIN
from tests.kube import binaries
from tests.kube.api import Json

_SYSCTLS = {
    "vm.overcommit_memory": "1",
    "vm.panic_on_oom": "0",
    "kernel.panic": "10",
    "kernel.panic_on_oops": "1",
    "kernel.keys.root_maxkeys": "1000000",
    "kernel.keys.root_maxbytes": "25000000",
}
_CONTAINERD = f"""\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{images.PAUSE}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "CNI"
"""


class Node:
    """Starts when it is made; `Ready` is for the API server to say."""

    def __init__(self, folder: Path, number: int, kubeconfig: Path, group: str, env: dict[str, str]) -> None:
        self.name = f"node-{number}"
        self.folder, self._number, self._env = folder, number, env
        self._group = f"{group}/{self.name}"
        self._process: subprocess.Popen[bytes] | None = None
        for part in ("lib/kubelet", "log", "cni", "sysctl"):
            (folder / part).mkdir(parents=True)
        images.copy_template(folder / "lib/containerd")
        self._write(kubeconfig)
        network.plug_in(number)
        self.start()

    def start(self) -> None:
        """Also after a kill: with the disk as it was then."""
        cgroups.make(self._group)
        script = str(Path(__file__).with_name("node.sh"))
        apart = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child"]
        words = [*apart, "bash", script, str(self.folder), self.name, binaries.built("kubelet")]
        with open(self.folder / "node.log", "ab") as log:
            self._process = subprocess.Popen(
                words, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        """All at once, and without a word to anyone: its Pods' network goes first."""
        assert self._process is not None, f"{self.name} is dead already"
        network.unplug(self._number)
        pid = self._process.pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(first), signal.SIGKILL)
        self._process.wait(30)
        self._process = None
        assert not cgroups.remove(self._group), f"something of {self.name} lives on"

    def revive(self) -> None:
        network.plug_in_again(self._number)
        self.start()

    @property
    def alive(self) -> bool:
        return self._process is not None

    def logs(self) -> str:
        found = [self.folder / name for name in ("node.log", "containerd.log", "kubelet.log")]
        return "\n".join(f"== {one.name}\n{one.read_text(errors='replace')[-4000:]}" for one in found if one.exists())

    def _write(self, kubeconfig: Path) -> None:
        for name, value in _SYSCTLS.items():
            (self.folder / "sysctl" / name).write_text(value)
        (self.folder / "address").write_text(network.address(self._number))
        (self.folder / "kubeconfig.json").write_text(kubeconfig.read_text())
        (self.folder / "containerd.toml").write_text(_CONTAINERD.replace("CNI", str(self.folder / "cni")))
        (self.folder / "cni/10-pods.conflist").write_text(json.dumps(self._pod_network()))
        (self.folder / "kubelet.json").write_text(json.dumps(self._kubelet()))
        (self.folder / "resolv.conf").write_text("")

    def _pod_network(self) -> Json:
        bridge = {
            "type": "bridge",
            "bridge": network.bridge(self._number),
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": network.subnet(self._number)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}

    def _kubelet(self) -> Json:
        own = network.address(self._number)
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": own,
            "healthzBindAddress": own,
            "readOnlyPort": 0,
            # Who reaches this network is the test itself.
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._group}",
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "clusterDomain": DOMAIN,
            "clusterDNS": [network.HOST],
            "resolvConf": str(self.folder / "resolv.conf"),
            "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": 8,
            "syncFrequency": "2s",
        }
