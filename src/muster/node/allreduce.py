"""How fast do the ranks of a training add up numbers together? What `muster bench net` runs on each of them.

    python -m muster.node.allreduce [--via auto|gloo|nccl] [--sizes 1024,…] [--repeat N] [--seconds S] [--beside S]

An all-reduce takes as long as the rank that waits longest. Rank 0 prints what came out, as one line behind `MARK`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from muster.mesh.wait import mesh_status, mesh_wait
from muster.node.first_bench import MARK
from muster.types.bench import bus_bytes

WARM_UP = 3
LEAST = 5  # turns of each size, however slow
SHARES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def main() -> None:
    given = _arguments()
    mesh_wait()
    use_nccl = given.via == "nccl" or (given.via == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_nccl else torch.device("cpu")
    if use_nccl:
        torch.cuda.set_device(device)
    _join("nccl" if use_nccl else "gloo", given.beside)
    sizes = [int(size) for size in given.sizes.split(",")]
    found = [_measure(size, device, given.repeat, given.seconds) for size in sizes]
    if dist.get_rank() == 0:
        workers = dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
        said = {"via": dist.get_backend(), "ranks": dist.get_world_size(), "workers": workers, "mesh": mesh_status()}
        print(MARK + json.dumps(said | {"sizes": found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _join(via: str, beside_s: float | None) -> None:
    """Beside a program that comes after us, nothing of ours may be left in the store that both use."""
    if beside_s is None:
        dist.init_process_group(via)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    at, within = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=beside_s)
    store = PrefixStore("muster-bench", TCPStore(*at, size, False, timeout=within, wait_for_workers=False))
    dist.init_process_group(via, store=store, rank=rank, world_size=size, timeout=within)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m muster.node.allreduce")
    parser.add_argument("--via", choices=["auto", "gloo", "nccl"], default="auto")
    parser.add_argument("--sizes", default="1024")
    parser.add_argument("--repeat", type=int, default=100, help="turns of each size, at most")
    parser.add_argument("--seconds", type=float, default=2.0, help="after which a size has been measured enough")
    parser.add_argument(
        "--beside", type=float, metavar="S", help="a program comes after it, in at most so many seconds"
    )
    return parser.parse_args()


def _measure(size: int, device: torch.device, repeat: int, seconds: float) -> dict[str, Any]:
    numbers = torch.ones(max(1, size // 4), dtype=torch.float32, device=device)
    warm = [_turn(numbers, device) for _ in range(WARM_UP)]
    # Everyone has to take the same number of turns: rank 0 says how many fit.
    fits = max(LEAST, min(repeat, int(seconds / max(min(warm), 1e-6))))
    count = torch.tensor([fits], dtype=torch.int64, device=device)
    dist.broadcast(count, 0)
    times = torch.tensor([_turn(numbers, device) for _ in range(int(count.item()))], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    ordered = sorted(times.tolist())
    taken = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in SHARES.items()}
    carried = bus_bytes(numbers.numel() * 4, dist.get_world_size())
    slowest_first = dict(zip(taken, reversed(taken.values()), strict=True))
    speed = {name: carried / slow for name, slow in slowest_first.items()}
    return {"bytes": numbers.numel() * 4, "count": len(ordered), "seconds": taken, "bytesPerSecond": speed}


def _turn(numbers: torch.Tensor, device: torch.device) -> float:
    dist.barrier()
    numbers.fill_(1.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    dist.all_reduce(numbers)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
