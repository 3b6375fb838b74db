"""What do members bring back that were here, or with another coordinator, before?

Their round, how its ranks ended meanwhile, what they have in memory, and perhaps the record of a run that this
coordinator has never seen. Whether they are let in is `world.joining`'s business.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from muster.core.succession import electorate
from muster.core.world import launches, records, transitions
from muster.core.world.run import Run, kept_lease
from muster.types.frames import Presented, RecallFrame, RunRecord, reported
from muster.types.run_event import Kind
from muster.types.world import MemberId, Role
from muster.world.believable import believable
from muster.world.conversation import Conversation


class Returning:
    def __init__(self, at: Conversation) -> None:
        self._at = at

    def follow(self, record: RunRecord, now: float) -> None:
        """The highest round presented is the one to go on with, until this coordinator leads a round of its own."""
        at = self._at
        if record.round >= 0 and not (record.store and (record.seats or record.outline)):
            raise ValueError("a record shows a round without its seats")  # whatever it is needed for
        before = at.run
        if before is not None and at.led:
            at.run = transitions.skip_past(before, record.round)
        elif before is None or record.round >= before.next_round:
            self.restore(record, now, certain=False)
            if before is not None:
                self._retell(before)
        elif before.recovery_until is not None:
            for seat in record.told_seats:  # of a large world each knows its own alone
                at.run = transitions.seat_shown(at.run or before, record.round, seat)
            if not at.knows_lent:
                at.run = transitions.lent_too(at.run or before, record.lent)

    def _retell(self, before: Run) -> None:
        """Members that were here before a higher round was presented have to hear of it."""
        if before.round is not None:
            self._at.send_all(RecallFrame(round=before.round.number, reason="a later round was presented"))
        self._at.send_record()

    def restore(self, record: RunRecord, now: float, *, certain: bool) -> None:
        """Take over the round that a record shows; members that are already here enter it again."""
        at = self._at
        record = records.on_clock(record, at.clock, now)
        before, last = at.run, record.as_round()
        settings, target = record.settings, record.target
        lent = {**({} if at.knows_lent else record.lent), **(before.lent if before is not None else {})}
        if at.directed and before is not None:
            settings, target = replace(before.settings, lease_s=settings.lease_s), before.target
        settings = kept_lease(before, settings)
        # Where others may lead, no member keeps its ranks for a coordinator that is dead: they are back soon, or lost.
        soon = electorate.can_succeed(record.electorate)
        run = transitions.restored(
            settings,
            target,
            record.restarts_used,
            last,
            now,
            gate=record.gate,
            lent=lent,
            healing=record.healing,
            usual=record.pace,
            certain=certain,
            soon=soon,
        )
        at.unsaved = True
        run = replace(
            run,
            best_step=record.best_step,
            stale_rounds=record.stale_rounds,
            proven=record.proven,
            taken_back=record.taken_back,
            hopeless=record.hopeless,
            durable_step=record.durable_step,
            holds_farewell=at.directed if before is None else before.holds_farewell,
            ordered=None if before is None else before.ordered,
            **_ids(record, before, at.incarnation),
        )
        if before is not None and before.outcome is not None:
            run = transitions.adopt(run, before.outcome)
        elif record.outcome is not None:
            run = transitions.adopt(run, record.outcome)
            at.ended_at = now
            if last is not None and not {seat.member_id for seat in last.seats} <= last.finished:
                # Members that have the outcome may still be stopping their ranks, and the next run must wait for them.
                run = replace(run, not_before=now + settings.lease_s + settings.kill_margin_s)
        for member in before.members.values() if before is not None else ():
            entered = transitions.join(run, member, now)
            if isinstance(entered, Run):
                run = entered
        for member_id in run.members:  # none of them says again what it has in memory
            if before is not None and member_id in before.holdings:
                run = transitions.holds(run, member_id, before.holdings[member_id], now)
        at.run = run
        at.unreached |= at.agents.keys()  # what they reported is forgotten: being told anew, they report anew
        if last is not None:
            at.tell(Kind.RECOVERED, f"took over round {last.number} in epoch {at.epoch}", now)

    def enter(self, member_id: MemberId, present: Presented, now: float) -> None:
        """What a member brings from before its connection broke: exits, success, a stop."""
        assert self._at.run is not None
        run, number = self._at.run, present.round
        if present.holding is not None:
            run = transitions.holds(run, member_id, believable(present.holding), now)
        if number is not None:
            run = transitions.exited(run, member_id, number, reported(present.exits, now))
            if present.finished:
                run = transitions.finished(run, member_id, number)
            if present.running:
                run = transitions.started(run, member_id, number)
                if present.up:
                    run = transitions.up(run, member_id, number, now, seen=False)
            else:
                run = transitions.stopped(run, member_id, number, present.store_port, now, present.why)
        self._at.run = run
        self.out_of_round(member_id, running=present.running)

    def out_of_round(self, member_id: MemberId, *, running: bool = False) -> None:
        """It lost its place before the release reached it, or is not let in again: nobody else would say so."""
        run = self._at.run
        assert run is not None
        member = run.members.get(member_id)
        returns = run.recovery_until is not None or (member is not None and member.role is Role.ACTIVE)
        if run.round is not None and not returns and not running:
            self._at.run = transitions.gone(run, member_id, run.round.number)


def _ids(record: RunRecord, before: Run | None, fresh: str) -> dict[str, Any]:
    """Merge the ids of a record's run with those of the run that was here before."""
    own_ids, own_launches = ((), ()) if before is None else (before.incarnations, before.launches)
    ids = launches.merged(own_ids, record.incarnations, launches.MOST_INCARNATIONS)
    return {
        "incarnations": ids or (fresh,),
        "launches": launches.merged(own_launches, record.launches, launches.MOST_LAUNCHES),
        "earlier": (record.earlier or (before.earlier if before is not None else ()))[-launches.MOST_EARLIER :],
    }
