"""Why is a training where it is? One sentence first, then what leads to it.

The reconciler writes its reasons into conditions, in words meant for users; this module picks the one that answers
the question and puts what else matters behind it. It shows no variable of `env`, and no line that a rank printed but
the last words of the one that failed first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from muster.core.training import moments, state_words
from muster.core.world import last_words
from muster.types import plural
from muster.types.event import FINISHED, WORKER_EXITED, Event
from muster.types.training import LENT, Condition, Outcome, Status, Training
from muster.types.world import show_round_times as show_times

_EVENTS_SHOWN = 5
_DECISION = frozenset({"OutcomeDecided"})
_EXITS_SHOWN = 8
_CONDITIONS = ("Valid", "Admitted", "BelowMinimum", "Resizing", "TargetReached", "MeshReady", "DegradedMesh", "Stalled")
_BAD = {"Admitted": "False", "BelowMinimum": "True", "TargetReached": "False", "MeshReady": "False"}
_BAD |= {"Resizing": "True", "Stalled": "True", "DegradedMesh": "True", "Valid": "False"}


@dataclass(frozen=True)
class Explanation:
    """A sentence that answers, and lines that support it."""

    summary: str
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  {line}" for line in self.details)])


def explain(
    training: Training, events: Sequence[Event], now: datetime, steady: datetime | None = None, *, lent: str = ""
) -> Explanation:
    """What holds a training up, or how it ended. `steady` is now on the clock that durations are measured with.

    `lent`: where the pool says that GPUs of its workers are, and when they come back. No status tells that: it changes
    with every second.
    """
    summary = _summary(training, now, lent)
    told = (f"lent: {lent}",) if lent and lent not in summary and not training.is_terminal else ()
    details = (*told, *_details(training, now, steady or now, summary), *_last_events(training, events, now, summary))
    return Explanation(summary, details)


def show_age(age: timedelta) -> str:
    """A duration in its two largest units, as a person would say it: 45s, 3m20s, 2h5m, 4d1h."""
    seconds = max(0, int(age.total_seconds()))
    for size, below, unit, next_unit in ((86_400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if seconds >= size:
            rest = seconds % size // below
            return f"{seconds // size}{unit}{rest}{next_unit}" if rest else f"{seconds // size}{unit}"
    return f"{seconds}s"


def show_round_times(status: Status) -> str:
    """Say how long the round that is out took to run and to make a step; empty if that is not known."""
    times = status.round_times
    if times is None or times.round != status.round:
        return ""
    return show_times(times.ranks_run_seconds, times.next_step_seconds)


# The sentence ------------------------------------------------------------------------------------


def _summary(training: Training, now: datetime, lent: str) -> str:
    name, status, world = training.metadata.name, training.status, training.status.world_size
    if training.is_terminal:
        return _ended(training, now)
    if status.outcome is not None:
        return _sentence(f"{name} is ending as {status.outcome.state}", _why(status.outcome))
    if training.metadata.deletion_timestamp is not None:
        return f"{name} is being deleted: its workers are being stopped."
    if training.spec.cancel is not None:
        age = show_age(now - training.spec.cancel.requested_at)
        return f"{name} is being cancelled since {age}: its ranks are being stopped."
    if status.observed_generation == 0:
        return f"{name} was submitted; the control plane has not looked at it yet."
    if training.generation <= status.observed_generation and _is_bad(valid := status.condition("Valid")):
        return _sentence(f"{name} is {status.phase} and stays as it is", _message(valid))
    if _is_bad(admitted := status.condition("Admitted")):
        return _sentence(f"{name} is {status.phase}", _message(admitted))
    if status.phase == "pending":
        return _sentence(
            f"{name} is pending with {plural.workers(world.min, f'{world.ready} of at least ')}", _blocker(training)
        )
    if _is_bad(below := status.condition("BelowMinimum")):
        return _sentence(
            f"{name} is below its minimum: {plural.workers_train(world.min, f'{world.ready} of ')}", _message(below)
        )
    if _is_bad(resizing := status.condition("Resizing")):
        return _sentence(f"{name} is resizing to {plural.workers(world.target)}", _message(resizing))
    if training.generation > status.observed_generation:
        return f"{name} was changed; the control plane has not acted on that yet."
    if _is_bad(reached := status.condition("TargetReached")):
        why = lent if lent and reached is not None and reached.reason == LENT else _message(reached)
        return _sentence(f"{name} trains with {plural.workers(world.target, f'{world.ready} of ')}", why)
    if _is_bad(stalled := status.condition("Stalled")):
        return _sentence(f"{name} is ready, but its steps have stalled", _message(stalled))
    if training.spec.elasticity == "fill" and (more := world.ready - world.target) > 0:
        told = f"{plural.workers_train(world.ready)}, {more} more than asked for"
        return f"{name} is ready: {told}, until somebody needs their GPUs."
    took = show_round_times(status)
    trains = f"{plural.workers_train(world.target, f'{world.ready} of ')} in round {status.round}"
    return f"{name} is ready: {trains}" + (f"; {took}." if took else ".")


def _ended(training: Training, now: datetime) -> str:
    status = training.status
    ago = f" {show_age(now - status.finished_at)} ago" if status.finished_at else ""
    took = ""
    began, ended = moments.started(status), moments.finished(status)
    if began and ended:
        took = f" after {show_age(ended - began)}"
    verb = {"succeeded": "succeeded", "failed": "failed", "cancelled": "was cancelled"}[status.phase]
    why = "" if status.phase == "succeeded" or status.outcome is None else _why(status.outcome)
    return _sentence(f"{training.metadata.name} {verb}{ago}{took}", why)


def _blocker(training: Training) -> str:
    """The first condition that is not as it should be, in the order in which a training passes them."""
    for kind in ("MeshReady", "BelowMinimum", "TargetReached", "Resizing"):
        condition = training.status.condition(kind)
        if _is_bad(condition) and _message(condition):
            return _message(condition)
    return "its world has not formed yet"


def _why(outcome: Outcome) -> str:
    return first_line(outcome.message) or (str(outcome.first_failure) if outcome.first_failure else outcome.reason)


def first_line(text: str) -> str:
    """A message without the lines that it goes on with, and without the words that announce them."""
    line, *more = text.strip().splitlines() or [""]
    if more and line.endswith(":"):
        line = line.rpartition(";")[0] or line
    return line.strip()


def _sentence(what: str, why: str) -> str:
    text = " ".join(f"{what}: {why}".split()) if why else what  # on one line, whatever the reason looked like
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _is_bad(condition: Condition | None) -> bool:
    return condition is not None and condition.status == _BAD.get(condition.type)


def _message(condition: Condition | None) -> str:
    return "" if condition is None else condition.message or condition.reason


# What supports it --------------------------------------------------------------------------------


def _details(training: Training, now: datetime, steady: datetime, summary: str) -> Iterator[str]:
    status, spec = training.status, training.spec
    if training.is_terminal:
        yield from _exits(training, summary)
    else:
        yield from _conditions(training, now, summary)
        yield from _deadlines(training, now, steady)
        if 0 < status.observed_generation < training.generation:
            yield f"generation {training.generation} was asked for; generation {status.observed_generation} is acted on"
        yield from _state(training)
        if status.spares.target:
            yield f"spares: {status.spares.ready} of {status.spares.target} ready"
    if status.restarts:
        yield f"restarts: {status.restarts} of {spec.max_restarts}"
    if status.last_resize is not None:
        resize = status.last_resize
        ago = f", {show_age(now - resize.at)} ago" if resize.at else ""
        reason = f": {resize.reason}" if resize.reason else ""
        yield f"last resize: {plural.workers(resize.to_target, f'{resize.from_target} → ')}{ago}{reason}"


def _conditions(training: Training, now: datetime, summary: str) -> Iterator[str]:
    """Yield a line for each bad condition. A message that was shown already is not repeated."""
    shown = [summary]
    for kind in _CONDITIONS:
        condition = training.status.condition(kind)
        if condition is None or not _is_bad(condition):
            continue
        since = f" for {show_age(now - condition.last_transition_time)}" if condition.last_transition_time else ""
        message = _message(condition) or "no reason was given"
        text = " ".join(message.split())
        yield f"{kind} is {condition.status}{since}" + ("" if any(text in one for one in shown) else f": {message}")
        shown.append(text)


def _state(training: Training) -> Iterator[str]:
    """What of its state is safe, what a loss would cost, and why its ranks went on where they did."""
    state = training.status.kept_state
    if state is None:
        return
    if state.lost:
        yield f"state: {state.lost}"
    yield f"state: {state_words.safe(state)}"
    if state.loss:
        yield f"state: {state.loss}"
    if state.resumed:
        yield f"state: the ranks of round {training.status.round} went on {state.resumed}"
    if state.refused:
        yield f"state: not all of it is kept: {state.refused}"


def _deadlines(training: Training, now: datetime, steady: datetime) -> Iterator[str]:
    below = training.status.condition("BelowMinimum")
    admitted = not _is_bad(training.status.condition("Admitted"))  # one that queues does not fail for it
    if admitted and below is not None and _is_bad(below) and below.last_transition_time:
        left = below.last_transition_time + timedelta(seconds=training.spec.below_minimum_timeout_seconds) - now
        yield f"it fails in {show_age(left)} unless {plural.workers_train(training.status.world_size.min)} by then"
    if (deadline := moments.deadline(training)) is not None:
        yield f"its deadline is in {show_age(deadline - steady)}"


def _exits(training: Training, summary: str) -> Iterator[str]:
    failed = [one for one in training.status.rank_exits or () if one.failed]
    for one in failed[:_EXITS_SHOWN]:
        where = f" on {one.worker}" if one.worker else ""
        yield f"{one}{where} in round {one.round}"
    if len(failed) > _EXITS_SHOWN:
        yield f"and {len(failed) - _EXITS_SHOWN} more ranks that failed"
    first = training.status.outcome.first_failure if training.status.outcome else None
    words = last_words.last_output(first.stderr_tail) if first is not None else ""
    if first is not None and words and words not in summary:
        yield f"last output of rank {first.rank}: {words}"


def _last_events(training: Training, events: Sequence[Event], now: datetime, summary: str) -> Iterator[str]:
    """Yield the latest events that explain the state: warnings and exits before the others, in the order of their time.

    Leave out events with the cause that the summary has already.
    """
    journal = [event for event in events if event.uid == training.metadata.uid or not event.uid]
    ends = [place for place, event in enumerate(journal) if event.reason in FINISHED.values()]
    if training.is_terminal and ends:
        journal = journal[: ends[0] + 1]  # the exits of its workers after the end explain nothing
        cause = first_line(training.status.outcome.message) if training.status.outcome else ""
        repeated = _DECISION if not cause or cause not in summary else {journal[-1].reason} | _DECISION
        journal = [event for event in journal if not (cause and cause in event.message and event.reason in repeated)]
    telling = [place for place, event in enumerate(journal) if event.type == "Warning" or event.reason == WORKER_EXITED]
    others = [place for place in range(len(journal)) if place not in set(telling)]
    chosen = telling[-_EVENTS_SHOWN:]
    if free := _EVENTS_SHOWN - len(chosen):
        chosen += others[-free:]
    for event in (journal[place] for place in sorted(chosen)):
        age = f"{show_age(now - event.at)} ago" if event.at else "just now"
        yield f"{age}: {event.reason}" + (f": {_new_in(first_line(event.message), summary)}" if event.message else "")


def _new_in(message: str, summary: str) -> str:
    """Return a message with "the same" in place of a cause that the summary has named."""
    cause, worker, rest = message.partition("; worker ")
    return f"the same; worker {rest}" if worker and cause in summary else message
