"""What does the demo play, and how does it end? Two pipelines side by side, then what happened.

One pipeline's failure is its own: the scheduler quarantines it, its processes are ended, and the other goes on.
However the demo ends, no process stays behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from muster.errors import MusterError, how_to_install
from muster.sharing import Pool, Scheduler
from muster.sharing.demo import tasks
from muster.sharing.demo.crew import Crew, WorkerDied
from muster.sharing.demo.pipeline import ANSWERS, INFER, Pipeline, Recipe
from muster.sharing.demo.timeline import IDLE, Timeline

OK, ERROR, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
GPUS = 4
_HOOK_TIMEOUT_S = 10.0
_MIN_TURN_S = 1.0
_LEAVE_S = 2 * _HOOK_TIMEOUT_S + 10.0
_COLUMNS = 100
_LONGEST_S = 300.0  # a demo that takes longer hangs


@dataclass(frozen=True)
class Settings:
    rollouts: int
    seed: int
    pace_s: float


def run(settings: Settings, out: TextIO) -> int:
    """Play it; the exit code."""
    if settings.rollouts < 2:
        print("the demo needs at least two rollouts: rewards rise from the first to the last", file=out)
        return USAGE
    if importlib.util.find_spec("torch") is None:
        print(f"the demo needs torch: {how_to_install('torch')}", file=out)
        return ERROR
    try:
        return asyncio.run(_until_terminated(_play(settings, out)))
    except KeyboardInterrupt:
        print("interrupted; every process has been ended", file=out)
        return INTERRUPTED
    except asyncio.CancelledError:
        print("terminated; every process has been ended", file=out)
        return TERMINATED
    except (MusterError, TimeoutError) as error:
        print(f"the demo failed: {error or 'it took too long'}", file=out)
        return ERROR


async def _until_terminated(play: Awaitable[int]) -> int:
    """Lets SIGTERM end the demo in order, as asyncio lets SIGINT."""
    task = asyncio.current_task()
    if task is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await play


async def _play(settings: Settings, out: TextIO) -> int:
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:5.1f} s  {line}", file=out, flush=True)

    with tempfile.TemporaryDirectory(prefix="muster-share-demo-") as folder:
        async with asyncio.timeout(_LONGEST_S), Crew(Path(folder) / "workers.log") as crew:
            say("four GPU slots, imitated on the CPU: learning, loading and freeing are real, decoding is slowed")
            say("torch is loaded once; every worker is forked from that process")
            scheduler = Scheduler(
                Pool(gpus=GPUS, gpus_per_node=GPUS), hook_timeout_s=_HOOK_TIMEOUT_S, min_turn_s=_MIN_TURN_S
            )
            await scheduler.start()
            try:
                show = _Show(scheduler, crew, Path(folder), say)
                await show.play(recipes(settings))
            finally:
                await scheduler.stop()
        show.crew_left = crew.anything_left
    return show.report(out)


def recipes(settings: Settings) -> list[Recipe]:
    infer = tuple(range(GPUS))
    half = GPUS // 2
    shared = (settings.rollouts, settings.seed)
    return [
        Recipe("P1", "A", tasks.REVERSE, infer[:half], infer, 72, settings.pace_s, *shared),
        Recipe("P2", "B", tasks.COMPLEMENT, infer[half:], infer, 40, settings.pace_s, *shared),
    ]


class _Show:
    def __init__(self, scheduler: Scheduler, crew: Crew, folder: Path, say: Callable[[str], None]) -> None:
        self._scheduler, self._crew, self._folder, self._say = scheduler, crew, folder, say
        self._timeline = Timeline(GPUS, time.monotonic)
        self._pipelines: list[Pipeline] = []
        self._out: dict[str, str] = {}  # pipelines that did not finish, and why
        self._begin = self._end = time.monotonic()
        self._still_leased: list[int] = []
        self.crew_left = False

    async def play(self, recipes: Sequence[Recipe]) -> None:
        for recipe in recipes:
            folder = self._folder / recipe.name
            made = await Pipeline.start(recipe, self._scheduler, self._crew, folder, self._timeline, self._say)
            self._pipelines.append(made)
            self._introduce(made)
        self._begin = time.monotonic()
        try:
            await self._all_to_their_ends()
        finally:
            self._end = time.monotonic()
        self._still_leased = sorted(self._scheduler.snapshot().leases)

    async def _all_to_their_ends(self) -> None:
        lost = asyncio.create_task(self._crew.lost.wait())
        lives = [asyncio.create_task(self._live(pipeline)) for pipeline in self._pipelines]
        try:
            waiting = set(lives)
            while waiting:
                done, _ = await asyncio.wait([lost, *waiting], return_when=asyncio.FIRST_COMPLETED)
                if lost in done:
                    raise WorkerDied("the process that forks the workers is gone")
                waiting = {life for life in waiting if not life.done()}
            await asyncio.gather(*lives)
        finally:
            for task in (lost, *lives):
                task.cancel()
            await asyncio.gather(lost, *lives, return_exceptions=True)

    async def _live(self, pipeline: Pipeline) -> None:
        """Run a pipeline; if it fails, take it out so that the others can go on."""
        try:
            await _while_all_live(pipeline)
        except MusterError as error:
            await self._take_out(pipeline, error)
        else:
            self._say(f"{pipeline.recipe.name} is done")

    async def _take_out(self, pipeline: Pipeline, error: MusterError) -> None:
        """It cannot vouch for its GPUs any more. They are free when its processes are gone for certain."""
        name = pipeline.recipe.name
        self._say(f"{name} failed: {error}")
        await pipeline.generation.give_up(error)
        with contextlib.suppress(MusterError, TimeoutError):  # its hooks fail, and the scheduler draws the conclusion
            async with asyncio.timeout(_LEAVE_S):
                await self._scheduler.await_release_gpus(name, INFER)
        quarantined = self._scheduler.snapshot().quarantined.get(name)
        self._out[name] = f"quarantined: {quarantined}" if quarantined else f"out: {error}"
        self._say(f"{name} is {self._out[name]}")
        await self._crew.end(pipeline.workers)
        for letter in (pipeline.recipe.letter, pipeline.recipe.letter.lower()):
            self._timeline.give(self._timeline.held_by(letter), letter)
        await self._scheduler.unregister_pipeline(name)
        self._say(f"{name}: all its processes are ended, so its GPUs are free for the others")

    def _introduce(self, pipeline: Pipeline) -> None:
        recipe = pipeline.recipe
        self._say(
            f"{recipe.name} learns to '{recipe.task.name}': {recipe.prompts} prompts x {ANSWERS} answers a rollout, "
            f"an artificial {recipe.pace_s * 1000:.0f} ms a digit in place of a GPU's decoding"
        )
        for kind, workers, gpus in (
            ("train", pipeline.trainers, recipe.train_gpus),
            ("infer", pipeline.generators, recipe.infer_gpus),
        ):
            pids = " ".join(str(worker.pid) for worker in workers)
            self._say(f"{recipe.name} {kind} on GPUs {' '.join(map(str, gpus))}: processes {pids}")

    # The end -------------------------------------------------------------------------------------

    def report(self, out: TextIO) -> int:
        """Print what happened; the exit code."""
        lines = [*self._picture(), "", *(self._summary(pipeline) for pipeline in self._pipelines)]
        resizes = sum(pipeline.generation.resizes for pipeline in self._pipelines)
        again = sum(pipeline.generation.queued_again for pipeline in self._pipelines)
        lines.append(f"{resizes} resizes; {again} turns in flight were queued again")
        problems = self._problems()
        print(*lines, *problems, sep="\n", file=out, flush=True)
        return ERROR if problems else OK

    def _picture(self) -> list[str]:
        took, busy = self._end - self._begin, self._timeline.busy_share(self._begin, self._end)
        legend = [
            f"{pipeline.recipe.letter} = {pipeline.recipe.name} trains, {pipeline.recipe.letter.lower()} = generates"
            for pipeline in self._pipelines
        ]
        title = f"{took:.1f} s from left to right, {took / _COLUMNS:.2f} s a column; GPUs held {busy:.0%} of the time"
        return [
            "",
            title,
            f"{'; '.join(legend)}; {IDLE} = idle",
            *self._timeline.draw(self._begin, self._end, _COLUMNS),
        ]

    def _summary(self, pipeline: Pipeline) -> str:
        name, rewards = pipeline.recipe.name, pipeline.rewards
        if name in self._out:
            return f"{name}: {self._out[name]}"
        return f"{name}: mean reward {rewards[0]:.3f} -> {rewards[-1]:.3f} over {len(rewards)} rollouts"

    def _problems(self) -> list[str]:
        found = [f"{name} did not finish" for name in self._out]
        for pipeline in self._pipelines:
            if pipeline.recipe.name not in self._out and pipeline.rewards[-1] <= pipeline.rewards[0]:
                found.append(f"{pipeline.recipe.name}'s reward did not rise")
        if self._still_leased:
            found.append(f"GPUs {self._still_leased} are still leased")
        if self.crew_left:
            found.append("processes are still running")
        return [f"problem: {problem}" for problem in (*found, *self._timeline.clashes)]


async def _while_all_live(pipeline: Pipeline) -> None:
    """The pipeline's loop, given up as soon as one of its processes is gone."""
    loop = asyncio.create_task(pipeline.run())
    deaths = {asyncio.create_task(worker.gone.wait()): worker for worker in pipeline.workers}
    try:
        await asyncio.wait([loop, *deaths], return_when=asyncio.FIRST_COMPLETED)
        gone = [worker for death, worker in deaths.items() if death.done()]
        if gone and not loop.done():
            raise WorkerDied(f"{gone[0].name} (process {gone[0].pid}) is gone")
        await loop
    finally:
        for task in (loop, *deaths):
            task.cancel()
        await asyncio.gather(loop, *deaths, return_exceptions=True)
