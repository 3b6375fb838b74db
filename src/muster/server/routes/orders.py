"""Orders to a training: scale, cancel."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response

from muster.core.training import edits
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
_ENDED = Answer("It has ended already; nothing changed.", "Training")

OPERATIONS = (
    Operation(
        "POST", f"{TRAINING}/scale", scale_training, "Set the target", {202: _TAKEN}, _REFUSALS, body=Body("Scale")
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
