"""Is the server there, is it ready, how busy is it, and what does it answer?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

from starlette.responses import Response

from muster.errors import Unavailable
from muster.ports import Filter, Stored
from muster.server import training_metrics
from muster.server.answers import as_json
from muster.server.calls import Call
from muster.server.describe import Answer, Operation
from muster.server.metrics import MEDIA_TYPE, Labels, family
from muster.types.codec import show_time, to_wire
from muster.types.training import TERMINAL

PHASES = ("pending", "ready", "succeeded", "failed", "cancelled")
MOST_TRAININGS = 500  # that have series of their own: those that were started last

# Of each training that keeps state: what it is called, what it says, and the field that it is read from.
STATE = {
    "step": ("Newest step that is safe.", "step"),
    "survives_worker": ("1 if that step survives the loss of any one worker.", "survives"),
    "newest_step": ("Newest step that is whole in memory.", "newest_step"),
    "durable_step": ("Newest step on disk.", "durable_step"),
    "age_seconds": ("For how long that step has been the newest that is safe.", "safe_at"),
    "bytes": ("Size of that step, each rank once.", "bytes"),
    "memory_bytes": ("Memory that state takes on all workers.", "memory_bytes"),
    "commit_seconds": ("What a copy takes from the training.", "commit_seconds"),
    "overhead_ratio": ("What copies take, as a share of the time of steps.", "overhead"),
    "loss_steps": ("Steps that the loss of a worker would cost now.", "loss_steps"),
    "loss_seconds": ("Seconds of training that it would cost.", "loss_seconds"),
}
_NEVER = datetime.min.replace(tzinfo=UTC)


async def healthz(call: Call) -> Response:
    services = call.services
    return as_json({"status": "ok", "version": services.version, "startedAt": show_time(services.started_at)})


async def readyz(call: Call) -> Response:
    if not call.services.ready():
        raise Unavailable("the control plane is not ready yet", hint="try again in a moment")
    if (trouble := call.services.store.trouble) is not None:
        raise Unavailable(str(trouble), hint="make room on its disk; it goes on by itself")
    return as_json({"status": "ready"})


async def metrics(call: Call) -> Response:
    text = "\n".join((*_held(call), *call.services.meter.lines()))
    return Response(f"{text}\n", media_type=MEDIA_TYPE)


def _held(call: Call) -> Iterable[str]:
    services = call.services
    stored = services.store.page(Filter()).items
    phases = Counter(one.phase for one in stored)
    by_phase: dict[Labels, float] = {(("phase", phase),): float(phases[phase]) for phase in PHASES}
    yield from family("muster_trainings", "gauge", "Trainings that are stored.", by_phase)
    running = [one.uid for one in stored if one.phase not in TERMINAL]
    workers: dict[Labels, float] = {
        (("backend", name),): float(sum(worker.alive for uid in running for worker in backend.workers(uid)))
        for name, backend in services.backends.items()
    }
    yield from family("muster_workers", "gauge", "Workers that run.", workers)
    yield from family("muster_store_version", "counter", "Changes so far.", {(): float(services.store.version)})
    build: dict[Labels, float] = {(("version", services.version),): 1.0}
    yield from family("muster_build_info", "gauge", "Which version serves.", build)
    started: dict[Labels, float] = {(): services.started_at.timestamp()}
    yield from family("muster_start_time_seconds", "gauge", "Since when it serves.", started)
    seen = [one for one in stored if one.phase not in TERMINAL and call.identity.sees(one.key.namespace)]
    yield from training_metrics.lines(training_metrics.latest(seen, MOST_TRAININGS), services.measured)
    yield from _state(call, seen)
    for name, value in services.gauges().items():
        kind = "counter" if name.endswith("_total") else "gauge"
        yield from family(name, kind, name.replace("_", " "), {(): value})


def _state(call: Call, running: Iterable[Stored]) -> Iterable[str]:
    """What of each training's state is safe: only where it is kept, and only what the caller may read of."""
    keep = [one.training for one in running if b'"keptState"' in one.raw]
    shown = sorted(keep, key=lambda one: one.status.started_at or _NEVER, reverse=True)[:MOST_TRAININGS]
    now = call.services.clock.now()
    found: dict[str, dict[Labels, float]] = {name: {} for name in STATE}
    for training in sorted(shown, key=lambda one: (one.key.namespace, one.key.name)):
        if (state := training.status.kept_state) is None:
            continue
        labels = (("namespace", training.key.namespace), ("training", training.key.name))
        age = None if state.safe_at is None else max(0.0, (now - state.safe_at).total_seconds())
        values = {"age_seconds": age, "survives_worker": state.survives in ("worker", "domain")}
        for name, (_, field) in STATE.items():
            if (value := values.get(name, getattr(state, field))) is not None:
                found[name][labels] = float(value)
    for name, series in found.items():
        if series:
            yield from family(f"muster_training_state_{name}", "gauge", STATE[name][0], series)


async def whoami(call: Call) -> Response:
    services = call.services
    return as_json(to_wire(call.identity) | {"place": services.place, "backends": sorted(services.backends)})


async def openapi(call: Call) -> Response:
    return Response(call.request.app.openapi_bytes, media_type="application/json")


_HEALTH = {200: Answer("It is.", "Health")}
_TEXT = {200: Answer("Prometheus text.", media_type="text/plain")}
_WHO = {200: Answer("Its name, role and namespaces.", "Identity")}
_DOCUMENT = {200: Answer("This document.", "Document")}

OPERATIONS = (
    Operation("GET", "/healthz", healthz, "Is the server there", _HEALTH, open=True),
    Operation("GET", "/readyz", readyz, "Is it ready to serve", _HEALTH, open=True),
    Operation("GET", "/metrics", metrics, "How busy is it", _TEXT),
    Operation("GET", "/v1/whoami", whoami, "Whose token is it", _WHO),
    Operation("GET", "/openapi.json", openapi, "What it answers", _DOCUMENT, open=True),
)
