"""What does a Pod's spec ask for, and what does its status say? Pure: the kubelet and the scheduler act on it."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from tests.kube.api import Json

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][-._A-Za-z0-9]*)\))")
_SUFFIXES = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
RESOURCES = ("cpu", "memory", "nvidia.com/gpu")
ENDED = ("Succeeded", "Failed")


def key_of(pod: Json) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def path_of(pod: Json) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def quantity(text: str | int | float) -> float:
    """`500m`, `2`, `1Gi`."""
    match = re.fullmatch(r"([0-9.e+]+)([A-Za-z]*)", str(text))
    assert match, f"not a quantity: {text}"
    return float(match[1]) * (_SUFFIXES[match[2]] if match[2] else 1)


def requested(pod: Json) -> dict[str, float]:
    """As the scheduler counts: a limit is the request where there is none."""
    total = dict.fromkeys(RESOURCES, 0.0)
    for container in pod["spec"]["containers"]:
        resources = container.get("resources", {})
        for name, amount in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
            if name in total:
                total[name] += quantity(amount)
    return total


def expand(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes does it: unknown names stay, `$$(NAME)` is `$(NAME)`."""

    def put(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return values.get(match[2], match[0])

    return _REFERENCE.sub(put, text)


def scratch(pod: Json) -> set[str]:
    """Where its container finds volumes that begin empty."""
    empty = {one["name"] for one in pod["spec"].get("volumes", []) if "emptyDir" in one}
    mounts = pod["spec"]["containers"][0].get("volumeMounts", [])
    return {one["mountPath"] for one in mounts if one["name"] in empty}


def secrets_of(container: Json) -> set[str]:
    """Names of the Secrets that its environment needs."""
    sources = [entry.get("valueFrom", {}).get("secretKeyRef") for entry in container.get("env", [])]
    return {source["name"] for source in sources if source and not source.get("optional")}


def decoded(secret: Json) -> dict[str, str]:
    return {name: base64.b64decode(value).decode() for name, value in secret.get("data", {}).items()}


def environment(pod: Json, secrets: Mapping[str, Mapping[str, str]], ip: str) -> dict[str, str]:
    """Raises KeyError for a key that its Secret lacks."""
    values: dict[str, str] = {}
    for entry in pod["spec"]["containers"][0].get("env", []):
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            values[entry["name"]] = _field(pod, source["fieldRef"]["fieldPath"], ip)
        elif "secretKeyRef" in source:
            wanted = source["secretKeyRef"]
            if not wanted.get("optional") or wanted["key"] in secrets.get(wanted["name"], {}):
                values[entry["name"]] = secrets[wanted["name"]][wanted["key"]]
        else:
            values[entry["name"]] = expand(entry.get("value", ""), values)
    return values


def command(container: Json, values: Mapping[str, str]) -> tuple[str, ...]:
    words = [*container.get("command", []), *container.get("args", [])]
    return tuple(expand(word, values) for word in words)


def _field(pod: Json, path: str, ip: str) -> str:
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(pod["metadata"].get(match[1], {}).get(match[2], ""))
    known = {"status.podIP": ip, "status.hostIP": "127.0.0.1", "spec.nodeName": pod["spec"]["nodeName"]}
    known |= {f"metadata.{name}": pod["metadata"][name] for name in ("name", "namespace", "uid")}
    known["spec.serviceAccountName"] = pod["spec"].get("serviceAccountName", "default")
    return str(known[path])


# Statuses


def conditions(ready: bool, reason: str = "") -> list[Json]:
    now = stamp()
    said = {"reason": reason} if reason else {}
    return [
        {"type": "Initialized", "status": "True", "lastTransitionTime": now},
        *(
            {"type": kind, "status": str(ready), "lastTransitionTime": now, **({} if ready else said)}
            for kind in ("ContainersReady", "Ready")
        ),
    ]


def status(pod: Json, phase: str, state: Json, *, ip: str = "", restarts: int = 0, last: Json | None = None) -> Json:
    """What is written to `status`, for a Pod of one container in that state."""
    container = pod["spec"]["containers"][0]
    ready = "running" in state
    written: Json = {
        "phase": phase,
        "hostIP": "127.0.0.1",
        "conditions": conditions(ready, "PodCompleted" if phase == "Succeeded" else "ContainersNotReady"),
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": ready,
                "started": ready,
                "restartCount": restarts,
                "state": state,
                "lastState": last or {},
            }
        ],
    }
    return written | ({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {})


def waiting(reason: str, message: str = "") -> Json:
    return {"waiting": {"reason": reason, "message": message}}


def terminated(code: int, reason: str, started: str, message: str = "") -> Json:
    ended = {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": stamp()}
    return {"terminated": ended | ({"message": message} if message else {})}


def unschedulable(nodes: int, refusals: Sequence[str]) -> str:
    """In the words of the real scheduler, by the refusals of single nodes."""
    if not nodes:
        return "no nodes available to schedule pods"
    counted = sorted(f"{refusals.count(refusal)} {refusal}" for refusal in set(refusals))
    return f"0/{nodes} nodes are available: {', '.join(counted)}."
