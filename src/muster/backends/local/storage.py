"""Where is a training's storage on one machine? A folder for each, which ranks find by a variable.

Nothing is mounted here: `mount` is for Pods. What is kept stays for the next training of that name, a claim for all
that name it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from muster.types.storage import Storage
from muster.types.training import Key, Training


def folders(home: Path, training: Training) -> Mapping[str, Path]:
    """Variable → folder."""
    return {one.variable: _folder(home, training.key, one) for one in training.spec.storage}


def _folder(home: Path, key: Key, storage: Storage) -> Path:
    root = home / "storage" / key.namespace
    return root / "claims" / storage.claim if storage.claim else root / "trainings" / key.name / storage.name


def provide(home: Path, training: Training) -> None:
    for folder in folders(home, training).values():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def remove(home: Path, key: Key, storage: Iterable[Storage]) -> None:
    """What was not to be kept."""
    for one in storage:
        if not one.keep and not one.claim:
            shutil.rmtree(_folder(home, key, one), ignore_errors=True)
