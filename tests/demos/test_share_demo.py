"""The demo's pipelines and its training learn for real, GPUs change hands for real, and nothing stays behind."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.demos import filling_training, show, step_log, tasks
from muster.demos import policy as policies
from muster.demos.generation import GenerationStage
from muster.demos.occupancy import Occupancy, Spell
from muster.demos.orders import INFER, TRAIN, Generate, Group, Load, Memory, Unload, Weigh
from muster.demos.pipeline import Recipe
from muster.demos.policy import DigitPolicy, Part
from muster.demos.processes import DemoProcesses, RankProcess, WorkerDied, WorkerFailed, start_fork_server
from muster.demos.step_log import STEPS, Line, StepLog
from muster.demos.tasks import DIGITS, LENGTH, Digits, Task
from muster.demos.training import TrainingStage
from muster.sharing import ClusterSpec
from tests.fleet import eventually

pytestmark = pytest.mark.xdist_group("torch")

BOUND_S = 150.0
END_S = 10.0
TASKS = (tasks.REVERSE, tasks.COMPLEMENT)

digits = st.tuples(*[st.integers(0, DIGITS - 1)] * LENGTH)


# Tasks -------------------------------------------------------------------------------------------


@given(st.sampled_from(TASKS), digits, digits)
def test_a_reward_is_one_for_the_right_answer_only(task: Task, prompt: tuple[int, ...], said: tuple[int, ...]) -> None:
    reward = task.reward(prompt, said)
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == (said == task.solve(prompt))


@given(st.sampled_from(TASKS), digits, st.integers(0, LENGTH - 1), st.integers(1, DIGITS - 1))
def test_each_wrong_digit_costs_its_share(task: Task, prompt: tuple[int, ...], place: int, off: int) -> None:
    said = list(task.solve(prompt))
    said[place] = (said[place] + off) % DIGITS
    assert task.reward(prompt, said) == pytest.approx(1 - 1 / LENGTH)


@given(st.sampled_from(TASKS), digits)
def test_both_tasks_undo_themselves(task: Task, prompt: tuple[int, ...]) -> None:
    assert task.solve(task.solve(prompt)) == prompt


def test_an_answer_of_another_length_earns_nothing() -> None:
    assert tasks.REVERSE.reward((1, 2, 3, 4), (4, 3, 2)) == 0.0


# The policy --------------------------------------------------------------------------------------


def rolled_out(policy: DigitPolicy, recipe: Recipe, rollout: int) -> tuple[Group, ...]:
    orders = recipe.orders(rollout)
    return recipe.groups(orders, [list(spoken(policy, order))[-1] for order in orders])


def spoken(policy: DigitPolicy, order: Generate) -> Iterator[tuple[tuple[int, ...], ...]]:
    return policies.speak(policy, order.prompt, order.count, order.seed)


def mean_reward(groups: Sequence[Group]) -> float:
    return fmean(reward for group in groups for reward in group.rewards)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
@pytest.mark.parametrize("which", [0, 1])
def test_rewards_at_least_double_within_five_rollouts(which: int, seed: int) -> None:
    """The same rollouts as in the demo, for what is sampled depends on the seed and the weights alone."""
    torch.set_num_threads(1)
    recipe = show.recipes(rollouts=5, seed=seed, pace_s=0.0)[which]
    torch.manual_seed(seed)
    policy = DigitPolicy()
    optimiser = policies.Adam(policy)
    rewards = []
    for rollout in range(5):
        groups = rolled_out(policy, recipe, rollout)
        rewards.append(mean_reward(groups))
        old = policies.log_probs(policy, groups, Part())
        policies.learn(policy, optimiser, groups, old, seed=rollout)
    assert rewards[-1] > 2 * rewards[0], rewards


def test_the_parts_of_two_ranks_make_up_the_whole() -> None:
    recipe = show.recipes(rollouts=2, seed=3, pace_s=0.0)[0]
    policy = DigitPolicy()
    groups = rolled_out(policy, recipe, 0)[:4]
    whole = policies.log_probs(policy, groups, Part())
    assert len(whole) == sum(len(group.answers) for group in groups)
    for rank in (0, 1):
        part = torch.tensor(policies.log_probs(policy, groups, Part(rank, 2)))
        torch.testing.assert_close(part, torch.tensor(whole[rank::2]))


def test_the_optimiser_takes_the_steps_of_the_one_in_torch(tmp_path: Path) -> None:
    ours, theirs = DigitPolicy(8), DigitPolicy(8)
    theirs.load_state_dict(ours.state_dict())
    adam, reference = policies.Adam(ours), torch.optim.Adam(theirs.parameters(), lr=1e-2)
    for _ in range(3):
        gradients = [torch.randn_like(one) for one in ours.parameters()]
        adam.step(gradients)
        policies.save_optimiser(adam, tmp_path / "adam.pt")
        adam = policies.load_optimiser(ours, tmp_path / "adam.pt")
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_published_weights_are_read_back_as_they_were(tmp_path: Path) -> None:
    policy = DigitPolicy(8)
    policies.save(policy, tmp_path / "weights.pt")
    again = policies.load(tmp_path / "weights.pt").state_dict()
    for name, tensor in policy.state_dict().items():
        torch.testing.assert_close(again[name], tensor)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


# The processes -----------------------------------------------------------------------------------


@asynccontextmanager
async def ranks_of(*clusters: str) -> AsyncIterator[list[RankProcess]]:
    start_fork_server()
    with closing(DemoProcesses()) as processes:
        async with asyncio.timeout(BOUND_S):
            yield [processes.start(f"rank {at}", cluster) for at, cluster in enumerate(clusters)]
    assert not processes.anything_left


def weights_at(path: Path, width: int, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    policies.save(DigitPolicy(width), path)
    return path


def an_order(seed: int = 7, pace_s: float = 0.0) -> Generate:
    return Generate(prompt=(1, 2, 3, 4), count=4, seed=seed, pace_s=pace_s)


def test_a_worker_takes_weights_into_memory_and_really_frees_them(tmp_path: Path) -> None:
    width = 2048
    size = 4 * width * width

    async def scenario() -> tuple[Memory, Memory, Memory]:
        async with ranks_of(INFER) as [rank]:
            small = weights_at(tmp_path / "small.pt", 8)
            await rank.ask(Load(small))  # what the first load of any weights sets up stays
            before = await rank.ask(Unload())
            loaded = await rank.ask(Load(weights_at(tmp_path / "large.pt", width)))
            return before, loaded, await rank.ask(Unload())

    before, loaded, dropped = asyncio.run(scenario())
    assert before.tensors == 0
    assert loaded.tensors > size
    assert loaded.resident - before.resident > 0.9 * size
    assert dropped.tensors == 0
    assert loaded.resident - dropped.resident > 0.9 * size


def test_a_turn_in_flight_ends_when_the_weights_are_taken_away(tmp_path: Path) -> None:
    async def scenario() -> tuple[tuple[Digits, ...] | None, Memory]:
        async with ranks_of(INFER) as [rank]:
            await rank.ask(Load(weights_at(tmp_path / "weights.pt", 8)))
            turn = asyncio.create_task(rank.ask(an_order(pace_s=BOUND_S)))
            dropped = await rank.ask(Unload())
            return await turn, dropped

    turn, dropped = asyncio.run(scenario())
    assert turn is None
    assert dropped.tensors == 0


def test_an_order_that_cannot_be_followed_is_answered_and_the_worker_goes_on(tmp_path: Path) -> None:
    async def scenario() -> Memory:
        async with ranks_of(INFER) as [rank]:
            with pytest.raises(WorkerFailed, match="FileNotFoundError"):
                await rank.ask(Load(tmp_path / "missing.pt"))
            return await rank.ask(Weigh())

    assert asyncio.run(scenario()).tensors == 0


def test_who_waits_for_a_killed_worker_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ranks_of(INFER) as [rank]:
            await rank.ask(Load(weights_at(tmp_path / "weights.pt", 8)))
            turn = asyncio.create_task(rank.ask(an_order(pace_s=BOUND_S)))
            os.kill(rank.pid, signal.SIGKILL)
            with pytest.raises(WorkerDied):
                await turn
            with pytest.raises(WorkerDied):
                await rank.ask(Weigh())

    asyncio.run(scenario())


def distance(one: DigitPolicy, other: DigitPolicy) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return math.sqrt(sum(float((mine - theirs).detach().square().sum()) for mine, theirs in pairs))


def test_giving_up_at_the_moment_of_the_answer_is_giving_up() -> None:
    """A rank that is put to sleep just as its turn ends must stop; it would go on with the next turn otherwise."""

    async def scenario() -> None:
        ours, theirs = multiprocessing.Pipe()
        rank = RankProcess(multiprocessing.current_process(), ours)
        asking = asyncio.create_task(rank.ask(Weigh()))
        await asyncio.sleep(0)  # it asks
        theirs.send(Memory(0, 0))
        await asyncio.sleep(0)  # the answer is there
        await asyncio.sleep(0)  # it is heard, and whoever asked has not run yet
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        theirs.close()
        await rank.gone.wait()
        rank.hang_up()

    asyncio.run(scenario())


def test_two_trainers_learn_what_one_would_have(tmp_path: Path) -> None:
    recipe = show.recipes(rollouts=2, seed=0, pace_s=0.0)[0]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    alone = DigitPolicy()
    groups = rolled_out(alone, recipe, 0)[:8]
    old = policies.log_probs(alone, groups, Part())
    policies.learn(alone, policies.Adam(alone), groups, old, seed=0)

    async def scenario() -> Path:
        async with ranks_of(TRAIN, TRAIN) as trainers:
            training = TrainingStage(trainers, tmp_path)
            await training.join()
            await training.begin(seed=0)
            first = training.newest
            rows = await training.log_probs(groups)
            await training.unload()
            await training.load()
            await training.learn(groups, rows, seed=0)
            await training.publish()
            await training.unload()
            assert training.newest != first
            return training.newest

    together = policies.load(asyncio.run(scenario()))
    moved, apart = distance(alone, policies.load(tmp_path / "weights-00001.pt")), distance(alone, together)
    assert apart < 0.05 * moved  # the order in which floats are added differs, and Adam magnifies it


# Generation --------------------------------------------------------------------------------------


async def nothing(_: int) -> None:
    """Nobody counts."""


def test_a_turn_on_a_rank_that_is_put_to_sleep_is_queued_again_and_answered_the_same(tmp_path: Path) -> None:
    orders = [an_order(seed) for seed in range(6)]
    weights = weights_at(tmp_path / "weights.pt", 8)
    expected = [list(spoken(policies.load(weights), order))[-1] for order in orders]

    async def scenario() -> tuple[list[tuple[tuple[int, ...], ...]], GenerationStage, bool]:
        async with ranks_of(INFER, INFER) as ranks:
            occupancy = Occupancy(2, asyncio.get_running_loop().time)
            generation = GenerationStage(ranks, ClusterSpec(gpus=[0, 1]), lambda: weights, occupancy, "a")
            await generation.expand({0: [0]})
            slow = [Generate(order.prompt, order.count, order.seed, pace_s=0.02) for order in orders]
            rollout = asyncio.create_task(generation.answer(slow, nothing))
            await asyncio.sleep(0)  # the rollout queues its turns
            await asyncio.sleep(0)  # the rank takes the first
            await generation.shrink([0])
            empty = await generation.vacated([0])
            assert occupancy.held_by("a") == []
            await generation.expand({0: [0], 1: [1]})
            return await rollout, generation, empty

    answers, generation, empty = asyncio.run(scenario())
    assert empty
    assert answers == expected
    assert generation.queued_again == 1
    assert generation.resizes == 4


def test_a_rank_that_wakes_has_the_newest_weights(tmp_path: Path) -> None:
    published = [weights_at(tmp_path / f"{seed}.pt", 32, seed) for seed in (1, 2)]
    newest = [published[0]]
    order = an_order()

    async def scenario() -> list[tuple[tuple[int, ...], ...]]:
        async with ranks_of(INFER) as ranks:
            occupancy = Occupancy(1, asyncio.get_running_loop().time)
            generation = GenerationStage(ranks, ClusterSpec(gpus=[0]), lambda: newest[0], occupancy, "a")
            said = []
            for newest[0] in published:
                await generation.expand({0: [0]})
                await generation.expand({0: [0]})  # idempotent
                said += await generation.answer([order], nothing)
                await generation.shrink([0])
                await generation.shrink([0])
            assert generation.resizes == 4
            return said

    expected = [list(spoken(policies.load(path), order))[-1] for path in published]
    assert expected[0] != expected[1]
    assert asyncio.run(scenario()) == expected


def test_a_pipeline_that_gave_up_vouches_for_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ranks_of(INFER) as ranks:
            occupancy = Occupancy(1, asyncio.get_running_loop().time)
            weights = weights_at(tmp_path / "weights.pt", 8)
            generation = GenerationStage(ranks, ClusterSpec(gpus=[0]), lambda: weights, occupancy, "a")
            await generation.expand({0: [0]})
            await generation.give_up(WorkerDied("a trainer is gone"))
            with pytest.raises(WorkerFailed, match="a trainer is gone"):
                await generation.shrink([0])

    asyncio.run(scenario())


# The occupancy ------------------------------------------------------------------------------------


@dataclass
class SetClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_row_shows_who_held_the_gpu_and_when() -> None:
    clock = SetClock()
    occupancy = Occupancy(2, clock)
    occupancy.take([0], "a")
    clock.now = 2.0
    occupancy.give([0], "a")
    clock.now = 3.0
    occupancy.take([0, 1], "B")
    clock.now = 5.0
    occupancy.give([1], "B")
    assert occupancy.draw(0.0, 5.0, columns=5) == ["GPU 0 aa.BB", "GPU 1 ...BB"]
    assert occupancy.busy_share(0.0, 5.0) == pytest.approx(0.6)
    assert occupancy.clashes == []


def test_a_short_training_stage_is_shown() -> None:
    clock = SetClock()
    occupancy = Occupancy(1, clock)
    for letter, until in (("a", 0.8), ("A", 0.9), ("b", 2.0)):
        occupancy.take([0], letter)
        clock.now = until
        occupancy.give([0], letter)
    assert occupancy.draw(0.0, 2.0, columns=2) == ["GPU 0 Ab"]


def test_two_holders_of_one_gpu_are_noticed() -> None:
    occupancy = Occupancy(1, SetClock())
    occupancy.take([0], "a")
    occupancy.take([0], "b")
    assert occupancy.clashes == ["GPU 0 was taken by b while a had it"]


def test_books_of_others_are_compared() -> None:
    clock = SetClock()
    occupancy = Occupancy(2, clock)
    for begin, letter, end in ((1.0, "A", 2.0), (4.0, "b", 5.0)):
        clock.now = begin
        occupancy.take([0], letter)
        clock.now = end
        occupancy.give([0], letter)
    apart = [Spell(0, "t", 0.0, 1.0), Spell(0, "t", 2.0, 4.0), Spell(0, "t", 5.0, 6.0), Spell(1, "t", 0.0, 6.0)]
    occupancy.enter(apart)
    assert occupancy.clashes == []
    assert occupancy.draw(0.0, 6.0, columns=6) == ["GPU 0 tAttbt", "GPU 1 tttttt"]
    assert occupancy.handed_over("t") == (2, 2)
    assert occupancy.busy_share(0.0, 6.0) == 1.0
    assert occupancy.busy_share(0.0, 6.0, "t") == pytest.approx(10 / 12)


@pytest.mark.parametrize(("begin", "end"), [(0.0, 1.1), (1.9, 3.0), (1.2, 1.4), (0.0, 9.0), (1.5, 1.5)])
def test_a_gpu_in_two_books_at_once_is_noticed(begin: float, end: float) -> None:
    occupancy = Occupancy(1, SetClock(9.0), spells=[Spell(0, "a", 1.0, 2.0)])
    occupancy.enter([Spell(0, "t", begin, end)])
    assert occupancy.clashes == ["GPU 0 was used by t while a had it"]


def test_a_gpu_that_is_still_held_is_noticed_too() -> None:
    clock = SetClock()
    occupancy = Occupancy(1, clock)
    occupancy.take([0], "b")
    clock.now = 5.0
    occupancy.enter([Spell(0, "t", 3.0, 4.0)])
    assert occupancy.clashes == ["GPU 0 was used by t while b had it"]


# The filling training ------------------------------------------------------------------------------


def test_its_loss_falls() -> None:
    torch.set_num_threads(1)
    model = filling_training.network()
    momentum = [torch.zeros_like(one) for one in model.parameters()]
    losses = []
    for step in range(250):
        found, loss = filling_training.gradients(model, step, rank=0)
        filling_training.improve(model, momentum, found)
        losses.append(loss.item())
    assert fmean(losses[-5:]) < 0.2 * fmean(losses[:5])


def test_each_rank_has_its_own_part_of_the_data() -> None:
    one, other = (filling_training.points(step=3, rank=rank)[0] for rank in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(one, filling_training.points(step=3, rank=0)[0])


def test_a_rank_says_what_it_does_with_its_gpu(tmp_path: Path) -> None:
    with StepLog(tmp_path, {"CUDA_VISIBLE_DEVICES": "3", "MUSTER_ROUND": "7"}) as log:
        log.restored(step=4, ranks=2)
        log.begins(5)
        log.ends(5, loss=0.25)
    with open(tmp_path / STEPS, "a") as file:
        file.write("ends 3 7 half a li")  # of a rank that writes just now
    told = step_log.read(tmp_path)
    assert [line.what for line in told] == ["starts", "restored", "begins", "ends"]
    assert {(line.gpu, line.round) for line in told} == {(3, 7)}
    assert (told[-1].step, told[-1].ranks, told[-1].loss) == (5, 2, 0.25)
    assert [line.at for line in told] == sorted(line.at for line in told)


def test_nothing_is_told_before_it_begins(tmp_path: Path) -> None:
    assert step_log.read(tmp_path) == []


def steps_of(round: int, gpus: Sequence[int], begin: float, restored: int, until: int) -> list[Line]:
    """A round that does a step a second on these GPUs, and is called back in the middle of the next."""
    ranks = len(gpus)
    found = [Line("starts", gpu, round, begin) for gpu in gpus]
    found += [Line("restored", gpu, round, begin, restored, ranks) for gpu in gpus]
    for at, step in enumerate(range(restored + 1, until + 1)):
        found += [Line("begins", gpu, round, begin + at, step, ranks) for gpu in gpus]
        found += [Line("ends", gpu, round, begin + at + 1, step, ranks, 1 / step) for gpu in gpus]
    return found + [Line("begins", gpu, round, begin + until - restored, until + 1, ranks) for gpu in gpus]


def test_a_rank_uses_its_gpu_from_its_begin_to_the_end_of_its_last_step() -> None:
    told = steps_of(0, (0, 1), 10.0, 0, 3) + steps_of(1, (1,), 14.0, 3, 5)
    assert step_log.spells(told, "t") == [
        Spell(0, "t", 10.0, 13.0),
        Spell(1, "t", 10.0, 13.0),
        Spell(1, "t", 14.0, 16.0),
    ]


def test_a_round_that_goes_on_where_the_one_before_ended_loses_nothing() -> None:
    told = step_log.account(steps_of(0, (0, 1), 10.0, 0, 3) + steps_of(1, (1,), 14.0, 3, 5))
    assert (told.steps, told.lost, told.rounds, told.largest) == (5, 0, 2, 2)
    assert told.losses == [1 / step for step in range(1, 6)]


def test_steps_that_are_done_twice_were_lost() -> None:
    told = step_log.account(steps_of(0, (0, 1), 10.0, 0, 5) + steps_of(1, (0, 1), 20.0, 2, 4))
    assert (told.steps, told.lost, len(told.losses)) == (5, 3, 5)


# The whole ---------------------------------------------------------------------------------------


@dataclass
class Demo:
    """The demo as a process, read line by line and bounded in time."""

    rollouts: int
    pace_s: float
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        code = f"import sys; from muster import demos; sys.exit(demos.run({self.rollouts}, pace_s={self.pace_s}))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._watchdog = threading.Timer(BOUND_S, self.process.kill)
        self._watchdog.start()

    def read_until(self, wanted: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if wanted in line:
                return
        raise AssertionError(f"ended without {wanted!r}:\n{self.text}")

    def finish(self) -> int:
        assert self.process.stdout is not None
        self.lines += [line.rstrip("\n") for line in self.process.stdout]
        code = self.process.wait()
        self._watchdog.cancel()
        return code

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def pids(self, who: str = "") -> list[int]:
        rows = re.findall(rf"{who}.* on GPUs .*: processes ([\d ]+)$", self.text, re.MULTILINE)
        return [int(pid) for row in rows for pid in row.split()]

    @property
    def parent(self) -> int:
        return int(Path(f"/proc/{self.pids()[0]}/stat").read_text().rpartition(")")[2].split()[1])

    @property
    def keeper(self) -> int:
        [pid] = re.findall(r"all its processes are below (\d+)$", self.text, re.MULTILINE)
        return int(pid)

    def below_keeper(self) -> list[int]:
        """The control plane, its workers and their ranks, as they are now."""
        found, parents = {self.keeper}, parents_of_all()
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return sorted(found)

    def ranks_of_training(self) -> list[int]:
        """Those that write down their steps."""
        return [pid for pid in self.below_keeper() if any(name.endswith(STEPS) for name in open_files(pid))]

    def signal_a_rank(self, number: signal.Signals) -> None:
        """Of the training. Between two rounds there is none."""
        done: list[int] = []

        def try_it() -> bool:
            for pid in self.ranks_of_training()[:1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                    done.append(pid)
            return bool(done)

        eventually(try_it, "a rank of the training", BOUND_S)

    def everything(self) -> list[int]:
        return [self.parent, *self.pids(), *self.below_keeper()]

    def left(self) -> list[int]:
        return [pid for pid in self.pids() if Path(f"/proc/{pid}").exists()]


def parents_of_all() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def words_of(pid: int) -> list[str]:
    """Its command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def open_files(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(entry))
    return found


def memory_of(pids: Sequence[int]) -> int:
    """What these processes take together: what several share is counted once."""
    found = 0
    for pid in pids:
        with suppress(OSError):  # a rank may go at any moment
            [kilobytes] = re.findall(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            found += 1024 * int(kilobytes)
    return found


def ended(pids: Sequence[int]) -> list[int]:
    """Descriptors that tell of the end of each that is there."""
    found = []
    for pid in pids:
        with suppress(ProcessLookupError):
            found.append(os.pidfd_open(pid))
    return found


def all_end(ends: Sequence[int]) -> bool:
    """The demo itself is gone: what has to be woken first to end has little time."""
    try:
        return all(select.select([end], [], [], END_S)[0] for end in ends)
    finally:
        for end in ends:
            os.close(end)


@pytest.mark.pages
def test_the_demo_plays_to_its_end_and_leaves_nothing() -> None:
    demo = Demo(rollouts=5, pace_s=0.01)
    demo.read_until("P1 rollout 4/5")
    assert len(demo.pids()) == 12
    ends = ended(demo.everything())
    assert memory_of([demo.process.pid, *demo.everything()]) < 3e9
    assert demo.finish() == 0, demo.text
    assert all_end(ends), "something is still running"
    for name in ("P1", "P2"):
        assert len(re.findall(rf"{name} rollout \d/5: mean reward", demo.text)) == 5
        [(first, last)] = re.findall(rf"{name}: mean reward (\S+) -> (\S+) over 5 rollouts", demo.text)
        assert float(last) > 2 * float(first)
    rows = re.findall(r"^GPU (\d) ([AaBbt.]{100})$", demo.text, re.MULTILINE)
    assert [gpu for gpu, _ in rows] == ["0", "1", "2", "3", "4"]
    assert [{"A", "B"} & set(row) for _, row in rows] == [{"A"}, {"A"}, {"B"}, {"B"}, set()]
    assert any({"a", "b"} <= set(row) for _, row in rows), "GPUs move between the pipelines"
    assert all("t" in row for _, row in rows), "the training has every GPU at some time"
    [(lent, back, steps, lost, first, last)] = re.findall(
        r"T: lent a GPU (\d+) times and got one back (\d+) times; (\d+) steps, (\d+) committed steps lost; "
        r"loss (\S+) -> (\S+)",
        demo.text,
    )
    assert int(lent) >= 4
    assert int(back) >= 4
    assert int(steps) > 100
    assert int(lost) == 0
    assert float(last) < 0.2 * float(first)
    assert "problem" not in demo.text


@pytest.mark.pages
def test_a_killed_worker_costs_its_own_pipeline_only() -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("P1 rollout 1/3")
    os.kill(demo.pids("P1 infer")[0], signal.SIGKILL)
    assert demo.finish() == 1, demo.text
    assert re.search(r"P1 is quarantined: .*P1 generator 0", demo.text), demo.text
    assert "P2: mean reward" in demo.text
    assert "P2 rollout 3/3" in demo.text
    assert "problem: P1 did not finish" in demo.text
    assert demo.left() == []


@pytest.mark.soak  # half a minute each
def test_a_killed_rank_of_the_training_heals() -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("P1 rollout 1/3")
    demo.signal_a_rank(signal.SIGKILL)
    assert demo.finish() == 0, demo.text
    assert " 0 committed steps lost" in demo.text
    assert "T is done" in demo.text
    assert "problem" not in demo.text


@pytest.mark.pages
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)]
)
def test_an_interrupted_demo_leaves_nothing(number: signal.Signals, code: int) -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("P1 rollout 1/3")
    ends = ended(demo.everything())
    demo.process.send_signal(number)
    assert demo.finish() == code, demo.text
    assert all_end(ends), "something is still running"


@pytest.mark.soak  # half a minute each
def test_a_demo_that_is_interrupted_while_it_starts_leaves_nothing() -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("T is a training")
    keeper, ends = demo.keeper, ended(demo.below_keeper())
    demo.process.send_signal(signal.SIGINT)
    assert demo.finish() == 130, demo.text
    assert all_end(ends)
    assert not Path(f"/proc/{keeper}").exists()


@pytest.mark.soak  # half a minute each
def test_an_interrupt_at_the_terminal_is_for_the_demo_alone() -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("P1 rollout 1/3")
    ends = ended(demo.everything())
    os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.finish() == 130, demo.text
    assert "interrupted; every process has been ended" in demo.text
    assert "failed" not in demo.text
    assert all_end(ends), "something is still running"


@pytest.mark.pages
def test_a_killed_demo_takes_its_processes_with_it() -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("P1 rollout 1/3")
    ends = ended(demo.everything())
    [home] = {word for pid in demo.below_keeper() for word in words_of(pid) if word.endswith("/home")}
    os.kill(demo.pids()[0], signal.SIGSTOP)  # nor can one stay that hears nothing
    demo.signal_a_rank(signal.SIGSTOP)
    demo.process.kill()
    assert all_end(ends), "something is still running"
    assert demo.finish() == -signal.SIGKILL
    assert not Path(home).parent.exists()


@pytest.mark.pages
def test_the_death_of_the_workers_parent_ends_the_demo() -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("P1 rollout 1/3")
    ends = ended(demo.everything())
    os.kill(demo.parent, signal.SIGKILL)
    assert demo.finish() == 1, demo.text
    assert "the process that forks the workers is gone" in demo.text
    assert all_end(ends), "something is still running"


@pytest.mark.soak  # half a minute each
def test_the_death_of_the_control_plane_ends_the_demo() -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("P1 rollout 1/3")
    ends = ended(demo.everything())
    os.kill(demo.keeper, signal.SIGKILL)  # the one that would end all others
    assert demo.finish() == 1, demo.text
    assert "the control plane is gone" in demo.text
    assert all_end(ends), "something is still running"


def test_one_rollout_is_too_few_to_see_anything_rise(capsys: pytest.CaptureFixture[str]) -> None:
    assert show.run(1, seed=0, pace_s=0.0, out=sys.stdout) == 2
    assert "at least two rollouts" in capsys.readouterr().out
