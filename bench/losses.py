"""How long does a job stand still that loses a worker, or a machine? The same loss for us and for each peer.

A job has some workers that train and a spare that stands by. What is lost is lost in one instant: every process of a
worker, or a machine, which is a network namespace whose link is taken down or whose processes are all killed.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import programs, report
from bench.launchers import Launcher, Spot
from bench.report import Sample, progress, stories
from muster import DistributedTraining
from tests.fleet import Fleet, Process, eventually, family, free_port, gone, kill_all
from tests.kube.plane import KubePlane
from tests.netns.machines import Machines
from tests.plane import Plane, fresh

LIMIT_S = 90.0  # for a job that may never recover; a torchrun that does not ends after 77 s
MACHINES_LIMIT_S = 45.0  # there nothing ends by itself
START_S = 120.0
QUIET_S = 0.5
SETTLED_S = 10.0  # also for a spare that never rests, as one of torchft
FAILURES = 3  # after which we are not asked again


@contextlib.contextmanager
def a_fleet() -> Iterator[Fleet]:
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    fleet = Fleet(folder)
    try:
        yield fleet
    finally:
        fleet.close()
        shutil.rmtree(folder, ignore_errors=True)


class Job:
    """Started by one launcher, its workers all here or each on a machine of its own. The first hosts the meeting."""

    def __init__(self, fleet: Fleet, launcher: Launcher, active: int, machines: Machines | None) -> None:
        self.fleet = fleet
        self.active = active
        self.machines = machines
        self.workers: dict[int, Process] = {}
        self._launcher = launcher
        self._program: tuple[str, ...] = (programs.write(fleet.folder)[launcher.program], str(fleet.notes))
        self._made = 0
        self._spare = -1
        self.struck = 0.0
        fleet.host, fleet.port = self._address(0), free_port()
        fleet.env["MUSTER_RUN_TOKEN"] = "a token of the bench, which opens nothing"
        if machines is not None:
            fleet.env |= {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}

    def begin(self) -> None:
        """The spare comes when the others train, so that it is one everywhere."""
        for place in range(self.active):
            self._start(place)
            time.sleep(0.5 if place == 0 else 0.0)
        eventually(lambda: len(self.ready()) >= self.active or self._ended(), "the first group", START_S)
        assert not self._ended(), f"ended with exit {self._ended()}"
        self.add_spare(self.active)

    def add_spare(self, place: int) -> None:
        if self.machines is not None and place in self.workers:
            self.machines.power_on(place)
        self._start(place)
        self._spare = place

    def settle(self) -> None:
        settle(self.workers[self._spare].pid)

    def ready(self) -> list[tuple[float, int, int]]:
        return programs.marks(self.fleet.notes, "ready")

    def training(self) -> list[int]:
        """Where the newest group has its ranks."""
        pids = {pid for _, _, pid in self.ready()[-self.active :]}
        return [place for place, worker in self.workers.items() if pids & set(family(worker.pid))]

    def lose(self, place: int, how: Strike) -> Sample:
        """Seconds to the first all-reduce of the next group, or what came instead."""
        before = self.ready()
        others = [worker for where, worker in self.workers.items() if where != place]
        struck = self.struck = how(self, place)
        limit_s = LIMIT_S if self.machines is None else MACHINES_LIMIT_S
        while time.monotonic() < struck + limit_s:
            if len(again := self.ready()[len(before) :]) >= self.active:
                return min(at for at, _, _ in again) - struck
            ended = [worker.proc.returncode for worker in others if worker.proc.poll() is not None]
            if len(others) - len(ended) < self.active:
                codes = ", ".join(sorted({str(code) for code in ended}))
                return f"never: the job ended with exit {codes} after {time.monotonic() - struck:.0f} s"
            time.sleep(0.005)
        left = sum(not gone(pid) for _, _, pid in before[-self.active :] if place not in self._places(pid))
        return f"never in {limit_s:g} s; {left} of the {self.active - 1} other ranks go on"

    def released(self, number: int) -> float:
        """When the coordinator released the round after that one."""
        view = self.fleet.until("a later round", lambda v: v["round"] > number)
        return float(
            next(line["at"] for line in view["story"] if line["kind"] == "release" and line["at"] > self.struck)
        )

    def _ended(self) -> list[int]:
        return [worker.proc.returncode for worker in self.workers.values() if worker.proc.poll() is not None]

    def _places(self, pid: int) -> list[int]:
        return [place for place, worker in self.workers.items() if pid in family(worker.pid)]

    def _address(self, place: int) -> str:
        return "127.0.0.1" if self.machines is None else self.machines.address(place)

    def _start(self, place: int) -> None:
        name = f"w{self._made:03}"
        spot = Spot(name, self._address(place), self.fleet.address, place == 0, self.active)
        inside = self.machines.inside(place) if self.machines is not None else ()
        command = self._launcher.command(spot, self._program)
        self.workers[place] = self.fleet.start(*inside, *command, **self._launcher.env(spot))
        self._made += 1


# What is lost ------------------------------------------------------------------------------------

Strike = Callable[[Job, int], float]  # returns when it was


def every_process(job: Job, place: int) -> float:
    """Launcher, helpers and ranks, and whatever else they started."""
    pids = family(job.workers[place].pid)
    struck = time.monotonic()
    kill_all(pids)
    return struck


def launcher_only(job: Job, place: int) -> float:
    struck = time.monotonic()
    job.workers[place].kill()
    return struck


def link(job: Job, place: int) -> float:
    assert job.machines is not None
    struck = time.monotonic()
    job.machines.link(place, up=False)
    return struck


def machine_killed(job: Job, place: int) -> float:
    assert job.machines is not None
    struck = time.monotonic()
    job.machines.kill(place)
    return struck


def settle(spare: int) -> None:
    """A spare stands by when it has nothing left to do, as in any real job."""
    deadline = time.monotonic() + SETTLED_S
    last = -1.0
    while time.monotonic() < deadline and (used := cpu_s(spare)) > last + 0.03:
        last = used
        time.sleep(QUIET_S)


def cpu_s(pid: int) -> float:
    """What a process and all that it started have used, in seconds."""
    used = 0.0
    for one in family(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / 100
    return used


# Again and again ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is lost, of how large a job, where."""

    how: Strike
    active: int = 2
    of_machines: bool = False
    first: bool = False  # the one with which the others meet; else another


@dataclass
class Healed:
    first_all_reduce: list[Sample]
    released: list[float]  # ours only: peers have no such moment


def series(launcher: Launcher, case: Case, repeat: int, *, watch: bool = False, patient: bool = False) -> Healed:
    """As many losses, in one job while it heals. `patient`: also after one that did not, if another did."""
    healed = Healed([], [])
    samples = healed.first_all_reduce
    if launcher.missing:
        samples.append(launcher.missing)
        return healed
    while len(samples) < repeat and (failed := len(stories(samples))) < FAILURES:
        if failed and (not patient or failed == len(samples)):
            break
        try:
            _one_job(launcher, case, repeat, healed, watch)
        except AssertionError as problem:
            samples.append(f"did not start: {str(problem).splitlines()[0][:80]}")
    return healed


def _one_job(launcher: Launcher, case: Case, repeat: int, healed: Healed, watch: bool) -> None:
    samples = healed.first_all_reduce
    with a_fleet() as fleet, contextlib.ExitStack() as stack:
        machines = stack.enter_context(Machines(case.active + 1)) if case.of_machines else None
        stack.callback(fleet.close)  # before its machines are taken away
        job = Job(fleet, launcher, case.active, machines)
        job.begin()
        while True:
            job.settle()
            place = next((place for place in job.training() if (place == 0) is case.first), None)
            if place is None:
                raise AssertionError("the first one does not train" if case.first else "only the first one trains")
            number = fleet.until("a round", lambda v: v["state"] == "training")["round"] if watch else 0
            samples.append(job.lose(place, case.how))
            progress(f"{launcher.name}, {len(samples)} of {repeat}: {report.show(samples[-1])}")
            if watch and isinstance(samples[-1], float):
                healed.released.append(job.released(number) - job.struck)
            if isinstance(samples[-1], str) or len(samples) >= repeat or case.first:
                return
            job.add_spare(place)


# Under a control plane ---------------------------------------------------------------------------


def under_a_control_plane(plane: Plane | KubePlane, agents: Callable[[], dict[str, int]], repeat: int) -> list[Sample]:
    """Kill all of a worker again and again; the control plane brings the next spare. `agents`: worker → pid."""
    script = programs.write(plane.folder)["group"]
    training = plane.train("lossy", script=script, args=[str(plane.notes)], world=(2, 2, 2), spares=1)
    samples: list[Sample] = []

    def ready() -> list[tuple[float, int, int]]:
        return programs.marks(plane.notes, "ready")

    eventually(lambda: len(ready()) >= 2, "the first group", START_S)
    while len(samples) < repeat and len(stories(samples)) < FAILURES:
        victim, spare = eventually(lambda: _standing(training, agents()), "a spare stands by")
        settle(spare)
        doomed, before, struck = family(victim), len(ready()), time.monotonic()
        kill_all(doomed)
        while len(again := ready()[before:]) < 2 and time.monotonic() < struck + LIMIT_S:
            time.sleep(0.005)
        healed = len(again) >= 2
        samples.append(min(at for at, _, _ in again) - struck if healed else f"never in {LIMIT_S:g} s")
        progress(f"{len(samples)} of {repeat}: {report.show(samples[-1])}")
    return samples


def _standing(training: DistributedTraining, agents: dict[str, int]) -> tuple[int, int] | None:
    """The pids of the last rank's worker and of the spare, once the status tells of nobody that is gone."""
    status = fresh(training).training.status
    ranks = sorted(training.ranks, key=lambda rank: rank.rank)
    spares = agents.keys() - {rank.worker for rank in ranks}
    whole = len(ranks) == 2 and status.spares.ready == 1 and all(rank.worker in agents for rank in ranks)
    return (agents[ranks[-1].worker], agents[spares.pop()]) if whole and len(spares) == 1 else None
