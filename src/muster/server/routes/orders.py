"""Orders to a training: scale, kill, cancel."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response

from muster.core.training import edits, seats
from muster.core.training.admission import backend_of
from muster.errors import Conflict, Unavailable
from muster.server.answers import as_object
from muster.server.calls import Call
from muster.server.describe import Answer, Body, Operation
from muster.server.routes.objects import TRAINING, edited
from muster.types.codec import limited


@dataclass(frozen=True)
class ScaleOrder:
    target: int  # its limits are the training's own: beyond them the answer says world_size_out_of_bounds


@dataclass(frozen=True)
class CancelOrder:
    grace_seconds: float | None = limited(None, ge=0, le=86_400)


async def scale_training(call: Call) -> Response:
    """Asynchronous: the generation of the object that comes back is the caller's receipt."""
    key = call.writable()
    order = await call.record(ScaleOrder)
    actor = call.identity.name
    return as_object(await edited(call, key, lambda training: edits.scaled(training, order.target, actor=actor)), 202)


@dataclass(frozen=True)
class KillOrder:
    rank: int
    whole_worker: bool = False
    round: int | None = None  # refused if the training is in another one, so that a repeated order kills nobody else


async def kill_rank(call: Call) -> Response:
    """Kill a rank's process, or its worker's, and write it to the journal."""
    key = call.writable()
    order = await call.record(KillOrder)
    training, actor = call.found(key).training, call.identity.name
    seat = seats.seat_of(training, order.rank)
    if order.round is not None and order.round != training.status.round:
        hint = f"muster describe {key.name}"
        raise Conflict(f"{key.name} is in round {training.status.round}, not {order.round}", hint=hint)
    served = call.services.backends
    backend = served.get(backend_of(training.spec, served))
    if backend is None:
        raise Unavailable(f"backend {training.spec.backend!r} of training {key.name!r} is not served here")
    count = await backend.kill(training, seat.worker, None if order.whole_worker else order.rank)
    if not count:
        hint = f"muster describe {key.name}"
        raise Conflict(f"rank {order.rank} of {key.name} has no process now: its world forms anew", hint=hint)
    note = edits.killed(training, seat, whole_worker=order.whole_worker, actor=actor).event
    return as_object(await edited(call, key, lambda latest: edits.Edit(latest, note)), 202)


async def cancel_training(call: Call) -> Response:
    key = call.writable()
    order = await call.record(CancelOrder, empty={})
    now, actor = call.services.clock.now(), call.identity.name
    stored = await edited(
        call, key, lambda training: edits.cancelled(training, order.grace_seconds, now=now, actor=actor)
    )
    return as_object(stored, 200 if stored.training.is_terminal else 202)


_REFUSALS = (403, 404, 409, 413, 422)
_TAKEN = Answer("The order is stored; the training follows.", "Training")
_KILLED = Answer("The processes got SIGKILL; the training heals.", "Training")
_ENDED = Answer("It has ended already; nothing changed.", "Training")

OPERATIONS = (
    Operation(
        "POST", f"{TRAINING}/scale", scale_training, "Set the target", {202: _TAKEN}, _REFUSALS, body=Body("Scale")
    ),
    Operation(
        "POST",
        f"{TRAINING}/kill",
        kill_rank,
        "Kill a rank or its worker",
        {202: _KILLED},
        (*_REFUSALS, 503),
        body=Body("Kill"),
    ),
    Operation(
        "POST",
        f"{TRAINING}/cancel",
        cancel_training,
        "End it",
        {200: _ENDED, 202: _TAKEN},
        _REFUSALS,
        body=Body("Cancel", required=False),
    ),
)
