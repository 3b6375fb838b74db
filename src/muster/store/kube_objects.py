"""What is an object of the Kubernetes API as a training, and a training as such an object? Pure.

With each change of an object travels what the journal is to say of it, its *outbox*: in an annotation with the spec, in
a field with the status. A control plane that dies before it has written the journal leaves it there for the next one.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from muster.core.edits import first_status
from muster.kube.client import Json
from muster.ports import Record, Version, Write
from muster.types.codec import Invalid, from_wire, to_wire
from muster.types.event import Event
from muster.types.training import API_VERSION, KIND, REQUEST, UNREADABLE, Key, Spec, Status, Training

log = logging.getLogger("muster.store")

FINALIZER = "muster.dev/training"
OUTBOX = "muster.dev/journal"  # annotation
STATUS_OUTBOX = "journal"  # field of the status
_LONGEST_NOTE = 1000
_LARGEST_OUTBOX = 65_536

Outbox = Mapping[str, Any]  # mark, events, records


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


def object_of(training: Training, extras: Extras, outbox: Outbox | None, version: Version | None = None) -> Json:
    """What is created, or put in the place of that version; the status is written apart."""
    about = training.metadata
    metadata: Json = {"name": about.name, "namespace": about.namespace, "labels": dict(about.labels)}
    metadata["annotations"] = {**about.annotations, **packed(outbox, OUTBOX)}
    metadata["finalizers"] = list(extras.finalizers)
    if version is None and training.uid:
        metadata["annotations"][REQUEST] = training.uid
    if version is not None:
        metadata["resourceVersion"] = str(version)
    if extras.owners:
        metadata["ownerReferences"] = list(extras.owners)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": to_wire(training.spec)}


def status_of(key: Key, version: Version, status: Status, outbox: Outbox | None) -> Json:
    metadata = {"name": key.name, "namespace": key.namespace, "resourceVersion": str(version)}
    shown = {**to_wire(status), **packed(outbox, STATUS_OUTBOX)}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": shown}


# The outbox --------------------------------------------------------------------------------------


def outbox_of(write: Write, mark: str) -> Outbox:
    records = [[one.kind, one.key, None if one.value is None else dict(one.value)] for one in write.records]
    return {"mark": mark, "events": [to_wire(event) for event in write.events], "records": records}


def packed(outbox: Outbox | None, name: str) -> dict[str, str]:
    """Under that name, if there is one and it is of a size that an object can carry."""
    if outbox is None:
        return {}
    text = json.dumps(outbox, separators=(",", ":"))
    return {name: text} if len(text) <= _LARGEST_OUTBOX else {}


def outboxes(item: Json) -> Iterator[tuple[str, Write]]:
    """What the journal is to say of an object: its mark, and the entries. What cannot be read is nobody's loss."""
    annotations, status = item["metadata"].get("annotations") or {}, item.get("status") or {}
    for text in (annotations.get(OUTBOX), status.get(STATUS_OUTBOX)):
        if not text:
            continue
        try:
            held = json.loads(text)
            events = tuple(from_wire(Event, event, strict=False) for event in held["events"])
            records = tuple(Record(kind, key, value) for kind, key, value in held["records"])
            yield str(held["mark"]), Write(events=events, records=records)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s: what it says for the journal cannot be read: %r", key_of(item), error)


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
