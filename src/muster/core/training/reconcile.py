"""What has to be done so that a training becomes what its spec says, and what its status is now.

`reconcile(training, observed, now)` looks at the stored object and at what is really there, never at what happened
before, so that it can be asked again at any time. It starts nothing itself: `control` carries the plan out. `now` is
of the clock that durations are measured with; `observed` says by how much the time of day differs from it.

The stages, in the order in which they are asked about:

    ended      terminal: let the workers go, remove what is to be removed, answer edits with a warning
    closing    the outcome is stored: tell the workers, collect every exit, then one write of phase and exits
    proposed   the coordinator has come to an outcome: store it
    live       as many workers as wanted, the right target, an honest status; of a spec that is invalid, the status only
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from muster.backoff import Backoff
from muster.core.training import exits, lifecycle, metering, moments, pacing
from muster.core.training import status as statuses
from muster.core.training.status import Observed
from muster.core.world import run
from muster.core.world.seating import natural
from muster.types import plural, world
from muster.types.event import FINISHED, TERMINAL_EDIT, Event
from muster.types.training import QUEUE, Outcome, Spec, Status, Training
from muster.types.worker import Worker

FAREWELL = timedelta(days=1)  # how long workers keep their exits for a control plane that is away
ORPHAN = timedelta(days=7)  # how long ranks train on without one
BENCH_S = 60.0  # for `bench`, with all that it has to import
COLLECT = timedelta(seconds=10)  # beyond the grace, for a worker to report how its ranks ended
LEAVE = timedelta(seconds=10)  # for a worker to leave by itself once it may
ABSENT = timedelta(seconds=5)  # a worker that runs but has left the run for so long is of no use
STEP_REFRESH = timedelta(seconds=1)
QUICK_STARTS = 3  # workers that may die in a minute before starting others is slowed down
BACKOFF = Backoff(1.0, 32.0)
_RECENT = timedelta(minutes=1)
USAGE_ERROR = 2  # what muster-node answers to an order that cannot be carried out anywhere


@dataclass(frozen=True)
class OpenRun:
    settings: world.Settings
    target: int
    lent: Mapping[str, str] = field(default_factory=dict)  # workers that may have no rank now, and why


@dataclass(frozen=True)
class StartWorker:
    name: str
    gpus: tuple[int, ...] | None = None  # None: its backend chooses


@dataclass(frozen=True)
class StopWorker:
    name: str
    why: str
    kill: bool = False


@dataclass(frozen=True)
class EndRun:
    """Order an outcome; the coordinator proposes it back."""

    state: world.OutcomeState
    reason: str
    message: str


@dataclass(frozen=True)
class Confirm:
    outcome: Outcome


@dataclass(frozen=True)
class MarkDead:
    """Workers that the coordinator need not wait for, neither to come back nor to end their ranks: they are dead."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Tell the coordinator where workers are that do not know it themselves."""

    spots: Mapping[str, world.Spot]


@dataclass(frozen=True)
class LetGo:
    pass


@dataclass(frozen=True)
class Suspend:
    """Write into its spec that it is suspended: it came around our API, and somebody else queues it."""

    why: str


@dataclass(frozen=True)
class CloseRun:
    pass


@dataclass(frozen=True)
class Remove:
    why: str


Action = OpenRun | StartWorker | StopWorker | EndRun | Confirm | MarkDead | Place | LetGo | CloseRun | Suspend | Remove


@dataclass(frozen=True)
class Plan:
    actions: tuple[Action, ...]
    status: Status
    reason: str
    events: tuple[Event, ...] = ()
    wake_at: datetime | None = None
    mesh: Mapping[str, str] = field(default_factory=dict)  # the keys that say how its mesh is; none once it ends


def settings_of(spec: Spec) -> world.Settings:
    """What the coordinator has to know of a spec."""
    grace = spec.stop_grace_seconds
    if spec.cancel is not None and spec.cancel.grace_seconds is not None:
        grace = spec.cancel.grace_seconds
    return world.Settings(
        min=spec.world_size.min,
        max=spec.world_size.max,
        target=spec.world_size.target,
        spares=spec.spares,
        max_restarts=spec.max_restarts,
        hang_timeout_s=spec.hang_timeout_seconds,
        no_progress_rounds=spec.no_progress_rounds,
        below_min_timeout_s=spec.below_minimum_timeout_seconds,
        stop_grace_s=grace,
        lease_s=spec.lease_seconds,
        farewell_s=FAREWELL.total_seconds(),
        orphan_s=ORPHAN.total_seconds(),
        spare_orphan_s=ORPHAN.total_seconds(),
        gate_timeout_s=spec.mesh.timeout_seconds if spec.mesh.required else None,
        segment=spec.segment,
        bench_s=BENCH_S if spec.bench else None,
    )


def world_outcome(outcome: Outcome) -> world.RunOutcome:
    """A stored outcome as workers are told it."""
    at = outcome.finished_at.timestamp() if outcome.finished_at is not None else 0.0
    return world.RunOutcome(world.OutcomeState(outcome.state), outcome.reason, outcome.message, finished_at=at)


def reconcile(training: Training, seen: Observed, now: datetime) -> Plan:
    if training.is_terminal:
        return _ended(training, seen, now)
    if training.status.outcome is not None:
        return _closing(training, seen, training.status.outcome, now)
    if seen.run is not None and seen.run.outcome is not None:
        return _proposed(training, seen, seen.run.outcome, now)
    return _live(training, seen, now)


# Ended -------------------------------------------------------------------------------------------


def _ended(training: Training, seen: Observed, now: datetime) -> Plan:
    status, events = training.status, []
    if training.generation > status.observed_generation:
        message = (
            f"generation {training.generation} edits a training that has {status.phase}; "
            f"it wants {_wish(training.spec)}, and nothing follows from it"
        )
        events.append(Event(TERMINAL_EDIT, message, "Warning", data={"generation": training.generation}))
        status = replace(status, observed_generation=training.generation)
    actions: list[Action] = []
    alive = [worker for worker in seen.workers if worker.alive]
    finished = moments.finished(status) or now
    if seen.run is not None and not seen.confirmed and status.outcome is not None:
        actions.append(Confirm(status.outcome))  # a coordinator that has just come back has told nobody yet
    if seen.run is not None and seen.run.holds_farewell:
        actions.append(LetGo())
    # Who never ran has nobody in it that would leave.
    actions += [StopWorker(one.name, "the training has ended") for one in alive if one.waiting and not one.stopping]
    overdue = [StopWorker(worker.name, "it did not leave by itself", kill=True) for worker in alive]
    wake = None
    if alive and now >= finished + LEAVE:
        actions += overdue
        wake = now + LEAVE
    elif alive:
        wake = finished + LEAVE
    elif seen.run is not None:
        actions.append(CloseRun())
    expiry = _expiry(training, now)
    if expiry is not None and not alive:
        if now >= expiry:
            return Plan((*actions, Remove(_why_removed(training))), status, "to be removed", tuple(events))
        wake = expiry
    return Plan(tuple(actions), status, f"ended: {status.phase}", tuple(events), wake)


def _expiry(training: Training, now: datetime) -> datetime | None:
    if training.metadata.deletion_timestamp is not None:
        return now
    ttl, finished = training.spec.ttl_seconds_after_finished, moments.finished(training.status)
    if ttl is None or finished is None:
        return None
    return finished + timedelta(seconds=ttl)


def _why_removed(training: Training) -> str:
    if training.metadata.deletion_timestamp is not None:
        return "deleted on request"
    return f"finished more than {training.spec.ttl_seconds_after_finished:g} s ago"


def _wish(spec: Spec) -> str:
    size = spec.world_size
    return f"world size {size.min}:{size.target}:{size.max} with {plural.counted(spec.spares, 'spare')}"


# Proposed and closing ----------------------------------------------------------------------------


def _proposed(training: Training, seen: Observed, proposal: world.RunOutcome, now: datetime) -> Plan:
    """Store the outcome, phase unchanged. A cancel that was stored before it wins over ranks that exited 0."""
    outcome = Outcome(
        state=proposal.state.value,
        reason=proposal.reason,
        message=_message(proposal, seen),
        first_failure=exits.first_failure(training, seen, proposal, now),
        finished_at=seen.shown(now),
    )
    asked = _asked_to_end(training)
    if asked is not None and proposal.state is world.OutcomeState.SUCCEEDED:
        message = f"{asked.message} (its ranks had all exited 0 by then)"
        outcome = Outcome("cancelled", asked.reason, message, None, seen.shown(now))
    status = moments.kept(replace(training.status, outcome=outcome), "decided_at", now, seen.ahead)
    event = Event("OutcomeDecided", f"{outcome.state}: {outcome.message}", round=status.round)
    return Plan((), status, outcome.message, (event,))


def _message(proposal: world.RunOutcome, seen: Observed) -> str:
    """On one line, without the rank's last words; whom the platform lets wait is why too few are there."""
    told = proposal.message.partition("\n")[0].removesuffix("; its last stderr lines:")
    waits = statuses.waits(seen) if proposal.reason == "below_minimum" else ""
    return f"{told}; {waits}" if waits else told


def _closing(training: Training, seen: Observed, outcome: Outcome, now: datetime) -> Plan:
    """Every rank's end is collected before the phase turns; what is missing after the grace is a lost node."""
    decided = moments.decided(training.status) or now
    if seen.run is not None and not seen.confirmed:
        return Plan((Confirm(outcome),), training.status, "telling the workers the outcome", wake_at=now + COLLECT)
    grace = settings_of(training.spec).stop_grace_s
    until = decided + timedelta(seconds=grace) + COLLECT
    missing = _not_quiet(seen)
    if missing and now < until:
        reason = f"{outcome.state}: collecting the exits of {', '.join(missing)}"
        return Plan((), training.status, reason, wake_at=until)
    return _finish(training, seen, outcome, now)


def _not_quiet(seen: Observed) -> list[str]:
    """Workers that still have something to say about how their ranks ended."""
    if seen.run is None:
        return []
    slow = set(run.unacknowledged(seen.run))
    here = {member.name for member in seen.run.members.values()}
    last = seen.run.round
    seated = {seat.name for seat in last.seats} if last is not None else set()
    awaited = {worker.name for worker in seen.workers if worker.alive and worker.name in seated - here}
    return sorted(slow | awaited)


def _finish(training: Training, seen: Observed, outcome: Outcome, now: datetime) -> Plan:
    status = lifecycle.with_phase(statuses.mirrored(training, seen, now), outcome.state)
    size = replace(status.world_size, ready=0, below_minimum=False)
    status = replace(
        status,
        world_size=size,
        spares=replace(status.spares, ready=0),
        rendezvous_endpoint=None,
        rank_exits=exits.collected(training, seen, outcome.state, now),
        outcome=outcome,
        ranks=statuses.last_ranks(training, seen, now),
        workers=(),
        kept_state=statuses.last_state(status.kept_state),
        finished_at=seen.shown(now),
    )
    status = moments.kept(status, "finished_at", now, seen.ahead)
    generation, shown = training.generation, seen.shown(now)
    for kind in ("TargetReached", "BelowMinimum", "Resizing"):
        status = lifecycle.with_condition(status, kind, False, "Ended", f"it has {outcome.state}", shown, generation)
    failures = "; ".join(str(one) for one in status.rank_exits or () if one.failed)
    message = outcome.message + (f" [{failures}]" if failures else "")
    warning = outcome.state == "failed"
    event = Event(FINISHED[outcome.state], message, "Warning" if warning else "Normal", round=status.round)
    event = replace(event, data=metering.when(shown, now))
    return Plan((), status, outcome.message, (event,))


# Live --------------------------------------------------------------------------------------------


def _live(training: Training, seen: Observed, now: datetime) -> Plan:
    invalid = bool(statuses.problems_with(training, seen))
    still = invalid or training.spec.suspend
    asked = _asked_to_end(training) or (None if still else _must_fail(training, seen, now))
    if asked is not None:
        return _end(training, seen, asked, now)
    if not still and _is_queued_and_new(training):
        why = f"it is queued in {training.metadata.labels[QUEUE]!r}: it begins when it is admitted"
        return Plan((Suspend(why),), training.status, why)
    status = statuses.mirrored(training, seen, now)
    events = statuses.news(training, seen, status)
    moves = seen.kept is not None or any(rank.step is not None for rank in status.ranks)
    wake = now + STEP_REFRESH if moves else None
    keys = statuses.mesh_keys(training, seen)
    if invalid:  # what runs goes on as it was
        return Plan((), status, "its spec is invalid", events, wake, keys)
    if training.spec.suspend:
        return Plan(_held_back(training, seen), status, seen.grant.message, events, wake, keys)
    wake = _sooner(wake, moments.deadline(replace(training, status=status)))
    if not seen.grant.admitted:
        return Plan((), status, seen.grant.message, events, wake, keys)
    talked = statuses.wait_counts_at(seen)
    wake = _sooner(wake, talked if talked is not None and talked > now else None)
    size, lent = statuses.size_of(training.spec, seen), seen.grant.lent
    settings = run.kept_lease(seen.run, replace(settings_of(training.spec), target=size))
    actions: list[Action] = []
    if seen.run is None or (seen.run.settings, seen.run.target, seen.run.lent) != (settings, size, lent):
        actions.append(OpenRun(settings, size, lent))
    if dead := _dead_and_awaited(seen):
        actions.append(MarkDead(dead))
    if (spots := _spots(seen)) != (seen.run.spots if seen.run is not None else {}):
        actions.append(Place(spots))
    workers, later = _workers(training, seen, now)
    actions += workers
    return Plan(tuple(actions), status, seen.reason or seen.grant.message, events, _sooner(wake, later), keys)


def _is_queued_and_new(training: Training) -> bool:
    return QUEUE in training.metadata.labels and not training.status.observed_generation


def _held_back(training: Training, seen: Observed) -> tuple[Action, ...]:
    """All workers leave as if each had been asked to: ranks are told first. The run stays, and misses nobody."""
    actions: list[Action] = []
    if seen.run is not None:
        settings = run.kept_lease(seen.run, replace(settings_of(training.spec), below_min_timeout_s=world.NEVER_S))
        if (seen.run.settings, seen.run.target) != (settings, settings.target):
            actions.append(OpenRun(settings, training.spec.world_size.target, seen.run.lent))
    if dead := _dead_and_awaited(seen):
        actions.append(MarkDead(dead))
    actions += [
        StopWorker(worker.name, "the training is suspended")
        for worker in seen.workers
        if worker.alive and not worker.stopping
    ]
    return tuple(actions)


def _dead_and_awaited(seen: Observed) -> tuple[str, ...]:
    """Those of which nothing is left, ranks included, once they are heard of no more. Of others only time can tell."""
    last = seen.last_round
    if last is None or seen.run is None:
        return ()
    here = seen.run.members
    ended = {worker.name for worker in seen.workers if not worker.alive and worker.cleared}
    return tuple(
        seat.name
        for seat in last.seats
        if seat.name in ended and seat.member_id not in last.gone and seat.member_id not in here
    )


def _spots(seen: Observed) -> Mapping[str, world.Spot]:
    """Where workers are of which the platform knows it; those of one domain, and of one node, follow each other."""
    known = [worker for worker in seen.workers if worker.alive and worker.domain is not None]
    ordered = sorted(
        known,
        key=lambda one: (not one.domain, natural(one.domain or ""), natural(one.node), natural(one.name), one.name),
    )
    return {worker.name: world.Spot(worker.domain or None, index) for index, worker in enumerate(ordered)}


def _asked_to_end(training: Training) -> EndRun | None:
    if training.spec.cancel is not None:
        return EndRun(world.OutcomeState.CANCELLED, "cancelled", "cancelled on request")
    if training.metadata.deletion_timestamp is not None:
        return EndRun(world.OutcomeState.CANCELLED, "deleted", "cancelled because it is being deleted")
    return None


def _must_fail(training: Training, seen: Observed, now: datetime) -> EndRun | None:
    return _overdue(training, seen, now) or _cannot_start(seen) or _out_of_memory(training, seen)


def _overdue(training: Training, seen: Observed, now: datetime) -> EndRun | None:
    deadline = moments.deadline(training)
    if deadline is None or now < deadline:
        return None
    limit = training.spec.active_deadline_seconds
    message = f"it ran longer than its deadline of {limit:g} s"
    if moments.started(training.status) is None:
        why = statuses.why_it_waits(training, seen)
        message = f"it did not begin within its deadline of {limit:g} s" + (f": {why}" if why else "")
    return EndRun(world.OutcomeState.FAILED, "deadline_exceeded", message)


def _cannot_start(seen: Observed) -> EndRun | None:
    """An order that no worker can carry out, and too few are there without: starting more would not help."""
    if seen.run is not None and seen.run.below_min_since is None:
        return None
    last = max(seen.workers, key=lambda worker: _ordinal(worker.name), default=None)
    if last is None or last.exit_code != USAGE_ERROR or last.stopping:
        return None
    why = last.last_words or "muster-node did not accept its command line"
    return EndRun(world.OutcomeState.FAILED, "cannot_start", f"workers cannot start: {last.name}: {why}")


def _out_of_memory(training: Training, seen: Observed) -> EndRun | None:
    """A worker that is killed for memory fails as its ranks would alone: it costs a restart, and there may be none."""
    killed = seen.killed_for_memory
    used, allowed = seen.run.restarts_used if seen.run is not None else 0, training.spec.max_restarts
    if not killed or used + len(killed) <= allowed:
        return None
    last, spent = killed[-1], f"{allowed} of {allowed} restarts used"
    for seat in seen.last_round.seats if seen.last_round is not None else ():
        if seat.name == last.name and seen.last_round is not None:
            rank, number = seen.last_round.first_rank_of(seat.rank), seen.last_round.number
            message = f"{last.reason} (rank {rank}); worker {last.name}, round {number}; {spent}"
            return EndRun(world.OutcomeState.FAILED, "rank_failed", message)
    message = f"worker {last.name}: exit_code={last.exit_code} reason={last.reason}; {spent}"
    return EndRun(world.OutcomeState.FAILED, "rank_failed", message)


def _end(training: Training, seen: Observed, order: EndRun, now: datetime) -> Plan:
    """Through the coordinator if there is one; a training that never had one ends with a single write."""
    if seen.run is not None:
        settings = run.kept_lease(seen.run, settings_of(statuses.in_effect(training, seen)))
        settings = replace(settings, target=seen.run.settings.target)
        differ = seen.run.settings != settings
        actions: list[Action] = [OpenRun(settings, seen.run.target, seen.run.lent)] if differ else []
        status = statuses.mirrored(training, seen, now)
        return Plan((*actions, order), status, order.message, statuses.news(training, seen, status))
    outcome = Outcome(order.state.value, order.reason, order.message, None, seen.shown(now))
    return _finish(training, seen, outcome, now)


def _workers(training: Training, seen: Observed, now: datetime) -> tuple[list[Action], datetime | None]:
    """Start those that are missing, each under a name that nobody had before; stop spares that are too many."""
    size, wanted = _wanted(training, seen)
    here = [worker for worker in seen.workers if worker.alive and not worker.stopping]
    alive = [worker for worker in here if worker.name not in seen.grant.lent]
    useless: list[Action] = [StopWorker(name, "it does not leave its GPUs", kill=True) for name in seen.grant.overdue]
    useless += [
        StopWorker(worker.name, "its GPUs are for others, and nobody waits for its return")
        for worker in here
        if worker.name in seen.grant.surplus
    ]
    wake: datetime | None = None
    for worker in alive:
        since = seen.absent_since.get(worker.name)
        if since is None:
            continue
        if now >= since + ABSENT:
            useless.append(StopWorker(worker.name, "it runs, but the world lost it", kill=True))
        wake = _sooner(wake, since + ABSENT)
    have = _not_leaving(alive, seen)
    # One that has left the run is on its way out, though its process may still be there for a moment.
    present = [worker for worker in have if worker.name not in seen.absent_since]
    if len(present) > wanted:
        return [*useless, *_too_many(size, seen, present, len(present) - wanted)], wake
    missing = wanted - len(have)
    if missing <= 0:
        return useless, wake
    ready_at = _may_start_at(seen.workers, now)
    if now < ready_at:
        return useless, _sooner(wake, ready_at)
    if seen.starts.count is not None and seen.starts.count < missing:
        missing, wake = seen.starts.count, _sooner(wake, now + pacing.LOOK_AGAIN)
    first = 1 + max((_ordinal(worker.name) for worker in seen.workers), default=-1)
    names = [f"{training.metadata.name}-{first + index}" for index in range(missing)]
    return [*useless, *_started(names, seen)], wake


def _wanted(training: Training, seen: Observed) -> tuple[int, int]:
    """How many workers are to train together, and how many are wanted with the spares."""
    back = statuses.taken_back(training, seen)
    size = back.size if back is not None else statuses.size_of(training.spec, seen)
    return size, min(size + training.spec.spares, seen.grant.workers)


def _not_leaving(workers: list[Worker], seen: Observed) -> list[Worker]:
    members = seen.run.members.values() if seen.run is not None else ()
    leaving = {member.name for member in members if member.role is world.Role.LEAVING}
    return [worker for worker in workers if worker.name not in leaving]


def lacking(training: Training, seen: Observed, now: datetime) -> tuple[int, int]:
    """How many workers of the world, and how many spares, have yet to be started. None while it pauses."""
    ends = training.is_terminal or training.status.outcome is not None or training.spec.suspend
    if ends or not seen.grant.admitted or now < _may_start_at(seen.workers, now):
        return 0, 0
    size, wanted = _wanted(training, seen)
    alive = [worker for worker in seen.workers if worker.alive and not worker.stopping]
    have = len(_not_leaving([worker for worker in alive if worker.name not in seen.grant.lent], seen))
    actives = max(0, min(size, wanted) - have)
    return actives, max(0, wanted - have - actives)


def _started(names: list[str], seen: Observed) -> list[StartWorker]:
    """On GPUs of its own on which there is no other worker."""
    if seen.grant.places is None:
        return [StartWorker(name) for name in names]
    taken = {worker.gpus for worker in seen.workers if worker.alive}
    free = [gpus for gpus in seen.grant.places if gpus not in taken]
    return [StartWorker(name, gpus) for name, gpus in zip(names, free, strict=False)]


def _too_many(size: int, seen: Observed, have: list[Worker], count: int) -> list[Action]:
    """Who does not run yet first. Then only spares, and only while the world has its size: leaving it is not ours."""
    last_first = sorted(have, key=lambda worker: -_ordinal(worker.name))
    waiting = [worker for worker in last_first if worker.waiting]
    current = seen.run.running if seen.run is not None else None
    idle = set()
    if seen.run is not None and current is not None and current.world_size <= size:
        free = (world.Role.SPARE, world.Role.PARKED)
        idle = {member.name for member in seen.run.members.values() if member.role in free}
    spares = [worker for worker in last_first if worker.name in idle and not worker.waiting]
    return [StopWorker(worker.name, "there are more workers than wanted") for worker in (*waiting, *spares)[:count]]


def _ordinal(name: str) -> int:
    found = re.search(r"-(\d+)$", name)
    return int(found[1]) if found else -1


def _may_start_at(workers: tuple[Worker, ...], now: datetime) -> datetime:
    """Workers that keep dying are replaced ever more slowly."""
    recent = sorted(
        worker.ended_at
        for worker in workers
        if worker.ended_at is not None and worker.exit_code not in (0, None) and now - worker.ended_at < _RECENT
    )
    if len(recent) <= QUICK_STARTS:
        return now
    return recent[-1] + timedelta(seconds=BACKOFF.after(len(recent) - QUICK_STARTS))


def _sooner(one: datetime | None, other: datetime | None) -> datetime | None:
    return min((at for at in (one, other) if at is not None), default=None)
