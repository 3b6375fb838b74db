"""A training with as much state as is asked for. How it keeps that is a switch; all the rest is the same for all.

    state_script.py FOLDER --keep nothing|muster|save|async|torchft

It runs under muster-node, torchrun, as a replica of torchft, or with RANK and WORLD_SIZE set by hand, and needs torch
and what it keeps state with. It appends `TIME WORD RANK PID STEP VALUE` to FOLDER/marks and ends at the step that
FOLDER/until names. What takes a real step its time comes last in a step, after the commit: a step that is begun again
after a loss is not measured with it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LAYERS = 8
SHARE = 0.03  # of the time, which saves may take: so many steps lie between two of them
TIMED = 4  # saves, before that is known; the first prepares much
BUSY = 192  # rows of the matrices with which time is spent


class Marks:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = 0

    def __call__(self, word: str, step: int, value: object = "-", at: float | None = None) -> None:
        line = f"{time.monotonic() if at is None else at:.6f} {word} {self.rank} {os.getpid()} {step} {value}\n"
        out = os.open(self.folder / "marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(out, line.encode())
        os.close(out)


# How state is kept -------------------------------------------------------------------------------


class Nothing:
    """And what the others have in common: a group that ends with one of its ranks."""

    def __init__(self, given: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.given = given
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def restore(self) -> int:
        return 0

    def begin(self) -> int:
        """A step begins: how many are done."""
        return self.step

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def group(self) -> int:
        """Another number, another group."""
        return 0

    def reduce(self, gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)

    def agreed(self) -> bool:
        return True

    def commit(self, step: int) -> float | None:
        """So many steps are done. For how long the training waited, if anything was saved."""
        self.step = step
        return None

    def close(self) -> None:
        pass


class InMemory(Nothing):
    def restore(self) -> int:
        import muster

        self._state = muster.State(model=self.model, optimizer=self.optimizer, overhead=self.given.overhead)
        self.step = self._state.restore()
        return self.step

    def commit(self, step: int) -> float | None:
        super().commit(step)
        began = time.monotonic()
        self._state.commit(step)
        return time.monotonic() - began

    def close(self) -> None:
        self._state.wait()


class Saved(Nothing):
    """A file by torch.save, which rank 0 replaces. The first few are timed, from which follows how often."""

    def restore(self) -> int:
        self._costs: list[float] = []
        self._folder: Path = self.given.folder
        if (newest := self._newest()) is not None:
            self.step = self._load(newest)
        return self.step

    def commit(self, step: int) -> float | None:
        super().commit(step)
        every = self._every()
        if every is not None and step % every:
            return None
        began = time.monotonic()
        self._save(step)
        took = time.monotonic() - began
        self._costs.append(took)
        if every is None and self.rank == 0 and len(self._costs) == TIMED:
            cost = statistics.median(self._costs[1:])
            self._note(max(1, math.ceil(cost / (SHARE * self.given.step_s))))
        return took

    def _every(self) -> int | None:
        """One word for all ranks and rounds; None while it is not known."""
        try:
            return int((self._folder / "every").read_text())
        except FileNotFoundError:
            return None

    def _note(self, every: int) -> None:
        draft = self._folder / "every.new"
        draft.write_text(str(every))
        draft.rename(self._folder / "every")

    def _newest(self) -> Path | None:
        path = self._folder / "checkpoint.pt"
        return path if path.exists() else None

    def _save(self, step: int) -> None:
        if self.rank == 0:
            draft = self._folder / "checkpoint.new"
            torch.save(
                {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}, draft
            )
            draft.rename(self._folder / "checkpoint.pt")

    def _load(self, path: Path) -> int:
        kept = torch.load(path)
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        return int(kept["step"])


class SavedBeside(Saved):
    """A folder by torch's distributed checkpoint, written beside the training; the newest two are kept."""

    def restore(self) -> int:
        self._beside = dist.new_group(backend="gloo")
        self._under_way: Any = None
        return super().restore()

    def _all(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _newest(self) -> Path | None:
        whole = [path.parent for path in self._folder.glob("dcp-*/.metadata")]
        return max(whole, default=None)

    def _save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        if self._under_way is not None:
            self._under_way.result()
            if self.rank == 0:
                for old in sorted(path.parent for path in self._folder.glob("dcp-*/.metadata"))[:-2]:
                    shutil.rmtree(old, ignore_errors=True)
        where = self._folder / f"dcp-{step:08d}"
        self._under_way = async_save(self._all(), checkpoint_id=str(where), process_group=self._beside)

    def _load(self, path: Path) -> int:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        kept = self._all()
        load(kept, checkpoint_id=str(path))
        set_state_dict(self.model, self.optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        return int(path.name.removeprefix("dcp-"))

    def close(self) -> None:
        if self._under_way is not None:
            self._under_way.result()


class Replicas(Nothing):
    """torchft: who comes gets the state of another replica; a spare takes every step, without a part of the batch."""

    def restore(self) -> int:
        import socket

        own = os.environ["OWN_ADDRESS"]
        socket.gethostname = lambda: own
        torchft = importlib.import_module("torchft")
        modes = importlib.import_module("torchft.manager").WorldSizeMode
        active, tuned = int(os.environ["ACTIVE"]), os.environ["TUNED"] == "1"
        patience = timedelta(seconds=2 if tuned else 60)
        self._store: Any = vars(dist)["TCPStore"](own, 0, is_master=True, wait_for_workers=False)
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=patience),
            load_state_dict=self._load,
            state_dict=lambda: {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()},
            min_replica_size=active,
            world_size_mode=modes.FIXED_WITH_SPARES,
            use_async_quorum=False,
            timeout=patience,
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=self._store.port,
            hostname=own,
            lighthouse_addr="http://" + os.environ["LIGHTHOUSE"],
            replica_id=os.environ["REPLICA"],
        )
        return 0

    def _load(self, kept: dict[str, Any]) -> None:
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])

    def begin(self) -> int:
        self._manager.start_quorum()
        self.step = self._manager.current_step()
        return self.step

    @property
    def rank(self) -> int:
        found = self._manager.participating_rank() if self._manager.is_participating() else None
        return -1 if found is None else found

    @property
    def group(self) -> int:
        return int(self._manager._quorum_id)

    def reduce(self, gradient: torch.Tensor) -> None:
        self._manager.allreduce(gradient).wait()

    def agreed(self) -> bool:
        return bool(self._manager.should_commit())

    def commit(self, step: int) -> float | None:
        super().commit(step)
        return None

    def close(self) -> None:
        self._manager.shutdown()


KINDS: dict[str, type[Nothing]] = {
    "nothing": Nothing,
    "muster": InMemory,
    "save": Saved,
    "async": SavedBeside,
    "torchft": Replicas,
}


# The training ------------------------------------------------------------------------------------


def a_model(megabytes: float) -> torch.nn.Sequential:
    """Weights and the two moments that Adam keeps of each are so large together."""
    width = round(math.sqrt(megabytes * 1e6 / 3 / 4 / LAYERS))
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def gradients(model: torch.nn.Sequential, step: int, rank: int) -> list[torch.Tensor]:
    """Of a batch that is this rank's at this step, whoever has the rank."""
    width = next(model.parameters()).shape[1]
    rows = torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * step + max(rank, 0)))
    model.zero_grad()
    (model(rows) ** 2).mean().backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for one in tensors:
        found.update(one.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def last_step(folder: Path) -> int:
    try:
        return int((folder / "until").read_text())
    except (FileNotFoundError, ValueError):
        return sys.maxsize


def train(given: argparse.Namespace) -> None:
    begun = time.monotonic()
    mark = Marks(given.folder)
    torch.set_num_threads(1)
    if given.keep != "torchft":
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        mark.rank = dist.get_rank()
        mark("grouped", 0, f"{time.monotonic() - begun:.4f}")
    torch.manual_seed(0)
    model = a_model(given.mb)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    kept = KINDS[given.keep](given, model, optimizer)
    mark("built", 0)
    step = kept.restore()
    mark("restored", step)
    seen: int | None = None
    while (step := kept.begin()) < last_step(given.folder):
        mark.rank, busy_from = kept.rank, time.monotonic()
        reduced = 0.0
        for one in gradients(model, step, kept.rank):
            kept.reduce(one)
            reduced = reduced or time.monotonic()
        if not kept.agreed():
            continue
        if kept.group != seen and kept.rank >= 0:
            seen = kept.group
            mark("reduced", step, at=reduced)
        optimizer.step()
        waited = kept.commit(step + 1)
        if kept.rank >= 0:
            mark("done", step + 1, "-" if waited is None else f"{waited:.6f}")
        time.sleep(max(0.0, given.step_s - (time.monotonic() - busy_from)))
    mark("end", step, digest(model.parameters()))
    kept.close()


# What a copy of each step costs ------------------------------------------------------------------


def spend(times: int, matrix: torch.Tensor) -> None:
    for _ in range(times):
        matrix @ matrix


def times_for(seconds: float, matrix: torch.Tensor) -> int:
    spend(20, matrix)
    began, count = time.monotonic(), 200
    spend(count, matrix)
    return max(1, round(seconds * count / (time.monotonic() - began)))


def turns(given: argparse.Namespace) -> None:
    """The same steps with commits and without, by turns; a copy of the same bytes in between."""
    mark = Marks(given.folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mark.rank = dist.get_rank()
    torch.manual_seed(0)
    model = a_model(given.mb)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    kept = InMemory(given, model, optimizer)
    step = kept.restore()
    matrix = torch.randn(BUSY, BUSY)
    times = times_for(given.step_s, matrix)

    def one(commit: bool) -> float:
        nonlocal step
        began = time.monotonic()
        found = gradients(model, step, kept.rank)
        spend(times, matrix)
        for gradient in found:
            dist.all_reduce(gradient)
        optimizer.step()
        step += 1
        if commit:
            kept.commit(step)
        return time.monotonic() - began

    one(commit=False)
    tensors = [*model.parameters(), *(one for kind in ("exp_avg", "exp_avg_sq") for one in _moments(optimizer, kind))]
    copies = [torch.zeros_like(one) for one in tensors]
    for _ in range(3):  # until memory for all is there
        one(commit=True)
    kept.close()
    for _ in range(given.turns):
        for word, commit in (("without", False), ("with", True)):
            one(commit)  # what is left of the turn before has its time
            for _ in range(given.steps):
                mark(word, step, f"{one(commit):.6f}")
            kept.close()
        began = time.monotonic()
        with torch.no_grad():
            for into, tensor in zip(copies, tensors, strict=True):
                into.copy_(tensor)
        mark("memcpy", step, f"{time.monotonic() - began:.6f}")
    mark("end", step, digest(model.parameters()))


def _moments(optimizer: torch.optim.Optimizer, kind: str) -> list[torch.Tensor]:
    return [state[kind] for state in optimizer.state.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", choices=sorted(KINDS), default="nothing")
    parser.add_argument("--mb", type=float, default=100.0, help="weights and moments together, in millions of bytes")
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--overhead", type=float, default=1.0, help="of muster.State; 1: each step is copied")
    parser.add_argument("--turns", type=int, default=0, help="measure what commits cost, in so many turns")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    given = parser.parse_args()
    run: Callable[[argparse.Namespace], None] = turns if given.turns else train
    run(given)


if __name__ == "__main__":
    main()
