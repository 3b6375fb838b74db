"""Rank programs for the benchmarks, written to a folder when needed. Each appends `TIME WORD RANK PID` to marks."""

from __future__ import annotations

from pathlib import Path

_MARK = """
import os, sys, time, signal
folder = sys.argv[1]
def mark(word):
    fd = os.open(os.path.join(folder, "marks"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{time.monotonic():.6f} {word} {os.environ['RANK']} {os.getpid()}\\n".encode())
    os.close(fd)
"""

GROUP = (
    _MARK
    + """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
mark("ready")
victim = sys.argv[2] if len(sys.argv) > 2 else ""
if victim == os.environ["RANK"] and not os.path.exists(os.path.join(folder, "crashed")):
    dist.barrier()
    open(os.path.join(folder, "crashed"), "w").close()
    mark("crash")
    os.kill(os.getpid(), signal.SIGKILL)
elif victim and not os.path.exists(os.path.join(folder, "crashed")):
    dist.barrier()
go = torch.zeros(1)
while not go.item():
    go = torch.tensor([float(os.path.exists(os.path.join(folder, "go")))])
    dist.all_reduce(go, op=dist.ReduceOp.MIN)
    time.sleep(0.002)
mark("done")
"""
)

WAIT = (
    _MARK
    + """
mark("start")
while not os.path.exists(os.path.join(folder, "go")):
    time.sleep(0.005)
mark("done")
"""
)


def write(folder: Path) -> dict[str, str]:
    paths = {}
    for name, text in (("group", GROUP), ("wait", WAIT)):
        path = folder / f"{name}.py"
        path.write_text(text)
        paths[name] = str(path)
    return paths


def marks(folder: Path, word: str) -> list[tuple[float, int, int]]:
    """(time, rank, pid) of every mark with that word."""
    try:
        lines = (folder / "marks").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = [line.split() for line in lines]
    return [(float(time), int(rank), int(pid)) for time, kind, rank, pid in found if kind == word]
