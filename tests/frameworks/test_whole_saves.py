"""While a framework saves, its rank is one that saves: whoever would end it sees that, and waits."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from muster.node import progress

pytestmark = [pytest.mark.frameworks, pytest.mark.xdist_group("frameworks")]


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mark"
    progress.create(str(path))
    monkeypatch.setenv(progress.FILE_VARIABLE, str(path))
    return path


def saves(mark: Path) -> bool:
    """Whether an agent could not end this rank now."""
    with mark.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_of_hugging_face(mark: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import muster.hf

    seen = []

    class Watched(Trainer):
        def _save(self, *args: Any, **kwargs: Any) -> None:
            seen.append(saves(mark))
            super()._save(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            assert not saves(mark)
            return super().training_step(*args, **kwargs)

    row = torch.zeros(4, dtype=torch.long)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=2, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    for callbacks, expected in (([muster.hf.KeepState()], True), ([], False)):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1))
        data = [{"input_ids": row, "labels": row}] * 8
        trainer = Watched(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()
        trainer.save_model(str(tmp_path / "last"))
        assert seen == [expected] * 3
        seen.clear()


def test_of_lightning(mark: Path, tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    import muster.lightning

    seen = []

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            assert not saves(mark)
            loss: torch.Tensor = self.net(batch[0]).mean()
            return loss

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.append(saves(mark))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        callbacks=[muster.lightning.KeepState(), ModelCheckpoint(tmp_path / "out", every_n_train_steps=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(8, 4)), 4))
    assert seen and all(seen) and not saves(mark)


def test_of_accelerate(mark: Path, tmp_path: Path) -> None:
    from accelerate import Accelerator

    import muster.accelerate

    seen = []
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    accelerator.register_save_state_pre_hook(lambda *_: seen.append(saves(mark)))
    state = muster.accelerate.keep_state(accelerator)
    assert state.restore() == 0 and state.restore(7) == 7
    state.commit(8)  # without an agent: nothing
    accelerator.save_state(str(tmp_path / "out"))
    assert seen == [True] and not saves(mark) and (tmp_path / "out/model.safetensors").exists()
    assert model.weight.shape == (1, 4)


def test_accelerate_refuses_what_it_cannot_keep() -> None:
    from accelerate import Accelerator

    import muster
    import muster.accelerate

    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    with pytest.raises(muster.InvalidRequest, match="nothing to keep yet"):
        muster.accelerate.keep_state(accelerator)
