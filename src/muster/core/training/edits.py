"""What does a request make of a training? The new value, and the event that records who asked for it.

A request that cannot be granted raises the error that its sender gets; whatever is wrong with a document is said at
once. Whether the name is free, the version current and the quota kept is for whoever holds the store to find out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from muster.core.training.admission import backend_of
from muster.errors import Conflict, InvalidRequest, UDTerminalState, WorldSizeOutOfBounds
from muster.types import plural
from muster.types.codec import Invalid, Problem, camel, from_wire, to_wire
from muster.types.event import EMBEDDED, Event
from muster.types.training import (
    API_VERSION,
    KIND,
    MASK,
    QUEUE,
    Cancel,
    Metadata,
    RankStatus,
    Spec,
    Status,
    Training,
    Uid,
    WorldStatus,
    problems_of,
)

FIXED = (
    "command",
    "script",
    "module",
    "args",
    "working_dir",
    "interpreter",
    "env",
    "secret_env",
    "procs_per_worker",
    "resources",
    "lease_seconds",
    "warm",
    "preload",
    "backend",
    "image",
    "package",
    "requirements",
    "mesh",
    "segment",
    "topology_key",
    "template",
    "storage",
    "bench",
)
SERVER_METADATA = ("uid", "generation", "resourceVersion", "creationTimestamp", "deletionTimestamp")
_TOP = ("apiVersion", "kind", "metadata", "spec", "status")
_PROGRAMS = {"command", "script", "module"}
_MOST_PROBLEMS = 500
_PROBLEMS_IN_MESSAGE = 8


@dataclass(frozen=True)
class Edit:
    """A training as a request leaves it. No event: the request changed nothing, and nothing is to be written."""

    training: Training
    event: Event | None = None


# Create ------------------------------------------------------------------------------------------


def created(
    body: object, *, namespace: str, now: datetime, uid: Uid, actor: str, backends: Collection[str] | None = None
) -> Edit:
    """A new training from a document. What only the server may set is ignored, as on Kubernetes."""
    document = _as_document(body)
    problems = _head_problems(document)
    given = document.get("metadata", {})
    if isinstance(given, dict):
        given = {name: value for name, value in given.items() if name not in SERVER_METADATA}
        if given.get("namespace", namespace) != namespace:
            problems.append(Problem("metadata.namespace", f"must be {namespace!r}, as in the address, or absent"))
        given["namespace"] = namespace
    wire = {"metadata": given} | ({"spec": document["spec"]} if "spec" in document else {})
    training = _checked(wire, problems, backends)
    if QUEUE in training.metadata.labels:  # whoever queues it says when it begins
        training = replace(training, spec=replace(training.spec, suspend=True))
    metadata = replace(training.metadata, uid=uid, generation=1, creation_timestamp=_stamp(now))
    size = training.spec.world_size
    made = replace(training, metadata=metadata, status=first_status(training.spec))
    return Edit(made, Event("Created", f"{_who(actor)} submitted it, for {plural.workers(size.target)}", actor=actor))


def _who(actor: str) -> str:
    """Return how sentences name an actor. The embedded token is the one of the user who runs the control plane."""
    return "the control plane's own user" if actor == EMBEDDED else actor


def first_status(spec: Spec) -> Status:
    """What is true of a training that nobody has looked at yet."""
    size = spec.world_size
    return Status(world_size=WorldStatus(target=size.target, min=size.min, max=size.max, below_minimum=True))


def _as_document(body: object) -> dict[str, Any]:
    if isinstance(body, dict):
        return body
    raise refused([Problem("body", "must be an object")], "the body")


def _head_problems(document: Mapping[str, Any]) -> list[Problem]:
    problems = [Problem(str(name), "unknown field") for name in document if name not in _TOP]
    for name, only in (("apiVersion", API_VERSION), ("kind", KIND)):
        if document.get(name, only) != only:
            problems.append(Problem(name, f"must be {only}"))
    return problems


def _checked(wire: dict[str, Any], problems: list[Problem], backends: Collection[str] | None) -> Training:
    """The training that a document describes; or every problem with it, those between its fields too."""
    found: Training | None = None
    bad: set[str] = set()
    try:
        found = Training.from_wire(wire, strict=True)
    except Invalid as invalid:
        problems += [_without_secret(problem) for problem in invalid.problems]
        bad = {".".join(problem.field.partition("[")[0].split(".", 2)[:2]) for problem in invalid.problems}
    rest = found or _what_can_be_read(wire, bad)
    if rest is not None:
        problems += [problem for problem in problems_of(rest) if not _follows_from(problem, bad)]
        if backends is not None and backend_of(rest.spec, backends) not in backends:
            known = ", ".join(sorted(backends)) or "none"
            problems.append(Problem("spec.backend", f"{rest.spec.backend!r} is not served here; known: {known}"))
    if problems or found is None:
        name = wire["metadata"].get("name") if isinstance(wire["metadata"], dict) else None
        raise refused(problems, f"training {name[:80]!r}" if isinstance(name, str) else "the training")
    return found


def _what_can_be_read(wire: Mapping[str, Any], bad: Collection[str]) -> Training | None:
    """The document without its bad fields, so that what is wrong between the others can be said as well."""
    metadata, spec = wire.get("metadata"), wire.get("spec")
    if not isinstance(metadata, dict) or not isinstance(spec, dict):
        return None
    left = {name: value for name, value in metadata.items() if f"metadata.{name}" not in bad}
    left.setdefault("name", "unnamed")
    kept = {name: value for name, value in spec.items() if f"spec.{name}" not in bad}
    try:
        return Training(from_wire(Metadata, left), from_wire(Spec, kept))
    except Invalid:  # a name with a dot in it was mistaken for a path; what is known already is enough
        return None


def _follows_from(problem: Problem, bad: Collection[str]) -> bool:
    """Whether a problem may be there only because a bad field was left out."""
    if problem.field == "spec":
        return any(f"spec.{name}" in bad for name in _PROGRAMS)
    return problem.field == "spec.secretEnv" and "spec.env" in bad


def _without_secret(problem: Problem) -> Problem:
    """A problem with a variable does not repeat its value, which may be a secret."""
    if not problem.field.startswith("spec.env"):
        return problem
    return replace(problem, message=problem.message.split(", not ")[0])


# Edit --------------------------------------------------------------------------------------------


def patched(
    training: Training, patch: object, *, now: datetime, actor: str, backends: Collection[str] | None = None
) -> Edit:
    """A merge patch (RFC 7386) of labels, annotations and spec. A secret that comes back masked stays as it was."""
    document = _as_document(patch)
    problems = _head_problems(document)
    old = training.to_wire()
    meta = _merged_metadata(training, old["metadata"], document.get("metadata", {}), problems)
    spec = merged(old["spec"], document["spec"]) if "spec" in document else old["spec"]
    if isinstance(spec, dict):
        spec = {**spec}
        _unmask(training.spec, spec)
        if training.spec.cancel is None and isinstance(spec.get("cancel"), dict):
            spec["cancel"] = {"requestedAt": to_wire(Cancel(now))["requestedAt"], **spec["cancel"]}
    read = _checked({"metadata": meta} | ({} if spec is None else {"spec": spec}), problems, backends)
    new = to_wire(read.spec)
    changed = [name for name in Spec.__dataclass_fields__ if new.get(camel(name)) != old["spec"].get(camel(name))]
    if changed and training.is_terminal:
        target = read.spec.world_size.target if "world_size" in changed else None
        raise _ended(training, target, f"its {', '.join(map(camel, changed))} cannot change any more")
    if refusals := _fixed_problems(training, changed):
        raise refused(refusals, f"training {training.metadata.name!r}")
    metadata = replace(training.metadata, labels=read.metadata.labels, annotations=read.metadata.annotations)
    touched = [
        name for name in ("labels", "annotations") if getattr(metadata, name) != getattr(training.metadata, name)
    ]
    if not changed and not touched:
        return Edit(training)
    metadata = replace(metadata, generation=training.generation + bool(changed))
    names = ", ".join([*map(camel, changed), *touched])
    event = Event("Edited", f"{_who(actor)} changed {names}", actor=actor, data={"fields": names.split(", ")})
    return Edit(replace(training, metadata=metadata, spec=read.spec if changed else training.spec), event)


def merged(target: object, patch: object) -> object:
    """RFC 7386: null removes, objects merge, everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _merged_metadata(training: Training, old: Mapping[str, Any], patch: object, problems: list[Problem]) -> object:
    if not isinstance(patch, dict):
        problems.append(Problem("metadata", "must be an object"))
        return old
    stale = patch.get("resourceVersion")
    if isinstance(stale, str) and stale != training.metadata.resource_version:
        raise _stale(training, stale)
    for name, value in patch.items():
        if name not in ("labels", "annotations") and value != old.get(name):
            known = any(name == camel(field) for field in Metadata.__dataclass_fields__)
            problems.append(Problem(f"metadata.{name}", "cannot be changed" if known else "unknown field"))
    return merged(old, {name: patch[name] for name in ("labels", "annotations") if name in patch})


def _unmask(old: Spec, spec: dict[str, Any]) -> None:
    env = spec.get("env")
    if isinstance(env, dict):
        kept = {name: old.env[name] for name in old.secret_env if name in old.env and env.get(name) == MASK}
        spec["env"] = {**env, **kept}


def _fixed_problems(training: Training, changed: Collection[str]) -> list[Problem]:
    found = [Problem(f"spec.{camel(name)}", "cannot change after submission") for name in FIXED if name in changed]
    if "cancel" in changed and training.spec.cancel is not None:
        found.append(Problem("spec.cancel", "stands: it can be neither altered nor taken back"))
    return found


def marks(spec: Spec) -> dict[str, str]:
    """What tells later whether a field was changed that cannot change, around us: field → digest."""
    wire = to_wire(spec)
    return {camel(name): _digest(wire.get(camel(name))) for name in FIXED}


def altered(spec: Spec, before: Mapping[str, str]) -> tuple[str, ...]:
    """The fields that are not what they were when those marks were taken."""
    now = marks(spec)
    return tuple(name for name, mark in before.items() if now.get(name, mark) != mark)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "replace")).hexdigest()[:16]


# Orders ------------------------------------------------------------------------------------------


def scaled(training: Training, target: int, *, actor: str) -> Edit:
    """Another target. Its generation is the caller's receipt; the target that it has already needs none."""
    size = training.spec.world_size
    name = training.metadata.name
    if training.is_terminal:
        raise _ended(training, target, f"it cannot be scaled to {target}")
    if not size.min <= target <= size.max:
        raise WorldSizeOutOfBounds(
            f"training {name!r} can have {plural.workers(size.max, f'{size.min} to ')}, not {target}",
            requested=target,
            min=size.min,
            max=size.max,
            hint=f"choose a target between {size.min} and {size.max}, or change worldSize with a patch",
        )
    if (each := training.spec.segment) is not None and target % each:
        problem = Problem("target", f"{target} is not a multiple of segment, which is {each}")
        raise refused([problem], f"the size for training {name!r}")
    if target == size.target:
        return Edit(training)
    spec = replace(training.spec, world_size=replace(size, target=target))
    data = {"fromTarget": size.target, "toTarget": target}
    event = Event(
        "ScaleRequested", f"{_who(actor)} asked for {plural.workers(target)} instead of {size.target}", actor=actor
    )
    return Edit(_with_spec(training, spec), replace(event, data=data))


def killed(training: Training, seat: RankStatus, *, whole_worker: bool, actor: str) -> Edit:
    """Return the entry of the journal for processes that a person killed. The training itself is unchanged."""
    what = f"every process of {seat.worker}" if whole_worker else f"rank {seat.rank} on {seat.worker}"
    data = {"rank": seat.rank, "worker": seat.worker, "wholeWorker": whole_worker}
    event = Event("KillRequested", f"{_who(actor)} killed {what}", actor=actor, round=training.status.round, data=data)
    return Edit(training, event)


def cancelled(training: Training, grace_seconds: float | None, *, now: datetime, actor: str) -> Edit:
    """The order to end. Given to a training that has ended, or has that order already, it changes nothing."""
    if training.is_terminal or training.spec.cancel is not None:
        return Edit(training)
    spec = replace(training.spec, cancel=Cancel(_stamp(now), grace_seconds))
    grace = "" if grace_seconds is None else f", with {grace_seconds:g} seconds of grace"
    event = Event(
        "CancelRequested", f"{_who(actor)} cancelled it{grace}", actor=actor, data={"graceSeconds": grace_seconds}
    )
    return Edit(_with_spec(training, spec), event)


def deleted(training: Training, *, now: datetime, actor: str) -> Edit:
    """Marked for removal, once."""
    if training.metadata.deletion_timestamp is not None:
        return Edit(training)
    metadata = replace(training.metadata, deletion_timestamp=_stamp(now))
    return Edit(
        replace(training, metadata=metadata), Event("DeleteRequested", f"{_who(actor)} deleted it", actor=actor)
    )


def _with_spec(training: Training, spec: Spec) -> Training:
    return replace(training, spec=spec, metadata=replace(training.metadata, generation=training.generation + 1))


def _stamp(now: datetime) -> datetime:
    """Times travel in milliseconds: what is stored equals what is read back."""
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


# Refusals ----------------------------------------------------------------------------------------


def refused(problems: list[Problem], what: str) -> InvalidRequest:
    """One error that lists everything; beyond some hundred problems nobody reads on."""
    shown = tuple(dict.fromkeys(problems))[:_MOST_PROBLEMS]
    clauses = [f"{problem.field[:200]}: {problem.message}" for problem in shown[:_PROBLEMS_IN_MESSAGE]]
    if len(problems) > len(clauses):
        clauses.append(f"and {len(problems) - len(clauses)} more")
    return InvalidRequest(f"{what} is not valid: {'; '.join(clauses)}", problems=shown)


def _ended(training: Training, target: int | None, so: str) -> UDTerminalState:
    name, phase = training.metadata.name, training.status.phase
    return UDTerminalState(
        f"training {name!r} has ended as {phase}: {so}",
        phase=phase,
        requested_target=target,
        hint="submit a new training",
    )


def _stale(training: Training, given: str) -> Conflict:
    return Conflict(
        f"training {training.metadata.name!r} is at version {training.metadata.resource_version}, not {given[:40]}",
        hint="read it again, then decide",
    )
