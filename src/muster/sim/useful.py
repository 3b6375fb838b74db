"""How much of the GPUs' time does useful work, and how much could?

By slots, a GPU that serves one trajectory in one of its eight slots does an eighth of what it could; work that was
aborted and is done again is none. By GPUs, one that serves anything, trains or fills is at work. What a change of hands
takes, and what lies idle, is not useful in either sense.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from muster.sim.policies import Policy, SimulationResult, simulate
from muster.sim.recording import Use
from muster.sim.scenarios import Scenario, Steps
from muster.sim.trainings import TrainingLoad

HALVINGS = 60


@dataclass(frozen=True)
class Filled:
    """What a training that fills is worth beside the pipelines of a scenario: means over the seeds."""

    scenario: str
    seeds: int
    useful: float  # by slots
    useful_without: float
    at_most: float  # if every pipeline had just the GPUs that its trajectories need
    at_work: float  # by GPUs
    makespan_ratio: float  # of the pipelines, beside it ÷ without it
    resizes: float  # of the training

    def as_data(self) -> dict[str, object]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}

    def row(self) -> tuple[str, ...]:
        shares = (self.useful, self.useful_without, self.at_most, self.at_work)
        return (
            self.scenario,
            *(f"{share:.1%}" for share in shares),
            f"{self.makespan_ratio:.3f}",
            f"{self.resizes:.1f}",
        )


TITLES = ("SCENARIO", "USEFUL", "WITHOUT", "AT MOST", "GPUS AT WORK", "MAKESPAN ÷ WITHOUT", "RESIZES")


def filled(scenario: Scenario, seeds: Sequence[int], load: TrainingLoad | None = None) -> Filled:
    pairs = [
        (simulate(scenario, Policy.MUSTER, seed), simulate(scenario, Policy.MUSTER, seed, load or TrainingLoad()))
        for seed in seeds
    ]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(pairs)

    return Filled(
        scenario.name,
        len(pairs),
        mean([by_slots(scenario, beside) for _, beside in pairs]),
        mean([by_slots(scenario, alone) for alone, _ in pairs]),
        mean([if_all_ran_at_once(scenario, beside) for _, beside in pairs]),
        mean([by_gpus(scenario, beside) for _, beside in pairs]),
        mean([beside.makespan for _, beside in pairs]) / mean([alone.makespan for alone, _ in pairs]),
        mean([float(beside.training_resizes) for _, beside in pairs]),
    )


def by_slots(scenario: Scenario, outcome: SimulationResult) -> float:
    recording = outcome.recording
    served = (recording.busy_slot_s - recording.lost_slot_s) / scenario.slots
    return (served + _trained_s(scenario, outcome)) / (scenario.gpus * outcome.makespan)


def by_gpus(scenario: Scenario, outcome: SimulationResult) -> float:
    worked = outcome.recording.serving_gpu_s + _trained_s(scenario, outcome)
    return worked / (scenario.gpus * outcome.makespan)


def _trained_s(scenario: Scenario, outcome: SimulationResult) -> float:
    """Stages of pipelines and steps of the training beside them, on the scenario's GPUs and until the pipelines end."""
    return sum(
        min(span.end, outcome.makespan) - span.start
        for span in outcome.recording.spans
        if span.use in (Use.TRAIN, Use.FILL) and span.gpu < scenario.gpus and span.start < outcome.makespan
    )


# What could be -----------------------------------------------------------------------------------


def if_all_ran_at_once(scenario: Scenario, outcome: SimulationResult) -> float:
    """By slots, if every pipeline ran all its unfinished trajectories and had just the GPUs that these need: k of them
    in eight slots each fill k ÷ 8 of ceil(k ÷ 8) GPUs. Everything else is put to use at no cost."""
    wasted = sum(
        _step(step, len(step), scenario.slots)[1] for steps in _durations(scenario, outcome.seed) for step in steps
    )
    return 1 - wasted / (scenario.gpus * outcome.makespan)


def with_hindsight(scenario: Scenario, outcome: SimulationResult) -> float:
    """By slots, if whoever plans knew how long everything takes, chose how many GPUs each step has so that the least
    is wasted and no pipeline is later than it was, and nobody was in anybody's way. A change of hands costs nothing."""
    fixed_s = scenario.log_probs_s + scenario.training_s
    wasted = 0.0
    for steps in _durations(scenario, outcome.seed):
        options = [_sizes(step, scenario.slots) for step in steps]
        wasted += _least_waste(options, outcome.makespan - fixed_s * len(steps))
    return 1 - wasted / (scenario.gpus * outcome.makespan)


_Size = tuple[float, float]  # how long a step takes, and what it wastes in GPU-seconds


def _durations(scenario: Scenario, seed: int) -> list[list[list[float]]]:
    drawn: Sequence[Steps] = scenario.draw(seed)
    return [[[one.duration_s for one in step] for step in steps] for steps in drawn]


def _sizes(step: Sequence[float], slots: int) -> list[_Size]:
    return [_step(step, slots * gpus, slots) for gpus in range(1, math.ceil(len(step) / slots) + 1)]


def _step(step: Sequence[float], room: int, slots: int) -> _Size:
    """With so many slots: whichever is free first takes the next trajectory."""
    free = [0.0] * room
    ends = []
    for duration in step:
        end = heapq.heappop(free) + duration
        ends.append(end)
        heapq.heappush(free, end)
    wasted, left = 0.0, len(step)
    for begin, end in itertools.pairwise([0.0, *sorted(ends)]):
        running = min(left, room)
        wasted += (end - begin) * (math.ceil(running / slots) - running / slots)
        left -= 1
    return max(ends), wasted


def _least_waste(options: Sequence[Sequence[_Size]], limit_s: float) -> float:
    """One size for each step, all together within the limit: by a price on time, just as high as needed."""
    low, high = 0.0, 1e3
    for _ in range(HALVINGS):
        price = (low + high) / 2
        chosen = [min(sizes, key=lambda size: size[1] + price * size[0]) for sizes in options]
        if sum(took_s for took_s, _ in chosen) > limit_s:
            low = price
        else:
            high = price
    return sum(min(sizes, key=lambda size: size[1] + high * size[0])[1] for sizes in options)
