"""Faults in kept state, one after the other in one training: it goes on from what is right, or not at all.

Each kind of fault is met by a world that stands still at a step which every worker has. Then memory is damaged or
workers die, and what ranks have after they went on is compared with what a training without faults had at that step.
`MUSTER_FAULTS=N` is how many faults of each kind there are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from muster.state import disk
from tests.fleet import Fleet, eventually, family, kill_all
from tests.node.test_state import KEPT, Run, flip_all, memory_of

pytestmark = pytest.mark.soak
FAULTS = int(os.environ.get("MUSTER_FAULTS", "143"))  # of each of seven kinds: a thousand in all
ENDLESS = 1_000_000
TRIES, HELD_S = 10, 5.0


@dataclass
class Faulty:
    """A training that is replaced piece by piece."""

    fleet: Fleet
    workers: int
    spares: int
    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    domains: int = 0
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    run: Run = field(init=False)

    def __post_init__(self) -> None:
        self.fleet.coordinator()
        self.run = Run(self.fleet, {})
        self._names = (f"w{number}" for number in itertools.count())
        for place in range(self.workers + self.spares):
            self.join(place % self.domains if self.domains else None)

    @property
    def hold(self) -> Path:
        return self.fleet.notes / "hold"

    def join(self, domain: int | None = None, steps: int = ENDLESS) -> None:
        name = next(self._names)
        size = ("--nnodes", str(self.workers), "--spares", str(self.spares), "--max-restarts", "1000000")
        place = ("--domain", f"d{domain}") if domain is not None else ()
        program = (KEPT, str(self.fleet.notes), str(steps), "wait=1", "faults=1", "pause=0.01", *self.words)
        self.run.nodes[name] = self.fleet.node(name, *size, *place, *self.options, program=program)

    @property
    def round(self) -> int:
        return max((int(number) for number, *_ in self.run.lines("begin")), default=-1)

    def stands_still(self, copies: int) -> int:
        """All ranks wait at one step, which so many workers have: that step."""
        everybody = self.workers + self.spares
        self.fleet.until("all are here", lambda v: v["state"] == "training" and len(v["members"]) == everybody)
        eventually(lambda: len(self.run.begun(self.round)) == self.workers or None, "ranks run")
        step = max(self.run.begun(self.round).values())
        for _ in range(TRIES):
            self.run.reaches(step + 2, self.round, self.workers)
            self.hold.touch()
            step = eventually(self._one_step, "all wait at one step")
            if not copies:
                return step
            with contextlib.suppress(AssertionError):
                self.run.is_held(step, copies, HELD_S)
                return step
            self.hold.unlink()  # on a busy machine a spare that came late is not given every step
        raise AssertionError(f"step {step} and those before are not held by {copies}")

    def _one_step(self) -> int | None:
        told = set(self.run.steps(self.round).values())
        time.sleep(0.05)  # longer than a step: nobody is on the way to another
        return told.pop() if len(told) == 1 and told == set(self.run.steps(self.round).values()) else None

    def lose(self, *ranks: int) -> None:
        """The workers of those ranks, at once."""
        names = {self.run.worker_of(rank, self.round) for rank in ranks}
        kill_all([pid for name in names for pid in family(self.run.nodes.pop(name).pid)])

    def goes_on(self, after: int) -> tuple[int, int]:
        """Until a later round has made a step: from which step it went on, and how many rounds it took."""
        self.hold.unlink(missing_ok=True)

        def look() -> tuple[int, int] | None:
            now = self.round
            begun, steps = self.run.begun(now), self.run.steps(now)
            if now > after and len(steps) == self.workers and len(set(begun.values())) == 1:
                return begun[0], now - after
            return None

        return eventually(look, "it goes on", 60)

    def is_right(self) -> None:
        """What ranks had at each step was always the same, and is what a training without faults has."""
        told: dict[tuple[int, int], set[str]] = {}
        for _, rank, step, made in self.run.lines("sum"):
            told.setdefault((int(rank), int(step)), set()).add(made)
        assert all(len(made) == 1 for made in told.values()), {k: v for k, v in told.items() if len(v) > 1}
        last = max(step for _, step in told)
        self.fleet.order("cancel", why="enough")
        self.fleet.run_id, self.run = "undisturbed", Run(self.fleet, {})
        (self.fleet.notes / "kept.log").unlink()
        self.words, self.options, self.spares = (), (), 0
        for _ in range(self.workers):
            self.join(steps=last)
        self.run.ends()
        alone = {(int(rank), int(step)): made for _, rank, step, made in self.run.lines("sum")}
        assert len(told) > FAULTS
        assert {key: made for key, (made,) in told.items()} == {key: alone[key] for key in told}


def zero_rest(run: Run, worker: str) -> None:
    """Of all that it keeps the second half was never written."""
    for path in memory_of(run.nodes[worker]):
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            used = max(size // 16, 4096)
            file.seek(used // 2)
            file.write(bytes(size - used // 2))


def mix(run: Run, worker: str) -> None:
    """Each of its segments has the content of another."""
    found = memory_of(run.nodes[worker])
    content = [path.read_bytes() for path in found]
    for path, data in zip(found, content[1:] + content[:1], strict=True):
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            file.write(data[:size])


DAMAGE: dict[str, Callable[[Run, str], object]] = {
    "bit flip": lambda run, worker: flip_all(run.nodes[worker]),
    "torn write": zero_rest,
    "mixed steps": mix,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_memory(fleet: Fleet, kind: str) -> None:
    """All that the worker has which goes on is damaged, then the other one dies."""
    faulty = Faulty(fleet, 2, 1)
    for _ in range(FAULTS):
        step, number = faulty.stands_still(copies=3), faulty.round
        goes = faulty.draw.randrange(2)
        DAMAGE[kind](faulty.run, faulty.run.worker_of(1 - goes, number))
        faulty.lose(goes)
        went_on, rounds = faulty.goes_on(number)
        assert went_on == step and rounds <= 2, faulty.run.story("release")[-3:]
        faulty.join()
    faulty.is_right()


def test_a_buddy_that_died_before(fleet: Fleet) -> None:
    """Both workers of the world die, one after the other: what their spares were given is all that is left."""
    faulty = Faulty(fleet, 2, 2)
    for _ in range(FAULTS):
        step, number = faulty.stands_still(copies=4), faulty.round
        first = faulty.draw.randrange(2)
        faulty.lose(first)
        time.sleep(faulty.draw.random() / 20)
        faulty.lose(1 - first)
        went_on, rounds = faulty.goes_on(number)
        assert went_on == step and rounds <= 2, faulty.run.story("release")[-3:]
        faulty.join()
        faulty.join()
    faulty.is_right()


def test_a_domain_that_died(fleet: Fleet) -> None:
    """Two of four workers and one of two spares, all of one domain, at once."""
    faulty = Faulty(fleet, 4, 2, domains=2)
    for _ in range(FAULTS):
        step, number = faulty.stands_still(copies=2), faulty.round
        view = fleet.until("it survives that", lambda v: v["kept_state"]["survives"] == "domain")
        assert view["kept_state"]["step"] == step
        domains = {member["name"]: member["domain"] for member in view["members"]}
        gone = faulty.draw.choice(sorted(set(domains.values())))
        names = [name for name, domain in domains.items() if domain == gone]
        kill_all([pid for name in names for pid in family(faulty.run.nodes.pop(name).pid)])
        for _ in names:
            faulty.join(int(gone.removeprefix("d")))
        went_on, rounds = faulty.goes_on(number)
        assert went_on == step and rounds <= 2, faulty.run.story("release")[-3:]
    faulty.is_right()


def test_what_is_not_a_number_after_it_was_restored(fleet: Fleet) -> None:
    """The step is whole and useless: the one before it is taken, in the next round."""
    faulty = Faulty(fleet, 2, 1)
    for _ in range(FAULTS):
        step, number = faulty.stands_still(copies=3), faulty.round
        (fleet.notes / "nan").touch()
        faulty.lose(faulty.draw.randrange(2))
        went_on, rounds = faulty.goes_on(number)
        assert went_on == step - 1 and rounds == 2, faulty.run.story("release")[-3:]
        faulty.join()
    faulty.is_right()


def test_out_of_room(fleet: Fleet, tmp_path: Path) -> None:
    """Memory has no room for one copy: what is on disk counts."""
    folder = tmp_path / "kept"
    faulty = Faulty(fleet, 2, 1, (f"durable={folder}", "every=0.01"), ("--state-memory", "64Ki"))
    for _ in range(FAULTS):
        eventually(lambda: disk.steps(folder) or None, "a step on disk")
        faulty.stands_still(copies=0)
        number, on_disk = faulty.round, max(disk.steps(folder))
        faulty.lose(faulty.draw.randrange(2))
        went_on, rounds = faulty.goes_on(number)
        assert went_on >= on_disk and rounds <= 2, faulty.run.story("release")[-3:]
        faulty.join()
    faulty.is_right()
