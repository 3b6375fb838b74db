"""What does the coordinator say and do for one run, without sockets and without a clock?

Frames come in through `greet`, `hear` and `part`; `settle` lets `core.world` decide until it has nothing more to do.
What has to be sent gathers in `outbox`; when `unsaved` is set, the record must be kept before it is sent. The service
drives this with real connections and time, the simulator with virtual ones. Hellos are dealt with by `world.joining`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from muster.core.world import decisions, transitions
from muster.core.world import run as runs
from muster.core.world.gates import Gate
from muster.types.world import MemberId, Outcome, OutcomeState, Progress, Role, Round, RunId, Settings
from muster.world import frames_out, records, views
from muster.world.frames_in import MAX_TEXT, exits, integer, paths, reach
from muster.world.frames_out import Peer
from muster.world.joining import Joining, Visitor
from muster.world.wire import Frame


@dataclass(frozen=True)
class RunEvent:
    """One line of a run's story."""

    at: float
    kind: str
    text: str
    round: int | None


class RunProtocol(Joining):
    def __init__(
        self, run_id: RunId, *, epoch: int = 1, settings: Settings | None = None, directed: bool = False
    ) -> None:
        """A `directed` run takes its settings, its outcome's confirmation and its farewell from outside."""
        super().__init__(run_id, epoch=epoch, settings=settings, directed=directed)
        self.wake_at = math.inf
        self.story: deque[RunEvent] = deque(maxlen=500)
        self.on_story: Callable[[RunEvent], None] | None = None
        self.on_decision: Callable[[runs.Run, runs.Decision, runs.Run], None] | None = None
        self._renewed: bytes | None = None
        self.released = False  # a round, whose frames are in the outbox
        self.first_steps = False  # a rank of this round has told its step for the first time

    @classmethod
    def from_record(
        cls, run_id: RunId, record: Mapping[str, Any], now: float, *, directed: bool = False
    ) -> RunProtocol:
        """A protocol for a run whose coordinator died: same round, next epoch."""
        protocol = cls(run_id, epoch=int(record.get("epoch", 0)) + 1, directed=directed)
        protocol._restore(record, now, certain=True)
        return protocol

    # What they say

    def hear(self, peer: Peer, frame: Frame, now: float) -> None:
        visitor = self._visitors.get(id(peer))
        if visitor is None or self.run is None:
            if frame["type"] == "ask" and visitor is not None:
                self._answer(peer, frame, now)
            return
        if visitor.kind == "control":
            self._answer(peer, frame, now)
            return
        if visitor.member_id is None:
            return
        if visitor.kind == "guard":
            self._hear_guard(peer, visitor.member_id, frame, now)
        else:
            self._heard[visitor.member_id] = now
            self._hear_agent(peer, visitor, visitor.member_id, frame, now)

    def _hear_guard(self, peer: Peer, member_id: MemberId, frame: Frame, now: float) -> None:
        assert self.run is not None
        if frame["type"] == "gone":
            self._tell("gone", f"the guard of {self._name(member_id)} ended its ranks", now)
            if self._guards.get(member_id) is not peer:  # its word comes late: the agent lives and has another
                self.run = transitions.gone(self.run, member_id, integer(frame, "round"))
                return
            self.run = transitions.guard_cleared(self._renewed_run(), member_id, integer(frame, "round"), now)
            self._drop(member_id)
        elif frame["type"] == "alive":
            self.run = transitions.guard_alive(self.run, member_id, now)

    def _hear_agent(self, peer: Peer, visitor: Visitor, member_id: MemberId, frame: Frame, now: float) -> None:
        assert self.run is not None
        kind, number = frame["type"], integer(frame, "round")
        current = self.run.round.number if self.run.round else -1
        if kind == "renew":
            self._renew(peer, visitor, member_id, frame, now)
            return
        if kind in ("started", "up", "exits", "finished", "saving", "stopped", "failed") and (
            number < current or integer(frame, "epoch") < visitor.epoch
        ):
            self._send(peer, "stale", round=current, seq=frame.get("seq"))
            if kind == "stopped":  # one that has lost its place ran something older all the while
                self._out_of_round(member_id, {})
            return
        match kind:
            case "started":
                self.run = transitions.started(self.run, member_id, number)
            case "up":
                self.run = transitions.up(self.run, member_id, number, now)
            case "exits":
                ends = exits(frame.get("exits"), now)
                for end, _ in ends:
                    if end.failed:
                        self._tell("exit", f"rank {end.rank} on {end.worker}: {end.reason}", now)
                self.run = transitions.exited(self.run, member_id, number, ends)
                self._send(peer, "got", seq=frame.get("seq"))
            case "finished":
                self.run = transitions.finished(self.run, member_id, number)
            case "stopped":
                port, why = integer(frame, "store_port"), str(frame.get("why") or "")
                self.run = transitions.exited(self.run, member_id, number, exits(frame.get("exits"), now))
                self.run = transitions.stopped(self.run, member_id, number, port, now, why)
            case "saving":
                what = str(frame.get("what"))[:MAX_TEXT]
                self._tell("saving", f"{self._name(member_id)}: {what}", now)
                self.run = transitions.saves(self.run, member_id, number, what)
            case "leaving":
                why = str(frame.get("why") or "it leaves")
                self._tell("leaving", f"{self._name(member_id)}: {why}", now)
                self.run = transitions.leaving(self.run, member_id, why, now)
            case "failed":
                self._fail(member_id, frame, now)
            case "unfit":
                self._tell("unfit", f"{self._name(member_id)}: {frame.get('why')}", now)
                self.run = transitions.unfit(self.run, member_id, str(frame.get("why")), now)
            case "fit":
                self.run = transitions.fit(self.run, member_id)
            case "listens":
                self.run = transitions.listens(self.run, member_id, paths(frame.get("paths")))
            case "reached":
                self.run = transitions.reached(self.run, member_id, reach(frame.get("peers")))
            case "ack":
                self.run = transitions.exited(self.run, member_id, number, exits(frame.get("exits"), now))
                self.run = transitions.acknowledge(self.run, member_id)
                self.unsaved |= self.directed  # it may be gone before its exits are recorded elsewhere

    def _renew(self, peer: Peer, visitor: Visitor, member_id: MemberId, frame: Frame, now: float) -> None:
        assert self.run is not None
        if steps := frame.get("steps"):
            marks = [(int(rank), Progress(int(step), now - float(age))) for rank, step, age in steps]
            known = len(self.run.round.progress) if self.run.round else 0
            self.run = transitions.advanced(self.run, member_id, integer(frame, "round"), marks)
            self.first_steps |= self.run.round is not None and len(self.run.round.progress) > known
        if visitor.told_reason != self.reason:
            visitor.told_reason = self.reason
            self._send(peer, "renewed", reason=self.reason)
            return
        if self._renewed is None:
            self._renewed = self._voice.frame("renewed")
        self._queue(peer, self._renewed)

    def _fail(self, member_id: MemberId, frame: Frame, now: float) -> None:
        """A launcher with a budget of its own (torchrun) has given up."""
        assert self.run is not None
        if self.run.outcome is None:
            number = self.run.round.number if self.run.round else None
            ends = [end for end, _ in exits(frame.get("exits"), now)]
            message = f"{self._name(member_id)}: {frame.get('message') or 'its launcher gave up'}"
            first = ends[0] if ends else None
            outcome = Outcome(OutcomeState.FAILED, "rank_failed", message, number, first)
            self.run = decisions.carry_out(self.run, runs.End(outcome), now)
            self._ended(now)

    # Orders and questions from outside

    def _answer(self, peer: Peer, frame: Frame, now: float) -> None:
        question = frame.get("ask")
        if self.run is None:
            self._send(peer, "error", code="not_found", message=f"no run {self.run_id!r} here", seq=frame.get("seq"))
            return
        refusal: transitions.Refused | None = None
        if question == "set-target":
            refusal = self.set_target(integer(frame, "target"), [str(name) for name in frame.get("remove") or ()], now)
        elif question == "cancel":
            refusal = self.cancel(str(frame.get("why") or "cancelled on request"))
        elif question != "show":
            refusal = transitions.Refused("invalid", f"unknown request {question!r}")
        if refusal is not None:
            self._send(peer, "error", code=refusal.code, message=refusal.message, seq=frame.get("seq"))
            return
        self.settle(now)
        self._send(peer, "answer", seq=frame.get("seq"), view=self.view(now))

    def set_target(self, target: int, remove: list[str], now: float) -> transitions.Refused | None:
        assert self.run is not None
        changed = transitions.set_target(self.run, target, remove, now)
        if isinstance(changed, transitions.Refused):
            return changed
        self._tell("target", f"target {self.run.target} → {target}", now)
        self.run, self.unsaved = changed, True
        record = self._voice.record("record")
        for peer in self._agents.values():
            self._queue(peer, record)
        return None

    def cancel(self, why: str) -> transitions.Refused | None:
        assert self.run is not None
        changed = transitions.cancel(self.run, why)
        if isinstance(changed, transitions.Refused):
            return changed
        self.run = changed
        return None

    def view(self, now: float) -> dict[str, Any]:
        """What `muster world show` prints."""
        assert self.run is not None
        story = [dataclasses.asdict(line) | {"ago_s": round(now - line.at, 3)} for line in self.story]
        return views.view(self.run_id, self.epoch, self.run, self.reason, now) | {"story": story}

    # Directing a run from outside

    def reconfigure(self, settings: Settings, target: int, now: float) -> None:
        assert self.run is not None
        before = self.run
        self.run = transitions.reconfigure(self._renewed_run(), settings, target, now)
        if self.run is before:
            return
        self.unsaved = True
        if before.target != target:
            self._tell("target", f"target {before.target} → {target}", now)
        record = self._voice.record("record")
        for peer in self._agents.values():
            self._queue(peer, record)

    def order(self, outcome: Outcome) -> None:
        """End the run like that, unless it has come to an end already."""
        assert self.run is not None
        self.run = transitions.order(self.run, outcome)

    def mark_dead(self, names: Sequence[str]) -> None:
        """Members that are dead, without a word of their own: nothing of theirs runs any more."""
        assert self.run is not None
        for seat in self.run.round.seats if self.run.round is not None else ():
            if seat.name in names:
                self.run = transitions.gone(self.run, seat.member_id, self.run.round.number if self.run.round else -1)

    def confirm(self, outcome: Outcome) -> None:
        """The outcome is recorded, perhaps as another one than was proposed here: tell everyone."""
        if self.run is None or self.confirmed:
            return
        self.confirmed = self.unsaved = True
        self.run = transitions.confirm(self.run, outcome)
        self._push_outcome(list(self._agents.values()))

    def let_go(self) -> None:
        """The end is recorded with every exit: members may leave."""
        if self.run is not None:
            self.run = transitions.let_go(self.run)

    # Keeping

    def stamp_outcome(self, wall: float) -> None:
        """The moment at which the outcome is stored is the moment at which it became true."""
        if self.run is not None and self.run.outcome is not None and not self.run.outcome.finished_at:
            self.run = replace(self.run, outcome=replace(self.run.outcome, finished_at=wall))

    def record(self) -> dict[str, Any]:
        """All that another coordinator needs to go on with this run."""
        assert self.run is not None
        return records.record(self.run_id, self.epoch, self.run)

    # Deciding

    def settle(self, now: float) -> float:
        """Carry out decisions until there is only waiting left; returns when to ask again."""
        if self.run is None:
            return math.inf
        self._try_held(now)
        while True:
            self.run = transitions.tell_time(self._renewed_run(), now)
            decision = decisions.decide(self.run, now)
            self.reason = decision.reason
            before = self.run
            self.run = decisions.carry_out(before, decision.action, now)
            if self.on_decision is not None:
                self.on_decision(before, decision, self.run)
            if isinstance(decision.action, runs.Wait):
                self._name_peers()
                self.wake_at = min([decision.wake_at, *(self._held_until() if self._held else ())])
                return self.wake_at
            self._effects(before, decision, now)

    def stood_still(self, by_s: float) -> None:
        """The coordinator's own process was stopped or starved: that silence is not the members'."""
        if self.run is not None:
            self.run = transitions.extend_leases(self._renewed_run(), by_s)

    def _effects(self, before: runs.Run, decision: runs.Decision, now: float) -> None:
        match decision.action:
            case runs.Lose(members=ids):
                for member_id in ids:
                    self._tell("lost", f"{before.members[member_id].name}: silent for a lease", now)
                    self._drop(member_id)
                    self._probe(member_id)
            case runs.CallBack():
                self._recall(decision.reason, now)
            case runs.CheckHealth(members=ids):
                for member_id in ids:
                    self._send_to(member_id, "check")
            case runs.TurnGate(gate=gate):
                self._turned(before.coming or before.gate, gate, decision.reason, now)
            case runs.KeepOut():
                self._tell("kept-out", decision.reason, now)
            case runs.Heal(gate=gate):
                self.unsaved = True
                self._turned(before.gate, gate, decision.reason, now)
            case runs.Release(round=formed):
                self._release(before, formed, now)
            case runs.Dismiss(members=ids):
                self._tell("dismissed", decision.reason, now)
                for member_id in ids:
                    self._send_to(member_id, "dismiss", reason=decision.reason)
            case runs.End():
                self._ended(now)
            case runs.Farewell():
                self._tell("farewell", decision.reason, now)
                for peer in self._agents.values():
                    self._send(peer, "farewell")
            case runs.GiveUpOn(members=missing):
                self._tell("recovered", decision.reason, now)
                if not missing:
                    self.outbox += frames_out.releases_to_idle(self._voice, self._agents)

    def _recall(self, reason: str, now: float) -> None:
        self._tell("recall", reason, now)
        self.outbox += frames_out.recalls(self._voice, self._agents)

    def _release(self, before: runs.Run, formed: Round, now: float) -> None:
        assert self.run is not None
        self.unsaved = self._led = self.released = True
        self._tell("release", formed.why, now)
        self.outbox += frames_out.releases(self._voice, self._agents)
        for member_id, member in self.run.members.items():
            if member.role is Role.PARKED and before.members[member_id].role is not Role.PARKED:
                self._tell("parked", f"{member.name}: {member.note}", now)

    def _turned(self, before: Gate | None, gate: Gate | None, reason: str, now: float) -> None:
        if gate is not None and (before is None or before.state is not gate.state):
            self._tell(f"mesh-{gate.state}", reason, now)

    def _name_peers(self) -> None:
        """Tell the members of a run with a gate whom they have to reach, whenever that has changed."""
        if self.run is None or self.run.settings.gate_timeout_s is None or self.run.outcome is not None:
            return
        listening = {member_id: member.paths for member_id, member in self.run.members.items() if member.paths}
        told, self._peers_told = self._peers_told, listening
        due = self._untold & listening.keys()
        new = {member_id: peer for member_id, peer in self._agents.items() if member_id in due}
        self._untold = (self._untold - new.keys()) & self._agents.keys()
        self.outbox += frames_out.peers(self._voice, self._agents, new, told, listening)

    def _send_to(self, member_id: MemberId, kind: str, **fields: Any) -> None:
        if peer := self._agents.get(member_id):
            self._send(peer, kind, **fields)

    def _drop(self, member_id: MemberId) -> None:
        if peer := self._agents.pop(member_id, None):
            self._visitors.pop(id(peer), None)
            peer.refuse("lost", "nothing was heard for a lease; say hello again")

    def probe_lost(self) -> None:
        """Keep asking while a guard is busy ending ranks."""
        if self.run is None or self.run.round is None:
            return
        for member_id in self.run.round.fences:
            if member_id not in self.run.round.gone:
                self._probe(member_id)

    # The story

    def _tell(self, kind: str, text: str, now: float) -> None:
        number = self.run.round.number if self.run is not None and self.run.round else None
        line = RunEvent(now, kind, text, number)
        self.story.append(line)
        if self.on_story is not None:
            self.on_story(line)
        self._renewed = None
