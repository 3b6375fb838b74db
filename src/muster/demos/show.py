"""What does the demo play, and how does it end? Two pipelines and a training side by side, then what happened.

One pipeline's failure is its own: the scheduler quarantines it, its processes are ended, and the others go on.
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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TextIO

from muster.demos import filling, tasks
from muster.demos.control_plane import ControlPlane, ControlPlaneGone
from muster.demos.filling import FillingTraining
from muster.demos.occupancy import IDLE, Occupancy
from muster.demos.orders import INFER
from muster.demos.pipeline import ANSWERS, DemoPipeline, Recipe
from muster.demos.processes import DemoProcesses, WorkerDied, start_fork_server
from muster.demos.step_log import Account
from muster.errors import MusterError, how_to_install
from muster.sdk.client import Client
from muster.sharing.remote import RemoteScheduler, connect

OK, ERROR, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
SHARED = 4  # GPUs of both pipelines
GPUS = SHARED + 1  # one more than the pipelines can use: a training's minimum is never taken
_LEAVE_S = 30.0
_COLUMNS = 100
_LONGEST_S = 300.0  # a demo that takes longer hangs


def run(rollouts: int, seed: int, pace_s: float, out: TextIO) -> int:
    """Play it; the exit code."""
    if rollouts < 2:
        print("the demo needs at least two rollouts: rewards rise from the first to the last", file=out)
        return USAGE
    if importlib.util.find_spec("torch") is None:
        print(f"the demo needs torch: {how_to_install('torch')}", file=out)
        return ERROR
    try:
        with (
            tempfile.TemporaryDirectory(prefix="muster-share-demo-", ignore_cleanup_errors=True) as folder,
            contextlib.closing(ControlPlane(Path(folder), GPUS)) as plane,  # it starts while torch is loaded
        ):
            start_fork_server()  # before the event loop, so that an interrupt need not wait for torch
            play = _play(recipes(rollouts, seed, pace_s), plane, Path(folder), out)
            return asyncio.run(_until_terminated(play))
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


async def _play(chosen: Sequence[Recipe], plane: ControlPlane, folder: Path, out: TextIO) -> int:
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:5.1f} s  {line}", file=out, flush=True)

    say(f"{GPUS} GPU slots, imitated on the CPU: learning, loading and freeing are real, decoding is slowed")
    say(f"a control plane of the demo's own plans who has them: all its processes are below {plane.pid}")
    async with asyncio.timeout(_LONGEST_S):
        url, token = await plane.serving()
        async with Client(url, token) as client, await connect(url, token) as scheduler:
            training = FillingTraining(client, folder / filling.NAME, GPUS, say)
            with contextlib.closing(DemoProcesses()) as processes:
                show = _Show(scheduler, training, processes, folder, say)
                await _while_it_plans(plane, show.play(chosen))
    show.anything_left = processes.anything_left
    return show.report(out)


async def _while_it_plans(plane: ControlPlane, play: Coroutine[None, None, None]) -> None:
    playing, gone = asyncio.create_task(play), asyncio.create_task(plane.gone())
    try:
        await asyncio.wait([playing, gone], return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            raise ControlPlaneGone("the control plane is gone")
        await playing
    finally:
        for task in (playing, gone):
            task.cancel()
        await asyncio.gather(playing, gone, return_exceptions=True)


def recipes(rollouts: int, seed: int, pace_s: float) -> list[Recipe]:
    infer = tuple(range(SHARED))
    half = SHARED // 2
    return [
        Recipe("P1", "A", tasks.REVERSE, infer[:half], infer, 72, pace_s, rollouts, seed),
        Recipe("P2", "B", tasks.COMPLEMENT, infer[half:], infer, 40, pace_s, rollouts, seed),
    ]


class _Show:
    def __init__(
        self,
        scheduler: RemoteScheduler,
        training: FillingTraining,
        processes: DemoProcesses,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._scheduler, self._training, self._processes = scheduler, training, processes
        self._folder, self._say = folder, say
        self._account = Account()
        self._occupancy = Occupancy(GPUS, time.monotonic)
        self._pipelines: list[DemoPipeline] = []
        self._out: dict[str, str] = {}  # pipelines that did not finish, and why
        self._begin = self._end = time.monotonic()
        self._still_leased: list[int] = []
        self.anything_left = False

    async def play(self, recipes: Sequence[Recipe]) -> None:
        await self._training.submit()
        for recipe in recipes:
            folder = self._folder / recipe.name
            made = DemoPipeline(recipe, self._scheduler, self._processes, folder, self._occupancy, self._say)
            self._pipelines.append(made)
            self._introduce(made)
        await self._training.has_all()
        self._say(f"{filling.NAME} trains on all {GPUS} GPUs; the pipelines begin")
        self._begin = time.monotonic()
        for made in self._pipelines:
            await made.register()
        await self._all_to_their_ends()
        self._still_leased = sorted((await self._scheduler.snapshot()).leases)
        await self._training.come_back()
        self._end = time.monotonic()
        await self._training.finish()
        self._account = self._training.account()
        self._occupancy.enter(self._training.spells())

    async def _all_to_their_ends(self) -> None:
        lives = [asyncio.create_task(self._live(pipeline)) for pipeline in self._pipelines]
        try:
            await asyncio.gather(*lives)
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)

    async def _live(self, pipeline: DemoPipeline) -> None:
        """Run a pipeline; if it fails, take it out so that the others can go on."""
        try:
            await _while_all_live(pipeline)
        except MusterError as error:
            if self._processes.lost:
                raise WorkerDied("the process that forks the workers is gone") from error
            await self._take_out(pipeline, error)
        else:
            self._say(f"{pipeline.recipe.name} is done")

    async def _take_out(self, pipeline: DemoPipeline, error: MusterError) -> None:
        """It cannot vouch for its GPUs any more. They are free when its processes are gone for certain."""
        name = pipeline.recipe.name
        self._say(f"{name} failed: {error}")
        await pipeline.generation.give_up(error)
        with contextlib.suppress(MusterError, TimeoutError):  # its hooks fail, and the scheduler draws the conclusion
            async with asyncio.timeout(_LEAVE_S):
                await self._scheduler.await_release_gpus(name, INFER)
        if name not in (await self._scheduler.snapshot()).quarantined:  # it held nothing that a hook had to free
            await self._scheduler.quarantine_pipeline(name, str(error))
        self._out[name] = f"quarantined: {(await self._scheduler.snapshot()).quarantined[name]}"
        self._say(f"{name} is {self._out[name]}")
        self._processes.end(pipeline.ranks)
        for letter in (pipeline.recipe.letter, pipeline.recipe.letter.lower()):
            self._occupancy.give(self._occupancy.held_by(letter), letter)
        await self._scheduler.unregister_pipeline(name)
        self._say(f"{name}: all its processes are ended, so its GPUs are free for the others")

    def _introduce(self, pipeline: DemoPipeline) -> None:
        recipe = pipeline.recipe
        self._say(
            f"{recipe.name} learns to '{recipe.task.name}': {recipe.prompts} prompts x {ANSWERS} answers a rollout, "
            f"an artificial {recipe.pace_s * 1000:.0f} ms a digit in place of a GPU's decoding, "
            f"and {recipe.judging_s:.1f} s in place of a judge that needs no GPU"
        )
        for kind, ranks, gpus in (
            ("train", pipeline.trainers, recipe.train_gpus),
            ("infer", pipeline.generators, recipe.infer_gpus),
        ):
            pids = " ".join(str(rank.pid) for rank in ranks)
            self._say(f"{recipe.name} {kind} on GPUs {' '.join(map(str, gpus))}: processes {pids}")

    # The end -------------------------------------------------------------------------------------

    def report(self, out: TextIO) -> int:
        """Print what happened; the exit code."""
        lines = [*self._picture(), "", *(self._summary(pipeline) for pipeline in self._pipelines)]
        resizes = sum(pipeline.generation.resizes for pipeline in self._pipelines)
        again = sum(pipeline.generation.queued_again for pipeline in self._pipelines)
        lines.append(self._told_of_training())
        lines.append(f"{resizes} resizes; {again} turns in flight were queued again")
        problems = self._problems()
        print(*lines, *problems, sep="\n", file=out, flush=True)
        return ERROR if problems else OK

    def _picture(self) -> list[str]:
        took, busy = self._end - self._begin, self._occupancy.busy_share(self._begin, self._end)
        fills = self._occupancy.busy_share(self._begin, self._end, filling.LETTER) / busy if busy else 0.0
        legend = [
            f"{pipeline.recipe.letter} = {pipeline.recipe.name} trains, {pipeline.recipe.letter.lower()} = generates"
            for pipeline in self._pipelines
        ]
        return [
            "",
            f"{took:.1f} s from left to right, {took / _COLUMNS:.2f} s a column",
            f"GPUs held {busy:.0%} of the time, {fills:.0%} of that by the training",
            f"{'; '.join(legend)}; {filling.LETTER} = {filling.NAME} fills; {IDLE} = idle",
            *self._occupancy.draw(self._begin, self._end, _COLUMNS),
        ]

    def _told_of_training(self) -> str:
        told, (lent, back) = self._account, self._occupancy.handed_over(filling.LETTER)
        if not told.losses:
            return f"{filling.NAME}: it did not train"
        return (
            f"{filling.NAME}: lent a GPU {lent} times and got one back {back} times; {told.steps} steps, "
            f"{told.lost} committed steps lost; loss {told.first_loss:.3f} -> {told.last_loss:.3f}"
        )

    def _summary(self, pipeline: DemoPipeline) -> str:
        name, rewards = pipeline.recipe.name, pipeline.rewards
        if name in self._out:
            return f"{name}: {self._out[name]}"
        return f"{name}: mean reward {rewards[0]:.3f} -> {rewards[-1]:.3f} over {len(rewards)} rollouts"

    def _problems(self) -> list[str]:
        found = [f"{name} did not finish" for name in self._out]
        for pipeline in self._pipelines:
            if pipeline.recipe.name not in self._out and pipeline.rewards[-1] <= pipeline.rewards[0]:
                found.append(f"{pipeline.recipe.name}'s reward did not rise")
        found += self._problems_of_training()
        if self._still_leased:
            found.append(f"GPUs {self._still_leased} are still leased")
        if self.anything_left:
            found.append("processes are still running")
        return [f"problem: {problem}" for problem in (*found, *self._occupancy.clashes)]

    def _problems_of_training(self) -> list[str]:
        told, found = self._account, []
        if self._training.problem:
            found.append(f"{filling.NAME} did not finish: {self._training.problem}")
        if told.lost:
            found.append(f"{filling.NAME} lost {told.lost} committed steps")
        if told.losses and told.last_loss >= told.first_loss:
            found.append(f"{filling.NAME}'s loss did not fall")
        return found


async def _while_all_live(pipeline: DemoPipeline) -> None:
    """The pipeline's loop, given up as soon as one of its processes is gone."""
    loop = asyncio.create_task(pipeline.run())
    deaths = {asyncio.create_task(rank.gone.wait()): rank for rank in pipeline.ranks}
    try:
        await asyncio.wait([loop, *deaths], return_when=asyncio.FIRST_COMPLETED)
        gone = [rank for death, rank in deaths.items() if death.done()]
        if gone and not loop.done():
            raise gone[0].death()
        await loop
    finally:
        for task in (loop, *deaths):
            task.cancel()
        await asyncio.gather(loop, *deaths, return_exceptions=True)
