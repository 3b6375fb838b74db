"""Which pipelines share which GPUs, how long do their trajectories take, and how fast could it be at best?

A scenario is one of four built in, or a JSON file:

    {"name": "mine", "gpus": 8, "slots": 8,
     "pipelines": [{"batch": 64, "median_s": 40, "sigma": 1.0, "cap_s": 600, "steps": 5, "train": [0, 1]}, …]}

Optional at the top: gpus_per_node (all), shrink_s (2), expand_s (6), turn_s (10), log_probs_s (10), training_s (40).
Optional per pipeline: count (1: that many alike), infer (all GPUs), tp_size (1), weight (1.0), train (the next pair).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.types.codec import Invalid, Problem


@dataclass(frozen=True)
class Trajectory:
    duration_s: float
    turns: int

    @property
    def turn_s(self) -> float:
        return self.duration_s / self.turns


Steps = tuple[tuple[Trajectory, ...], ...]


@dataclass(frozen=True)
class Workload:
    """What one pipeline does: `steps` times a batch of log-normal trajectories, then training."""

    batch: int
    median_s: float
    sigma: float
    cap_s: float
    steps: int
    train: tuple[int, ...]
    infer: tuple[int, ...]
    tp_size: int = 1
    weight: float = 1.0


@dataclass(frozen=True)
class Scenario:
    name: str
    workloads: tuple[Workload, ...]
    gpus: int = 8
    gpus_per_node: int = 8
    slots: int = 8
    shrink_s: float = 2.0
    expand_s: float = 6.0
    turn_s: float = 10.0
    log_probs_s: float = 10.0
    training_s: float = 40.0

    def draw(self, seed: int) -> tuple[Steps, ...]:
        """Every pipeline's trajectories, by step and index: one `gauss` each, so that no policy changes them."""
        return tuple(self._draw(workload, 100 * seed + at) for at, workload in enumerate(self.workloads))

    def _draw(self, workload: Workload, seed: int) -> Steps:
        source = random.Random(seed)
        return tuple(tuple(self._one(workload, source) for _ in range(workload.batch)) for _ in range(workload.steps))

    def _one(self, workload: Workload, source: random.Random) -> Trajectory:
        duration = min(workload.cap_s, workload.median_s * math.exp(source.gauss(0, workload.sigma)))
        return Trajectory(duration, max(1, math.ceil(duration / self.turn_s)))

    def lower_bound(self, seed: int) -> float:
        """No schedule is faster: the GPUs have that much to do, and the longest pipeline that much one by one."""
        fixed = self.log_probs_s + self.training_s
        work, longest = 0.0, 0.0
        for workload, steps in zip(self.workloads, self.draw(seed), strict=True):
            alone = sum(max(one.duration_s for one in step) + fixed for step in steps)
            slot_s = sum(one.duration_s for step in steps for one in step)
            work += slot_s * workload.tp_size / self.slots + len(steps) * fixed * len(workload.train)
            longest = max(longest, alone)
        return max(work / self.gpus, longest)


def _pairs(*kinds: tuple[int, Workload]) -> tuple[Workload, ...]:
    alike = [workload for count, workload in kinds for _ in range(count)]
    return tuple(replace(workload, train=(2 * at, 2 * at + 1)) for at, workload in enumerate(alike))


_ALL = tuple(range(8))
_TAIL = Workload(batch=64, median_s=40, sigma=1.0, cap_s=600, steps=5, train=(), infer=_ALL)
_EVEN = Workload(batch=192, median_s=40, sigma=0.5, cap_s=160, steps=4, train=(), infer=_ALL)

BUILT_IN: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("tail", _pairs((4, _TAIL))),
        Scenario(
            "mixed", _pairs((2, replace(_TAIL, batch=128, median_s=60)), (2, replace(_TAIL, batch=32, median_s=20)))
        ),
        Scenario("even", _pairs((4, _EVEN))),
        Scenario("skewed", _pairs((1, replace(_EVEN, batch=384)), (3, replace(_EVEN, batch=96)))),
    )
}


def find(name: str) -> Scenario:
    """A built-in scenario, or the one that a file describes."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name)
    if not path.is_file():
        raise _wrong("scenario", f"{name!r} is neither one of {', '.join(BUILT_IN)} nor a file")
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise _wrong("scenario", f"{name} is not JSON: {error}") from error
    return parse(data, path.stem)


_NUMBERS = ("shrink_s", "expand_s", "turn_s", "log_probs_s", "training_s")
_OF_PIPELINE = {"batch", "median_s", "sigma", "cap_s", "steps", "train", "infer", "tp_size", "weight", "count"}


def parse(data: object, name: str = "scenario") -> Scenario:
    """A scenario from JSON values. The module's text lists the fields."""
    top = _table(data, "scenario", {"name", "gpus", "gpus_per_node", "slots", "pipelines", *_NUMBERS})
    gpus = _whole(top, "gpus", 8)
    rows = top.get("pipelines")
    if not isinstance(rows, list) or not rows:
        raise _wrong("pipelines", "a list with at least one pipeline is needed")
    workloads: list[Workload] = []
    for at, row in enumerate(rows):
        fields = _table(row, f"pipelines[{at}]", _OF_PIPELINE)
        for _ in range(_whole(fields, "count", 1)):
            workloads.append(_workload(fields, gpus, len(workloads)))
    return Scenario(
        name=str(top.get("name", name)),
        workloads=tuple(workloads),
        gpus=gpus,
        gpus_per_node=_whole(top, "gpus_per_node", gpus),
        slots=_whole(top, "slots", 8),
        **{field: _number(top, field, getattr(Scenario, field)) for field in _NUMBERS if field in top},
    )


def _workload(fields: Mapping[str, object], gpus: int, at: int) -> Workload:
    return Workload(
        batch=_whole(fields, "batch"),
        median_s=_number(fields, "median_s"),
        sigma=_number(fields, "sigma", 0.5, least=0.0),
        cap_s=_number(fields, "cap_s", math.inf),
        steps=_whole(fields, "steps", 1),
        train=_gpus(fields, "train", tuple(sorted({2 * at % gpus, (2 * at + 1) % gpus})), gpus),
        infer=_gpus(fields, "infer", tuple(range(gpus)), gpus),
        tp_size=_whole(fields, "tp_size", 1),
        weight=_number(fields, "weight", 1.0),
    )


def _table(data: object, where: str, known: set[str]) -> Mapping[str, object]:
    if not isinstance(data, dict):
        raise _wrong(where, "must be a table of fields")
    unknown = sorted(set(data) - known)
    if unknown:
        raise _wrong(f"{where}.{unknown[0]}", f"is not known; these are: {', '.join(sorted(known))}")
    return data


def _number(fields: Mapping[str, object], name: str, default: float | None = None, least: float = 1e-9) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise _wrong(name, f"must be a positive number, not {value!r}")
    return float(value)


def _whole(fields: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(name, f"must be a whole number from 1, not {value!r}")
    return value


def _gpus(fields: Mapping[str, object], name: str, default: tuple[int, ...], gpus: int) -> tuple[int, ...]:
    value: object = fields.get(name, default)
    if isinstance(value, Sequence) and value and all(type(one) is int and 0 <= one < gpus for one in value):
        return tuple(sorted(value))
    raise _wrong(name, f"must list GPUs from 0 to {gpus - 1}, not {value!r}")


def _wrong(field: str, message: str) -> Invalid:
    return Invalid([Problem(field, message)])
