"""What does the API promise? An OpenAPI document, made from the same operations and records that answer the calls."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from muster.core.packages import KeptPackage
from muster.core.training.admission import ANYWHERE
from muster.core.training.edits import FIXED, SERVER_METADATA
from muster.core.training.explain import Explanation
from muster.server.auth import Identity
from muster.server.calls import JSON, Call
from muster.types import pools
from muster.types.codec import camel, schema_of
from muster.types.event import Event
from muster.types.sharing import Holder, Priority, ProgressReport, WorkerHolder
from muster.types.training import API_VERSION, DNS_LABEL, KIND, PACKAGE, Training
from muster.types.usage import Usage

Schema = dict[str, Any]
Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True)
class Header:
    """A header that a call understands."""

    name: str
    about: str
    pattern: str


@dataclass(frozen=True)
class Body:
    """What a call is sent."""

    schema: str  # name among SCHEMAS
    media_types: tuple[str, ...] = (JSON,)
    required: bool = True


@dataclass(frozen=True)
class Answer:
    about: str
    schema: str | None = None  # name among SCHEMAS; None: a text
    media_type: str = JSON  # empty: nothing but the status
    links: bool = False  # the object that comes back can be addressed by every call that takes a name


@dataclass(frozen=True)
class Operation:
    """One call: where it is, who answers it, and everything that can come back."""

    method: str
    path: str
    handler: Handler
    summary: str
    answers: Mapping[int, Answer]
    refusals: tuple[int, ...] = ()
    query: type | None = None
    body: Body | None = None
    headers: tuple[Header, ...] = ()
    open: bool = False  # no token is needed

    @property
    def name(self) -> str:
        return camel(self.handler.__name__)


_PATH_PARTS = {
    "namespace": (DNS_LABEL, 63),
    "name": (DNS_LABEL, 52),
    "pool": (DNS_LABEL, 63),
    **{part: (pools.NAME, 128) for part in ("pipeline", "key", "action")},
    "node": ("[0-9]+", 9),
    "digest": (PACKAGE, 71),
}
_PROGRAMS = ("command", "script", "module")
_REFUSALS = {
    401: "No token, or one that is not known.",
    403: "The token may not do that, or the namespace's quota is used up.",
    404: "There is no such training or pipeline, or no such address.",
    409: "The name is taken, the version is stale, it has ended, or the scheduler refuses.",
    410: "The history asked for is no longer kept: list, then watch again.",
    413: "The body is too large.",
    422: "Something in the request is wrong; details.fields lists all of it.",
    429: "Too much at once with this token, or too many packages to check: try again after Retry-After.",
    500: "A fault of the server's own.",
    503: "Not now: try again.",
}


def document(operations: Sequence[Operation], version: str, backends: Collection[str]) -> Schema:
    links = {one.name: _link(one) for one in operations if "{name}" in one.path}
    paths: dict[str, Schema] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, links)
    about = (
        "Trainings, their status, logs, events and usage; pools of shared GPUs. Every error has one form; see Error."
    )
    return {
        "openapi": "3.0.3",
        "info": {"title": "muster", "version": version, "description": about},
        "paths": paths,
        "components": {
            "schemas": _schemas(backends),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _link(operation: Operation) -> Schema:
    found = {name: f"$response.body#/metadata/{name}" for name in ("namespace", "name")}
    return {"operationId": operation.name, "parameters": found}


def _operation(operation: Operation, links: Schema) -> Schema:
    answers = {
        str(status): _answer(answer) | ({"links": links} if answer.links else {})
        for status, answer in operation.answers.items()
    }
    refusals = {*operation.refusals, 500, 503} | (set() if operation.open else {401, 429})
    if "{" in operation.path:
        refusals.add(404)  # whatever cannot be a name leads nowhere
    answers |= {str(status): _answer(Answer(_REFUSALS[status], "Error")) for status in sorted(refusals)}
    shown: Schema = {"operationId": operation.name, "summary": operation.summary, "responses": answers}
    shown["security"] = [] if operation.open else [{"bearer": []}]
    if parameters := [*_path_parameters(operation), *_query_parameters(operation), *_header_parameters(operation)]:
        shown["parameters"] = parameters
    if operation.body is not None:
        content = {kind: {"schema": _ref(operation.body.schema)} for kind in operation.body.media_types}
        shown["requestBody"] = {"required": operation.body.required, "content": content}
    return shown


def _answer(answer: Answer) -> Schema:
    headers = {"X-Request-Id": {"description": "Names this request in the log.", "schema": {"type": "string"}}}
    schema = {"type": "string"} if answer.schema is None else _ref(answer.schema)
    shown = {"description": answer.about, "headers": headers}
    return shown | ({"content": {answer.media_type: {"schema": schema}}} if answer.media_type else {})


def _path_parameters(operation: Operation) -> Iterable[Schema]:
    for name, (pattern, longest) in _PATH_PARTS.items():
        if f"{{{name}}}" in operation.path:
            schema = {"type": "string", "pattern": f"^{pattern}$", "maxLength": longest, "minLength": 1}
            yield {"name": name, "in": "path", "required": True, "schema": schema}


def _query_parameters(operation: Operation) -> Iterable[Schema]:
    if operation.query is not None:
        for name, schema in schema_of(operation.query)["properties"].items():
            about = schema.pop("description", "")
            schema.pop("nullable", None)  # a query has no null: what is not given is absent
            yield {"name": name, "in": "query", "required": False, "description": about, "schema": schema}


def _header_parameters(operation: Operation) -> Iterable[Schema]:
    for header in operation.headers:
        schema = {"type": "string", "pattern": f"^(?:{header.pattern})$"}
        yield {"name": header.name, "in": "header", "required": False, "description": header.about, "schema": schema}


# Schemas -----------------------------------------------------------------------------------------


def _schemas(backends: Collection[str]) -> Schema:
    plan = {"type": "object", "description": "What the backend would start."}
    return {
        "Training": _with_head(schema_of(Training)),
        "DryRun": _with_head(schema_of(Training) | {"properties": {**schema_of(Training)["properties"], "plan": plan}}),
        "NewTraining": _new_training(backends),
        "TrainingPatch": _patch(),
        "TrainingList": _list_of("TrainingList", "Training", _list_metadata()),
        "Event": schema_of(Event),
        "EventList": _list_of("EventList", "Event"),
        "Usage": schema_of(Usage),
        "UsageList": _list_of("UsageList", "Usage"),
        "Explanation": schema_of(Explanation),
        "Metrics": _metrics(),
        "Scale": _closed({"type": "object", "required": ["target"], "properties": {"target": _workers()}}),
        "Kill": _closed(
            {
                "type": "object",
                "required": ["rank"],
                "properties": {
                    "rank": {"type": "integer"},
                    "wholeWorker": {"type": "boolean"},
                    "round": {"type": ["integer", "null"]},
                },
            }
        ),
        "Cancel": _closed({"type": "object", "properties": {"graceSeconds": _grace()}}),
        "Identity": schema_of(Identity),
        "SignInCode": _texts("code", seconds={"type": "number"}),
        "SignIn": _closed(_texts(code={"type": "string", "maxLength": 128})),
        "SignedIn": _texts("token", "name", "role"),
        "Health": {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}},
        "Document": {"type": "object"},
        "Package": schema_of(KeptPackage),
        "PackageContent": {"type": "string", "format": "binary"},
        "ServerSentEvent": _server_sent_event(),
        "Error": _error(),
        **_pool_schemas(),
    }


def _texts(*names: str, **others: Schema) -> Schema:
    fields: Schema = {**{name: {"type": "string"} for name in names}, **others}
    return {"type": "object", "required": list(fields), "properties": fields}


def _metrics() -> Schema:
    """What a training logs: points are `[step, seconds since 1970, value]`."""
    row = {"type": "array", "items": {"type": "number", "nullable": True}}
    rows = {"type": "array", "items": row}
    series: Schema = {"name": {"type": "string"}, "points": rows, "notFinite": {"type": "integer"}}
    known = ("cpuPercent", "memoryBytes", "gpuPercent", "gpuMemoryBytes")
    worker: Schema = {name: {"type": "number", "nullable": True} for name in known}
    worker |= {"name": {"type": "string"}, "at": {"type": "number"}, "recent": rows}
    found = {"series": _rows(series, ["name", "points"]), "workers": _rows(worker, list(worker))}
    return {"type": "object", "required": list(found), "properties": found}


def _rows(fields: Schema, required: list[str]) -> Schema:
    return {"type": "array", "items": {"type": "object", "required": required, "properties": fields}}


def _pool_schemas() -> Schema:
    """What is said about pools of shared GPUs."""
    asked = _closed(schema_of(pools.GpuRequest))
    names = [one.name for one in Priority]
    either = [{"type": "string", "enum": names}, {"type": "integer", "minimum": 0, "maximum": len(names) - 1}]
    asked["properties"]["priority"] = {"oneOf": either}
    asked["required"] = ["cluster", "priority"]
    registration = _closed(schema_of(pools.Registration))
    cluster = _closed(schema_of(pools.ClusterForm))
    registration["properties"]["clusters"]["additionalProperties"] = cluster
    text, gpus = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
    done: Schema = {"state": text, "gpus": gpus, "text": text}
    return {
        "Pool": _pool(text, gpus),
        "PoolList": _list_of("PoolList", "Pool"),
        "PoolEvent": schema_of(pools.PoolEvent),
        "PoolEventList": _list_of("PoolEventList", "PoolEvent"),
        "PoolState": {"type": "object", "required": ["state"], "properties": {"state": text, "reason": text}},
        "PoolGpus": {"type": "object", "required": list(done), "properties": done},
        "PipelineRegistration": registration,
        "GpuRequest": asked,
        "GpuRelease": _closed(schema_of(pools.ReleaseOrder)),
        "RolloutProgress": _closed(schema_of(pools.ProgressForm)),
        "PipelineAction": schema_of(pools.Action),
        "ActionAnswer": _closed(schema_of(pools.ActionAnswer)),
        "NodeState": _closed(schema_of(pools.NodeState)),
        "KillOrder": _closed(schema_of(pools.KillOrder)),
        "Why": _closed(schema_of(pools.Why)),
        "ProgressReport": schema_of(ProgressReport),
        "ProgressReportList": _list_of("ProgressReportList", "ProgressReport"),
    }


def _pool(text: Schema, gpus: Schema) -> Schema:
    count = {"type": "integer"}
    waiting = dict.fromkeys(("pipeline", "cluster", "priority", "reason"), text)
    fields: Schema = {
        "name": text,
        "gpus": count,
        "gpusPerNode": count,
        "devices": {"type": "array", "items": text},
        "pipelines": {"type": "array", "items": schema_of(pools.PipelineView)},
        "leases": {"type": "object", "additionalProperties": schema_of(Holder)},
        "idle": gpus,
        "pending": {"type": "array", "items": {"type": "object", "required": list(waiting), "properties": waiting}},
        "openRollouts": {"type": "object", "additionalProperties": count},
        "quarantined": {"type": "object", "additionalProperties": text},
        "workers": {"type": "object", "additionalProperties": schema_of(WorkerHolder)},
        "holders": {"type": "array", "items": schema_of(pools.GpuView)},
        "waiting": {"type": "array", "items": schema_of(pools.WaitingView)},
        "waitingCount": count,
        "usage": {"type": "array", "items": schema_of(pools.UsedView)},
    }
    return {"type": "object", "required": list(fields), "properties": fields}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _with_head(schema: Schema) -> Schema:
    head = {"apiVersion": {"type": "string", "enum": [API_VERSION]}, "kind": {"type": "string", "enum": [KIND]}}
    return {**schema, "properties": {**head, **schema["properties"]}}


def _new_training(backends: Collection[str]) -> Schema:
    """What may be sent. What only the server sets is ignored there, so that what was read can be sent again."""
    schema = _closed(_with_head(schema_of(Training)))
    for name in SERVER_METADATA:
        schema["properties"]["metadata"]["properties"][name] = {"readOnly": True}
    schema["properties"]["status"] = {"readOnly": True}
    spec = schema["properties"]["spec"]
    spec["properties"]["command"]["minItems"] = 1
    spec["properties"]["script"]["minLength"] = 1
    spec["properties"]["backend"]["enum"] = sorted({*backends, ANYWHERE} if len(backends) == 1 else backends)
    schema["properties"]["spec"] = {"oneOf": [_running(spec, program) for program in _PROGRAMS]}
    return schema


def _running(spec: Schema, program: str) -> Schema:
    """A spec that says what to run in one of the ways, and in none of the others."""
    properties = {name: one for name, one in spec["properties"].items() if name == program or name not in _PROGRAMS}
    return {**spec, "properties": properties, "required": [program]}


def _patch() -> Schema:
    texts = {"type": "object", "nullable": True, "additionalProperties": {"type": "string", "nullable": True}}
    spec = _closed(schema_of(Training)["properties"]["spec"])
    for name in map(camel, FIXED):
        del spec["properties"][name]
    spec["properties"]["cancel"].pop("required")
    for schema in spec["properties"].values():
        schema["nullable"] = True
    metadata = {"type": "object", "properties": {"labels": texts, "annotations": copy.deepcopy(texts)}}
    return _closed({"type": "object", "properties": {"metadata": metadata, "spec": spec}})


def _closed(schema: Schema) -> Schema:
    """No field beyond those named, here and below."""
    closed = copy.deepcopy(schema)
    todo = [closed]
    while todo:
        one = todo.pop()
        if "properties" in one:
            one.setdefault("additionalProperties", False)
            todo += one["properties"].values()
        if "items" in one:
            todo.append(one["items"])
    return closed


def _list_of(kind: str, item: str, metadata: Schema | None = None) -> Schema:
    properties: Schema = {
        "apiVersion": {"type": "string", "enum": [API_VERSION]},
        "kind": {"type": "string", "enum": [kind]},
        "items": {"type": "array", "items": _ref(item)},
    }
    if metadata is not None:
        properties["metadata"] = metadata
    return {"type": "object", "required": sorted(properties), "properties": properties}


def _list_metadata() -> Schema:
    fields = {
        "resourceVersion": {"type": "string", "description": "Watch from here to miss nothing."},
        "continue": {"type": "string", "description": "Send it to get the next page; empty at the end."},
    }
    return {"type": "object", "required": list(fields), "properties": fields}


def _workers() -> Schema:
    size: Schema = schema_of(Training)["properties"]["spec"]["properties"]["worldSize"]["properties"]["target"]
    return size


def _server_sent_event() -> Schema:
    """One of a stream: a change with its version, an entry of the journal, or an error and then the end."""
    kinds = {"type": "string", "enum": ["ADDED", "MODIFIED", "DELETED", "EVENT", "error"]}
    data = {"type": "string", "description": "JSON: a type and its object, or an Error."}
    fields: Schema = {"event": kinds, "id": {"type": "string"}, "data": data}
    return {"type": "object", "required": ["event", "data"], "properties": fields}


def _grace() -> Schema:
    cancel = schema_of(Training)["properties"]["spec"]["properties"]["cancel"]
    grace: Schema = cancel["properties"]["graceSeconds"]
    return grace


def _error() -> Schema:
    text = {"type": "string"}
    fields: Schema = {"code": text, "message": text, "hint": text, "details": {"type": "object"}, "requestId": text}
    inner = {"type": "object", "required": list(fields), "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}
