"""How does a GRPO trainer of TRL share its GPUs? `share` puts its generation and its training into stages of a pool.

Between stages its weights are not on the device, and nothing of it runs: rewards are computed while others work.
TRL's own methods are wrapped on the trainer itself; nothing of it is changed elsewhere. Written for trl 1.16.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from muster.errors import InvalidRequest, SharingError
from muster.sharing.engines.torch_engine import TorchEngine
from muster.sharing.hooks import PipelineHooks
from muster.sharing.sync import Rollout, SharedPool
from muster.types.sharing import GENERATION_CLUSTER, Priority

INTERRUPT_AFTER_S = 60.0  # how long a shrink waits for a call of generate, before that begins anew later
_WRAPPED = (
    *("_generate", "_generate_single_turn", "_get_per_token_logps_and_entropies", "_calculate_rewards"),
    *("compute_loss", "_prepare_for_training", "_inner_training_loop", "_step", "model", "add_callback"),
)
log = logging.getLogger("muster.sharing")


def share(
    trainer: Any,
    pool: SharedPool,
    *,
    engine: PipelineHooks | None = None,
    interrupt_after_s: float = INTERRUPT_AFTER_S,
) -> None:
    """From now on `trainer.train()` takes turns with the other pipelines of the pool; on every rank.

    `engine` moves the policy between host and device, for generation and for training; by default a `TorchEngine`,
    which makes sure that memory is free. Other models of the trainer, and the optimizer's state, are on the device
    while it trains.
    """
    _check(trainer, pool)
    _SharedTrainer(trainer, pool, engine, interrupt_after_s)


class _Interrupted(Exception):
    """Somebody has waited long enough for this call of generate."""


class _SharedTrainer:
    def __init__(self, trainer: Any, pool: SharedPool, engine: PipelineHooks | None, interrupt_after_s: float) -> None:
        self._trainer, self._pool = trainer, pool
        self._device: torch.device = trainer.accelerator.device
        self._engine = engine or pool.gate.engine or TorchEngine(trainer.model, device=self._device)
        self._interrupt_after_s = interrupt_after_s
        self._rollouts = itertools.count()
        self._rollout: Rollout | None = None
        self._training: contextlib.ExitStack | None = None
        self._beside = _Beside(trainer, self._device)
        self._ranks = {rank: list(gpus) for rank, gpus in enumerate(pool.clusters[GENERATION_CLUSTER].bundles)}
        self._wrap()
        self._beside.unload()
        pool.attach(self._engine)

    def _wrap(self) -> None:
        trainer = self._trainer
        plain = not any(isinstance(one, nn.Module) for one in trainer.reward_funcs)
        around: dict[str, Callable[..., Any]] = {
            "_generate": self._generates,
            "_generate_single_turn": self._takes_a_turn,
            "_get_per_token_logps_and_entropies": self._trains,
            "compute_loss": self._trains,
            "_calculate_rewards": self._needs_nothing if plain else self._trains,
            "_prepare_for_training": self._prepares,
            "_inner_training_loop": self._ends,
        }
        for name, wrapper in around.items():
            setattr(trainer, name, _bound(wrapper, getattr(trainer, name)))
        if trainer.rollout_func is not None:
            trainer.rollout_func = _bound(self._takes_a_turn, trainer.rollout_func)
        trainer.model.register_forward_pre_hook(self._guard)
        trainer.add_callback(_callback(self._step_ended))

    # Stages

    def _generates(self, generate: Callable[..., Any], prompts: Sequence[Any]) -> Any:
        self._leave()
        number = f"{self._trainer.state.global_step}-{next(self._rollouts)}"
        target = len(prompts) * self._trainer.accelerator.num_processes
        with self._pool.generation(number, target) as self._rollout:
            try:
                found = generate(prompts)
                self._rollout.completed(len(prompts))
                return found
            finally:
                self._rollout = None

    def _takes_a_turn(self, generate: Callable[..., Any], *words: Any, **named: Any) -> Any:
        model, args = self._trainer.model, self._trainer.args
        while self._rollout is not None:
            saves_memory = model.is_gradient_checkpointing
            with self._rollout.turn():
                try:
                    return generate(*words, **named)
                except _Interrupted:
                    log.warning("%s generates this batch anew: its GPUs were wanted back", self._pool.pipeline)
            if saves_memory:  # TRL turns it off while it generates, and on again only if that ends well
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
        return generate(*words, **named)

    def _trains(self, work: Callable[..., Any], *words: Any, **named: Any) -> Any:
        self._enter(Priority.ACTOR_TRAINING)
        return work(*words, **named)

    def _needs_nothing(self, work: Callable[..., Any], *words: Any, **named: Any) -> Any:
        self._leave()
        return work(*words, **named)

    def _prepares(self, work: Callable[..., Any], *words: Any, **named: Any) -> Any:
        """It puts the model on the device, and loads a checkpoint."""
        self._enter(Priority.INITIALIZATION)
        found = work(*words, **named)
        self._leave()
        return found

    def _ends(self, work: Callable[..., Any], *words: Any, **named: Any) -> Any:
        try:
            return work(*words, **named)
        finally:
            self._leave(*sys.exc_info())

    def _step_ended(self) -> None:
        """Training goes on without a break, unless it generates next."""
        trainer = self._trainer
        if trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0:
            self._leave()

    def _enter(self, priority: Priority) -> None:
        if self._training is not None:
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._pool.training(priority))
            self._pool.run(self._engine.expand(self._ranks))
            self._beside.load()
            self._training = stack.pop_all()

    def _leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Everything down, then the lease is given back."""
        training, self._training = self._training, None
        if training is None:
            return
        self._beside.unload()
        self._pool.run(self._engine.shrink(list(self._ranks)))
        training.__exit__(kind, error, trace)

    def _guard(self, model: nn.Module, inputs: object) -> None:
        """Nothing is computed without a lease, whoever calls the model."""
        rollout = self._rollout
        if rollout is not None and rollout.interrupted(self._interrupt_after_s):
            raise _Interrupted
        if self._training is None and (rollout is None or not rollout.in_turn):
            raise SharingError(
                f"the model of {self._pool.pipeline} is used outside of its stages: it holds no GPU now",
                hint="train with trainer.train(), or use pool.training()",
            )


class _Beside:
    """What is on the device for training only: other models of the trainer, and the optimizer's state."""

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self._trainer, self._device = trainer, device
        self._moved: list[tuple[dict[Any, Any], Any]] = []  # where a tensor of the optimizer was

    def load(self) -> None:
        for model in self._models():
            _moved(model, self._device, self._device)
        for state, name in self._moved:
            state[name] = state[name].to(self._device, non_blocking=True)
        self._moved = []

    def unload(self) -> None:
        for model in self._models():
            _moved(model, torch.device("cpu"), self._device)
        if self._device.type == "cpu":
            return
        for state in self._states():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device.type == self._device.type:
                    state[name] = value.to("cpu")
                    self._moved.append((state, name))

    def _models(self) -> Iterable[nn.Module]:
        if self._trainer.ref_model is not None:
            yield self._trainer.ref_model
        yield from (one for one in self._trainer.reward_funcs if isinstance(one, nn.Module))

    def _states(self) -> Iterable[dict[Any, Any]]:
        optimizer = self._trainer.optimizer
        return [] if optimizer is None else list(optimizer.state.values())


def _moved(model: nn.Module, to: torch.device, device: torch.device) -> None:
    if device.type == "cpu":
        return
    model.to(to)
    if to.type == "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _bound(wrapper: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    def call(*words: Any, **named: Any) -> Any:
        return wrapper(wrapped, *words, **named)

    return call


def _callback(step_ended: Callable[[], None]) -> Any:
    base: Any = importlib.import_module("transformers").TrainerCallback

    class AtStepEnd(base):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            step_ended()

    return AtStepEnd()


def _check(trainer: Any, pool: SharedPool) -> None:
    missing = [name for name in _WRAPPED if not hasattr(trainer, name)]
    if missing:
        raise InvalidRequest(
            f"{type(trainer).__name__} is no GRPO trainer as trl 1.16 has it: it has no {missing[0]}",
            hint="pip install trl==1.16.0, or write the stages yourself with muster.sharing.sync",
        )
    if trainer.use_vllm:
        raise InvalidRequest("a trainer with use_vllm cannot be shared: its engine is not moved")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise InvalidRequest("a model in parts (FSDP, DeepSpeed) cannot be moved off the device")
    if len(pool.clusters[GENERATION_CLUSTER].bundles) != 1:
        raise InvalidRequest(
            "a trainer cannot be shared in several bundles: its ranks wait for each other", hint="connect with gpus="
        )
