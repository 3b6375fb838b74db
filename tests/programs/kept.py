"""A replicated training whose state is kept: each step is a function of the one before and of what each rank draws.

usage: kept.py DIR STEPS [KEY=VALUE …]    mib: size of the weights; pause: seconds in a step; sharded: each rank has
weights of its own; crash: rank:step at which it ends in its first round; stop: all ranks wait at that step for DIR/on;
wait: each step is waited for; nan: rank:step:count, that many rounds that went on from there fail; durable: folder;
optim: one of torch's optimizers, whose first one costs a process two seconds, instead of the same by hand; faults: what
all ranks have is told at every step, they wait while there is DIR/hold, and rank 0 ends once if there is DIR/nan;
any: what is learned does not depend on the size of the world, not in the last bit
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import muster

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
options = dict(word.split("=") for word in sys.argv[3:])
number = int(os.environ["MUSTER_ROUND"])

torch.set_num_threads(1)
torch.manual_seed(0)
width = max(8, int((float(options.get("mib", 0)) * (1 << 18)) ** 0.5))
model = torch.nn.Linear(width, width, bias=False)
RATE, MOMENTUM = 1e-2, 0.9
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM) if "optim" in options else None
momentum = torch.zeros(width, width)  # without one
drawn = torch.zeros(())  # what this rank drew up to now: per rank, and from its own generator
own = torch.zeros(4)
durable = options.get("durable")
state = muster.State(
    model=model,
    optimizer=optimizer if optimizer is not None else momentum,
    drawn=drawn,
    own=own,
    seen=[],
    durable=durable,
    durable_every=timedelta(seconds=float(options.get("every", 600))),
    overhead=1.0,
)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(rank)
begin = state.restore()
told = os.open(folder / "kept.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def tell(*words: object) -> None:
    os.write(told, (" ".join(map(str, words)) + "\n").encode())


def all_of_it() -> str:
    kept = optimizer.state_dict()["state"][0]["momentum_buffer"] if optimizer is not None else momentum
    parts = (model.weight.detach(), kept, drawn, own)
    found = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts) + repr(state["seen"]).encode())
    return found.hexdigest()[:16]


tell("begin", number, rank, begin, os.environ["MUSTER_WORKER"], os.getpid())
crash = options.get("crash")
nan = options.get("nan", "-1:-1:0").split(":")
if int(nan[0]) == rank and begin >= int(nan[1]) and 0 < number <= int(nan[2]):
    raise SystemExit("loss is not a number")
if "faults" in options:
    if begin:
        tell("sum", number, rank, begin, all_of_it())
    if rank == 0 and (folder / "nan").exists():
        (folder / "nan").unlink()
        raise SystemExit("loss is not a number")
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
for step in range(begin, steps):
    if options.get("stop") == str(step) and number == 0:
        while not (folder / "on").exists():
            time.sleep(0.01)
    while "faults" in options and (folder / "hold").exists():
        time.sleep(0.005)
    drawn += torch.rand(())
    own[:] = step + rank
    state["seen"] = [*state["seen"][-3:], step]
    loss = (model(torch.full((2, width), 1.0 + step % 7)) ** 2).mean()
    model.zero_grad()
    loss.backward()
    grad = model.weight.grad
    assert grad is not None
    if "any" in options:
        dist.all_reduce(grad, dist.ReduceOp.MAX)  # it is the same on all
    else:
        dist.all_reduce(grad)
        grad /= ranks
    if optimizer is not None:
        optimizer.step()
    else:
        momentum.mul_(MOMENTUM).add_(grad)
        with torch.no_grad():
            model.weight.add_(momentum, alpha=-RATE)
    state.commit(step + 1)
    if "wait" in options:
        state.wait()
    tell("step", number, rank, step + 1)
    if "faults" in options:
        tell("sum", number, rank, step + 1, all_of_it())
    if crash == f"{rank}:{step + 1}" and number == 0:
        os._exit(3)
    time.sleep(float(options.get("pause", 0)))
state.wait()
if optimizer is not None:
    momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
made = hashlib.sha256(model.weight.detach().numpy().data)
made.update(momentum.numpy().data)
tell("end", number, rank, f"{drawn.item():.9f}", int(own[0]), state["seen"][-1], made.hexdigest())
dist.destroy_process_group()
