"""What does a Node's status say while its kubelet is well?"""

from __future__ import annotations

from collections.abc import Mapping

from tests.kube.api import Json
from tests.kube.pods import stamp

# All of them must be there; kubectl shows some.
_INFO = {
    **dict.fromkeys(("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "kubeProxyVersion"), ""),
    "containerRuntimeVersion": "",
    "architecture": "amd64",
    "operatingSystem": "linux",
    "kubeletVersion": "v1.20.2",
}


def node_status(room: Mapping[str, str], port: int) -> Json:
    """`port` is where its kubelet serves logs."""
    now = stamp()
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}
    return {
        "capacity": dict(room),
        "allocatable": dict(room),
        "conditions": [{**ready, "lastHeartbeatTime": now, "lastTransitionTime": now}],
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        "nodeInfo": dict(_INFO),
    }
