"""A script of some framework on two workers and a spare: what its ranks print, and how to take a worker away.

The scripts know nothing of muster. Each takes FOLDER STEPS EVERY PAUSE, prints where it begins, each step and where it
ends, and saves to FOLDER every so many steps, in its framework's own way.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fleet import Fleet, Process, eventually, family, kill_all

SCRIPTS = Path(__file__).parent / "scripts"
# One thread each, or they wait for each other; nobody is asked for models. A spare that has joined is warm soon.
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu"}
PATIENCE_S = 180.0
_STEP = re.compile(r"step (\d+) of rank (\d+)/(\d+) pid (\d+) at ([\d.]+)")
_BEGIN = re.compile(r"begins at step (\d+) as rank (\d+)/(\d+) pid (\d+) at ([\d.]+)")
_END = re.compile(r"ends at step (\d+) as rank (\d+)/(\d+)")


@dataclass(frozen=True)
class Step:
    number: int
    rank: int
    world: int
    pid: int
    at: float  # time.monotonic() of the rank, which all processes here share


@dataclass(frozen=True)
class Begin:
    step: int
    rank: int
    world: int
    pid: int
    at: float


def steps_in(text: str) -> list[Step]:
    return [Step(int(n), int(rank), int(of), int(pid), float(at)) for n, rank, of, pid, at in _STEP.findall(text)]


class Job:
    """Workers a and b train, c is the spare; all know the same folder."""

    def __init__(self, fleet: Fleet, *program: str) -> None:
        self.fleet = fleet
        self.program = program
        self.workers: dict[str, Process] = {}
        fleet.env |= QUIET
        fleet.env.pop("PYTHONDONTWRITEBYTECODE", None)

    def start(self, *options: str) -> None:
        self.fleet.coordinator()
        for index, name in enumerate("abc"):
            self.join(name, *options, "--infra-rank", str(index))

    def join(self, name: str, *options: str) -> None:
        world = () if "--nnodes" in options else ("--nnodes", "2", "--spares", "1")
        self.workers[name] = self.fleet.node(name, *world, *options, program=self.program)

    def spare(self, name: str) -> None:
        """One more, in the place of one that was lost; returns when it stands by."""
        self.join(name)
        self.fleet.until("a spare stands by", lambda v: [m["role"] for m in v["members"]].count("spare") == 1)

    @property
    def text(self) -> str:
        return "".join(worker.text for worker in self.fleet.processes)

    def steps(self) -> list[Step]:
        return steps_in(self.text)

    def begins(self) -> list[Begin]:
        told = _BEGIN.findall(self.text)
        found = [Begin(int(n), int(rank), int(of), int(pid), float(at)) for n, rank, of, pid, at in told]
        return sorted(found, key=lambda one: one.at)

    def ends(self) -> list[int]:
        return [int(step) for step, _, _ in _END.findall(self.text)]

    def reach(self, number: int, *, world: int = 2, after: Sequence[Begin] = ()) -> Step:
        """The first that has done that step in a world of that size, later than those that had begun."""
        old = {one.pid for one in after}

        def seen() -> Step | None:
            assert any(worker.proc.poll() is None for worker in self.workers.values()), self.text[-6000:]
            return next((s for s in self.steps() if s.number >= number and s.world == world and s.pid not in old), None)

        try:
            return eventually(seen, f"step {number} in a world of {world}", PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text[-6000:]}") from None

    def holder(self, rank: int) -> str:
        """Which worker has that rank now."""
        view = self.fleet.until("a round trains", lambda v: v["state"] == "training")
        return next(str(m["name"]) for m in view["members"] if m["role"] == "active" and m["rank"] == rank)

    def lose_agent(self, name: str = "") -> float:
        """Of that worker, or of the one that has rank 1."""
        worker = self.workers.pop(name or self.holder(1))
        struck = time.monotonic()
        worker.kill()
        return struck

    def lose_worker(self, name: str = "") -> float:
        pids = family(self.workers.pop(name or self.holder(1)).pid)
        struck = time.monotonic()
        kill_all(pids)
        return struck

    def finish(self) -> None:
        """Everybody who is left ends well."""
        codes = {name: worker.wait(PATIENCE_S) for name, worker in self.workers.items()}
        assert set(codes.values()) == {0}, f"{codes}\n{self.text[-6000:]}"


def scripted(fleet: Fleet, script: str, *, steps: int, every: int = 5, pause: float = 0.1, width: int = 32) -> Job:
    """A job of one of the scripts, which saves to the folder `output`."""
    words = [str(fleet.folder / "output"), str(steps), str(every), str(pause)]
    words += [str(width)] if width != 32 else []
    return Job(fleet, str(SCRIPTS / f"{script}.py"), *words)
