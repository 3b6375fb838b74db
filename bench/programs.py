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

TORCHFT = (
    _MARK
    + """
import socket, subprocess
own, tuned, active = os.environ["OWN_ADDRESS"], os.environ["TUNED"] == "1", int(os.environ["ACTIVE"])
socket.gethostname = lambda: own  # machines of a benchmark have no names
if os.environ["HOSTS_LIGHTHOUSE"] == "1":
    lighthouse = [sys.executable, os.environ["PYTHONPATH"] + "/bin/torchft_lighthouse"]
    lighthouse += ["--bind", os.environ["LIGHTHOUSE"], "--min_replicas", str(active)]
    subprocess.Popen(lighthouse + (["--heartbeat_timeout_ms", "1000", "--quorum_tick_ms", "20"] if tuned else []))
import torch
from datetime import timedelta
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.manager import WorldSizeMode
patience = timedelta(seconds=2 if tuned else 60)
store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=patience), load_state_dict=lambda state: None, state_dict=lambda: {},
    min_replica_size=active, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES, use_async_quorum=False, timeout=patience,
    rank=0, world_size=1, store_addr=own, store_port=store.port, hostname=own,
    lighthouse_addr="http://" + os.environ["LIGHTHOUSE"], replica_id=os.environ["REPLICA"],
)
seen = None
while True:
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    if manager.should_commit() and manager.is_participating() and manager._quorum_id != seen:
        seen = manager._quorum_id
        mark("ready")
    time.sleep(0.002)
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
    for name, text in (("group", GROUP), ("replica", TORCHFT), ("wait", WAIT)):
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
