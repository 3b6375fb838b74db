"""State that is written to a folder and given to others, in this process."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import muster

ALWAYS = timedelta(0)


def keep(folder: Path, step: int = 1, /, **named: Any) -> muster.State:
    state = muster.State(durable=folder, durable_every=ALWAYS, **named)
    commit(state, step)
    return state


def commit(state: muster.State, step: int) -> None:
    state.commit(step)
    state.wait()


def restored(folder: Path, /, **named: Any) -> muster.State:
    state = muster.State(durable=folder, **named)
    assert state.restore() == 1
    return state
