from __future__ import annotations

import pytest
import torch

from muster.state import copying


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small tensors: on a machine that others use, threads wait for each other more than they compute."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may give no memory in a few milliseconds; then a step would not be kept."""
    monkeypatch.setattr(copying, "SOON_S", 60.0)
