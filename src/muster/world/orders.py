"""What is ordered of a run from outside: by `muster world` over a control connection, or by whoever directs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from muster.core.world import lending, transitions, views
from muster.core.world.transitions import Refusal
from muster.types.frames import AnswerFrame, AskFrame, ErrorFrame, RunRecord
from muster.types.run_event import Kind
from muster.types.world import Electorate, RunOutcome, Settings, Spot
from muster.world import wire
from muster.world.conversation import Conversation
from muster.world.frames_out import Peer


class Orders:
    def __init__(self, at: Conversation) -> None:
        self._at = at

    # Over a control connection

    def take(self, peer: Peer, frame: AskFrame, now: float) -> bool:
        """Do what is asked for; False if it was refused, which the asker has then been told."""
        refusal = self._refusal(frame, now)
        if refusal is not None:
            self._at.send(peer, ErrorFrame(code=refusal.code, message=refusal.message, seq=frame.seq))
        return refusal is None

    def answer(self, peer: Peer, frame: AskFrame, now: float) -> None:
        self._at.send(peer, AnswerFrame(seq=frame.seq, view=self.view(now)))

    def _refusal(self, frame: AskFrame, now: float) -> Refusal | None:
        if self._at.run is None:
            return Refusal("not_found", f"no run {self._at.run_id!r} here")
        match frame.ask:
            case "show":
                return None
            case "set-target":
                return self.set_target(-1 if frame.target is None else frame.target, frame.remove, now)
            case "cancel":
                return self.cancel(frame.why or "cancelled on request")
        return Refusal("invalid", f"unknown request {frame.ask!r}")

    def set_target(self, target: int, remove: Sequence[str], now: float) -> Refusal | None:
        at = self._at
        assert at.run is not None
        changed = transitions.set_target(at.run, target, list(remove), now)
        if isinstance(changed, Refusal):
            return changed
        at.tell(Kind.TARGET, f"target {at.run.target} → {target}", now)
        at.run, at.unsaved = changed, True
        at.send_record()
        return None

    def cancel(self, why: str) -> Refusal | None:
        assert self._at.run is not None
        changed = transitions.cancel(self._at.run, why)
        if isinstance(changed, Refusal):
            return changed
        self._at.run = changed
        return None

    def view(self, now: float) -> dict[str, Any]:
        """What `muster world show` prints."""
        at = self._at
        assert at.run is not None
        story = [dataclasses.asdict(event) | {"ago_s": round(now - event.at, 3)} for event in at.story]
        return (
            _electors(at.electorate, settled=at.is_settled(at.electorate))
            | views.view(at.run_id, at.epoch, at.run, at.reason, now, at.lifelines)
            | {"story": story}
        )

    # From whoever directs it

    def reconfigure(self, settings: Settings, target: int, now: float, lent: Mapping[str, str] | None = None) -> None:
        at = self._at
        before = at.renewed_run()
        at.run = transitions.reconfigure(before, settings, target, now, lent)
        at.knows_lent |= lent is not None
        if at.run is before:
            return
        at.unsaved = True
        moved = lending.changes(before.lent, at.run)
        if before.target != target or moved:
            size = f"target {before.target} → {target}" if before.target != target else f"target stays {target}"
            at.tell(Kind.TARGET, f"{size}; {moved}" if moved else size, now)
        at.send_record()

    def end(self, outcome: RunOutcome) -> None:
        """End the run like that, unless it has come to an end already."""
        assert self._at.run is not None
        self._at.run = transitions.order(self._at.run, outcome)

    def mark_dead(self, names: Sequence[str]) -> None:
        """Members that are dead, without a word of their own: nothing of theirs runs any more."""
        run = self._at.run
        assert run is not None
        for seat in run.round.seats if run.round is not None else ():
            if seat.name in names and run.round is not None:
                run = transitions.gone(run, seat.member_id, run.round.number)
        self._at.run = run

    def place(self, spots: Mapping[str, Spot]) -> None:
        """Where members are that do not know it themselves."""
        assert self._at.run is not None
        self._at.run = transitions.placed(self._at.run, spots)

    def confirm(self, outcome: RunOutcome) -> None:
        """The outcome is recorded, perhaps as another one than was proposed here: tell everyone."""
        at = self._at
        if at.run is None or at.confirmed:
            return
        at.confirmed = at.unsaved = True
        at.run = transitions.confirm(at.run, outcome)
        at.push_outcome(list(at.agents.values()))

    def let_go(self) -> None:
        """The end is recorded with every exit: members may leave."""
        if self._at.run is not None:
            self._at.run = transitions.let_go(self._at.run)

    # Keeping

    def record(self, wall: float) -> RunRecord:
        """All that another coordinator needs to go on with this run.

        The moment at which an outcome is first kept is the moment at which it became true.
        """
        at = self._at
        assert at.run is not None
        if at.run.outcome is not None and not at.run.outcome.finished_at:
            at.run = replace(at.run, outcome=replace(at.run.outcome, finished_at=wall))
        return at.moment.record


def _electors(known: Electorate, *, settled: bool) -> dict[str, Any]:
    """Who leads, and who has a voice when another has to be found; nobody under a control plane."""
    current = known.groups[-1] if known.groups else ()
    return {
        "term": known.term,
        "leader": known.leader.name if known.leader is not None else None,
        "electors": [{"name": one.name, "post": wire.show_address(*one.post)} for one in current],
        "electors_settled": settled,
    }
