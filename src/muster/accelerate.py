"""accelerate: a loop of one's own goes on from memory at the step at which the world was lost.

    state = muster.accelerate.keep_state(accelerator)  # after accelerator.prepare(...)
    step = state.restore()
    … state.commit(step + 1)

It is a `muster.State` of all that the accelerator has prepared or was told to save. `accelerator.save_state` is whole:
no rank is ended in the middle of it.
"""

from __future__ import annotations

from typing import Any

from muster.callbacks import Apart, agent_keeps, offered, whole
from muster.errors import InvalidRequest
from muster.state.state import State

_SPLIT = ("DEEPSPEED", "MEGATRON_LM", "FSDP", "TP")


class AcceleratorState(State):
    def restore(self, done: int = 0) -> int:
        """As in `muster.State`. `done`: steps of a checkpoint that was loaded; nothing older is put over it."""
        if done > offered():
            return done
        return super().restore() or done

    def commit(self, step: int) -> None:
        if agent_keeps():
            super().commit(step)


def keep_state(accelerator: Any, *, overhead: float = 0.03, **more: Any) -> AcceleratorState:
    """Of the models, optimizers, schedulers, loaders and objects that it knows now, and of `more` by name."""
    if accelerator.distributed_type.name in _SPLIT:
        kind = accelerator.distributed_type.name
        raise InvalidRequest(f"muster.accelerate keeps what every rank has as a whole, not what {kind} has split")
    if not accelerator._models:
        raise InvalidRequest("keep_state comes after accelerator.prepare(...): there is nothing to keep yet")
    parts: dict[str, Any] = {}
    for kind, every in (
        ("model", [accelerator.unwrap_model(one) for one in accelerator._models]),
        ("optimizer", [getattr(one, "optimizer", one) for one in accelerator._optimizers]),
        ("scheduler", [Apart(one) for one in accelerator._schedulers]),
        ("loader", [one for one in accelerator._dataloaders if getattr(one, "use_stateful_dataloader", False)]),
        ("scaler", [accelerator.scaler] if accelerator.scaler is not None else []),
        ("object", accelerator._custom_objects),
    ):
        parts |= {f"{kind}{index}": one for index, one in enumerate(every)}
    accelerator.save_state = whole(type(accelerator).save_state.__get__(accelerator))
    return AcceleratorState(overhead=overhead, **parts, **more)
