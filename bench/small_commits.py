"""The fixed cost of a commit: a small state and short steps, while other processes keep every core busy.

`figures` runs the training; as a program this file is one rank of it: `small_commits.py FOLDER STEPS STEP_S`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.report import Figure

LAYERS, WIDTH = 4, 250  # 2.9 MiB with two moments of Adam, in 24 tensors
WORKERS = 2
WARM_UP = 20  # steps in which the pace settles
LIMIT_S = 300.0
COST_MS = 2.0
BUSY = "while True: pass"


def figures(given: argparse.Namespace) -> Iterator[Figure]:
    from bench import report
    from bench.losses import a_fleet
    from bench.report import Figure, Goal
    from tests.fleet import eventually

    with a_fleet() as fleet:
        fleet.coordinator()
        words = (str(fleet.notes), str(given.small_steps), str(given.small_step_s))
        loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
        try:
            for number in range(WORKERS):
                fleet.node(f"w{number}", "--nnodes", str(WORKERS), program=(__file__, *words))
            results = [fleet.notes / f"commits-{rank}.json" for rank in range(WORKERS)]
            eventually(lambda: all(path.exists() for path in results) or None, "the training ends", LIMIT_S)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
        ranks = [json.loads(path.read_text()) for path in results]
    costs, waits = ([value for rank in ranks for value in rank[kind]] for kind in ("costs", "waits"))
    job = f"{WORKERS} workers, 2.9 MiB of Adam state, steps of {given.small_step_s:g} s, one endless loop a core"
    note = "without the time in which the core ran other processes"
    cost = report.compared(f"{job}; cost of a commit", costs, {}, "ms", Goal(p50=COST_MS))
    yield Figure(**{**vars(cost), "note": note})
    yield report.compared(f"{job}; a commit returns after, by the clock", waits, {}, "ms", Goal())
    copied_share = statistics.mean(rank["kept"] for rank in ranks) * 100
    yield Figure(f"{job}; steps that are copied", copied_share, "%", "100 %", copied_share >= 100, samples=len(waits))


def train(folder: Path, steps: int, step_s: float) -> None:
    """Train as one rank, and write the cost of each commit."""
    import torch
    import torch.distributed as dist

    import muster
    from muster.state.copying import Copier
    from muster.state.pace import Pace

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    copies, costs = 0, []
    copy, copied = Copier.copy, Pace.copied

    def counted(self: Copier, *args: object) -> None:
        nonlocal copies
        copies += 1
        copy(self, *args)  # type: ignore[arg-type]

    def noted(self: Pace, cost_s: float) -> None:
        costs.append(cost_s)
        copied(self, cost_s)

    Copier.copy, Pace.copied = counted, noted  # type: ignore[method-assign,assignment]
    layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(layers.parameters())
    state = muster.State(model=layers, optimizer=optimizer)
    waits = []
    for step in range(state.restore(), steps):
        began = time.monotonic()
        while time.monotonic() - began < step_s:
            torch.randn(200, 200) @ torch.randn(200, 200)
        layers(torch.randn(8, WIDTH)).square().mean().backward()
        for parameter in layers.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step == WARM_UP:
            copies, costs = 0, []
        began = time.monotonic()
        state.commit(step + 1)
        if step >= WARM_UP:
            waits.append(time.monotonic() - began)
    result = {"costs": costs, "waits": waits, "kept": copies / len(waits)}
    draft = folder / f"commits-{dist.get_rank()}.new"
    draft.write_text(json.dumps(result))
    draft.rename(draft.with_suffix(".json"))


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
