"""What happened to every GPU, who waited, and what did it cost?

A recording is written by the simulated pipelines as things happen to them, not by the scheduler: it is what the
scheduler really did. It also checks, GPU by GPU, that nobody is let onto what another one still has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Use(StrEnum):
    """What a GPU is doing for somebody."""

    EXPAND = "expand"
    SERVE = "serve"
    SHRINK = "shrink"
    TRAIN = "train"
    FILL = "fill"  # an elastic training works on it
    RESIZE = "resize"  # an elastic training stands still while its size changes


@dataclass(frozen=True)
class GpuSpan:
    """A GPU in one use, from `start` to `end`."""

    gpu: int
    pipeline: str
    use: Use
    start: float
    end: float


@dataclass(frozen=True)
class QueueWait:
    """A request in the queue."""

    pipeline: str
    cluster: str
    priority: str
    start: float
    end: float


@dataclass(frozen=True)
class PolicyDecision:
    """Something that was decided, with its reason where the scheduler gives one."""

    at: float
    pipeline: str
    what: str
    reason: str = ""


@dataclass(frozen=True)
class Recording:
    gpus: int
    spans: tuple[GpuSpan, ...]
    waits: tuple[QueueWait, ...]
    decisions: tuple[PolicyDecision, ...]
    resizes: int = 0
    vain_shrinks: int = 0
    idle_wanted_gpu_s: float = 0.0
    busy_slot_s: float = 0.0
    lost_slot_s: float = 0.0
    serving_gpu_s: float = 0.0  # of GPUs that served at least one trajectory

    def gpu_seconds(self) -> dict[str, float]:
        """How long GPUs were in each use."""
        total = {use.value: 0.0 for use in Use}
        for span in self.spans:
            total[span.use.value] += span.end - span.start
        return total

    def waited_s(self, cluster: str) -> float:
        return sum(wait.end - wait.start for wait in self.waits if wait.cluster == cluster)


class DoubleBooking(AssertionError):
    """Somebody was let onto a GPU that another one has."""


@dataclass
class _Demand:
    """What a pipeline could use, as far as it has told the scheduler."""

    remaining: int = 0
    slots: int = 1
    reach: Sequence[Sequence[int]] = ()  # the GPUs of each of its bundles
    bundles: int = 0

    @property
    def unmet(self) -> bool:
        return self.bundles < math.ceil(self.remaining / self.slots)


@dataclass(frozen=True)
class _Vacated:
    """A GPU that the scheduler took from a pipeline; `kept` for a training request that waited for it."""

    pipeline: str
    at: float
    kept: bool


@dataclass
class Recorder:
    """Takes notes on virtual time; `finish` gives the recording."""

    gpus: int
    now: Callable[[], float]
    settle_s: float  # so long a GPU may lie idle after a shrink and still count as passed on
    busy_slot_s: float = 0.0
    lost_slot_s: float = 0.0
    serving_gpu_s: float = 0.0
    resizes: int = 0
    _current: dict[int, tuple[str, Use, float]] = field(default_factory=dict)
    _spans: list[GpuSpan] = field(default_factory=list)
    _waits: list[QueueWait] = field(default_factory=list)
    _decisions: list[PolicyDecision] = field(default_factory=list)
    _demands: dict[str, _Demand] = field(default_factory=dict)
    _reserved: Counter[int] = field(default_factory=Counter)
    _vacated: dict[int, _Vacated] = field(default_factory=dict)  # by a shrink that somebody else should use
    _vain: int = 0
    _idle_wanted: float = 0.0
    _seen: float = 0.0

    def use(self, gpus: Iterable[int], pipeline: str, use: Use) -> None:
        """These GPUs go over to that use. Only their holder may change it."""
        self.advance()
        for gpu in gpus:
            before = self._current.get(gpu)
            if before is not None and before[0] != pipeline:
                raise DoubleBooking(f"GPU {gpu} is in {before[1]} for {before[0]} and was given to {pipeline}")
            self._close(gpu)
            self._judge(gpu, pipeline, use)
            self._current[gpu] = (pipeline, use, self.now())

    def free(self, gpus: Iterable[int], *, preempted: bool = False) -> None:
        """These GPUs are vacant; `preempted` when the scheduler wanted it so."""
        self.advance()
        for gpu in gpus:
            pipeline = self._current[gpu][0]
            self._close(gpu)
            if preempted:
                self._vacated[gpu] = _Vacated(pipeline, self.now(), kept=self._reserved[gpu] > 0)

    def demand(self, pipeline: str, remaining: int, slots: int, reach: Sequence[Sequence[int]]) -> None:
        self.advance()
        state = self._demands.setdefault(pipeline, _Demand())
        state.remaining, state.slots, state.reach = remaining, slots, reach

    def bundles(self, pipeline: str, change: int) -> None:
        self.advance()
        self._demands.setdefault(pipeline, _Demand()).bundles += change

    def reserve(self, gpus: Iterable[int]) -> None:
        """A fixed request waits for them: they are kept, not idle."""
        self.advance()
        self._reserved.update(gpus)

    def unreserve(self, gpus: Iterable[int]) -> None:
        self.advance()
        self._reserved.subtract(gpus)

    def waited(self, pipeline: str, cluster: str, priority: str, start: float) -> None:
        self._waits.append(QueueWait(pipeline, cluster, priority, start, self.now()))

    def decided(self, decision: PolicyDecision) -> None:
        self._decisions.append(decision)

    def advance(self) -> None:
        """Count the time since the last change as what it was."""
        now = self.now()
        if now > self._seen:
            self._idle_wanted += len(self._idle_and_wanted()) * (now - self._seen)
            self._seen = now

    def finish(self) -> Recording:
        self.advance()
        for gpu in list(self._current):
            self._close(gpu)
        return Recording(
            gpus=self.gpus,
            spans=tuple(sorted(self._spans, key=lambda span: (span.start, span.gpu))),
            waits=tuple(self._waits),
            decisions=tuple(self._decisions),
            resizes=self.resizes,
            vain_shrinks=self._vain + len(self._vacated),
            idle_wanted_gpu_s=self._idle_wanted,
            busy_slot_s=self.busy_slot_s,
            lost_slot_s=self.lost_slot_s,
            serving_gpu_s=self.serving_gpu_s,
        )

    def _idle_and_wanted(self) -> set[int]:
        """Vacant GPUs that make up a bundle of somebody who could use one more."""
        idle = {gpu for gpu in range(self.gpus) if gpu not in self._current and self._reserved[gpu] <= 0}
        unmet = [demand for demand in self._demands.values() if demand.unmet] if idle else []
        return {gpu for demand in unmet for bundle in demand.reach if idle.issuperset(bundle) for gpu in bundle}

    def _close(self, gpu: int) -> None:
        before = self._current.pop(gpu, None)
        if before is not None and self.now() > before[2]:
            self._spans.append(GpuSpan(gpu, before[0], before[1], before[2], self.now()))

    def _judge(self, gpu: int, pipeline: str, use: Use) -> None:
        """Was the shrink that vacated this GPU of any use? Not if its former holder gets it back, nor if it lay idle.

        A training request that waits for the rest of its GPUs may keep it meanwhile, if it is then granted.
        """
        vacated = self._vacated.pop(gpu, None)
        if vacated is None or (use is Use.TRAIN and vacated.kept):
            return
        back_again = vacated.pipeline == pipeline and use is Use.EXPAND
        if back_again or self.now() - vacated.at > self.settle_s:
            self._vain += 1
