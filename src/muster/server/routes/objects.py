"""Trainings as objects: create, list, read, patch, delete."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from starlette.responses import Response

from muster.core.keeping import IDEMPOTENCY
from muster.core.training import edits
from muster.core.training.admission import backend_of, impossible
from muster.core.training.edits import Edit
from muster.errors import AlreadyExists, Conflict, Unavailable
from muster.ports import Filter, Record, Stored, Write
from muster.server import paging
from muster.server.answers import as_json, as_object
from muster.server.calls import JSON, MERGE_PATCH, MOST, Call, is_label, no_training, read_selector
from muster.server.describe import Answer, Body, Header, Operation
from muster.types.codec import Problem, limited, show_time
from muster.types.training import API_VERSION, Key, Phase, Training, Uid

TRAININGS = "/v1/namespaces/{namespace}/trainings"
TRAINING = TRAININGS + "/{name}"
_MOST_TRIES = 20
_KEY = re.compile(r"[!-~]{1,255}")
_CLAUSE = r"[A-Za-z0-9][-A-Za-z0-9_./]{0,252}==?[-A-Za-z0-9_.]{0,63}"
SELECTOR = rf"({_CLAUSE}(,{_CLAUSE})*)?"
ABOUT_SELECTOR = "must be like team=vision,stage=dev"
_PAGE = 500
_KEYS_BETWEEN_SWEEPS = 500


@dataclass(frozen=True)
class CreateQuery:
    """With `force`, what could never start here is taken all the same: GPUs may come with the next control plane."""

    dry_run: bool = False
    force: bool = False


@dataclass(frozen=True)
class ListQuery:
    label_selector: str = limited("", pattern=SELECTOR, max_length=2048, about=ABOUT_SELECTOR)
    phase: Phase | None = None
    limit: int = limited(_PAGE, ge=1, le=1000)
    continue_: str = limited("", max_length=1024)


@dataclass(frozen=True)
class GetQuery:
    """With a version the answer comes as soon as the training is newer, or after the timeout as it is."""

    resource_version: int | None = limited(None, ge=0, le=MOST)
    timeout_seconds: float = limited(30.0, ge=0, le=60)


# Create ------------------------------------------------------------------------------------------


async def create_training(call: Call) -> Response:
    namespace = call.request.path_params["namespace"]
    if not is_label(namespace, 63):
        raise edits.refused([Problem("namespace", f"{namespace[:80]!r} is not a name")], "the address")
    call.identity.must_write(namespace)
    query = call.query(CreateQuery)
    key = _idempotency_key(call)
    body = await call.json()
    services, actor = call.services, call.identity.name
    uid = Uid(str(uuid.uuid4()))
    edit = edits.created(
        body, namespace=namespace, now=services.clock.now(), uid=uid, actor=actor, backends=services.backends
    )
    if query.dry_run:
        return _dry_run(call, edit.training)
    if key is None:
        return as_object(await _store_new(call, edit, ()), 201)
    async with services.keys.turn(f"{namespace}/{key}"):
        return await _create_once(call, edit, f"{namespace}/{key}", _digest(body))


async def _create_once(call: Call, edit: Edit, key: str, digest: str) -> Response:
    """Create, unless that key has created something that is still there."""
    store = call.services.store
    known = store.record(IDEMPOTENCY, key)
    if known is not None:
        stored = store.get(Key(edit.training.metadata.namespace, known["name"]))
        if stored is not None and stored.training.requested_uid == known["uid"]:
            if known["digest"] != digest:
                raise Conflict(
                    f"this Idempotency-Key has created training {known['name']!r} from another body",
                    retryable=False,
                    hint="use a new key for a new request",
                )
            return as_object(stored, 201, {"Idempotent-Replay": "true"})
    now = show_time(call.services.clock.now())
    value = {"uid": edit.training.uid, "name": edit.training.metadata.name, "digest": digest, "at": now}
    records = (*_keys_of_the_gone(call), Record(IDEMPOTENCY, key, value))
    return as_object(await _store_new(call, edit, records), 201)


def _keys_of_the_gone(call: Call) -> Iterable[Record]:
    """Now and then, keys whose training is no more: they would stand for nothing for ever."""
    if call.services.keys.turns % _KEYS_BETWEEN_SWEEPS == 0:
        store = call.services.store
        for key, value in store.records(IDEMPOTENCY).items():
            stored = store.get(Key(key.partition("/")[0], value["name"]))
            if stored is None or stored.training.requested_uid != value["uid"]:
                yield Record(IDEMPOTENCY, key, None)


async def _store_new(call: Call, edit: Edit, records: tuple[Record, ...]) -> Stored:
    key = edit.training.key
    assert edit.event is not None
    call.request.scope["muster.about"] = str(key)
    await _check_package(call, edit.training)
    if call.services.store.get(key) is not None:
        raise _taken(key)
    _check_possible(call, edit.training)
    return await _write(call, Write(put=edit.training, expect=0, events=(edit.event,), records=records), None)


async def _check_package(call: Call, training: Training) -> None:
    """Its code is here, and stays until the training is."""
    digest, kept = training.spec.package, call.services.packages
    if digest is None:
        return
    if kept is None or kept.find(training.key.namespace, digest) is None:
        problem = Problem("spec.package", f"{digest[:19]}… has not been sent to namespace {training.key.namespace!r}")
        raise edits.refused([problem], f"training {training.key.name!r}")
    await kept.renew(training.key.namespace, digest, call.services.clock.now())


def _check_possible(call: Call, training: Training) -> None:
    """What could never start is refused at once, unless its sender knows better."""
    if call.query(CreateQuery).force:
        return
    services, name = call.services, backend_of(training.spec, call.services.backends)
    counted = services.backends[name].capacity()
    gpus = services.pooled.get(name, None if counted is None else counted.gpus)
    if (problem := impossible(training.spec, gpus)) is not None:
        error = edits.refused([problem], f"training {training.key.name!r}")
        error.hint = "`muster pool` shows which GPUs there are; with --force (force=True) it is submitted all the same"
        raise error


def _dry_run(call: Call, training: Training) -> Response:
    if call.services.store.get(training.key) is not None:
        raise _taken(training.key)
    _check_possible(call, training)
    if call.services.quotas is not None:
        call.services.quotas.check(call.services.store, training)
    shown = replace(training, metadata=replace(training.metadata, uid="")).masked()
    served = call.services.backends
    plan = served[backend_of(training.spec, served)].plan(shown)
    return as_json({**shown.to_wire(), "plan": plan})


def _taken(key: Key) -> AlreadyExists:
    return AlreadyExists(
        f"there is a training {key.name!r} in namespace {key.namespace!r} already",
        hint=f"choose another name, or `muster delete {key.name}` first",
    )


def _idempotency_key(call: Call) -> str | None:
    key = call.header("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise edits.refused([Problem("Idempotency-Key", "must be 1 to 255 visible characters")], "the request")
    return key


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# Write -------------------------------------------------------------------------------------------


async def edited(call: Call, key: Key, make: Callable[[Training], Edit], expect: int | None = None) -> Stored:
    """Apply an edit to the training as it is now. Without `expect`, a writer that came between costs a retry."""
    for _ in range(_MOST_TRIES):
        stored = call.found(key)
        if expect is not None and stored.version != expect:
            raise Conflict(
                f"training {key.name!r} is at version {stored.version}, not {expect}", hint="read it again, then decide"
            )
        edit = make(stored.training)
        if edit.event is None:
            return stored
        try:
            write = Write(put=edit.training, expect=stored.version, events=(edit.event,))
            return await _write(call, write, stored.training)
        except Conflict:
            if expect is not None:
                raise
    raise Unavailable(f"training {key.name!r} changes too fast to be edited", hint="try again")


async def _write(call: Call, write: Write, before: Training | None) -> Stored:
    """Commit, within the namespace's quota."""
    assert write.put is not None
    services, namespace = call.services, write.put.metadata.namespace
    async with AsyncExitStack() as held:
        if services.quotas is not None and services.quotas.limits_of(namespace) is not None:
            await held.enter_async_context(services.quotas.turn(namespace))
            services.quotas.check(services.store, write.put, before)
        stored = await services.store.write(write)
    assert stored is not None
    return stored


# Read --------------------------------------------------------------------------------------------


async def list_trainings(call: Call) -> Response:
    namespace = call.namespace
    call.identity.must_read(namespace)
    return _listed(call, namespace)


async def list_all_trainings(call: Call) -> Response:
    return _listed(call, None)


def _listed(call: Call, namespace: str | None) -> Response:
    """A page, joined from what the store keeps as bytes: decoding five hundred objects would cost ten times more."""
    query = call.query(ListQuery)
    which = Filter(namespace, query.phase, read_selector(query.label_selector))
    services = call.services
    page = paging.page(services.store, services.seal, call.identity, which, query.limit, query.continue_)
    items = [one.shown for one in page.items]
    metadata = {"resourceVersion": str(page.version), "continue": page.next}
    head = json.dumps({"apiVersion": API_VERSION, "kind": "TrainingList", "metadata": metadata})
    body = b"".join((head[:-1].encode(), b', "items": [', b",".join(items), b"]}"))
    return Response(body, media_type=JSON)


async def get_training(call: Call) -> Response:
    key = call.readable()
    query = call.query(GetQuery)
    stored = call.found(key)
    seen = query.resource_version
    # A version beyond the store's own was seen in another life of it: such a caller is told at once what there is.
    if seen is not None and stored.version <= seen <= call.services.store.version:
        call.request.scope["muster.stream"] = True  # it waits by design: no part of the latencies
        newer = await call.services.store.newer(key, seen, query.timeout_seconds)
        if newer is None or newer.uid != stored.uid:
            raise no_training(key)
        stored = newer
    return as_object(stored)


async def patch_training(call: Call) -> Response:
    key = call.writable()
    expect = call.expected_version()
    patch = await call.json(MERGE_PATCH, JSON)
    now, actor, backends = call.services.clock.now(), call.identity.name, call.services.backends

    def make(training: Training) -> Edit:
        return edits.patched(training, patch, now=now, actor=actor, backends=backends)

    return as_object(await edited(call, key, make, expect))


async def delete_training(call: Call) -> Response:
    """Marks it; the control loop stops what runs and then removes it."""
    key = call.writable()
    expect = call.expected_version()
    now, actor = call.services.clock.now(), call.identity.name
    stored = await edited(call, key, lambda training: edits.deleted(training, now=now, actor=actor), expect)
    return as_object(stored, 202)


_IF_MATCH = Header("If-Match", "Only if the training is at this version.", r'(W/)?"[0-9]{1,15}"|[0-9]{1,15}|\*')
_KEY_HEADER = Header("Idempotency-Key", "A repeat with the same key returns what the first made.", "[!-~]{1,255}")
_ONE: Mapping[int, Answer] = {200: Answer("The training.", "Training")}
_MARKED: Mapping[int, Answer] = {202: Answer("The training, marked for removal.", "Training")}
_NEW: Mapping[int, Answer] = {
    200: Answer("Dry run: the training as it would be, and the plan.", "DryRun"),
    201: Answer("The training, stored.", "Training", links=True),
}
_LIST: Mapping[int, Answer] = {200: Answer("A page of trainings.", "TrainingList")}

OPERATIONS = (
    Operation(
        "POST",
        TRAININGS,
        create_training,
        "Submit a training",
        _NEW,
        (403, 409, 413, 422),
        query=CreateQuery,
        body=Body("NewTraining"),
        headers=(_KEY_HEADER,),
    ),
    Operation("GET", TRAININGS, list_trainings, "List trainings", _LIST, (403, 404, 422), query=ListQuery),
    Operation("GET", "/v1/trainings", list_all_trainings, "List all that the token may see", _LIST, (422,), ListQuery),
    Operation("GET", TRAINING, get_training, "Read, or wait for a change", _ONE, (403, 404, 422), query=GetQuery),
    Operation(
        "PATCH",
        TRAINING,
        patch_training,
        "Change labels, annotations or spec by merge patch",
        _ONE,
        (403, 404, 409, 413, 422),
        body=Body("TrainingPatch", (MERGE_PATCH, JSON)),
        headers=(_IF_MATCH,),
    ),
    Operation(
        "DELETE", TRAINING, delete_training, "Stop and remove", _MARKED, (403, 404, 409, 422), headers=(_IF_MATCH,)
    ),
)
