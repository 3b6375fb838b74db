"""When is a wait over, and how did it end?

The SDK, the CLI and the server share this answer. The caller looks at the training, says when it began to look, and
gets a value back: not yet (and why), done, or the error to raise. How to look, and how to be woken, is the caller's
business.

What holds for every wait:

- Old status never counts: nothing is reached before `observedGeneration` has caught up with `generation`.
- A terminal phase counts at once, whatever the clock says, because it never changes again.
- Time runs out only on a look that began at or after the deadline, so the last look always comes before the verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from muster.core.training.explain import first_line
from muster.errors import (
    BelowMinimumWorld,
    MusterError,
    ResizeTakenBack,
    ScaleSuperseded,
    TrainingCancelled,
    TrainingFailed,
    UDTerminalState,
    WaitTimeout,
)
from muster.types import plural
from muster.types.event import TARGET_REACHED, Event
from muster.types.training import TAKEN_BACK, Training, WorldStatus

Goal = Literal["min", "target", "complete", "result"]
"""`complete` takes a training that had ended before the wait began for an error; `result` for an answer."""


@dataclass(frozen=True)
class Receipt:
    """What a handle knows of its own `scale`: what it asked for, and the generation that the write produced.

    It is over once that target was reached, or the handle has asked for another one. Whoever moves the target after
    that takes nothing away; what is older than its generation is old status all the same.
    """

    target: int
    generation: int
    over: bool = False


@dataclass(frozen=True)
class Wait:
    """What is waited for. `timeout` is as the caller gave it, for the error's sake."""

    goal: Goal
    timeout: float | None = None
    receipt: Receipt | None = None


@dataclass(frozen=True)
class Look:
    """One look at the training: when it began, until when the wait may go on, and whether it is the wait's first."""

    at: float
    deadline: float | None = None
    first: bool = False

    @property
    def last(self) -> bool:
        return self.deadline is not None and self.at >= self.deadline


@dataclass(frozen=True)
class NotYet:
    reason: str


@dataclass(frozen=True)
class Done:
    world: WorldStatus


@dataclass(frozen=True)
class Raise:
    error: MusterError


Verdict = NotYet | Done | Raise


def judge(wait: Wait, training: Training, look: Look) -> Verdict:
    """What one look at the training means for the wait."""
    if training.is_terminal:
        return _ended(wait, training, look)
    if wait.goal == "target" and (moved := superseded(training, wait.receipt, wait.timeout)) is not None:
        return Raise(moved)
    if wait.goal == "target" and (back := taken_back(wait, training)) is not None:
        return Raise(back)
    missing = _missing(wait, training)
    if missing is None:
        return Done(world_of(training))
    return Raise(timed_out(wait, training, missing)) if look.last else NotYet(missing)


def world_of(training: Training, *, target: int | None = None) -> WorldStatus:
    """The world as last reported, with another target if one was asked for since.

    Before the first reconcile there is no report: the sizes are then those of the spec, nobody is ready, and that is
    below any minimum.
    """
    size, reported = training.spec.world_size, training.status.world_size
    if training.status.observed_generation == 0 and not training.is_terminal:
        reported = WorldStatus(reported.ready, size.target, size.min, size.max, below_minimum=True)
    return reported if target is None else replace(reported, target=target, min=size.min, max=size.max)


def after_look(receipt: Receipt | None, training: Training) -> Receipt | None:
    """The receipt after a look: over if the status tells that its target was reached, for it or a later generation."""
    if receipt is None or receipt.over:
        return receipt
    world, reached = training.status.world_size, training.status.condition("TargetReached")
    holds = reached is not None and reached.status == "True" and reached.observed_generation >= receipt.generation
    there = world.ready == world.target or (world.ready > world.target and training.spec.elasticity == "fill")
    return replace(receipt, over=True) if holds and there and world.target == receipt.target else receipt


def after_news(receipt: Receipt, events: Iterable[Event]) -> Receipt:
    """The receipt after a look into the journal, which also knows of targets that were moved since they were reached.

    Of entries that name no generation, as earlier versions wrote them, nothing can be known.
    """
    told = [event.data for event in events if event.reason == TARGET_REACHED]
    numbers = [(one.get("generation"), one.get("target")) for one in told]
    over = any(
        isinstance(generation, int) and generation >= receipt.generation and target == receipt.target
        for generation, target in numbers
    )
    return replace(receipt, over=True) if over else receipt


def superseded(training: Training, receipt: Receipt | None, timeout: float | None = None) -> ScaleSuperseded | None:
    """Return the error if another writer moved the target since the handle's own scale, before it was reached."""
    target = training.spec.world_size.target
    if receipt is None or receipt.over or target == receipt.target or training.generation < receipt.generation:
        return None
    return ScaleSuperseded(
        f"training {training.key}: this handle asked for {plural.workers(receipt.target)}, "
        f"but another writer has since set the target to {target}",
        requested=receipt.target,
        target=target,
        ready=training.status.world_size.ready,
        required_min=target,
        timeout=timeout,
        hint="refresh, then scale again if the former size is still wanted",
    )


def taken_back(wait: Wait, training: Training) -> ResizeTakenBack | None:
    """The error if the size asked for was tried and does not work, which is known of the caller's own write."""
    resizing, target = training.status.condition("Resizing"), training.spec.world_size.target
    if resizing is None or resizing.reason != TAKEN_BACK:
        return None
    asked = wait.receipt.generation if wait.receipt is not None else 0
    if resizing.observed_generation < max(training.generation, asked):
        return None
    return ResizeTakenBack(
        f"training {training.key} could not train with {plural.workers(target)}: {resizing.message}",
        requested=target,
        target=training.status.world_size.ready,
        ready=training.status.world_size.ready,
        required_min=target,
        timeout=wait.timeout,
        hint=f"muster scale {training.metadata.name} N asks for another size; it is not tried again by itself",
    )


def refusal(training: Training, requested_target: int | None = None) -> UDTerminalState:
    """The error for an order to a training that has ended."""
    asked = "" if requested_target is None else f": it cannot be scaled to {requested_target}"
    return UDTerminalState(
        f"training {training.key} has already {_PAST[training.status.phase]}{asked}",
        phase=training.status.phase,
        requested_target=requested_target,
        hint="wait() and result() answer for a training that has ended" if requested_target is None else "",
    )


def timed_out(wait: Wait, training: Training, reason: str) -> WaitTimeout:
    """The error for a wait whose time is over; `reason` says what was still missing."""
    within = "" if wait.timeout is None else f" within {wait.timeout:g} s"
    return WaitTimeout(
        f"training {training.key} {_WANTED[wait.goal]}{within}: {reason}",
        ready=training.status.world_size.ready,
        required_min=_required(wait, training),
        timeout=wait.timeout,
        hint=f"muster explain {training.metadata.name} says what it waits for",
    )


# How a training that has ended answers a wait ----------------------------------------------------


def _ended(wait: Wait, training: Training, look: Look) -> Verdict:
    if wait.goal == "complete" and look.first:
        return Raise(refusal(training))
    if training.status.phase == "succeeded":
        return Done(world_of(training))
    return Raise(failure(wait, training))


def failure(wait: Wait, training: Training) -> BelowMinimumWorld:
    """The error for a training that failed or was cancelled: why, and one clause per failed rank."""
    kind = TrainingFailed if training.status.phase == "failed" else TrainingCancelled
    exits = training.status.rank_exits or ()
    failed = [one for one in exits if one.failed]
    story = "; ".join(str(one) for one in failed)
    outcome = training.status.outcome
    if outcome is not None and (not story or outcome.reason not in _TOLD_BY_RANKS):
        story = "; ".join(part for part in (first_line(outcome.message) or outcome.reason, story) if part)
    where = f" --rank {failed[0].rank}" if failed else ""
    return kind(
        f"training {training.key} {_ENDED[training.status.phase]}" + (f": {story}" if story else ""),
        ready=training.status.world_size.ready,
        required_min=_required(wait, training),
        timeout=wait.timeout,
        rank_exits=exits,
        hint=f"muster logs {training.metadata.name}{where}",
    )


_TOLD_BY_RANKS = frozenset({"", "failed", "cancelled"})  # the ranks' own ends say it all
_PAST = {"succeeded": "succeeded", "failed": "failed", "cancelled": "been cancelled"}
_ENDED = {"failed": "failed", "cancelled": "was cancelled"}
_WANTED = {
    "min": "did not reach its minimum",
    "target": "did not reach its target",
    "complete": "did not finish",
    "result": "did not finish",
}


# What a running training still lacks -------------------------------------------------------------


def _missing(wait: Wait, training: Training) -> str | None:
    """What the goal still lacks, or None when it is reached."""
    if wait.goal in ("complete", "result"):
        return f"it is {training.status.phase}, {_counted(training)}"
    wanted = max(training.generation, wait.receipt.generation if wait.receipt else 0)
    observed = min(training.status.observed_generation, training.generation)
    if observed < wanted:
        return f"the control plane has not yet acted on generation {wanted} (it has seen {observed})"
    return _below_minimum(training) if wait.goal == "min" else _below_target(training)


def _below_minimum(training: Training) -> str | None:
    world, least = training.status.world_size, training.spec.world_size.min
    if world.ready >= least and not world.below_minimum:
        return None
    return f"{plural.workers(least, f'{world.ready} of at least ')} {'is' if least == 1 else 'are'} ready"


def _below_target(training: Training) -> str | None:
    """The condition must be true for this generation: one that is left from an earlier target proves nothing."""
    reached = training.status.condition("TargetReached")
    if reached is None or reached.status != "True" or reached.observed_generation < training.generation:
        said = f": {reached.message}" if reached is not None and reached.message else ""
        return f"{_counted(training)}{said}"
    ready, target = training.status.world_size.ready, training.spec.world_size.target
    agreed = ready == target or (ready > target and training.spec.elasticity == "fill")
    return None if agreed else _counted(training)


def _counted(training: Training) -> str:
    target = training.spec.world_size.target
    counted = plural.workers(target, f"{training.status.world_size.ready} of ")
    return f"{counted} {'is' if target == 1 else 'are'} ready"


def _required(wait: Wait, training: Training) -> int:
    size = training.spec.world_size
    if wait.goal == "min":
        return size.min
    receipt = wait.receipt
    return size.target if receipt is None or receipt.over else receipt.target
