"""Which records are kept beside the trainings, and what does each have to look like so that it can be believed?

Whoever reads a record relies on its shape; most are read at the start, where one that is not as it should be would
end a control plane again and again. A kind that is not known here is a newer version's: nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from muster.core.curves import KeptCurves
from muster.core.steady import Mark
from muster.types.codec import Invalid, camel, from_wire, limited
from muster.types.event import Event

WORKER = "worker"
TOKEN = "token"  # what a training's workers prove to the coordinator
RUN = "run"  # the coordinator's record of a run
MESH = "mesh"
CONTROL = "control"
IDEMPOTENCY = "idempotency"
SUM = "usage"  # of a training's entries that the journal no longer has
CURVES = "curves"  # what a training has logged
POOL = "pool"  # a part of what the scheduler of a pool knows; whoever takes it up checks it

_MOST_WORDS = 200


@dataclass(frozen=True)
class WorkerRecord:
    """What its backend needs to find it again, or to know how it ended."""

    name: str
    uid: str
    namespace: str
    training: str
    node: str
    started_at: datetime
    gpus: tuple[int, ...]
    ended_at: datetime | None = None
    exit_code: int | None = None
    why: str = ""
    last_words: str = ""
    reason: str = ""
    pid: int = 0
    ticks: int | None = None  # when the process with that pid was started, since the machine's boot
    boot: str = ""
    devices: tuple[str, ...] = ()  # the names of its GPUs, as CUDA has them; 0.1 did not say


@dataclass(frozen=True)
class _Token:
    token: str = limited(pattern=r"[-\w]{16,256}", about="is no token")
    marks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Mesh:
    namespace: str
    training: str


@dataclass(frozen=True)
class _Idempotency:
    uid: str
    name: str
    digest: str
    at: datetime


def last_alive(kept: Mapping[str, Any] | None) -> Mark | None:
    """When the control plane before this one was last known to live."""
    return from_wire(Mark, kept, strict=False) if kept else None


def _any(read: Any) -> str:
    return ""


# Kind → its fields, and the key that it must have because of them ("": any).
_SHAPES: Mapping[str, tuple[type, Callable[[Any], str]]] = {
    WORKER: (WorkerRecord, lambda read: f"{read.uid}/{read.name}"),
    TOKEN: (_Token, _any),
    MESH: (_Mesh, lambda read: f"{read.namespace}/{read.training}"),
    CONTROL: (Mark, _any),
    IDEMPOTENCY: (_Idempotency, _any),
    SUM: (Event, lambda read: read.uid),
    CURVES: (KeptCurves, _any),
}


def problem_with(kind: str, key: str, value: object) -> str:
    """Why a record cannot be believed; empty if it can."""
    if not isinstance(value, dict):
        return "is no object"
    if kind not in _SHAPES:
        return ""
    shape, key_of = _SHAPES[kind]
    try:
        read: Any = from_wire(shape, value, strict=False)
    except Invalid as error:
        return str(error)[:_MOST_WORDS]
    if (must := key_of(read)) and must != key:
        return f"stands under another name than its own, {must[:_MOST_WORDS]}"
    return next((f"{name}: has no time zone" for name in _zoneless(read, value)), "")


def _zoneless(read: Any, value: Mapping[str, Any]) -> Iterator[str]:
    """A time without its zone can be compared with no other."""
    for one in fields(read):
        name = camel(one.name)
        if isinstance(getattr(read, one.name), datetime) and datetime.fromisoformat(value[name]).tzinfo is None:
            yield name
