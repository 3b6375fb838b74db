"""Hugging Face: a Trainer goes on from memory at the step at which the world was lost.

    trainer = Trainer(..., callbacks=[muster.hf.KeepState()])
    trainer.train(resume_from_checkpoint=...)  # as before: whatever is newer counts

A Trainer finds its place in the data from the step in a checkpoint's `trainer_state.json`, before it has an optimizer.
So it is given a checkpoint that has nothing but that file; all the rest comes from memory when the optimizer is there.
A step is kept when the next one begins: what the Trainer does after a step (logs, evaluation, saves) belongs to it.
Its own saves are whole: no rank is ended in the middle of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from muster.callbacks import Apart, Generators, agent_keeps, offered, tell, whole
from muster.state.state import State

_STATE = "trainer_state.json"
_OF_NOW = {  # of a TrainerState: what this run says itself
    "max_steps",
    "num_train_epochs",
    "is_local_process_zero",
    "is_world_process_zero",
    "is_hyper_param_search",
    "trial_name",
    "trial_params",
    "stateful_callbacks",
}
_LOSSES = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")  # what is logged next


class KeepState(TrainerCallback):
    """Commits after each optimizer step, and restores before the first. Without muster it does nothing."""

    def __init__(self, *, overhead: float = 0.03) -> None:
        self._overhead = overhead
        self._trainer: Any = None
        self._memory = ""  # the checkpoint that says where to go on, if that is in memory
        self._kept: State | None = None
        self._generators = Generators()
        self._done = 0
        _attach()

    @contextlib.contextmanager
    def training(self, trainer: Any, given: str | bool | None) -> Iterator[str | bool | None]:
        """What the Trainer should resume from: that which was given, or what is in memory."""
        self._trainer, self._kept, self._memory = trainer, None, ""
        step = 0 if _is_sharded(trainer) else offered()
        if step == 0 or step < _step_of(trainer, given):
            yield given
            return
        with tempfile.TemporaryDirectory(prefix="muster-step-") as folder:
            stateful = [*_stateful(trainer), trainer.control]
            state = TrainerState(
                global_step=step, train_batch_size=trainer._train_batch_size, stateful_callbacks=stateful
            )
            state.compute_steps(trainer.args, max(trainer.args.max_steps, 1))
            state.save_to_json(os.path.join(folder, _STATE))
            self._memory = folder
            yield folder

    def is_memory(self, checkpoint: str) -> bool:
        return bool(self._memory) and checkpoint == self._memory

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        if not agent_keeps():
            return
        if _is_sharded(trainer):
            tell("state that DeepSpeed or FSDP has split is not kept in memory by muster.hf.KeepState")
            return
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        parts: dict[str, Any] = {"model": trainer.model, "optimizer": optimizer}
        if trainer.lr_scheduler is not None:
            parts["scheduler"] = Apart(trainer.lr_scheduler)
        if trainer.accelerator.scaler is not None:
            parts["scaler"] = trainer.accelerator.scaler
        self._kept = State(
            **parts, trainer=_Counters(trainer), generators=self._generators, random=False, overhead=self._overhead
        )
        if self._memory and (step := self._kept.restore()) != state.global_step:
            raise RuntimeError(f"step {step} came from memory where {state.global_step} was offered")
        self._done = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._generators.put()  # behind the batches that were skipped
        if self._kept is not None and state.global_step > self._done:
            self._done = state.global_step
            self._kept.commit(state.global_step)


class _Counters:
    """Where a Trainer is, apart from what its model and optimizer are."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        kept = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        losses = {name: getattr(self._trainer, name) for name in _LOSSES if hasattr(self._trainer, name)}
        callbacks = [(type(one).__name__, one.state().get("attributes", {})) for one in _stateful(self._trainer)]
        return {"state": {n: v for n, v in kept.items() if n not in _OF_NOW}, "losses": losses, "callbacks": callbacks}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        for name, value in kept["state"].items():
            setattr(self._trainer.state, name, value)
        for name, value in kept["losses"].items():
            there: Any = getattr(self._trainer, name, None)
            setattr(self._trainer, name, value.to(there.device) if hasattr(value, "to") else value)
        for one, (name, attributes) in zip(_stateful(self._trainer), kept["callbacks"], strict=False):
            if type(one).__name__ == name:
                for attribute, value in attributes.items():
                    setattr(one, attribute, value)


def _stateful(trainer: Any) -> list[Any]:
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]


def _is_sharded(trainer: Any) -> bool:
    return bool(trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)


def _step_of(trainer: Any, given: str | bool | None) -> int:
    """Of the checkpoint that was given; 0 if there is none, or if it is not whole."""
    try:
        folder = get_last_checkpoint(trainer.args.output_dir) if given is True else given
        if not folder:
            return 0
        return int(TrainerState.load_from_json(os.path.join(folder, _STATE)).global_step)
    except (OSError, ValueError, TypeError):
        return 0


# A callback is not told its Trainer, and hears of a save when it is over ----------------------------------------


def _keeper_of(trainer: Any) -> KeepState | None:
    return next((one for one in trainer.callback_handler.callbacks if isinstance(one, KeepState)), None)


def _attach() -> None:
    """Once for all: a Trainer without this callback does what it did."""
    if getattr(Trainer.train, "__muster__", False):
        return
    for name, change in (("train", _train), ("_load_from_checkpoint", _load)):
        setattr(Trainer, name, change(getattr(Trainer, name)))
    for name in ("_save_checkpoint", "save_model"):
        setattr(Trainer, name, _save(getattr(Trainer, name)))


def _train(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        keeper = _keeper_of(self)
        if keeper is None:
            return original(self, resume_from_checkpoint, *args, **kwargs)
        with keeper.training(self, resume_from_checkpoint) as chosen:
            return original(self, chosen, *args, **kwargs)

    train.__muster__ = True  # type: ignore[attr-defined]
    return train


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(self: Any, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> Any:
        keeper = _keeper_of(self)
        if keeper is not None and keeper.is_memory(resume_from_checkpoint):
            return None
        return original(self, resume_from_checkpoint, *args, **kwargs)

    return load


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    guarded = whole(original)

    @functools.wraps(original)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (original if _keeper_of(self) is None else guarded)(self, *args, **kwargs)

    return save
