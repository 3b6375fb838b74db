"""What is an object of the Kubernetes API as a training, and a training as such an object? Pure.

What an object carries for the journal is the business of `kube_outbox`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime

from muster.core.training.edits import first_status
from muster.kube.client import Json
from muster.ports import Version, Write
from muster.store.kube_outbox import OUTBOX, STATUS_OUTBOX
from muster.types import plural, pod_template
from muster.types.codec import Invalid, Problem, to_wire
from muster.types.event import Event
from muster.types.training import API_VERSION, KIND, REQUEST, UNREADABLE, Key, Spec, Status, Training

FINALIZER = "muster.dev/training"
_LONGEST_NOTE = 1000


@dataclass(frozen=True)
class Extras:
    """What an object carries beside the training itself."""

    finalizers: tuple[str, ...] = ()
    owners: tuple[Json, ...] = ()

    @property
    def is_ours(self) -> bool:
        return FINALIZER in self.finalizers


def training_of(item: Json) -> Training:
    """The training that an object of the API is. Raises Invalid."""
    about = dict(item["metadata"])
    wire = {"metadata": about, "spec": item.get("spec") or {}}
    for name in ("labels", "annotations"):
        if about.get(name) is None:
            about.pop(name, None)
    if OUTBOX in about.get("annotations", ()):
        about["annotations"] = {name: value for name, value in about["annotations"].items() if name != OUTBOX}
    if item.get("status"):
        wire["status"] = item["status"]
    if pod_template.is_too_deep(wire["spec"].get("template")):
        raise Invalid([Problem("spec.template", pod_template.TOO_DEEP)])
    training = Training.from_wire(wire)
    return training if "status" in wire else replace(training, status=first_status(training.spec))


def is_as_asked(asked: Training, found: Training) -> bool:
    """Whether a write whose answer was lost has been carried out."""
    extra = {REQUEST: found.metadata.annotations.get(REQUEST, "")}
    return (
        (to_wire(asked.spec), to_wire(asked.status)) == (to_wire(found.spec), to_wire(found.status))
        and asked.metadata.labels == found.metadata.labels
        and {**extra, **asked.metadata.annotations} == {**extra, **found.metadata.annotations}
        and asked.uid in (found.uid, extra[REQUEST])
        and (asked.metadata.deletion_timestamp is None) == (found.metadata.deletion_timestamp is None)
    )


def with_note(item: Json, error: Invalid, spec: Spec | None) -> Training:
    """One whose spec cannot be read: with the spec that it had, or with what is left of it, and what is wrong.

    The note makes it invalid, so that nothing follows from it but a condition.
    """
    bad = {re.split(r"[.\[]", f"{problem.field}.")[1] for problem in error.problems}
    left = {name: value for name, value in item["spec"].items() if name not in bad}
    about = item["metadata"]
    noted = {**about, "annotations": {**(about.get("annotations") or {}), UNREADABLE: str(error)[:_LONGEST_NOTE]}}
    return training_of({**item, "metadata": noted, "spec": left if spec is None else to_wire(spec)})


def object_of(training: Training, extras: Extras, carried: str, version: Version | None = None) -> Json:
    """What is created, or put in the place of that version; the status is written apart."""
    about = training.metadata
    metadata: Json = {"name": about.name, "namespace": about.namespace, "labels": dict(about.labels)}
    metadata["annotations"] = {**about.annotations, **({OUTBOX: carried} if carried else {})}
    metadata["finalizers"] = list(extras.finalizers)
    if version is None and training.uid:
        metadata["annotations"][REQUEST] = training.uid
    if version is not None:
        metadata["resourceVersion"] = str(version)
    if extras.owners:
        metadata["ownerReferences"] = list(extras.owners)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": to_wire(training.spec)}


def status_of(key: Key, version: Version, status: Status, carried: str) -> Json:
    metadata = {"name": key.name, "namespace": key.namespace, "resourceVersion": str(version)}
    shown = {**to_wire(status), **({STATUS_OUTBOX: carried} if carried else {})}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": shown}


def born(item: Json) -> Write:
    """What the journal says of a training that was applied around our API."""
    size, created = item["spec"].get("worldSize") or {}, item["metadata"].get("creationTimestamp")
    message = f"applied to the cluster, for {plural.workers(size.get('target', 1))}"
    at = datetime.fromisoformat(created) if created else None
    return Write(events=(Event("Created", message, actor="kubectl", at=at),))


# Where it is -------------------------------------------------------------------------------------


def collection(key: Key) -> str:
    return f"/apis/muster.dev/v1alpha1/namespaces/{key.namespace}/trainings"


def path_of(key: Key) -> str:
    return f"{collection(key)}/{key.name}"


def key_of(item: Json) -> Key:
    return Key(item["metadata"]["namespace"], item["metadata"]["name"])


def uid_of(item: Json | None) -> str | None:
    return item["metadata"]["uid"] if item is not None else None


def version_of(item: Json) -> Version:
    return int(item["metadata"]["resourceVersion"])
