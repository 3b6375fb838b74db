"""A training grows and shrinks while it runs, and every wait tells the truth about it.

It runs under your own control plane (`muster top` shows it), and removes the training at the end.

    .venv/bin/python examples/elastic_scale.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import muster
from muster import WorldSize

TRAIN = Path(__file__).with_name("train.py")
PATIENCE_S = 120.0
ENDLESS = 1_000_000


def main(targets: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory(prefix="elastic-scale-") as folder:
        training = muster.distributed(
            script=TRAIN,
            args=[f"{folder}/checkpoint.pt", "--steps", str(ENDLESS)],
            world_size=WorldSize(min=1, target=1, max=max(targets)),
            spares=1,  # the first to be used when it grows
        )
        print(f"submitted {training.name}")
        try:
            print(f"first   {training.wait_until_min_world(timeout=PATIENCE_S)}")
            for target in targets:
                began = time.monotonic()
                print(f"asked   {training.scale(target=target)}")
                world = training.wait_until_target_world(timeout=PATIENCE_S)
                print(f"reached {world} after {time.monotonic() - began:.2f} s, in round {training.ranks[0].round}")
                print(f"        {', '.join(f'rank {rank.rank} on {rank.worker}' for rank in training.ranks)}")
            resizes = [event.message for event in training.events() if event.reason == "Resizing"]
            print("\n".join(["resizes:", *(f"  {text}" for text in resizes)]))
            print(f"restarts spent: {training.training.status.restarts}")
            training.cancel(grace_seconds=1)
            try:
                training.wait(timeout=PATIENCE_S)
            except muster.TrainingCancelled as end:
                print(end)
        finally:
            training.delete(timeout=PATIENCE_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", type=int, nargs="*", default=[3, 2, 1], help="sizes, one after the other")
    main(parser.parse_args().targets)
