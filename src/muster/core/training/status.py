"""What is true of a training now: its status as it follows from what is observed.

Nothing is decided here. `worldSize.ready` counts only workers of the released round whose ranks all run; the
condition `TargetReached` holds only for a round of exactly the size that the looked-at generation asks for, and where
ranks tell steps only once one has made a step at a new size. Of a spec that cannot be acted on nothing follows: the
status goes on telling of what was there before, and `Valid` says why.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from muster.core.training import lifecycle, moments, present, state_loss
from muster.core.training.admission import Grant
from muster.core.training.explain import show_round_times
from muster.core.training.pacing import ANY_NUMBER, StartAllowance
from muster.core.world import heals, run, sizes
from muster.core.world.safe_state import Kept
from muster.types import plural, world
from muster.types.bench import Bench
from muster.types.codec import Problem
from muster.types.event import STATE_LOST, TARGET_REACHED, Event
from muster.types.state import KeptState
from muster.types.training import (
    LENT,
    SUSPENDED,
    TAKEN_BACK,
    RankStatus,
    Resize,
    RoundTimes,
    SparesStatus,
    Spec,
    Status,
    Training,
    WorldSize,
    WorldStatus,
    problems_of,
)
from muster.types.worker import KILLED, OOM_KILLED, SHORTAGE, Worker
from muster.types.world import Gate, GateState

RankPhase = Literal["starting", "running", "stopping", "succeeded", "failed", "lost"]

NOT_LOOKED_AT = Grant(0, False, "Unknown", "not looked at yet")
INVALID = "InvalidSpec"
WAITING = "WorkersWaiting"
STALLED = "Stalled"
WAIT_COUNTS = timedelta(seconds=3)  # a worker that waits for no longer than that is only being started
ONE_ROUND = timedelta(seconds=2)  # workers killed for memory within that died in the same round
_MOST_CAUSES = 3
_LONGEST_CAUSE = 400
_MOST_PROBLEMS = 20


@dataclass(frozen=True)
class Observed:
    """What is there: the coordinator's run, the backend's workers, and what may be had."""

    run: run.Run | None = None
    reason: str = ""  # the coordinator's, for users
    confirmed: bool = False  # its members were told the outcome
    workers: tuple[Worker, ...] = ()
    absent_since: Mapping[str, datetime] = field(default_factory=dict)  # workers that run and are not on the run
    grant: Grant = NOT_LOOKED_AT
    backend: str = "local"  # where it runs: what the spec's word for it stands for here
    altered: tuple[str, ...] = ()  # fields that were changed around us since its workers were started with them
    kept: Kept | None = None  # what of its state is safe
    starts: StartAllowance = ANY_NUMBER  # how many more workers its machine may start now
    ahead: timedelta = timedelta()  # by how much the time of day is ahead of the clock that durations are measured with

    def shown(self, at: datetime) -> datetime:
        """A moment of the clock that durations are measured with, as people read it."""
        return at + self.ahead

    @property
    def last_round(self) -> world.Round | None:
        return self.run.round if self.run is not None else None

    @functools.cached_property
    def by_name(self) -> Mapping[str, Worker]:
        return {worker.name: worker for worker in self.workers}

    @functools.cached_property
    def killed_for_memory(self) -> tuple[Worker, ...]:
        """Workers that the platform killed, ranks and all; of those that died in one round, the first."""
        found: list[Worker] = []
        for worker in sorted(self.workers, key=lambda one: one.ended_at or one.started_at):
            if worker.ended_at is None or (worker.reason, worker.exit_code) != (OOM_KILLED, KILLED):
                continue
            if not found or found[-1].ended_at is None or worker.ended_at - found[-1].ended_at > ONE_ROUND:
                found.append(worker)
        return tuple(found)


def problems_with(training: Training, seen: Observed) -> list[Problem]:
    """Why a spec that was stored around the API cannot be acted on."""
    fixed = "cannot change once workers were started with it: put it back, or submit a new training"
    return [*problems_of(training), *(Problem(f"spec.{name}", fixed) for name in seen.altered)]


def in_effect(training: Training, seen: Observed | None = None) -> Spec:
    """The spec that is acted on. One that cannot be leaves the world at the size that it had."""
    status = training.status
    if not status.observed_generation or not problems_with(training, seen or Observed()):
        return training.spec
    size = status.world_size
    return replace(training.spec, world_size=WorldSize(size.min, size.target, size.max), spares=status.spares.target)


def mirrored(training: Training, seen: Observed, now: datetime) -> Status:
    """The status as it is now, for the generation that was looked at."""
    problems, old = problems_with(training, seen), training.status
    spec = in_effect(training, seen)
    size = spec.world_size
    current = seen.run.running if seen.run is not None else None
    ready = _ready(old, seen, current)
    below = seen.run is None or seen.run.below_min_since is not None
    reached = current is not None and current.world_size == ready and not problems
    reached = reached and (ready == size.target or (spec.elasticity == "fill" and ready > size.target))
    reached = reached and not (seen.run is not None and (sizes.on_trial(seen.run) or heals.awaits_step(seen.run)))
    status = replace(
        old,
        observed_generation=max(old.observed_generation, training.generation),
        world_size=WorldStatus(ready, size.target, size.min, size.max, below),
        spares=SparesStatus(_spares(seen), spec.spares),
        round=old.round if seen.last_round is None else seen.last_round.number,
        round_times=_round_times(old, seen),
        rendezvous_endpoint=_endpoint(current),
        restarts=max(old.restarts, _restarts_used(spec, seen)),
        ranks=ranks(training, seen, now),
        workers=present.workers(old, seen, now),
        kept_state=kept_state(old, seen, now),
        bench=_bench(old, seen, now),
    )
    status = moments.waiting(training, status, now)
    if old.started_at is None and seen.last_round is not None:
        status = moments.kept(replace(status, started_at=seen.shown(now)), "started_at", now, seen.ahead)
    if old.phase == "pending" and ready >= size.min and not spec.suspend:
        status = lifecycle.with_phase(status, "ready")
    if old.observed_generation and old.world_size.target != size.target:
        direction = "scaled up" if size.target > old.world_size.target else "scaled down"
        resize = Resize(old.world_size.target, size.target, f"{direction} on request", seen.shown(now))
        status = replace(status, last_resize=resize)
    status = _validity(training, status, problems, seen.shown(now))
    told = replace(training, spec=spec)
    return lifecycle.set_back(_conditions(told, seen, status, reached=reached, below=below, now=now))


def _round_times(old: Status, seen: Observed) -> RoundTimes | None:
    """Return how long the last round took; a coordinator that has come back knows only what was stored."""
    last, known = seen.last_round, old.round_times
    if last is None or last.ranks_run_s is None:
        return known if last is None or (known is not None and known.round == last.number) else None
    step_s = last.next_step_s
    return RoundTimes(last.number, round(last.ranks_run_s, 4), None if step_s is None else round(step_s, 4))


def _endpoint(current: world.Round | None) -> str | None:
    """Where the ranks of the round that is out meet: MASTER_ADDR and MASTER_PORT, as they have them."""
    if current is None or not current.store_port:
        return None
    host = f"[{current.store_addr}]" if ":" in current.store_addr else current.store_addr
    return f"{host}:{current.store_port}"


def _bench(old: Status, seen: Observed, now: datetime) -> Bench | None:
    """As it was measured once; a coordinator that has come back does not know it any more."""
    found = seen.run.bench if seen.run is not None else None
    return old.bench if found is None or old.bench is not None else replace(found, measured_at=seen.shown(now))


def size_of(spec: Spec, seen: Observed) -> int:
    """How many workers are to train together now. One that lends does without spares first."""
    size = spec.world_size
    if spec.elasticity == "fixed" or seen.grant.places is None:
        return size.target
    held = len(seen.grant.places)
    return max(size.min, min(size.max, max(min(size.target, held), held - spec.spares)))


def _lent(spec: Spec, seen: Observed) -> bool:
    """It trains with all that it has, and others have what it lacks."""
    current = seen.run.running if seen.run is not None else None
    return seen.grant.reason == LENT and current is not None and current.world_size == size_of(spec, seen)


def _restarts_used(spec: Spec, seen: Observed) -> int:
    used = seen.run.restarts_used if seen.run is not None else 0
    return max(used, min(used + len(seen.killed_for_memory), spec.max_restarts))


def _ready(old: Status, seen: Observed, current: world.Round | None) -> int:
    """Workers of the released round all of whose ranks run. A coordinator that has just come back does not know yet."""
    if current is None:
        return 0
    if seen.run is not None and seen.run.recovery_until is not None and old.round == current.number:
        return old.world_size.ready
    return len(current.up)


def _validity(training: Training, status: Status, problems: Sequence[Problem], now: datetime) -> Status:
    """Only what was invalid once has anything to say about that."""
    turn, generation = lifecycle.with_condition, training.generation
    if problems:
        listed = "; ".join(f"{one.field}: {one.message}" for one in problems[:_MOST_PROBLEMS])
        more = f"; and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        return turn(status, "Valid", False, INVALID, f"its spec cannot be acted on: {listed}{more}", now, generation)
    if status.condition("Valid") is not None:
        return turn(status, "Valid", True, "Valid", "its spec can be acted on", now, generation)
    return status


def _conditions(
    training: Training, seen: Observed, status: Status, *, reached: bool, below: bool, now: datetime
) -> Status:
    generation, size, shown = training.generation, training.spec.world_size, seen.shown(now)
    turn, valid = lifecycle.with_condition, status.condition("Valid")
    invalid = valid.message if valid is not None and valid.status == "False" else ""
    grant, suspended = seen.grant, seen.grant.reason == SUSPENDED
    if not invalid and (
        grant.admitted or suspended or not status.holds("Admitted")
    ):  # else, once admitted, it stays so
        status = turn(status, "Admitted", grant.admitted, grant.reason, grant.message, shown, generation)
    why = _why(seen, size.target, invalid)
    ready, back = status.world_size.ready, taken_back(training, seen)
    why = f"taken back to {back.size}: {back.why}" if back is not None else why
    aim = max(size.target, size_of(training.spec, seen))
    took = show_round_times(status)
    trains = plural.workers_train(aim, f"{ready} of ") + (f"; {took}" if took else "")
    told = trains if reached else f"{ready} of {aim} ready: {invalid or why}"
    name = "Reached" if reached else INVALID if invalid else WAITING if _waits_long(seen, why, now) else "NotYet"
    lent = _lent(training.spec, seen) and not reached and not invalid
    name = LENT if lent else name
    name = TAKEN_BACK if back is not None and not invalid else name
    status = turn(status, "TargetReached", reached, name, told, shown, generation)
    name = "Enough" if not below else "WorkersMissing" if status.phase == "ready" else "Forming"
    told = (
        _why(seen, size.min, invalid)
        if below
        else f"at least {plural.workers(size.min)} {'is' if size.min == 1 else 'are'} there"
    )
    status = turn(status, "BelowMinimum", below, name, told, shown, generation)
    moving = status.phase == "ready" and not reached and not below and not invalid and back is None and not lent
    told = f"towards {aim}: {why}" if moving else why if back is not None or lent else "no resize is going on"
    name = "Resizing" if moving else TAKEN_BACK if back is not None else LENT if lent else "Settled"
    status = turn(status, "Resizing", moving, name, told, shown, generation)
    status = _stalled(status, seen, shown, generation)
    ended = status.outcome is not None or (seen.run is not None and seen.run.outcome is not None)
    if ended or not training.spec.mesh.required:  # how the mesh was at the end stays to be seen
        return status
    return _mesh_conditions(training, _gate(seen), status, why, shown)


def _stalled(status: Status, seen: Observed, now: datetime, generation: int) -> Status:
    """Only a training whose steps have stalled once has the condition."""
    current = seen.run.running if seen.run is not None else None
    stall = seen.run.stall if seen.run is not None else None
    turn = lifecycle.with_condition
    if stall is not None and current is not None and stall.round == current.number:
        return turn(status, STALLED, True, "NoStep", stall.warning, now, generation)
    if status.condition(STALLED) is not None:
        return turn(status, STALLED, False, "StepsCome", "no stall is known", now, generation)
    return status


def taken_back(training: Training, seen: Observed) -> world.TakenBack | None:
    """The size that its spec asks for and that was seen not to work, with what is formed instead."""
    back = seen.run.taken_back if seen.run is not None else None
    return back if back is not None and back.target == size_of(training.spec, seen) else None


def why_it_waits(training: Training, seen: Observed) -> str:
    """What one that has not begun lacks."""
    return seen.grant.message if not seen.grant.admitted else _why(seen, training.spec.world_size.min, "")


def _why(seen: Observed, wanted: int, invalid: str) -> str:
    """What so many workers wait for: their platform, the coordinator, or to be given a place."""
    if seen.grant.reason in (SUSPENDED, LENT):
        return invalid or seen.grant.message
    running = sum(worker.alive and not worker.waiting and not worker.stopping for worker in seen.workers)
    if running < wanted and (told := waits(seen)):
        return told
    if running < wanted and seen.starts.reason:
        return seen.starts.reason
    failed = _not_started(seen) if running < wanted else ""
    if seen.run is not None:
        return f"{seen.reason}; {failed}" if failed else seen.reason
    if invalid:
        return invalid
    return (failed or "workers are being started") if seen.grant.admitted else seen.grant.message


def _not_started(seen: Observed) -> str:
    """Why the last worker that was ordered could not be started; empty if it was."""
    last = max(seen.workers, key=lambda worker: worker.started_at, default=None)
    if last is None or last.alive or last.exit_code != SHORTAGE:
        return ""
    return f"{last.name} {' '.join(last.why_ended.split())[:_LONGEST_CAUSE]}"


# Waiting for the platform ------------------------------------------------------------------------


def waits(seen: Observed) -> str:
    """Which workers the platform lets wait, and why; empty if none."""
    found = [f"{run.listed(names)} {'wait' if len(names) > 1 else 'waits'}: {why}" for why, names in _causes(seen)]
    return "; ".join(found[:_MOST_CAUSES])


def _causes(seen: Observed) -> list[tuple[str, list[str]]]:
    """Each cause once, with whom it keeps waiting."""
    found: dict[str, list[str]] = {}
    for worker in seen.workers:
        if worker.alive and worker.waiting:
            why = " ".join(worker.waiting.split())
            why = why if len(why) <= _LONGEST_CAUSE else f"{why[: _LONGEST_CAUSE - 1]}…"
            found.setdefault(why, []).append(worker.name)
    return list(found.items())


def wait_counts_at(seen: Observed) -> datetime | None:
    """When the first of those that wait has waited long enough to be talked about."""
    begun = [worker.started_at for worker in seen.workers if worker.alive and worker.waiting]
    return min(begun) + WAIT_COUNTS if begun else None


def _waits_long(seen: Observed, why: str, now: datetime) -> bool:
    since = wait_counts_at(seen)
    return since is not None and now >= since and why == waits(seen)


# The mesh ----------------------------------------------------------------------------------------


def _mesh_conditions(training: Training, gate: Gate | None, status: Status, why: str, now: datetime) -> Status:
    name = "Converging" if gate is None else gate.state.value.capitalize()
    told = f"nobody has to be reached yet: {why}"
    if gate is not None and gate.state is GateState.READY:
        told = f"all {gate.size} workers reach each other, at most {gate.slowest_s * 1000:.3g} ms for a round trip"
    elif gate is not None:
        told = f"not reached: {gate.named}"
    if name == "Degraded":
        told += f"; ranks started after {training.spec.mesh.timeout_seconds:g} s all the same"
    for kind, holds in (("MeshReady", name == "Ready"), ("DegradedMesh", name == "Degraded")):
        status = lifecycle.with_condition(status, kind, holds, name, told, now, training.generation)
    return status


def _gate(seen: Observed) -> Gate | None:
    """Of the world that trains; where none does, of the one that is to, or was."""
    if seen.run is None or seen.run.running is not None:
        return seen.run.gate if seen.run is not None else None
    return seen.run.coming or seen.run.gate


def mesh_keys(training: Training, seen: Observed) -> Mapping[str, str]:
    """Key → value that those who wait for the mesh of the round that is out must find, below the training's prefix."""
    current, gate = (seen.run.running, seen.run.gate) if seen.run is not None else (None, None)
    if current is None or gate is None or not training.spec.mesh.required:
        return {}
    names = {worker.name: worker.mesh_name for worker in seen.workers}
    keys = {f"mesh-{gate.state}/{names.get(seat.name) or seat.name}" for seat in current.seats}
    return dict.fromkeys(sorted(keys), f"round {current.number}")


# News --------------------------------------------------------------------------------------------


def news(training: Training, seen: Observed, status: Status) -> tuple[Event, ...]:
    """What is worth an entry in the journal between the stored status and this one."""
    old = training.status
    found = _ignored(training, seen) if old.observed_generation == 0 else []
    resize = status.last_resize
    if resize is not None and resize != old.last_resize:
        found.append(Event("Resizing", f"target {resize.from_target} → {resize.to_target}: {resize.reason}"))
    found += _turned(training, status)
    if status.phase == "ready" and old.phase != "ready":
        found.append(
            Event(
                "Ready",
                f"{plural.workers(status.world_size.ready)} run{'s' * (status.world_size.ready == 1)} ranks",
                round=status.round,
            )
        )
    if (loss := state_loss.found(old, seen.last_round)) is not None:
        found.append(Event(STATE_LOST, loss.text, "Warning", round=status.round, data=loss.data))
    return (*found, *_invalid(training, status), *_waiting(training, seen, status))


def _turned(training: Training, status: Status) -> list[Event]:
    found = []
    for kind, holds, event, bad in (
        ("Admitted", "False", "Queued", True),
        ("Admitted", "True", "Admitted", False),
        ("BelowMinimum", "True", "BelowMinimum", True),
        ("TargetReached", "True", TARGET_REACHED, False),
    ):
        was, is_now = training.status.condition(kind), status.condition(kind)
        turned = is_now is not None and is_now.status == holds and (was is None or was.status != holds)
        if is_now is None or not turned or (event == "BelowMinimum" and status.phase == "pending"):
            continue
        data: dict[str, Any] = {"generation": is_now.observed_generation, "target": status.world_size.target}
        told = Event(event, is_now.message, "Warning" if bad else "Normal", round=status.round)
        if (event, is_now.reason) == ("Queued", SUSPENDED):
            told = replace(told, reason=SUSPENDED, type="Normal")
        if event == TARGET_REACHED and (times := status.round_times) is not None:
            data |= {"ranksRunSeconds": times.ranks_run_seconds}
            data |= {} if times.next_step_seconds is None else {"nextStepSeconds": times.next_step_seconds}
        found.append(replace(told, data=data) if event == TARGET_REACHED else told)
    return found


def _invalid(training: Training, status: Status) -> list[Event]:
    """Once for each generation."""
    was, is_now = training.status.condition("Valid"), status.condition("Valid")
    if is_now is None or is_now.status != "False":
        return []
    if was is not None and was.status == "False" and was.observed_generation == is_now.observed_generation:
        return []
    return [Event(INVALID, is_now.message, "Warning", data={"generation": training.generation})]


def _waiting(training: Training, seen: Observed, status: Status) -> list[Event]:
    """Once for each cause: the stored condition has those that were told."""
    was, is_now = training.status.condition("TargetReached"), status.condition("TargetReached")
    if is_now is None or is_now.reason != WAITING:
        return []
    told = was.message if was is not None and was.reason == WAITING else ""
    return [
        Event("WorkerWaiting", f"{run.listed(names)}: {why}", "Warning", data={"workers": names})
        for why, names in _causes(seen)[:_MOST_CAUSES]
        if why not in told
    ]


def _ignored(training: Training, seen: Observed) -> list[Event]:
    """What was asked for and has no effect where it runs: nobody should have to find that out."""
    spec, backend = training.spec, seen.backend
    asked = {
        "image": backend == "local" and spec.image is not None,
        "resources.cpu": backend == "local" and spec.resources.cpu is not None,
        "template": backend == "local" and spec.template is not None,
        "topologyKey": backend == "local" and spec.topology_key is not None,
        "elasticity": backend != "local" and spec.elasticity != "fixed" and seen.grant.places is None,
    }
    return [
        Event("FieldIgnored", f"spec.{name} has no effect on the {backend} backend in this version", "Warning")
        for name, given in asked.items()
        if given
    ]


def _spares(seen: Observed) -> int:
    if seen.run is None:
        return 0
    out, lent = seen.run.kept_out, seen.run.lent
    spares = (one for one in seen.run.members.values() if one.role is world.Role.SPARE)
    return sum(one.member_id not in out and one.name not in lent and not one.doing for one in spares)


# State -------------------------------------------------------------------------------------------


def kept_state(old: Status, seen: Observed, now: datetime) -> KeptState | None:
    """Return what of its state is safe, and which finished steps the round began without."""
    state = _safe_state(old, seen, now)
    return None if state is None else state_loss.followed(state, old, seen.last_round)


def _safe_state(old: Status, seen: Observed, now: datetime) -> KeptState | None:
    """What of its state is safe. Who has just come back to its workers knows only what was known before."""
    before = old.kept_state
    if seen.kept is None:
        back = seen.run is not None and seen.run.recovery_until is None
        return last_state(before) if back else before
    known, age_s = seen.kept.state, seen.kept.age_s
    if before is not None and (before.step, before.round, before.survives) == (
        known.step,
        known.round,
        known.survives,
    ):
        return replace(known, safe_at=before.safe_at)
    return known if age_s is None else replace(known, safe_at=seen.shown(now) - timedelta(seconds=age_s))


def last_state(known: KeptState | None) -> KeptState | None:
    """What is left when nobody has anything in memory any more."""
    if known is None:
        return None
    return KeptState(
        durable_step=known.durable_step,
        resumed=known.resumed,
        refused=known.refused,
        reached=known.reached,
        lost=known.lost,
        lost_steps=known.lost_steps,
    )


# Ranks -------------------------------------------------------------------------------------------


def ranks(training: Training, seen: Observed, now: datetime) -> tuple[RankStatus, ...]:
    """Each rank of the last released round, as far as it is known."""
    last = seen.last_round
    if last is None:
        return training.status.ranks
    before, workers = {rank.rank: rank for rank in training.status.ranks}, seen.by_name
    found, rank = [], 0
    for seat in last.seats:
        worker = workers.get(seat.name)
        for _ in range(seat.procs):
            old = before.get(rank)
            same = old if old is not None and old.round == last.number else None
            mark = last.progress.get(rank)
            found.append(
                RankStatus(
                    rank=rank,
                    worker=seat.name,
                    node=worker.node if worker is not None else "",
                    phase=_phase(last, seat, rank),
                    round=last.number,
                    restarts=restarts(old, last.number),
                    started_at=same.started_at if same is not None else seen.shown(now),
                    step=mark.step if mark is not None else same.step if same is not None else None,
                )
            )
            rank += 1
    return tuple(found)


def _phase(last: world.Round, seat: world.Seat, rank: int) -> RankPhase:
    if (end := last.exits.get(rank)) is not None:
        return "succeeded" if end.exit_code == 0 else "failed"
    lost = (loss.member_id for loss in last.losses if not loss.planned)
    if seat.member_id in last.fences or seat.member_id in lost:
        return "lost"
    if last.recall is not None:
        return "stopping"
    return "running" if seat.member_id in last.up else "starting"


def restarts(old: RankStatus | None, number: int) -> int:
    """How often a rank was started before: rounds since it first appeared, as far as the status has followed."""
    return 0 if old is None else old.restarts + max(0, number - old.round)


def last_ranks(training: Training, seen: Observed, now: datetime) -> tuple[RankStatus, ...]:
    """The ranks of an ended training: each has come to its own end."""
    ended: frozenset[str] = frozenset({"succeeded", "failed", "lost"})
    return tuple(rank if rank.phase in ended else replace(rank, phase="lost") for rank in ranks(training, seen, now))
