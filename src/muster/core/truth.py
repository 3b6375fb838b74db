"""What is true of a training now: its status as it follows from what is observed, and how each rank ended.

Nothing is decided here. `worldSize.ready` counts only workers of the released round whose ranks all run; the
condition `TargetReached` holds only for a round of exactly the size that the looked-at generation asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from muster.core import gates, lifecycle, roll
from muster.core.admission import Grant
from muster.types import world
from muster.types.event import Event
from muster.types.training import (
    RankExit,
    RankStatus,
    Resize,
    SparesStatus,
    Status,
    Training,
    WorldStatus,
)
from muster.types.worker import Worker

RankPhase = Literal["starting", "running", "stopping", "succeeded", "failed", "lost"]


NOT_LOOKED_AT = Grant(0, False, "Unknown", "not looked at yet")


@dataclass(frozen=True)
class Observed:
    """What is there: the coordinator's roll, the backend's workers, and what may be had."""

    roll: roll.Roll | None = None
    reason: str = ""  # the coordinator's, for users
    confirmed: bool = False  # its members were told the outcome
    workers: tuple[Worker, ...] = ()
    absent_since: Mapping[str, datetime] = field(default_factory=dict)  # workers that run and are not on the roll
    grant: Grant = NOT_LOOKED_AT

    @property
    def last_round(self) -> world.Round | None:
        return self.roll.round if self.roll is not None else None

    @property
    def nodes(self) -> Mapping[str, str]:
        return {worker.name: worker.node for worker in self.workers}


def mirrored(training: Training, seen: Observed, now: datetime) -> Status:
    """The status as it is now, for the generation that was looked at."""
    spec, old = training.spec, training.status
    size = spec.world_size
    current = seen.roll.running if seen.roll is not None else None
    ready = _ready(old, seen, current)
    below = seen.roll is None or seen.roll.below_min_since is not None
    reached = current is not None and current.world_size == size.target == ready
    status = replace(
        old,
        observed_generation=max(old.observed_generation, training.generation),
        world_size=WorldStatus(ready, size.target, size.min, size.max, below),
        spares=SparesStatus(_spares(seen), spec.spares),
        round=old.round if seen.last_round is None else seen.last_round.number,
        restarts=max(old.restarts, seen.roll.restarts_used if seen.roll is not None else 0),
        ranks=_ranks(training, seen, now),
        started_at=old.started_at or (now if seen.last_round is not None else None),
    )
    if old.phase == "pending" and ready >= size.min:
        status = lifecycle.with_phase(status, "ready")
    if old.observed_generation and old.world_size.target != size.target:
        direction = "scaled up" if size.target > old.world_size.target else "scaled down"
        status = replace(status, last_resize=Resize(old.world_size.target, size.target, f"{direction} on request", now))
    return _conditions(training, seen, status, reached=reached, below=below, now=now)


def _ready(old: Status, seen: Observed, current: world.Round | None) -> int:
    """Workers of the released round all of whose ranks run. A coordinator that has just come back does not know yet."""
    if current is None:
        return 0
    if seen.roll is not None and seen.roll.recovery_until is not None and old.round == current.number:
        return old.world_size.ready
    return len(current.up)


def _conditions(
    training: Training, seen: Observed, status: Status, *, reached: bool, below: bool, now: datetime
) -> Status:
    generation, size = training.generation, training.spec.world_size
    turn = lifecycle.with_condition
    if seen.grant.admitted or not status.holds("Admitted"):  # once admitted, it stays so
        grant = seen.grant
        status = turn(status, "Admitted", grant.admitted, grant.reason, grant.message, now, generation)
    why = seen.reason if seen.roll is not None else seen.grant.message
    if seen.roll is None and seen.grant.admitted:
        why = "workers are being started"
    ready = status.world_size.ready
    told = f"{ready} of {size.target} workers train" if reached else f"{ready} of {size.target} ready: {why}"
    status = turn(status, "TargetReached", reached, "Reached" if reached else "NotYet", told, now, generation)
    name = "Enough" if not below else "WorkersMissing" if status.phase == "ready" else "Forming"
    told = why if below else f"at least {size.min} workers are there"
    status = turn(status, "BelowMinimum", below, name, told, now, generation)
    moving = status.phase == "ready" and not reached and not below
    told = f"towards {size.target}: {why}" if moving else "no resize is going on"
    status = turn(status, "Resizing", moving, "Resizing" if moving else "Settled", told, now, generation)
    ended = status.outcome is not None or (seen.roll is not None and seen.roll.outcome is not None)
    if ended or not training.spec.mesh.required:  # how the mesh was at the end stays to be seen
        return status
    return _mesh_conditions(training, _gate(seen), status, why, now)


# The mesh ----------------------------------------------------------------------------------------


def _mesh_conditions(training: Training, gate: gates.Gate | None, status: Status, why: str, now: datetime) -> Status:
    name = "Converging" if gate is None else gate.state.value.capitalize()
    told = f"nobody has to be reached yet: {why}"
    if gate is not None and gate.state is gates.State.READY:
        told = f"all {gate.size} workers reach each other, at most {gate.slowest_s * 1000:.3g} ms for a round trip"
    elif gate is not None:
        told = f"not reached: {gate.named}"
    if name == "Degraded":
        told += f"; ranks started after {training.spec.mesh.timeout_seconds:g} s all the same"
    for kind, holds in (("MeshReady", name == "Ready"), ("DegradedMesh", name == "Degraded")):
        status = lifecycle.with_condition(status, kind, holds, name, told, now, training.generation)
    return status


def _gate(seen: Observed) -> gates.Gate | None:
    """Of the world that trains; where none does, of the one that is to, or was."""
    if seen.roll is None or seen.roll.running is not None:
        return seen.roll.gate if seen.roll is not None else None
    return seen.roll.coming or seen.roll.gate


def mesh_keys(training: Training, seen: Observed) -> Mapping[str, str]:
    """Key → value that those who wait for the mesh of the round that is out must find, below the training's prefix."""
    current, gate = (seen.roll.running, seen.roll.gate) if seen.roll is not None else (None, None)
    if current is None or gate is None or not training.spec.mesh.required:
        return {}
    return {f"mesh-{gate.state}/{seat.name}": f"round {current.number}" for seat in current.seats}


def news(training: Training, status: Status) -> tuple[Event, ...]:
    """What is worth an entry in the journal between the stored status and this one."""
    old, found = training.status, _ignored(training) if training.status.observed_generation == 0 else []
    resize = status.last_resize
    if resize is not None and resize != old.last_resize:
        found.append(Event("Resizing", f"target {resize.from_target} → {resize.to_target}: {resize.reason}"))
    for kind, holds, event, bad in (
        ("Admitted", "False", "Queued", True),
        ("Admitted", "True", "Admitted", False),
        ("BelowMinimum", "True", "BelowMinimum", True),
        ("TargetReached", "True", "TargetReached", False),
    ):
        was, is_now = old.condition(kind), status.condition(kind)
        turned = is_now is not None and is_now.status == holds and (was is None or was.status != holds)
        if is_now is None or not turned or (event == "BelowMinimum" and status.phase == "pending"):
            continue
        found.append(Event(event, is_now.message, "Warning" if bad else "Normal", round=status.round))
    if status.phase == "ready" and old.phase != "ready":
        found.append(Event("Ready", f"{status.world_size.ready} workers run ranks", round=status.round))
    return tuple(found)


def _ignored(training: Training) -> list[Event]:
    """What was asked for and has no effect where it runs: nobody should have to find that out."""
    spec = training.spec
    asked = {
        "image": spec.backend == "local" and spec.image is not None,
        "resources.cpu": spec.backend == "local" and spec.resources.cpu is not None,
    }
    return [
        Event("FieldIgnored", f"spec.{name} has no effect on the {spec.backend} backend in this version", "Warning")
        for name, given in asked.items()
        if given
    ]


def _spares(seen: Observed) -> int:
    if seen.roll is None:
        return 0
    members, kept_out = seen.roll.members, seen.roll.kept_out
    return sum(one.role is world.Role.SPARE and one.member_id not in kept_out for one in members.values())


# Ranks -------------------------------------------------------------------------------------------


def _ranks(training: Training, seen: Observed, now: datetime) -> tuple[RankStatus, ...]:
    """Each rank of the last released round, as far as it is known."""
    last = seen.last_round
    if last is None:
        return training.status.ranks
    before, nodes = {rank.rank: rank for rank in training.status.ranks}, seen.nodes
    found, rank = [], 0
    for seat in last.seats:
        for _ in range(seat.procs):
            old = before.get(rank)
            same = old if old is not None and old.round == last.number else None
            mark = last.progress.get(rank)
            found.append(
                RankStatus(
                    rank=rank,
                    worker=seat.name,
                    node=nodes.get(seat.name, ""),
                    phase=_phase(last, seat, rank),
                    round=last.number,
                    restarts=_restarts(old, last.number),
                    started_at=same.started_at if same is not None else now,
                    step=mark.step if mark is not None else same.step if same is not None else None,
                )
            )
            rank += 1
    return tuple(found)


def _phase(last: world.Round, seat: world.Seat, rank: int) -> RankPhase:
    if (end := last.exits.get(rank)) is not None:
        return "succeeded" if end.exit_code == 0 else "failed"
    if seat.member_id in last.fences or any(loss.member_id == seat.member_id for loss in last.losses):
        return "lost"
    if last.recall is not None:
        return "stopping"
    return "running" if seat.member_id in last.up else "starting"


def _restarts(old: RankStatus | None, number: int) -> int:
    """How often a rank was started before: rounds since it first appeared, as far as the status has followed."""
    return 0 if old is None else old.restarts + max(0, number - old.round)


# Exits -------------------------------------------------------------------------------------------


def exits(training: Training, seen: Observed, state: str, now: datetime) -> tuple[RankExit, ...]:
    """Exactly one for each rank of the last round; whose end nobody reported was lost with its node."""
    before = {rank.rank: rank for rank in training.status.ranks}
    last, nodes = seen.last_round, seen.nodes
    if last is None:
        return tuple(_lost(rank) for rank in training.status.ranks)
    found = []
    for rank in _ranks(training, seen, now):
        end = last.exits.get(rank.rank)
        found.append(_lost(rank) if end is None else exit_of(end, state, before.get(rank.rank), nodes))
    return tuple(found)


def _lost(rank: RankStatus) -> RankExit:
    return RankExit(rank.rank, None, "NodeLost", None, rank.worker, rank.node, rank.round, rank.restarts)


def exit_of(end: world.RankExit, state: str, old: RankStatus | None, nodes: Mapping[str, str]) -> RankExit:
    """An exit as the training shows it, in a run that ends in that state."""
    reason = end.reason
    if end.exit_code == 0:
        reason = "Completed"
    elif end.stopped and state == "cancelled":
        reason = "Cancelled"
    return RankExit(
        rank=end.rank,
        exit_code=end.exit_code,
        termination_reason=reason,
        signal=end.signal,
        worker=end.worker,
        node=nodes.get(end.worker, ""),
        round=end.round,
        restart_count=_restarts(old, end.round),
        finished_at=datetime.fromtimestamp(end.finished_at, UTC) if end.finished_at else None,
        stderr_tail=end.stderr_tail,
    )


def last_ranks(training: Training, seen: Observed, now: datetime) -> tuple[RankStatus, ...]:
    """The ranks of an ended training: each has come to its own end."""
    ended: frozenset[str] = frozenset({"succeeded", "failed", "lost"})
    return tuple(rank if rank.phase in ended else replace(rank, phase="lost") for rank in _ranks(training, seen, now))
