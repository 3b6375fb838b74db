"""The demo's pipelines learn for real, its processes load and drop for real, and nothing stays behind."""

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
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.demos import policy as policies
from muster.demos import show, tasks
from muster.demos.generation import GenerationStage
from muster.demos.occupancy import Occupancy
from muster.demos.orders import INFER, TRAIN, Generate, Group, Load, Memory, Unload, Weigh
from muster.demos.pipeline import Recipe
from muster.demos.policy import DigitPolicy, Part
from muster.demos.processes import DemoProcesses, RankProcess, WorkerDied, WorkerFailed, start_fork_server
from muster.demos.tasks import DIGITS, LENGTH, Digits, Task
from muster.demos.training import TrainingStage
from muster.sharing import ClusterSpec

pytestmark = pytest.mark.xdist_group("torch")

BOUND_S = 90.0
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


@pytest.mark.parametrize("seed", [0, 1, 2])
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

    def left(self) -> list[int]:
        return [pid for pid in self.pids() if Path(f"/proc/{pid}").exists()]


def resident_bytes(pids: Sequence[int]) -> int:
    pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def test_the_demo_plays_to_its_end_and_leaves_nothing() -> None:
    demo = Demo(rollouts=5, pace_s=0.01)
    demo.read_until("P1 rollout 4/5")
    assert len(demo.pids()) == 12
    assert resident_bytes([demo.process.pid, demo.parent, *demo.pids()]) < 3e9
    assert demo.finish() == 0, demo.text
    assert demo.left() == []
    for name in ("P1", "P2"):
        assert len(re.findall(rf"{name} rollout \d/5: mean reward", demo.text)) == 5
        [(first, last)] = re.findall(rf"{name}: mean reward (\S+) -> (\S+) over 5 rollouts", demo.text)
        assert float(last) > 2 * float(first)
    rows = re.findall(r"^GPU (\d) ([AaBb.]{100})$", demo.text, re.MULTILINE)
    assert [gpu for gpu, _ in rows] == ["0", "1", "2", "3"]
    assert [{"A", "B"} & set(row) for _, row in rows] == [{"A"}, {"A"}, {"B"}, {"B"}]
    assert any({"a", "b"} <= set(row) for _, row in rows), "GPUs move between the pipelines"
    assert "problem" not in demo.text


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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing(number: signal.Signals, code: int) -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("P1 rollout 1/3")
    demo.process.send_signal(number)
    assert demo.finish() == code, demo.text
    assert demo.left() == []


def test_an_interrupt_at_the_terminal_is_for_the_demo_alone() -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("P1 rollout 1/3")
    os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.finish() == 130, demo.text
    assert "interrupted; every process has been ended" in demo.text
    assert "failed" not in demo.text
    assert demo.left() == []


def test_a_killed_demo_takes_its_processes_with_it() -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("P1 rollout 1/3")
    ends = [os.pidfd_open(pid) for pid in (demo.parent, *demo.pids())]
    os.kill(demo.pids()[0], signal.SIGSTOP)  # nor can one stay that hears nothing
    demo.process.kill()
    for end in ends:
        assert select.select([end], [], [], BOUND_S)[0], "it is still running"
        os.close(end)
    assert demo.finish() == -signal.SIGKILL


def test_the_death_of_the_workers_parent_ends_the_demo() -> None:
    demo = Demo(rollouts=3, pace_s=0.02)
    demo.read_until("P1 rollout 1/3")
    os.kill(demo.parent, signal.SIGKILL)
    assert demo.finish() == 1, demo.text
    assert "the process that forks the workers is gone" in demo.text
    assert demo.left() == []


def test_one_rollout_is_too_few_to_see_anything_rise(capsys: pytest.CaptureFixture[str]) -> None:
    assert show.run(1, seed=0, pace_s=0.0, out=sys.stdout) == 2
    assert "at least two rollouts" in capsys.readouterr().out
