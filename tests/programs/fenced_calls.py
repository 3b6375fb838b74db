"""A rank that repeats two actions until DIR/go exists: write a mark into the log of `fenced.py`, and call muster.

usage: fenced_calls.py DIR progress|should_save|saving|log|commit|restore|thread
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fenced import BEAT_S, Marks  # type: ignore[import-not-found]

import muster


def save() -> None:
    with muster.saving():
        pass


def state() -> muster.State:
    import torch

    return muster.State(weights=torch.zeros(8), overhead=1.0)


def repeat(call: Callable[[], object], folder: Path, marks: Marks) -> None:
    while not (folder / "go").exists():
        marks.mark("beat")
        call()
        time.sleep(BEAT_S)


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    marks = Marks(folder)
    marks.mark("start")
    if name in ("commit", "restore"):
        kept = state()
        kept.restore()
        steps = iter(range(1, 1 << 30))
        call: Callable[[], object] = kept.restore if name == "restore" else lambda: kept.commit(next(steps))
    else:
        call = {
            "progress": lambda: muster.progress(1),
            "thread": lambda: muster.progress(1),
            "should_save": muster.should_save,
            "saving": save,
            "log": lambda: muster.log(loss=1.0),
        }[name]
    if name == "thread":
        threading.Thread(target=repeat, args=(call, folder, marks), daemon=True).start()
        while not (folder / "go").exists():
            time.sleep(BEAT_S)
    else:
        repeat(call, folder, marks)
    marks.mark("end")


if __name__ == "__main__":
    main()
