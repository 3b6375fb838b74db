from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muster.cli import main, session
from tests.cli.stand_in import StandIn


@dataclass(frozen=True)
class Said:
    """What a command line left behind."""

    code: int
    out: str
    err: str


Muster = Callable[..., Said]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of whoever runs the tests takes part, and no home but an empty one."""
    for name in (
        "MUSTER_URL",
        "MUSTER_TOKEN",
        "MUSTER_NAMESPACE",
        "MUSTER_DEBUG",
        "MUSTER_GPUS",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith(("WANDB_", "HF_", "MLFLOW_", "AWS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def muster(capsys: pytest.CaptureFixture[str]) -> Muster:
    def call(*args: str) -> Said:
        code = main.call(args)
        out, err = capsys.readouterr()
        return Said(code, out, err)

    return call


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The control plane that commands find."""
    stand_in = StandIn()

    def open_client(url: str | None, token: str | None, namespace: str) -> Any:
        stand_in.asked = {"url": url, "token": token, "namespace": namespace}
        return stand_in

    monkeypatch.setattr(session, "open_client", open_client)
    return stand_in
