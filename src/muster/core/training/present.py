"""Which workers does a training have now, and what does each of them do?

Members of the run first, with the part that the coordinator gave them; then those that run, or should, and have not
joined it, and those that died lately. The list is for people: `status.ranks` and `status.spares` count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from muster.core.world.seating import natural
from muster.types import world
from muster.types.training import MOST_LISTED, Status, WorkerRole, WorkerStatus

if TYPE_CHECKING:
    from muster.core.training.status import Observed

_LONGEST_NOTE = 256
_ORDER: tuple[WorkerRole, ...] = ("active", "spare", "lent", "parked", "starting", "dead", "leaving")
DEAD_SHOWN = timedelta(minutes=10)  # how long a worker that died stays in the list
MOST_DEAD = 8  # in the list
LOST = "its agent is gone"


def workers(old: Status, seen: Observed, now: datetime) -> tuple[WorkerStatus, ...]:
    """Those that are there, in order; of very many, as many as are listed. Who is leaving at the end is no news."""
    run = seen.run
    if run is not None and (run.recovery_until is not None or run.outcome is not None):
        dead = {one.name: one for one in _dead(seen, now)}
        return tuple(dead.get(one.name, one) for one in old.workers)
    before = {(one.name, one.role): one.since for one in old.workers}
    found = [*_members(seen), *_others(old, seen), *_dead(seen, now)]
    found.sort(key=lambda one: (_ORDER.index(one.role), natural(one.name)))
    at_work = [one for one in found if one.role == "active"]
    others = [one for one in found if one.role != "active"][: max(MOST_LISTED // 2, MOST_LISTED - len(at_work))]
    listed = [*at_work[: MOST_LISTED - len(others)], *others]
    return tuple(replace(one, since=before.get((one.name, one.role)) or one.since or seen.shown(now)) for one in listed)


def _members(seen: Observed) -> Iterator[WorkerStatus]:
    if seen.run is None:
        return
    run, nodes, ranks = seen.run, seen.by_name, _ranks(seen.last_round)
    for member in run.members.values():
        worker, note = nodes.get(member.name), member.note or member.doing
        role: WorkerRole = member.role.value
        if member.name in run.lent:
            role, note = "lent", run.lent[member.name]
        elif role == "spare" and member.member_id in run.kept_out:
            role, note = "parked", run.kept_out[member.member_id]
        elif role == "spare" and member.doing:
            note = f"warming: {member.doing}"
        held = ranks.get(member.member_id, "") if role == "active" else ""
        node = worker.node if worker is not None else ""
        yield WorkerStatus(member.name, role, node, held, note=" ".join(note.split())[:_LONGEST_NOTE])


def _ranks(last: world.Round | None) -> Mapping[world.MemberId, str]:
    found, first = {}, 0
    for seat in last.seats if last is not None else ():
        found[seat.member_id] = str(first) if seat.procs == 1 else f"{first}-{first + seat.procs - 1}"
        first += seat.procs
    return found


def _others(old: Status, seen: Observed) -> Iterator[WorkerStatus]:
    """Processes that are not members. One that was a member has lost its agent, whatever its platform knows by now."""
    joined = {one.name for one in old.workers if one.role not in ("starting", "leaving")}
    here = {member.name for member in seen.run.members.values()} if seen.run is not None else set()
    for worker in seen.workers:
        if worker.alive and worker.name not in here:
            if worker.name in joined and not worker.stopping:
                yield WorkerStatus(worker.name, "dead", worker.node, note=LOST)
                continue
            role: WorkerRole = "leaving" if worker.stopping else "starting"
            note = " ".join(worker.waiting.split())[:_LONGEST_NOTE]
            yield WorkerStatus(worker.name, role, worker.node, since=seen.shown(worker.started_at), note=note)


def _dead(seen: Observed, now: datetime) -> list[WorkerStatus]:
    """Return the workers that died lately, and were not asked to leave."""
    found = [
        worker
        for worker in seen.workers
        if worker.ended_at is not None and not worker.stopping and worker.exit_code != 0
        if now - worker.ended_at < DEAD_SHOWN
    ]
    found.sort(key=lambda worker: worker.ended_at or now)
    return [
        WorkerStatus(
            worker.name,
            "dead",
            worker.node,
            since=seen.shown(worker.ended_at or now),
            note=" ".join((worker.why_ended or worker.reason or LOST).split())[:_LONGEST_NOTE],
        )
        for worker in found[-MOST_DEAD:]
    ]


def steady(found: tuple[WorkerStatus, ...]) -> tuple[WorkerStatus, ...]:
    """What of it is worth a write of its own. Joining is; having been started, and what it imports, is not."""
    return tuple(replace(one, note="", since=None) for one in found if one.role != "starting")
