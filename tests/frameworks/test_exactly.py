"""Wherever a run is cut, it goes on as the run that was not: same batches, same randomness, same losses, same weights.

One process, and a memory that is a dictionary: what is looked at is the callback and the framework's own loop.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

pytestmark = [pytest.mark.frameworks, pytest.mark.xdist_group("frameworks")]

MEMORY: dict[str, Any] = {}


class Memory:
    """In the place of muster.State."""

    def __init__(self, *, random: bool, overhead: float, **named: Any) -> None:
        self._named = named

    def restore(self) -> int:
        for name, one in self._named.items():
            one.load_state_dict(copy.deepcopy(MEMORY["kept"][name]))
        return int(MEMORY["step"])

    def commit(self, step: int) -> None:
        MEMORY["kept"] = {name: copy.deepcopy(one.state_dict()) for name, one in self._named.items()}
        MEMORY["step"] = step


class Cut(BaseException):
    pass


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import muster.hf
    import muster.lightning

    MEMORY.clear()
    for module in (muster.hf, muster.lightning):
        monkeypatch.setattr(module, "State", Memory)
        monkeypatch.setattr(module, "agent_keeps", lambda: True)
        monkeypatch.setattr(module, "offered", lambda: MEMORY.get("step", 0))
    yield


# Hugging Face -------------------------------------------------------------------------------------


def hf(folder: Path, cut: int | None, **settings: Any) -> tuple[Any, ...]:
    """Weights, losses and place at the end."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from muster.hf import KeepState

    class Cutter(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == cut:
                raise Cut

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (24, 16))]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        logging_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **({"save_strategy": "no"} | settings),
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[KeepState(), Cutter()]
    )
    try:
        trainer.train()
    except Cut:
        return ()
    told = [(one["step"], one.get("loss"), one.get("eval_loss")) for one in trainer.state.log_history[:-1]]
    return [p.tolist() for p in model.parameters()], told, trainer.state.global_step, trainer.state.epoch


@pytest.mark.parametrize(
    ("settings", "cuts"),
    [
        ({"max_steps": 14}, (1, 5, 6, 7, 13)),  # an epoch has six batches
        ({"num_train_epochs": 2, "gradient_accumulation_steps": 4}, (1, 2, 3)),
        ({"max_steps": 10, "eval_strategy": "steps", "eval_steps": 3}, (3, 4)),
        ({"max_steps": 7, "save_strategy": "steps", "save_steps": 3}, (3, 4)),
    ],
    ids=["epochs", "accumulated", "evaluated", "saved"],
)
def test_a_trainer_of_hugging_face(tmp_path: Path, settings: dict[str, Any], cuts: tuple[int, ...]) -> None:
    undisturbed = hf(tmp_path, None, **settings)
    for cut in cuts:
        MEMORY.clear()
        assert hf(tmp_path, cut, **settings) == ()
        assert MEMORY["step"] == cut
        assert hf(tmp_path, None, **settings) == undisturbed, f"cut at {cut}"


def test_a_checkpoint_that_is_newer_than_memory_wins_and_one_that_is_torn_does_not(tmp_path: Path) -> None:
    from transformers import TrainerControl, TrainerState

    import muster.hf

    newer, torn = tmp_path / "checkpoint-9", tmp_path / "checkpoint-12"
    for folder in (newer, torn):
        folder.mkdir()
    TrainerState(global_step=9).save_to_json(str(newer / "trainer_state.json"))
    chosen: list[str | bool | None] = []

    class Stand:
        is_deepspeed_enabled = is_fsdp_enabled = False
        _train_batch_size = 4
        control = TrainerControl()

        class callback_handler:
            callbacks = ()

        class args:
            output_dir = str(tmp_path)
            max_steps = 20
            logging_steps = save_steps = 5
            eval_steps = None

    for step, given in ((8, str(newer)), (9, str(newer)), (8, str(torn)), (0, str(torn)), (8, None), (0, None)):
        MEMORY["step"] = step
        with muster.hf.KeepState().training(Stand(), given) as what:
            chosen.append(what if what is None or str(tmp_path) in str(what) else "memory")
    assert chosen == [str(newer), "memory", "memory", str(torn), "memory", None]


# Lightning ----------------------------------------------------------------------------------------


def lightning(cut: int | None, validate: bool, **settings: Any) -> tuple[Any, ...]:
    """Weights, and what was seen on the way."""
    import lightning.pytorch as pl

    from muster.lightning import KeepState

    seen: list[Any] = []

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            seen.append(
                (self.trainer.global_step, self.trainer.current_epoch, index, batch[0].sum().item(), loss.item())
            )
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            seen.append(("validation", self.trainer.global_step))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Cutter(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == cut:
                raise Cut

    pl.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(48, 4))
    order: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[KeepState(), Cutter()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        **settings,
    )
    model = Model()
    with contextlib.suppress(Cut):
        trainer.fit(model, DataLoader(data, 4, sampler=order), DataLoader(data, 48) if validate else None)
    return [p.tolist() for p in model.parameters()], seen


@pytest.mark.parametrize(
    ("settings", "validate", "cuts"),
    [
        ({"max_steps": 14, "max_epochs": -1}, False, (1, 5, 6, 7, 12, 13)),  # an epoch has six batches
        ({"max_epochs": 3}, True, (5, 6, 7, 17)),
        ({"max_epochs": 2, "val_check_interval": 4}, True, (3, 4, 5, 6)),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, False, (1, 2, 3)),
    ],
    ids=["steps", "epochs", "validated", "accumulated"],
)
def test_a_trainer_of_lightning(settings: dict[str, Any], validate: bool, cuts: tuple[int, ...]) -> None:
    weights, seen = lightning(None, validate, **settings)
    for cut in cuts:
        MEMORY.clear()
        lightning(cut, validate, **settings)
        assert MEMORY["step"] == cut
        begin = next(index for index, one in enumerate(seen) if one[0] == cut)
        assert lightning(None, validate, **settings) == (weights, seen[begin:]), f"cut at {cut}"
