"""Does a shared trainer hold what it uses, and nothing else? With one that only looks like TRL's; the real one is in
tests/frameworks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from muster.errors import InvalidRequest, SharingError
from muster.sharing import ClusterSpec, trl
from muster.sharing.engines import TorchEngine
from tests.fleet import eventually
from tests.sharing.blocking import BOUND_S, Engine, InProcess, in_process, in_thread


class Model(nn.Linear):
    is_gradient_checkpointing = True
    checkpointing = 0

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        self.checkpointing += 1


class Trainer:
    """As much of a GRPO trainer as is wrapped."""

    def __init__(self, house: InProcess, reward: Callable[..., Any] | None = None) -> None:
        self.house = house
        self.model = Model(1, 1)
        self.accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1)
        self.args = SimpleNamespace(steps_per_generation=2, gradient_checkpointing_kwargs=None)
        self.state = SimpleNamespace(global_step=0)
        self.optimizer = self.ref_model = self.rollout_func = None
        self.reward_funcs = [reward or (lambda: 1.0)]
        self.num_iterations, self._step = 1, 0
        self.use_vllm = self.is_deepspeed_enabled = self.is_fsdp_enabled = False
        self.callbacks: list[Any] = []
        self.held: list[tuple[str, str]] = []
        self.slow: Callable[[], None] = lambda: None

    def note(self, what: str) -> None:
        self.held.append((what, ",".join(sorted({one.cluster for one in self.house.snapshot().leases.values()}))))

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def forward(self) -> None:
        self.model(torch.zeros(1))

    def _generate(self, prompts: list[str]) -> None:
        self._generate_single_turn(prompts)

    def _generate_single_turn(self, prompts: list[str]) -> None:
        self.note("generates")
        self.forward()
        self.slow()
        self.forward()

    def _get_per_token_logps_and_entropies(self) -> None:
        self.note("log-probabilities")
        self.forward()

    def _calculate_rewards(self) -> None:
        self.note("rewards")

    def compute_loss(self) -> None:
        self.note("loss")
        self.forward()

    def _prepare_for_training(self) -> None:
        self.note("prepares")

    def _inner_training_loop(self, steps: int) -> None:
        self._prepare_for_training()
        for _ in range(steps):
            if self._step % 2 == 0:
                self._generate(["a", "b"])
                self._get_per_token_logps_and_entropies()
                self._calculate_rewards()
            self.compute_loss()
            self._step += 1
            self.note("step")
            for callback in self.callbacks:
                callback.on_step_end(None, None, None)
        self.note("ends")


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(TrainerCallback=object))


def _shared(house: InProcess, trainer: Trainer, name: str = "p1", **options: Any) -> Engine:
    engine = Engine()
    trl.share(trainer, house.pipeline(name, engine=engine), **options)
    return engine


def test_each_stage_holds_its_cluster_and_rewards_hold_nothing() -> None:
    with in_process() as house:
        trainer = Trainer(house)
        engine = _shared(house, trainer)
        trainer._inner_training_loop(3)
        train, infer = "actor_train", "actor_infer"
        generated = [("generates", infer), ("log-probabilities", train), ("rewards", ""), ("loss", train)]
        first = [("prepares", train), *generated, ("step", train), ("loss", train), ("step", train)]
        assert trainer.held == [*first, *generated, ("step", train), ("ends", train)]
        assert not engine.awake and not house.snapshot().leases


def test_the_policy_leaves_the_device_between_stages() -> None:
    with in_process() as house:
        trainer = Trainer(house)
        engine = TorchEngine(trainer.model, device="cpu")
        trl.share(trainer, house.pipeline("p1", engine=engine))
        weights = trainer.model.weight.detach().clone()
        with pytest.raises(SharingError):
            trainer.forward()
        trainer._inner_training_loop(2)
        assert not engine._mover.on_device(trainer.model.weight) and torch.equal(trainer.model.weight, weights)


def test_reward_models_are_on_the_device_for_rewards() -> None:
    with in_process() as house:
        trainer = Trainer(house, nn.Linear(1, 1))
        _shared(house, trainer)
        trainer._inner_training_loop(1)
        assert ("rewards", "actor_train") in trainer.held


def test_a_model_that_is_used_outside_of_its_stages_is_an_error() -> None:
    with in_process() as house:
        trainer = Trainer(house)
        _shared(house, trainer)
        with pytest.raises(SharingError, match="outside of its stages"):
            trainer.forward()


def test_a_trainer_that_fails_gives_everything_back() -> None:
    def fails() -> None:
        raise ValueError("no memory")

    with in_process() as house:
        trainer = Trainer(house)
        engine = _shared(house, trainer)
        trainer.slow = fails
        with pytest.raises(ValueError, match="no memory"):
            trainer._inner_training_loop(1)
        assert not engine.awake and not house.snapshot().leases
        trainer.slow, trainer.note = lambda: None, lambda what: fails() if what == "step" else None  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="no memory"):
            trainer._inner_training_loop(1)
        assert not engine.awake and not house.snapshot().leases


def test_a_call_of_generate_for_which_others_wait_too_long_is_made_again() -> None:
    with in_process() as house:
        trainer, rival, pool = Trainer(house), house.pipeline("p2"), house.pipeline("p1")
        trl.share(trainer, pool, interrupt_after_s=0.0)
        waiting: list[Any] = []

        def slow() -> None:
            if not waiting:
                waiting.append(in_thread(lambda: _trains(rival)))
                eventually(lambda: pool._rollout is not None and pool._rollout.interrupted(), "it is told", BOUND_S)

        trainer.slow = slow
        trainer._inner_training_loop(1)
        assert waiting[0]() == (0,)
        assert [what for what, _ in trainer.held].count("generates") == 2
        assert trainer.model.checkpointing == 1, "what TRL leaves off is on again"


def _trains(pool: Any) -> tuple[int, ...]:
    with pool.training() as stage:
        gpus: tuple[int, ...] = stage.gpus
        return gpus


def test_what_cannot_be_shared_is_refused() -> None:
    with in_process() as house:
        pool = house.pipeline("p1")
        with pytest.raises(InvalidRequest, match=r"no GRPO trainer as trl 1\.16 has it: it has no _generate"):
            trl.share(SimpleNamespace(), pool)
        for name in ("use_vllm", "is_fsdp_enabled", "is_deepspeed_enabled"):
            trainer = Trainer(house)
            setattr(trainer, name, True)
            with pytest.raises(InvalidRequest, match="cannot be"):
                trl.share(trainer, pool)
        maps = {"actor_train": ClusterSpec([0, 1]), "actor_infer": ClusterSpec([0, 1])}
        with pytest.raises(InvalidRequest, match="several bundles"):
            trl.share(Trainer(house), house.pipeline("p2", maps))
