"""Which Pods may a training ask for? A partial Pod, of which everything that muster needs is left to muster.

What it is merged onto, and how, is the business of `backends.kube`. What it may ask of the cluster (host paths,
privileges, devices) is the cluster's to allow: Pod Security and quotas of its namespace see the Pod as any other.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.types.codec import MOST, Problem, is_text

CONTAINER = "worker"
HOME = "/home/worker"  # of a user that the image does not know
SHM = "/dev/shm"
AGENT = "/muster-agent"  # the agent for images without muster
GPU = "nvidia.com/gpu"
OWN_VOLUMES = "muster-"  # what names of volumes that muster makes begin with
MOST_BYTES = 64 * 1024
DEEPEST = 20
TOO_DEEP = f"is nested more than {DEEPEST} levels deep"
MANAGED_BY = "app.kubernetes.io/managed-by"

OWN = "is muster's own"
_WITH_ALL = f"{OWN}: a worker's container must end with all its processes"
_NOT_IN_POD = {
    **dict.fromkeys(("restartPolicy", "hostname", "subdomain", "enableServiceLinks", "ephemeralContainers"), OWN),
    **dict.fromkeys(("hostPID", "shareProcessNamespace"), _WITH_ALL),
    "terminationGracePeriodSeconds": f"{OWN}: it follows from spec.stopGraceSeconds",
}
_NOT_IN_WORKER = {
    **dict.fromkeys(("command", "args", "restartPolicy", "terminationMessagePath", "terminationMessagePolicy"), OWN),
    "image": f"{OWN}: spec.image sets it",
    "workingDir": f"{OWN}: spec.workingDir sets it",
}
_OWN_VARIABLES = ("POD_IP", "NODE_NAME")


@dataclass(frozen=True)
class Keyed:
    """A list whose entries Kubernetes merges by one of their fields; `inner` are such lists within an entry."""

    key: str
    inner: Mapping[str, Keyed] = field(default_factory=dict)


_IN_CONTAINER = {
    "env": Keyed("name"),
    "ports": Keyed("containerPort"),
    "volumeMounts": Keyed("mountPath"),
    "volumeDevices": Keyed("devicePath"),
}
# As `patchMergeKey` stands in the types of the Kubernetes API; every other list is replaced as a whole.
KEYED: Mapping[str, Keyed] = {
    "containers": Keyed("name", _IN_CONTAINER),
    "initContainers": Keyed("name", _IN_CONTAINER),
    "volumes": Keyed("name"),
    "imagePullSecrets": Keyed("name"),
    "hostAliases": Keyed("ip"),
    "schedulingGates": Keyed("name"),
    "resourceClaims": Keyed("name"),
    "topologySpreadConstraints": Keyed("topologyKey"),
}
_SAME_KEY_TWICE = ("ports", "topologySpreadConstraints")  # where Kubernetes tells entries apart by more than that


def problems(
    template: Mapping[str, Any], *, env: Collection[str] = (), mounts: Mapping[str, str], at: str = "spec.template"
) -> list[Problem]:
    """What is wrong with it. `env` are the variables that the spec sets, `mounts` says whose a path is already."""
    if found := _unusable(template, at):
        return found
    found = [Problem(f"{at}.{name}", "only metadata and spec are merged") for name in _others(template, at)]
    found += _metadata_problems(template.get("metadata"), f"{at}.metadata")
    spec, where = template.get("spec"), f"{at}.spec"
    if spec is None:
        return found
    if not isinstance(spec, Mapping):
        return [*found, Problem(where, "must be an object")]
    found += _refused(spec, _NOT_IN_POD, where)
    if wrong := _list_problems(spec, KEYED, where):
        return found + wrong
    found += [
        Problem(f"{where}.volumes[{one['name']}]", f"{OWN}: names that begin with {OWN_VOLUMES} are")
        for one in _entries(spec, "volumes")
        if one["name"].startswith(OWN_VOLUMES)
    ]
    found += [
        Problem(f"{where}.initContainers[{one['name']}]", f"{OWN}: choose another name")
        for one in _entries(spec, "initContainers")
        if one["name"] in (CONTAINER, AGENT.strip("/"))
    ]
    for one in _entries(spec, "containers"):
        if one["name"] == CONTAINER:
            found += _worker_problems(one, env, mounts, f"{where}.containers[{CONTAINER}]")
    return found


def _others(template: Mapping[str, Any], at: str) -> list[str]:
    return [name for name in template if name not in ("metadata", "spec")]


def _unusable(template: Mapping[str, Any], at: str) -> list[Problem]:
    """What must be right before anything else can be looked at."""
    if is_too_deep(template):
        return [Problem(at, TOO_DEEP)]
    size = _size(template)  # before everything in it is looked at
    if size > MOST_BYTES:
        return [Problem(at, f"has {size} bytes, at most {MOST_BYTES} are possible")]
    for path, value in _walk(template, at):
        if (wrong := _bad_value(value)) or (wrong := _bad_names(value)):
            return [Problem(path[:200], wrong)]
    return []


def is_too_deep(value: object, levels: int = DEEPEST) -> bool:
    """Found out level by level: what is that deep must not be walked through by anything that calls itself."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            inner
            for one in layer
            if isinstance(one, Mapping | list)
            for inner in (one.values() if isinstance(one, Mapping) else one)
        ]
    return bool(layer)


def _size(template: Mapping[str, Any]) -> int:
    try:
        return len(json.dumps(template, ensure_ascii=False))
    except (TypeError, ValueError):  # what it is will be told
        return 0


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything in it."""
    yield path, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from _walk(one, f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}")


def _bad_value(value: Any) -> str:
    if isinstance(value, str):
        return "" if is_text(value) and "\0" not in value else "is not valid text"
    if isinstance(value, bool) or value is None or isinstance(value, list | Mapping):
        return ""
    if isinstance(value, int | float):
        return "" if math.isfinite(value) and abs(value) < MOST else "is too large a number"
    return "is no JSON value"


def _bad_names(value: Any) -> str:
    if not isinstance(value, Mapping):
        return ""
    if not all(isinstance(name, str) and is_text(name) for name in value):
        return "has a name that is no text"
    told = next((name for name in value if name.startswith("$")), "")
    return f"{told[:40]!r} is a directive of a patch; fields and lists are merged without any" if told else ""


def _metadata_problems(metadata: Any, at: str) -> list[Problem]:
    if metadata is None:
        return []
    if not isinstance(metadata, Mapping):
        return [Problem(at, "must be an object")]
    found = [Problem(f"{at}.{name}", OWN) for name in metadata if name not in ("labels", "annotations")]
    for kind in ("labels", "annotations"):
        told = metadata.get(kind)
        if told is None:
            continue
        if not isinstance(told, Mapping):
            found.append(Problem(f"{at}.{kind}", "must be an object"))
            continue
        found += [Problem(f"{at}.{kind}[{name[:80]}]", OWN) for name in told if _is_own_label(name)]
        found += [
            Problem(f"{at}.{kind}[{name[:80]}]", "must be a text")
            for name, value in told.items()
            if not isinstance(value, str)
        ]
    return found


def _is_own_label(name: str) -> bool:
    prefix, slash, _ = name.rpartition("/")
    return name == MANAGED_BY or (bool(slash) and (prefix == "muster.dev" or prefix.endswith(".muster.dev")))


def _refused(given: Mapping[str, Any], own: Mapping[str, str], at: str) -> list[Problem]:
    return [Problem(f"{at}.{name}", why) for name, why in own.items() if name in given]


def _list_problems(given: Mapping[str, Any], known: Mapping[str, Keyed], at: str) -> list[Problem]:
    """Of lists that are merged by a key: each entry needs one, and has it alone."""
    found: list[Problem] = []
    for name, keyed in known.items():
        listed, where = given.get(name), f"{at}.{name}"
        if listed is None:
            continue
        if not isinstance(listed, list):
            found.append(Problem(where, "must be a list"))
            continue
        seen: set[object] = set()
        for index, entry in enumerate(listed):
            key = entry.get(keyed.key) if isinstance(entry, Mapping) else None
            if not isinstance(entry, Mapping) or not isinstance(key, int if name == "ports" else str) or not key:
                found.append(Problem(f"{where}[{index}]", f"needs its {keyed.key}"))
                continue
            if key in seen and name not in _SAME_KEY_TWICE:
                found.append(Problem(f"{where}[{key}]", "is given twice"))
            seen.add(key)
            found += _list_problems(entry, keyed.inner, f"{where}[{key}]")
    return found


def _entries(given: Mapping[str, Any], name: str) -> list[Any]:
    return given.get(name) or []


def _worker_problems(
    worker: Mapping[str, Any], env: Collection[str], mounts: Mapping[str, str], at: str
) -> list[Problem]:
    found = _refused(worker, _NOT_IN_WORKER, at)
    for one in _entries(worker, "env"):
        name = one["name"]
        if name.startswith("MUSTER_") or name in _OWN_VARIABLES:
            found.append(Problem(f"{at}.env[{name[:80]}]", f"{OWN}: choose another name"))
        elif name in env:
            found.append(Problem(f"{at}.env[{name[:80]}]", "is set by spec.env, too"))
    for one in _entries(worker, "volumeMounts"):
        path = posixpath.normpath(one["mountPath"])
        if path in mounts:
            found.append(Problem(f"{at}.volumeMounts[{one['mountPath'][:80]}]", mounts[path]))
    resources = worker.get("resources")
    if resources is not None and not isinstance(resources, Mapping):
        return [*found, Problem(f"{at}.resources", "must be an object")]
    for kind in ("limits", "requests"):
        amounts = (resources or {}).get(kind)
        if isinstance(amounts, Mapping) and GPU in amounts:
            found.append(Problem(f"{at}.resources.{kind}[{GPU}]", f"{OWN}: spec.resources.gpus sets it"))
    return found
