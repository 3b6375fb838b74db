"""How does a training with state heal that loses worker after worker? The same script and the same loss for all.

What the workers meet at (our coordinator, torchrun's store, torchft's lighthouse) is a process of its own, which is not
killed here: so any worker may be, whoever has rank 0.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import launchers, losses, report, state_marks
from bench.launchers import Launcher, Spot
from bench.losses import a_fleet
from bench.report import Sample, progress
from bench.state_marks import Mark, Resumed
from tests.fleet import Fleet, Process, eventually, family, free_port, kill_all

SCRIPT = Path(__file__).with_name("state_script.py")
ACTIVE = 2
LEISURE_S = 8.0  # a spare of ours goes on preparing itself a while after it came, and rests before that
LOOKS = 20  # at a spare, to see whether it rests
STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("listens on", flush=True)
while True:
    time.sleep(3600)
"""


@dataclass(frozen=True)
class Contestant:
    """A launcher, how the script keeps state under it, and at what its workers meet."""

    name: str
    launcher: Launcher
    keep: str
    meet: Callable[[Fleet], None]


def _coordinator(fleet: Fleet) -> None:
    fleet.coordinator()


def _store(fleet: Fleet) -> None:
    fleet.start(sys.executable, "-c", STORE, str(fleet.port)).expect("listens on", losses.START_S)


def _lighthouse(fleet: Fleet) -> None:
    program = str(launchers.TORCHFT / "bin" / "torchft_lighthouse")
    words = ("--bind", fleet.address, "--min_replicas", str(ACTIVE), "--heartbeat_timeout_ms", "1000")
    fleet.start(sys.executable, program, *words, "--quorum_tick_ms", "20", PYTHONPATH=str(launchers.TORCHFT))


muster = Contestant("muster", launchers.muster, "muster", _coordinator)
PEERS = (
    Contestant("torchrun tuned + torch.save", launchers.torchrun_tuned, "save", _store),
    Contestant("torchrun tuned + async distributed checkpoint", launchers.torchrun_tuned, "async", _store),
    Contestant("torchft 0.2.0 tuned", launchers.torchft_tuned, "torchft", _lighthouse),
)


def preloading(contestant: Contestant, modules: list[str]) -> Contestant:
    """With modules named that our warm parents import."""

    def command(spot: Spot, program: tuple[str, ...]) -> tuple[str, ...]:
        words = contestant.launcher.command(spot, program)
        at = len(words) - len(program)
        return (*words[:at], *(word for name in modules for word in ("--preload", name)), *program)

    return replace(contestant, launcher=replace(contestant.launcher, command=command))


@dataclass
class Series:
    """What came of a number of losses."""

    healed: list[Resumed] = field(default_factory=list)
    instead: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # for how long saves stopped the training
    every: int = 1  # a save each so many steps
    end: set[tuple[int, str]] = field(default_factory=set)  # step and weights

    @property
    def times(self) -> list[Sample]:
        return [*(one.took_s for one in self.healed), *self.instead]

    @property
    def lost(self) -> list[int]:
        return [one.lost for one in self.healed]


class Job:
    def __init__(
        self, fleet: Fleet, contestant: Contestant, words: tuple[str, ...], leisure_s: float = LEISURE_S
    ) -> None:
        self.fleet = fleet
        self._leisure_s = leisure_s
        self.workers: dict[str, Process] = {}
        self._contestant = contestant
        self._program = (str(SCRIPT), str(fleet.notes), "--keep", contestant.keep, *words)
        self._spare, self._spare_from = "", 0.0
        fleet.port = free_port()
        fleet.env["MUSTER_RUN_TOKEN"] = "a token of the bench, which opens nothing"
        contestant.meet(fleet)

    def begin(self) -> None:
        """The spare comes when the others train, so that it is one everywhere."""
        for _ in range(ACTIVE):
            self.start()
        self.until_done(5)  # how often peers save is known by then
        self.start()

    def start(self) -> None:
        self._spare, self._spare_from = f"w{len(self.fleet.processes):03}", time.monotonic()
        spot = Spot(self._spare, "127.0.0.1", self.fleet.address, first=False, active=ACTIVE)
        launcher = self._contestant.launcher
        self.workers[self._spare] = self.fleet.start(*launcher.command(spot, self._program), **launcher.env(spot))

    def marks(self) -> list[Mark]:
        try:
            return state_marks.parsed((self.fleet.notes / "marks").read_text())
        except FileNotFoundError:
            return []

    def done(self) -> int:
        return state_marks.done_by_all(self.marks(), ACTIVE, time.monotonic())

    def trained(self) -> int:
        """Steps of rank 0 in all, those that were done again included."""
        return sum(mark.word == "done" and mark.rank == 0 for mark in self.marks())

    def until_done(self, step: int) -> None:
        eventually(lambda: self.done() >= step or self._ended(), f"step {step}", losses.START_S)
        assert not self._ended(), f"ended with exit {self._ended()}"

    def settle(self) -> None:
        """The spare stands by, as in any real job, and training has come at least two steps further meanwhile."""
        reached = self.trained()
        time.sleep(max(0.0, self._spare_from + self._leisure_s - time.monotonic()))
        eventually(lambda: rests(self.workers[self._spare].pid), "the spare stands by", losses.START_S)
        eventually(lambda: self.trained() >= reached + 2 or self._ended(), "two more steps", losses.START_S)

    def holder(self, rank: int) -> str:
        pid = [mark.pid for mark in self.marks() if mark.word == "done" and mark.rank == rank][-1]
        return next(name for name, worker in self.workers.items() if pid in family(worker.pid))

    def lose(self, name: str) -> Resumed | str:
        """All processes of one worker."""
        doomed = family(self.workers.pop(name).pid)
        struck = time.monotonic()
        kill_all(doomed)
        while time.monotonic() < struck + losses.LIMIT_S:
            if (found := state_marks.resumed(self.marks(), ACTIVE, struck)) is not None:
                return found
            if len(ended := self._ended()) and len(self.workers) - len(ended) < ACTIVE:
                return f"never: the job ended with exit {', '.join(map(str, ended))}"
            time.sleep(0.02)
        return f"never in {losses.LIMIT_S:g} s"

    def story(self) -> str:
        """What our coordinator tells of the newest rounds."""
        told = [f"{line['at']:.3f} {line['text']}" for line in (self.fleet.view() or {"story": []})["story"]]
        return "\n  ".join(["what happened:", *told[-12:]])

    def finish(self) -> set[tuple[int, str]]:
        """Let it end a few steps on; at which step and with which weights that is."""
        (self.fleet.notes / "until").write_text(str(self.done() + 5))
        eventually(lambda: sum(mark.word == "end" for mark in self.marks()) >= ACTIVE, "the end", losses.START_S)
        return state_marks.ends(self.marks())

    def _ended(self) -> list[int]:
        return [worker.proc.returncode for worker in self.workers.values() if worker.proc.poll() is not None]


def rests(pid: int) -> bool:
    """Whether it has nothing to do most of the time: a spare that gets copies has, now and then, and one that starts
    wants to run all the time, also where the machine is so busy that it hardly does."""
    wants = 0
    for _ in range(LOOKS):
        wants += any(state_of(one) in "RD" for one in family(pid))
        time.sleep(losses.QUIET_S / LOOKS)
    return wants <= LOOKS // 3


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def series(
    contestant: Contestant, losses_wanted: int, words: tuple[str, ...], seed: int, leisure_s: float = LEISURE_S
) -> Series:
    """So many losses in one job, of the worker of each rank in turn, at any moment of a step, while it heals."""
    told = Series()
    if contestant.launcher.missing:
        told.instead.append(contestant.launcher.missing)
        return told
    moments = random.Random(seed)
    with a_fleet() as fleet:
        job = Job(fleet, contestant, words, leisure_s)
        try:
            job.begin()
            for turn in range(losses_wanted):
                job.settle()
                time.sleep(moments.random())
                came = job.lose(job.holder(turn % ACTIVE))
                progress(f"{contestant.name}, {turn + 1} of {losses_wanted}: {_shown(came)}")
                if isinstance(came, str):
                    told.instead.append(came)
                    break
                told.healed.append(came)
                if came.lost > 1 and contestant.keep == "muster":
                    progress(job.story())
                job.start()
            if not told.instead:
                told.end = job.finish()
        except AssertionError as problem:
            told.instead.append(f"failed: {str(problem).splitlines()[0][:120]}")
            for line in [line for one in fleet.processes for line in one.text.splitlines() if "rror" in line][-5:]:
                progress(line[:300])
        told.waits = state_marks.waits(job.marks())
        if (fleet.notes / "every").exists():
            told.every = int((fleet.notes / "every").read_text())
    return told


def _shown(came: Resumed | str) -> str:
    if isinstance(came, str):
        return came
    lost = f"{came.lost} lost, killed {came.after_s * 1000:.0f} ms after a commit"
    return f"{report.show(came.took_s)} s, goes on from step {came.step}, {lost}"


def undisturbed(until: int, words: tuple[str, ...]) -> set[tuple[int, str]]:
    """The same training to the same step, without a launcher and without a loss, as quickly as it goes."""
    with a_fleet() as fleet:
        (fleet.notes / "until").write_text(str(until))
        env = {"WORLD_SIZE": str(ACTIVE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        program = (str(SCRIPT), str(fleet.notes), *words, "--step-s", "0")
        ranks = [fleet.start(sys.executable, *program, RANK=str(rank), **env) for rank in range(ACTIVE)]
        for rank in ranks:
            assert rank.wait(3600.0) == 0, rank.text[-500:]
        return state_marks.ends(state_marks.parsed((fleet.notes / "marks").read_text()))


def by_turns(workers: int, spares: int, preload: list[str], words: tuple[str, ...], limit_s: float) -> list[Mark]:
    """Steps with commits and without, in one run without a loss."""
    contestant = preloading(muster, preload)
    with a_fleet() as fleet:
        job = Job(fleet, contestant, words)
        for place in range(workers + spares):
            spot = Spot(f"w{place}", "127.0.0.1", fleet.address, first=False, active=workers, spares=spares)
            job.workers[spot.name] = fleet.start(*contestant.launcher.command(spot, job._program))
        for worker in job.workers.values():
            assert worker.wait(limit_s) == 0, worker.text[-500:]
        return job.marks()
