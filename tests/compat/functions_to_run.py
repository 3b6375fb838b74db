"""A function that ranks can import, as a program for Basilica's SDK has it."""

from __future__ import annotations

import os

from muster.compat import basilica


@basilica.distributed(
    name="compat", world_size=basilica.WorldSize(2, 2, 3), gpu_count=0, nccl_env={"NCCL_DEBUG": "WARN"}
)
def train(word: str) -> None:
    print(f"{word} {os.environ['RANK']} {os.environ['NCCL_DEBUG']}", flush=True)
