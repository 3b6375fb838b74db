"""How long does a GPU take from a training that fills to a pipeline and back? Real processes, a real control plane.

One training with a minimum of one worker fills three imitated GPUs. A pipeline asks for the last of them, holds it
while the training goes on with two workers, and gives it back. Now and then a whole worker is killed in between. What
the training did is read from the log that its own ranks write.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bench.report import Sample, p50, progress
from muster import DistributedTraining
from muster.core.sharing.crews import WORTH_IT
from muster.core.training import metering
from muster.sharing import ClusterSpec, Priority
from muster.sharing.remote import RemoteScheduler, connect
from muster.types.event import WORKER_STARTED, Event
from tests.fleet import PROGRAMS, family, kill_all
from tests.plane import Plane

GPUS, LENT = 3, 2  # how many there are, and which one changes hands
STEP_S = 0.02
KILL_EVERY = 5
LIMIT_S = 60.0
HOLD_S = 0.3
LEAST_KEPT_S = 3.0
LAST_STEPS_S = 0.1  # a rank may still tell of a step after another worker was killed
AMPLE = 1.25  # times as long as the planner asks for


@dataclass(frozen=True)
class Line:
    what: str  # begin, step or safe
    at: float
    round: int
    ranks: int
    step: int
    rank: int
    devices: str


@dataclass(frozen=True)
class Handover:
    kept_s: float  # how long the training had the GPU before
    asked: float
    granted: float
    released: float
    back: float
    killed: str = ""  # who was, and when

    @property
    def vacating_s(self) -> float:
        return self.granted - self.asked

    @property
    def returning_s(self) -> float:
        return self.back - self.released


@dataclass
class Outcome:
    done: list[Handover] = field(default_factory=list)
    failed: str = ""
    kills: int = 0
    lost_to_handovers: int = 0  # steps whose commit had returned, and which were done again
    lost_to_kills: int = 0
    lost_though_safe: int = 0  # steps that were known to be safe, and were done again all the same
    steps: int = 0
    steps_on_lent: int = 0  # with a rank on the GPU while the pipeline had it
    wall_s: float = 0.0
    training_gpu_s: float = 0.0  # as metered
    pipeline_gpu_s: float = 0.0
    counted_twice_s: float = 0.0

    def vacating(self) -> list[Sample]:
        """Only those between which nobody was killed."""
        return [one.vacating_s for one in self.done if not one.killed]

    def returning(self) -> list[Sample]:
        return [one.returning_s for one in self.done if not one.killed]


def measure(count: int, seed: int = 1) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    plane = Plane(folder)
    try:
        plane.serve(MUSTER_GPUS=str(GPUS))
        return asyncio.run(_Scene(plane, folder, random.Random(seed)).play(count))
    finally:
        plane.close()
        shutil.rmtree(folder, ignore_errors=True)


class _Hooks:
    """The pipeline has a stage that trains, and no engine."""

    async def shrink(self, ranks: Sequence[int]) -> None:
        """At once."""

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        """At once."""


class _Scene:
    def __init__(self, plane: Plane, folder: Path, dice: random.Random) -> None:
        self._plane, self._folder, self._dice = plane, folder, dice
        self._outcome = Outcome()
        self._kill_times: list[float] = []

    async def play(self, count: int) -> Outcome:
        begun = time.time()
        training = await asyncio.to_thread(self._submit)
        try:
            async with await connect(self._plane.url, self._plane.api_token) as pool:
                cluster = ClusterSpec([LENT])
                await pool.register_pipeline("p1", {"actor_train": cluster, "actor_infer": cluster}, _Hooks())
                await pool.admit_pipeline("p1")
                for number in range(count):
                    await self._handover(pool, number)
        except (AssertionError, TimeoutError) as error:
            self._outcome.failed = f"hand-over {len(self._outcome.done) + 1}: {str(error) or 'took too long'}"
        (self._folder / "stop").touch()
        await asyncio.to_thread(training.wait, LIMIT_S)
        self._outcome.wall_s = time.time() - begun
        self._judge(await asyncio.to_thread(lambda: list(training.events())))
        return self._outcome

    def _submit(self) -> DistributedTraining:
        script, words = str(PROGRAMS / "filler.py"), [str(self._folder), str(STEP_S)]
        return self._plane.train(
            "fill",
            world=(1, 1, GPUS),
            script=script,
            args=words,
            resources={"gpus": 1},
            elasticity="fill",
            max_restarts=100_000,
        )

    async def _handover(self, pool: RemoteScheduler, number: int) -> None:
        whole = await self._trains(GPUS, after=self._outcome.done[-1].back if self._outcome.done else 0.0)
        if self._kill_times:
            whole = max(whole, await self._trains(GPUS, after=self._kill_times[-1]))
        await asyncio.sleep(max(0.0, whole + self._keep_s() - time.time()))
        asked = time.time()
        await pool.request_gpus("p1", "actor_train", Priority.ACTOR_TRAINING, timeout=LIMIT_S)
        granted = time.time()
        await self._trains(GPUS - 1, after=granted)
        kill_now = (number + 1) % KILL_EVERY == 0
        killed = ""
        if kill_now and number // KILL_EVERY % 2 == 0:
            killed = await self._kill("while the GPU was lent")
            if killed:
                await self._trains(GPUS - 1, after=self._kill_times[-1])
        await asyncio.sleep(HOLD_S)
        released = time.time()
        await pool.notify_release_gpus("p1", "actor_train")
        back = await self._trains(GPUS, after=released)
        self._outcome.done.append(Handover(asked - whole, asked, granted, released, back, killed))
        if kill_now and not killed:
            await self._kill("at full size")
        progress(
            f"{number + 1}: vacated {granted - asked:.3f} s, back {back - released:.3f} s{killed and ', ' + killed}"
        )

    def _keep_s(self) -> float:
        """So long that the planner fills at once the next time: what is filled is to be worth the change."""
        usual = [one for one in self._outcome.done if not one.killed][-20:]
        if not usual:
            return LEAST_KEPT_S
        switch_s = p50([one.vacating_s for one in usual]) + p50([one.returning_s for one in usual])
        return max(LEAST_KEPT_S, AMPLE * WORTH_IT * switch_s * (GPUS - 1))

    async def _trains(self, ranks: int, after: float) -> float:
        """When it took its first step with so many ranks after that."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for line in self._lines():
                    if line.what == "step" and line.ranks == ranks and line.at > after:
                        return line.at
                await asyncio.sleep(0.01)

    async def _kill(self, told: str) -> str:
        """Every process of one worker at once."""
        pids = self._plane.worker_pids()
        name = self._dice.choice(sorted(pids))
        self._kill_times.append(time.time())
        kill_all(family(pids[name]))
        self._outcome.kills += 1
        return f"{name} killed {told}"

    def _lines(self) -> list[Line]:
        return read_log(self._folder / "steps.log")

    # What came of it

    def _judge(self, events: Sequence[Event]) -> None:
        lines, outcome = self._lines(), self._outcome
        for lost in losses(lines):
            outcome.lost_though_safe += lost.safe
            struck = any(lost.after - LAST_STEPS_S < at < lost.before for at in self._kill_times)
            outcome.lost_to_kills += lost.committed if struck else 0
            outcome.lost_to_handovers += 0 if struck else lost.committed
        outcome.steps = sum(line.what == "step" for line in lines)
        held = [(one.granted, one.released) for one in outcome.done]
        on_it = {line.round for line in lines if line.what == "begin" and str(LENT) in line.devices.split(",")}
        outcome.steps_on_lent = sum(
            line.what == "step" and line.round in on_it and any(start < line.at < end for start, end in held)
            for line in lines
        )
        now = datetime.now(UTC)
        found = metering.intervals(events, now)
        outcome.training_gpu_s = sum(one.gpu_seconds for one in metering.totals(found, now=now))
        outcome.pipeline_gpu_s = sum(end - start for start, end in held)
        outcome.counted_twice_s = _overlap(list(_metered(events, now)), held)


@dataclass(frozen=True)
class Loss:
    after: float  # the last step that the round before told of
    before: float  # when the next one began
    committed: int
    safe: int


def losses(lines: Sequence[Line]) -> Iterator[Loss]:
    """What each round did again of what had been done before it."""
    committed = safe = 0
    last = 0.0
    for line in lines:
        if line.what == "begin" and line.rank == 0:
            yield Loss(last, line.at, max(0, committed - line.step), max(0, safe - line.step))
            committed = line.step
        elif line.what == "step":
            committed = max(committed, line.step)
        elif line.what == "safe":
            safe = max(safe, line.step)
        last = line.at if line.what != "begin" else last  # other ranks may begin before the first one


def read_log(path: Path) -> list[Line]:
    with contextlib.suppress(FileNotFoundError):
        return [_line(text) for text in path.read_text().splitlines()]
    return []


def _line(text: str) -> Line:
    what, at, number, ranks, step, rank, *devices = text.split(maxsplit=6)
    return Line(what, float(at), int(number), int(ranks), int(step), int(rank), "".join(devices))


_Span = tuple[float, float]


def _metered(events: Sequence[Event], now: datetime) -> Iterator[_Span]:
    """When the GPU that changes hands was metered for the training."""
    placed = {
        event.data["worker"]: event.data.get("gpus")
        for event in events
        if event.reason == WORKER_STARTED and "worker" in event.data
    }
    for one in metering.intervals(events, now):
        gpus = placed.get(one.worker)
        if not isinstance(gpus, list) or LENT not in gpus:
            continue
        start = one.since.timestamp()
        for lent, back in one.lent:
            yield start, lent.timestamp()
            start = (back or one.until or now).timestamp()
        yield start, (one.until or now).timestamp()


def _overlap(some: Sequence[_Span], others: Sequence[_Span]) -> float:
    return sum(max(0.0, min(end, to) - max(start, since)) for start, end in some for since, to in others)
