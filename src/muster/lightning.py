"""Lightning: a Trainer goes on from memory at the step at which the world was lost.

    trainer = Trainer(..., callbacks=[muster.lightning.KeepState()])
    trainer.fit(model, loader, ckpt_path=...)  # as before: whatever is newer counts

A step is kept when the next one begins: what the Trainer does after a step (validation, saves) belongs to it. Lightning
goes on in the middle of an epoch with its first batch unless the loader can be told its place; here the batches that
were used are skipped. Saves are whole: no rank is ended in the middle of one.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from muster.callbacks import Generators, agent_keeps, offered, tell, whole
from muster.state.state import State

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class KeepState(Callback):
    """Commits after each optimizer step, and restores before the first. Without muster it does nothing."""

    def __init__(self, *, overhead: float = 0.03) -> None:
        self._overhead = overhead
        self._kept: State | None = None
        self._generators = Generators()
        self._skip = False
        self._done = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.save_checkpoint = whole(type(trainer).save_checkpoint.__get__(trainer))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Behind the model's checkpoint, which is loaded, and before that of everything else."""
        self._kept, self._skip = None, False
        if not agent_keeps():
            return
        if trainer.strategy.restore_checkpoint_after_setup or not trainer.strategy.lightning_restore_optimizer:
            tell(f"state that {type(trainer.strategy).__name__} has split is not kept by muster.lightning.KeepState")
            return
        optimizers = {f"optimizer{index}": one for index, one in enumerate(trainer.optimizers)}
        self._kept = State(
            model=pl_module,
            **optimizers,
            trainer=_Loops(trainer),
            generators=self._generators,
            random=False,
            overhead=self._overhead,
        )
        loaded = trainer._checkpoint_connector._loaded_checkpoint
        step = offered()
        if step and step >= loaded.get("global_step", 0):
            self._kept.restore()
            loaded.clear()  # nothing older is put over it
            self._skip = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._skip:
            _skip_used(trainer.fit_loop)
        self._done = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._generators.put()  # behind the batches that were skipped
        if self._kept is not None and trainer.global_step > self._done:  # else gradients are being gathered
            self._done = trainer.global_step
            self._kept.commit(trainer.global_step)


class _Loops:
    """Where a Trainer is, apart from what its model and optimizers are."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        callbacks = {one.state_key: kept for one in trainer.callbacks if (kept := one.state_dict())}
        return {
            "fit_loop": _between_batches(copy.deepcopy(trainer.fit_loop.state_dict())),
            "callbacks": copy.deepcopy(callbacks),
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "data": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        }

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(kept["fit_loop"])
        for one in trainer.callbacks:
            if one.state_key in kept["callbacks"]:
                one.load_state_dict(kept["callbacks"][one.state_key])
        for config, state in zip(trainer.lr_scheduler_configs, kept["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        if kept["precision"]:
            trainer.precision_plugin.load_state_dict(kept["precision"])
        if kept["data"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(kept["data"])


def _between_batches(loop: dict[str, Any]) -> dict[str, Any]:
    """Without the batch that has been fetched, and will be again."""
    progress = loop["epoch_loop.batch_progress"]
    for one in (progress["total"], progress["current"]):
        one["ready"] = one["completed"]
    progress["is_last_batch"] = False
    return loop


def _skip_used(loop: Any) -> None:
    """Batches of this epoch that steps have used. A loader that can be told its place is there already."""
    fetcher, used = loop._data_fetcher, loop.epoch_loop.batch_progress.current.ready
    loaders = fetcher.combined_loader.flattened
    if all(hasattr(one, "load_state_dict") for one in loaders):
        return
    for one in loaders:
        for sampler in (getattr(one, "sampler", None), getattr(getattr(one, "batch_sampler", None), "sampler", None)):
            if callable(told := getattr(sampler, "set_epoch", None)):
                told(loop.epoch_progress.current.processed)
    iter(fetcher)  # it has begun with the order of the first epoch
    for _ in range(used):
        next(fetcher)
    fetcher.fetched -= used  # the loop adds them
