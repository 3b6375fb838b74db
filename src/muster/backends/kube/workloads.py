"""How is a Workload of Kueue written and read, and what does it say of where its Pods are to run? Pure.

Of the API `kueue.x-k8s.io/v1beta1`, which Kueue has served since 0.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from muster.backends.kube import render
from muster.backends.kube.render import Json
from muster.core.training.queueing import Workload
from muster.types.codec import show_time
from muster.types.training import QUEUE, Training

GROUP = "kueue.x-k8s.io"
VERSION = f"{GROUP}/v1beta1"
POD_SET = "workers"
_TARGET, _SPARES = "muster.dev/target", "muster.dev/spares"
# What quota and places are counted by; the rest of a Pod is nobody's business there.
_OF_POD = (
    "restartPolicy",
    "nodeSelector",
    "tolerations",
    "affinity",
    "priorityClassName",
    "runtimeClassName",
    "overhead",
)
_OF_CONTAINER = ("name", "image", "resources")


@dataclass(frozen=True)
class Place:
    """What the flavors that it was given add to its Pods."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()

    def applied(self, pod: Json) -> Json:
        spec = pod["spec"]
        more: Json = {}
        if self.node_selector:
            more["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **self.node_selector}
        if self.tolerations:
            more["tolerations"] = [*(spec.get("tolerations") or ()), *self.tolerations]
        return {**pod, "spec": spec | more} if more else pod


def name_of(training: Training) -> str:
    """Short enough for a label's value, and of this very training."""
    return f"training-{training.key.name[:40]}-{hashlib.sha256(training.uid.encode()).hexdigest()[:8]}"


def workload(training: Training, pod: Json) -> Json:
    """For all its workers, in one set, of which `min` may do."""
    spec, about = training.spec, training.metadata
    count = spec.world_size.target + spec.spares
    metadata = render.owned(training, name_of(training))
    metadata["annotations"] = {_TARGET: str(spec.world_size.target), _SPARES: str(spec.spares)}
    metadata["labels"] |= {f"{GROUP}/job-uid": training.uid}
    pods: Json = {"name": POD_SET, "count": count, "template": _template(pod)}
    if spec.world_size.min < count:
        pods["minCount"] = spec.world_size.min
    body: Json = {"queueName": about.labels[QUEUE], "podSets": [pods], "active": True, "priority": spec.priority}
    return {"apiVersion": VERSION, "kind": "Workload", "metadata": metadata, "spec": body}


def _template(pod: Json) -> Json:
    spec = pod["spec"]
    cut = {name: spec[name] for name in _OF_POD if name in spec}
    for kind in ("containers", "initContainers"):
        if spec.get(kind):
            cut[kind] = [{name: one[name] for name in _OF_CONTAINER if name in one} for one in spec[kind]]
    return {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": cut}


def read(item: Mapping[str, Any]) -> Workload | None:
    """None for one that is not as we write them."""
    notes = item["metadata"].get("annotations") or {}
    try:
        target, spares = int(notes[_TARGET]), int(notes[_SPARES])
    except (KeyError, ValueError):
        return None
    status = item.get("status") or {}
    holds = {one.get("type"): one for one in status.get("conditions") or () if one.get("status") == "True"}
    assigned = [one.get("count") for one in _assignments(status)]
    count = assigned[0] if assigned and isinstance(assigned[0], int) else target + spares
    evicted = holds.get("Evicted")
    why = (evicted.get("message") or evicted.get("reason") or "it was evicted") if evicted is not None else ""
    admitted = count if "Admitted" in holds and assigned else None
    return Workload(target, spares, admitted, "QuotaReserved" in holds, why, "Finished" in holds)


def flavors(item: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what was given to it."""
    found = {
        str(name) for one in _assignments(item.get("status") or {}) for name in (one.get("flavors") or {}).values()
    }
    return tuple(sorted(found))


def _assignments(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in (status.get("admission") or {}).get("podSetAssignments") or () if one.get("name") == POD_SET]


def placed(flavors: Iterable[Mapping[str, Any]]) -> Place:
    selector: dict[str, str] = {}
    tolerations: list[Mapping[str, Any]] = []
    for one in flavors:
        spec = one.get("spec") or {}
        selector |= spec.get("nodeLabels") or {}
        tolerations += spec.get("tolerations") or ()
    return Place(selector, tuple(tolerations))


def with_condition(item: Json, kind: str, holds: bool, reason: str, message: str, now: datetime) -> Json:
    """The object with that condition; what is not admitted any more has no quota either."""
    status = dict(item.get("status") or {})
    generation = item["metadata"].get("generation", 0)
    said = {"type": kind, "status": str(holds), "reason": reason, "message": message[:1000]}
    said |= {"lastTransitionTime": show_time(now), "observedGeneration": generation}
    status["conditions"] = [*(one for one in status.get("conditions") or () if one.get("type") != kind), said]
    if kind == "QuotaReserved" and not holds:
        status.pop("admission", None)
    return {**item, "status": status}
