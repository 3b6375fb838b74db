"""The coordinator's side of one run, without sockets and without a clock.

Frames come in through `greet`, `hear` and `part`; `settle` lets `core.stages` decide until it has nothing more to
do. What has to be sent gathers in `outbox`; when `unsaved` is set, the record must be kept before it is sent.
The service drives this with real connections and time, the simulator with virtual ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from muster.coordinator.wire import VERSION, Frame, encode, show
from muster.core import register, stages
from muster.core import roll as rolls
from muster.core.seating import natural
from muster.types.world import (
    Cause,
    Member,
    MemberId,
    Outcome,
    OutcomeState,
    Progress,
    RankExit,
    Role,
    Round,
    RunId,
    Settings,
)


class Peer(Protocol):
    """What a desk needs of a connection."""

    def send_raw(self, data: bytes) -> None: ...
    def refuse(self, code: str, message: str) -> None: ...


@dataclass(frozen=True)
class Happening:
    """One line of a run's story."""

    at: float
    kind: str
    text: str
    round: int | None


@dataclass
class _Visitor:
    """A connection that has said hello."""

    kind: str
    member_id: MemberId | None = None
    epoch: int = 0
    told_reason: str = ""


@dataclass
class _Waiting:
    """A hello whose name is still borne by an older member."""

    peer: Peer
    hello: Frame
    member: Member


class Desk:
    def __init__(
        self, run_id: RunId, *, epoch: int = 1, settings: Settings | None = None, directed: bool = False
    ) -> None:
        """A `directed` run takes its settings, its outcome's confirmation and its farewell from outside."""
        self.run_id = run_id
        self.epoch = epoch
        self.roll: rolls.Roll | None = register.open_roll(settings) if settings else None
        self.directed = directed
        self.confirmed = False  # a directed run's outcome is recorded, so members may be told
        if self.roll is not None:
            self.roll = replace(self.roll, holds_farewell=directed)
        self.outbox: list[tuple[Peer, bytes]] = []
        self.unsaved = False
        self.wake_at = math.inf
        self.reason = "nobody has joined yet"
        self.story: deque[Happening] = deque(maxlen=500)
        self.on_story: Callable[[Happening], None] | None = None
        self.on_decision: Callable[[rolls.Roll, rolls.Decision, rolls.Roll], None] | None = None
        self.ended_at: float | None = None
        self._agents: dict[MemberId, Peer] = {}
        self._guards: dict[MemberId, Peer] = {}
        self._visitors: dict[int, _Visitor] = {}
        self._heard: dict[MemberId, float] = {}
        self._held: list[_Waiting] = []
        self._renewed: bytes | None = None
        self._led = False  # it has released a round of its own
        self._asked: dict[MemberId, float] = {}  # since when each member that is held has asked for its name
        self._greeted: set[MemberId] = set()

    @classmethod
    def from_record(cls, run_id: RunId, record: Mapping[str, Any], now: float, *, directed: bool = False) -> Desk:
        """A desk for a run whose coordinator died: same round, next epoch."""
        desk = cls(run_id, epoch=int(record.get("epoch", 0)) + 1, directed=directed)
        desk._restore(record, now, certain=True)
        return desk

    # Who is there

    @property
    def connected(self) -> int:
        """Members, guards and those that wait for a name; control connections do not keep a run alive."""
        return len(self._agents) + len(self._guards) + len(self._held)

    def greet(self, peer: Peer, hello: Frame, now: float) -> None:
        """A connection whose token and version are in order says who it is."""
        kind = str(hello.get("kind"))
        if kind == "control":
            self._visitors[id(peer)] = _Visitor("control")
            self._send(peer, "welcome")
            return
        member = _member(hello)
        if member is None:
            peer.refuse("invalid", f"a hello must name its member_id and name, of at most {MAX_TEXT} characters")
            return
        if kind == "guard":
            self._visitors[id(peer)] = _Visitor("guard", member.member_id)
            self._guards[member.member_id] = peer
            self._send(peer, "welcome")
        elif kind == "agent":
            asked_at = self._asked.get(member.member_id, now)
            self._greet_agent(peer, hello, replace(member, joined_at=asked_at), now)
        else:
            peer.refuse("invalid", f"unknown kind of connection {kind!r}")

    def part(self, peer: Peer, now: float) -> None:
        """A connection ended: for an agent that is its death."""
        self._held = [waiting for waiting in self._held if waiting.peer is not peer]
        visitor = self._visitors.pop(id(peer), None)
        if visitor is None or visitor.member_id is None:
            return
        if visitor.kind == "guard" and self._guards.get(visitor.member_id) is peer:
            del self._guards[visitor.member_id]
        if visitor.kind == "agent" and self._agents.get(visitor.member_id) is peer:
            del self._agents[visitor.member_id]
            if self.roll is not None and visitor.member_id in self.roll.members:
                kind = "left" if self.roll.outcome is not None else "lost"
                self._tell(kind, f"{self._name(visitor.member_id)}: its connection closed", now)
                self.unsaved |= self.roll.round is not None and visitor.member_id in self.roll.round.finished
                self.roll = register.disconnected(self._renewed_roll(), visitor.member_id, now)
                self._probe(visitor.member_id)

    def _greet_agent(self, peer: Peer, hello: Frame, member: Member, now: float, *, held: bool = False) -> None:
        present = hello.get("present") or {}
        self._outrank(member.member_id, int(present.get("epoch") or 0))
        if not self._open(peer, hello, present, now):
            return
        assert self.roll is not None
        has_left = not present.get("running") and not self.roll.holds_farewell
        if self.roll.outcome is not None and (self.roll.farewell_said or has_left):
            self._visitors[id(peer)] = _Visitor("agent", None, self.epoch)
            self._send(peer, "welcome", settings=self.roll.settings.to_wire())
            self._push_outcome([peer])
            self._send(peer, "farewell")
            return
        entered = register.join(self._renewed_roll(), member, now)
        match entered:
            case register.Refused(code=code, message=message):
                peer.refuse(code, message)
                self._tell("refused", message, now)
                self._out_of_round(member.member_id, present)
            case register.Held():
                if not held:
                    self._send(peer, "hold", reason=entered.message)
                    self._out_of_round(member.member_id, present)
                self._asked[member.member_id] = member.joined_at
                self._held.append(_Waiting(peer, hello, member))
                self.reason = entered.message
            case rolls.Roll():
                self._welcome(peer, member, entered, present, now)

    def _outrank(self, member_id: MemberId, epoch: int) -> None:
        """Speak in a later epoch than any coordinator that this member knew before us."""
        if epoch > self.epoch or (epoch == self.epoch and member_id not in self._greeted):
            self.epoch = epoch + 1
        self._greeted.add(member_id)

    def _open(self, peer: Peer, hello: Frame, present: Mapping[str, Any], now: float) -> bool:
        """Make sure that there is a roll, the right one, and that this member asks for nothing else."""
        if record := present.get("record"):
            self._follow(record, now)
        given = {key: value for key, value in (hello.get("settings") or {}).items() if value is not None}
        try:
            if self.roll is None:
                settings = Settings.parse(given)
                if problems := settings.problems():
                    raise ValueError("; ".join(problems))
                self.roll = register.open_roll(settings)
            elif given and not self.directed and (odd := register.settings_differ(self.roll.settings, given)):
                peer.refuse("settings_differ", f"run {self.run_id} was opened with other settings: {'; '.join(odd)}")
                return False
        except ValueError as error:
            peer.refuse("invalid", f"bad settings: {error}")
            return False
        if self.roll.outcome is None and (outcome := present.get("outcome")):
            self.confirmed = True  # members are told only what was recorded
            self.roll = register.adopt(self.roll, Outcome.from_wire(outcome))
            self._ended(now)
        return True

    def _follow(self, record: Mapping[str, Any], now: float) -> None:
        """The highest round presented is the one to go on with, until this coordinator leads a round of its own."""
        if record["round"] >= 0:
            Round.from_wire(record)  # one that cannot be read is refused, whatever it is needed for
        before = self.roll
        if before is not None and self._led:
            self.roll = register.skip_past(before, record["round"])
        elif before is None or record["round"] >= before.next_round:
            self._restore(record, now, certain=False)
            if before is not None:
                self._retell(before)

    def _retell(self, before: rolls.Roll) -> None:
        """Members that were here before a higher round was presented have to hear of it."""
        assert self.roll is not None
        record = self._record_frame("record")
        for peer in self._agents.values():
            if before.round is not None:
                self._send(peer, "recall", round=before.round.number, grace_s=0.0, reason="a later round was presented")
            self._queue(peer, record)

    def _restore(self, record: Mapping[str, Any], now: float, *, certain: bool) -> None:
        """Take over the round that a record shows; members that are already here enter it again."""
        before = self.roll
        old = before.members if before is not None else {}
        last = _round_of(record)
        settings, target, used = Settings.parse(record["settings"]), int(record["target"]), record["restarts_used"]
        if self.directed and before is not None:
            settings, target = before.settings, before.target
        self.roll = register.restored(settings, target, int(used), last, now, certain=certain)
        self.unsaved = True
        self.roll = replace(
            self.roll,
            best_step=record.get("best_step"),
            stale_rounds=record.get("stale_rounds", 0),
            holds_farewell=self.directed if before is None else before.holds_farewell,
            ordered=None if before is None else before.ordered,
        )
        if before is not None and before.outcome is not None:
            self.roll = register.adopt(self.roll, before.outcome)
        elif outcome := record.get("outcome"):
            self.roll = register.adopt(self.roll, Outcome.from_wire(outcome))
            self.ended_at = now
        for member in old.values():
            entered = register.join(self.roll, member, now)
            if isinstance(entered, rolls.Roll):
                self.roll = entered
        if last is not None:
            self._tell("recovered", f"took over round {last.number} in epoch {self.epoch}", now)

    def _welcome(self, peer: Peer, member: Member, entered: rolls.Roll, present: Mapping[str, Any], now: float) -> None:
        returning = self._agents.get(member.member_id)
        if returning is not None:
            self._visitors.pop(id(returning), None)
        self.roll = entered
        self._asked.pop(member.member_id, None)
        self._visitors[id(peer)] = _Visitor("agent", member.member_id, self.epoch)
        self._agents[member.member_id] = peer
        self._send(peer, "welcome", settings=entered.settings.to_wire())
        self._enter_presented(member.member_id, present, now)
        self._tell("joined", f"{member.name} from {member.host or member.addr}", now)
        self._bring_up_to_date(peer, member.member_id, present, now)

    def _enter_presented(self, member_id: MemberId, present: Mapping[str, Any], now: float) -> None:
        """What a member brings from before its connection broke: exits, success, a stop."""
        assert self.roll is not None
        number = present.get("round")
        if number is not None:
            self.roll = register.exited(self.roll, member_id, number, _exits(present.get("exits"), now))
            if present.get("finished"):
                self.roll = register.finished(self.roll, member_id, number)
            if present.get("running"):
                self.roll = register.started(self.roll, member_id, number)
                if present.get("up"):
                    self.roll = register.up(self.roll, member_id, number, now)
            else:
                port, why = int(present.get("store_port") or 0), str(present.get("why") or "")
                self.roll = register.stopped(self.roll, member_id, number, port, now, why)
        self._out_of_round(member_id, present)

    def _out_of_round(self, member_id: MemberId, present: Mapping[str, Any]) -> None:
        """It lost its place before the release reached it, or is not let in again: nobody else would say so."""
        assert self.roll is not None
        member = self.roll.members.get(member_id)
        returns = self.roll.recovery_until is not None or (member is not None and member.role is Role.ACTIVE)
        if self.roll.round is not None and not returns and not present.get("running"):
            self.roll = register.gone(self.roll, member_id, self.roll.round.number)

    def _bring_up_to_date(self, peer: Peer, member_id: MemberId, present: Mapping[str, Any], now: float) -> None:
        assert self.roll is not None
        if self.roll.outcome is not None:
            self._push_outcome([peer])
            return
        current = self.roll.round
        held = present.get("round") if present.get("running") else None
        member = self.roll.members[member_id]
        mine = current is not None and member.role is Role.ACTIVE and current.seat_of(member_id) is not None
        if held is not None and not (mine and current is not None and current.number == held):
            self._send(peer, "recall", round=held, grace_s=0.0, cause="loss", reason="the world went on without it")
        if current is None:
            return
        # One that does not know the round is not told to start it while a later one may still be presented.
        sure = present.get("round") == current.number or now >= self.roll.not_before
        if mine and current.recall is None and sure:
            self._queue(peer, self._record_frame("release"))
        elif mine and current.recall is not None and member_id not in current.gone:
            self._queue(peer, self._recall_frame(current, _grace(current, member_id)))
        else:
            self._queue(peer, self._record_frame("record"))

    # What they say

    def hear(self, peer: Peer, frame: Frame, now: float) -> None:
        visitor = self._visitors.get(id(peer))
        if visitor is None or self.roll is None:
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
        assert self.roll is not None
        if frame["type"] == "gone":
            self._tell("gone", f"the guard of {self._name(member_id)} ended its ranks", now)
            if self._guards.get(member_id) is not peer:  # its word comes late: the agent lives and has another
                self.roll = register.gone(self.roll, member_id, _int(frame, "round"))
                return
            self.roll = register.guard_cleared(self._renewed_roll(), member_id, _int(frame, "round"), now)
            self._drop(member_id)
        elif frame["type"] == "alive":
            self.roll = register.guard_alive(self.roll, member_id, now)

    def _hear_agent(self, peer: Peer, visitor: _Visitor, member_id: MemberId, frame: Frame, now: float) -> None:
        assert self.roll is not None
        kind, number = frame["type"], _int(frame, "round")
        current = self.roll.round.number if self.roll.round else -1
        if kind == "renew":
            self._renew(peer, visitor, member_id, frame, now)
            return
        if kind in ("started", "up", "exits", "finished", "stopped", "failed") and (
            number < current or _int(frame, "epoch") < visitor.epoch
        ):
            self._send(peer, "stale", round=current, seq=frame.get("seq"))
            if kind == "stopped":  # one that has lost its place ran something older all the while
                self._out_of_round(member_id, {})
            return
        match kind:
            case "started":
                self.roll = register.started(self.roll, member_id, number)
            case "up":
                self.roll = register.up(self.roll, member_id, number, now)
            case "exits":
                ends = _exits(frame.get("exits"), now)
                for end, _ in ends:
                    if end.failed:
                        self._tell("exit", f"rank {end.rank} on {end.worker}: {end.reason}", now)
                self.roll = register.exited(self.roll, member_id, number, ends)
                self._send(peer, "got", seq=frame.get("seq"))
            case "finished":
                self.roll = register.finished(self.roll, member_id, number)
            case "stopped":
                port, why = _int(frame, "store_port"), str(frame.get("why") or "")
                self.roll = register.exited(self.roll, member_id, number, _exits(frame.get("exits"), now))
                self.roll = register.stopped(self.roll, member_id, number, port, now, why)
            case "leaving":
                why = str(frame.get("why") or "it leaves")
                self._tell("leaving", f"{self._name(member_id)}: {why}", now)
                self.roll = register.leaving(self.roll, member_id, why, now)
            case "failed":
                self._fail(member_id, frame, now)
            case "unfit":
                self._tell("unfit", f"{self._name(member_id)}: {frame.get('why')}", now)
                self.roll = register.unfit(self.roll, member_id, str(frame.get("why")), now)
            case "fit":
                self.roll = register.fit(self.roll, member_id)
            case "ack":
                self.roll = register.exited(self.roll, member_id, number, _exits(frame.get("exits"), now))
                self.roll = register.acknowledge(self.roll, member_id)
                self.unsaved |= self.directed  # it may be gone before its exits are recorded elsewhere

    def _renew(self, peer: Peer, visitor: _Visitor, member_id: MemberId, frame: Frame, now: float) -> None:
        assert self.roll is not None
        if steps := frame.get("steps"):
            marks = [(int(rank), Progress(int(step), now - float(age))) for rank, step, age in steps]
            self.roll = register.advanced(self.roll, member_id, _int(frame, "round"), marks)
        if visitor.told_reason != self.reason:
            visitor.told_reason = self.reason
            self._send(peer, "renewed", reason=self.reason)
            return
        if self._renewed is None:
            self._renewed = encode(self._frame("renewed"))
        self._queue(peer, self._renewed)

    def _fail(self, member_id: MemberId, frame: Frame, now: float) -> None:
        """A launcher with a budget of its own (torchrun) has given up."""
        assert self.roll is not None
        if self.roll.outcome is None:
            number = self.roll.round.number if self.roll.round else None
            ends = [end for end, _ in _exits(frame.get("exits"), now)]
            message = f"{self._name(member_id)}: {frame.get('message') or 'its launcher gave up'}"
            first = ends[0] if ends else None
            outcome = Outcome(OutcomeState.FAILED, "rank_failed", message, number, first)
            self.roll = stages.carry_out(self.roll, rolls.End(outcome), now)
            self._ended(now)

    # Orders and questions from outside

    def _answer(self, peer: Peer, frame: Frame, now: float) -> None:
        question = frame.get("ask")
        if self.roll is None:
            self._send(peer, "error", code="not_found", message=f"no run {self.run_id!r} here", seq=frame.get("seq"))
            return
        refusal: register.Refused | None = None
        if question == "set-target":
            refusal = self.set_target(_int(frame, "target"), [str(name) for name in frame.get("remove") or ()], now)
        elif question == "cancel":
            refusal = self.cancel(str(frame.get("why") or "cancelled on request"))
        elif question != "show":
            refusal = register.Refused("invalid", f"unknown request {question!r}")
        if refusal is not None:
            self._send(peer, "error", code=refusal.code, message=refusal.message, seq=frame.get("seq"))
            return
        self.settle(now)
        self._send(peer, "answer", seq=frame.get("seq"), view=self.view(now))

    def set_target(self, target: int, remove: list[str], now: float) -> register.Refused | None:
        assert self.roll is not None
        changed = register.set_target(self.roll, target, remove, now)
        if isinstance(changed, register.Refused):
            return changed
        self._tell("target", f"target {self.roll.target} → {target}", now)
        self.roll, self.unsaved = changed, True
        record = self._record_frame("record")
        for peer in self._agents.values():
            self._queue(peer, record)
        return None

    def cancel(self, why: str) -> register.Refused | None:
        assert self.roll is not None
        changed = register.cancel(self.roll, why)
        if isinstance(changed, register.Refused):
            return changed
        self.roll = changed
        return None

    # Directing a run from outside

    def reconfigure(self, settings: Settings, target: int, now: float) -> None:
        assert self.roll is not None
        before = self.roll
        self.roll = register.reconfigure(self._renewed_roll(), settings, target, now)
        if self.roll is before:
            return
        self.unsaved = True
        if before.target != target:
            self._tell("target", f"target {before.target} → {target}", now)
        record = self._record_frame("record")
        for peer in self._agents.values():
            self._queue(peer, record)

    def order(self, outcome: Outcome) -> None:
        """End the run like that, unless it has come to an end already."""
        assert self.roll is not None
        self.roll = register.order(self.roll, outcome)

    def confirm(self, outcome: Outcome) -> None:
        """The outcome is recorded, perhaps as another one than was proposed here: tell everyone."""
        if self.roll is None or self.confirmed:
            return
        self.confirmed = self.unsaved = True
        self.roll = register.confirm(self.roll, outcome)
        self._push_outcome(list(self._agents.values()))

    def let_go(self) -> None:
        """The end is recorded with every exit: members may leave."""
        if self.roll is not None:
            self.roll = register.let_go(self.roll)

    def view(self, now: float) -> dict[str, Any]:
        """What `muster world show` prints."""
        assert self.roll is not None
        roll = self.roll
        current = roll.round
        return {
            "run_id": self.run_id,
            "epoch": self.epoch,
            "state": self._state(),
            "reason": self.reason,
            "round": current.number if current else None,
            "world": current.world_size if roll.running and current else 0,
            "min": roll.settings.min,
            "target": roll.target,
            "max": roll.settings.max,
            "spares": sum(member.role is Role.SPARE for member in roll.members.values()),
            "restarts_used": roll.restarts_used,
            "max_restarts": roll.settings.max_restarts,
            "members": [_member_view(member, now) for member in _in_order(roll)],
            "steps": {str(rank): mark.step for rank, mark in sorted(current.progress.items())} if current else {},
            "outcome": roll.outcome.to_wire() if roll.outcome else None,
            "story": [dataclasses.asdict(line) | {"ago_s": round(now - line.at, 3)} for line in self.story],
        }

    def _state(self) -> str:
        assert self.roll is not None
        if self.roll.outcome is not None:
            return str(self.roll.outcome.state)
        if self.roll.recovery_until is not None:
            return "recovering"
        return "training" if self.roll.running else "forming"

    # Deciding

    def settle(self, now: float) -> float:
        """Carry out decisions until there is only waiting left; returns when to ask again."""
        if self.roll is None:
            return math.inf
        self._try_held(now)
        while True:
            self.roll = register.tell_time(self._renewed_roll(), now)
            decision = stages.decide(self.roll, now)
            self.reason = decision.reason
            before = self.roll
            self.roll = stages.carry_out(before, decision.action, now)
            if self.on_decision is not None:
                self.on_decision(before, decision, self.roll)
            if isinstance(decision.action, rolls.Wait):
                self.wake_at = min([decision.wake_at, *(self._held_until() if self._held else ())])
                return self.wake_at
            self._effects(before, decision, now)

    def stood_still(self, by_s: float) -> None:
        """The coordinator's own process was stopped or starved: that silence is not the members'."""
        if self.roll is not None:
            self.roll = register.extend_leases(self._renewed_roll(), by_s)

    def _effects(self, before: rolls.Roll, decision: rolls.Decision, now: float) -> None:
        match decision.action:
            case rolls.Lose(members=ids):
                for member_id in ids:
                    self._tell("lost", f"{before.members[member_id].name}: silent for a lease", now)
                    self._drop(member_id)
                    self._probe(member_id)
            case rolls.CallBack():
                self._recall(decision.reason, now)
            case rolls.CheckHealth(members=ids):
                for member_id in ids:
                    self._send_to(member_id, "check")
            case rolls.Release(round=formed):
                self._release(before, formed, now)
            case rolls.Dismiss(members=ids):
                self._tell("dismissed", decision.reason, now)
                for member_id in ids:
                    self._send_to(member_id, "dismiss", reason=decision.reason)
            case rolls.End():
                self._ended(now)
            case rolls.Farewell():
                self._tell("farewell", decision.reason, now)
                for peer in self._agents.values():
                    self._send(peer, "farewell")
            case rolls.GiveUpOn(members=missing):
                self._tell("recovered", decision.reason, now)
                if not missing:
                    self._release_to_idle()

    def _drop(self, member_id: MemberId) -> None:
        if peer := self._agents.pop(member_id, None):
            self._visitors.pop(id(peer), None)
            peer.refuse("lost", "nothing was heard for a lease; say hello again")

    def _recall(self, reason: str, now: float) -> None:
        assert self.roll is not None and self.roll.round is not None
        current = self.roll.round
        self._tell("recall", reason, now)
        frames: dict[float, bytes] = {}
        for seat in current.seats:
            if seat.member_id not in current.gone and (peer := self._agents.get(seat.member_id)):
                grace = _grace(current, seat.member_id)
                if grace not in frames:
                    frames[grace] = self._recall_frame(current, grace)
                self._queue(peer, frames[grace])

    def _recall_frame(self, current: Round, grace_s: float) -> bytes:
        recall = current.recall
        assert recall is not None
        order = {"round": current.number, "grace_s": grace_s, "cause": str(recall.cause), "reason": recall.reason}
        return encode(self._frame("recall", **order, dump=recall.cause is Cause.HANG))

    def _release(self, before: rolls.Roll, formed: Round, now: float) -> None:
        assert self.roll is not None
        self.unsaved = self._led = True
        self._tell("release", formed.why, now)
        release, record = self._record_frame("release"), self._record_frame("record")
        for member_id, member in self.roll.members.items():
            if peer := self._agents.get(member_id):
                self._queue(peer, release if member.role is Role.ACTIVE else record)
            if member.role is Role.PARKED and before.members[member_id].role is not Role.PARKED:
                self._tell("parked", f"{member.name}: {member.note}", now)

    def _release_to_idle(self) -> None:
        """A round that was taken over goes on: those that never heard of it start now."""
        assert self.roll is not None and self.roll.round is not None
        current = self.roll.round
        if not current.losses:
            for seat in current.seats:
                if seat.member_id not in current.started and (peer := self._agents.get(seat.member_id)):
                    self._queue(peer, self._record_frame("release"))

    def _ended(self, now: float) -> None:
        assert self.roll is not None and self.roll.outcome is not None
        self.ended_at = now
        self.unsaved = True
        self._tell(str(self.roll.outcome.state), self.roll.outcome.message, now)
        self._push_outcome(list(self._agents.values()))
        for waiting in self._held:
            self._push_outcome([waiting.peer])
            self._send(waiting.peer, "farewell")

    def _push_outcome(self, peers: list[Peer]) -> None:
        assert self.roll is not None and self.roll.outcome is not None
        if self.directed and not self.confirmed:
            return  # all of them will hear it when it is recorded
        outcome, settings = self.roll.outcome, self.roll.settings
        cancelled = outcome.state is OutcomeState.CANCELLED
        grace = settings.stop_grace_s if cancelled else settings.fail_grace_s
        for peer in peers:
            self._send(peer, "outcome", outcome=outcome.to_wire(), grace_s=grace, farewell_s=settings.farewell_s)

    def stamp_outcome(self, wall: float) -> None:
        """The moment at which the outcome is stored is the moment at which it became true."""
        if self.roll is not None and self.roll.outcome is not None and not self.roll.outcome.finished_at:
            self.roll = replace(self.roll, outcome=replace(self.roll.outcome, finished_at=wall))

    # Held names, leases, probes

    def _try_held(self, now: float) -> None:
        waiting, self._held = self._held, []
        for one in waiting:
            self._greet_agent(one.peer, one.hello, one.member, now, held=True)

    def _held_until(self) -> list[float]:
        assert self.roll is not None
        names = {one.member.name for one in self._held}
        return [member.lease_until for member in self.roll.members.values() if member.name in names]

    def _renewed_roll(self) -> rolls.Roll:
        """The roll with all leases that were renewed since it was last looked at."""
        assert self.roll is not None
        if self._heard:
            self.roll = register.renew(self.roll, self._heard)
            self._heard = {}
        return self.roll

    def _probe(self, member_id: MemberId) -> None:
        """Ask the guard of a lost member whether it is there; its word comes before the clock's."""
        if guard := self._guards.get(member_id):
            self._send(guard, "probe")

    def probe_lost(self) -> None:
        """Keep asking while a guard is busy ending ranks."""
        if self.roll is None or self.roll.round is None:
            return
        for member_id in self.roll.round.fences:
            if member_id not in self.roll.round.gone:
                self._probe(member_id)

    # Sending

    def record(self) -> dict[str, Any]:
        """All that another coordinator needs to go on with this run."""
        assert self.roll is not None
        roll = self.roll
        round_part = roll.round.to_wire() if roll.round else {"round": -1}
        return {
            **round_part,
            "run_id": self.run_id,
            "epoch": self.epoch,
            "settings": roll.settings.to_wire(),
            "target": roll.target,
            "restarts_used": roll.restarts_used,
            "best_step": roll.best_step,
            "stale_rounds": roll.stale_rounds,
            "outcome": roll.outcome.to_wire() if roll.outcome else None,
            "exits": [end.to_wire() for end in _settled_exits(roll)],
            "finished": sorted(roll.round.finished) if roll.round else [],
        }

    def _record_frame(self, kind: str) -> bytes:
        return encode(self._frame(kind, record=self.record()))

    def _frame(self, kind: str, **fields: Any) -> Frame:
        number = self.roll.round.number if self.roll is not None and self.roll.round else None
        return {"v": show(VERSION), "type": kind, "epoch": self.epoch, "round": number, **fields}

    def _send(self, peer: Peer, kind: str, **fields: Any) -> None:
        self._queue(peer, encode(self._frame(kind, **fields)))

    def _send_to(self, member_id: MemberId, kind: str, **fields: Any) -> None:
        if peer := self._agents.get(member_id):
            self._send(peer, kind, **fields)

    def _queue(self, peer: Peer, data: bytes) -> None:
        self.outbox.append((peer, data))

    def _tell(self, kind: str, text: str, now: float) -> None:
        number = self.roll.round.number if self.roll is not None and self.roll.round else None
        line = Happening(now, kind, text, number)
        self.story.append(line)
        if self.on_story is not None:
            self.on_story(line)
        self._renewed = None

    def _name(self, member_id: MemberId) -> str:
        member = self.roll.members.get(member_id) if self.roll is not None else None
        if member is not None:
            return member.name
        seat = self.roll.round.seat_of(member_id) if self.roll is not None and self.roll.round else None
        return seat.name if seat else str(member_id)


def _settled_exits(roll: rolls.Roll) -> list[RankExit]:
    """Ends that stand whatever comes: all of them once there is an outcome, before it those that succeeded."""
    if roll.round is None:
        return []
    return [end for end in roll.round.exits.values() if roll.outcome is not None or end.exit_code == 0]


def _round_of(record: Mapping[str, Any]) -> Round | None:
    """The round that a record shows, with what was known of its ranks' ends."""
    if not record.get("seats"):
        return None
    ends = [RankExit.from_wire(end) for end in record.get("exits") or ()]
    finished = frozenset(MemberId(member_id) for member_id in record.get("finished") or ())
    return replace(Round.from_wire(record), exits={end.rank: end for end in ends}, finished=finished)


def _grace(current: Round, member_id: MemberId) -> float:
    assert current.recall is not None
    return current.recall.leaver_grace_s if member_id in current.recall.leavers else current.recall.grace_s


MAX_TEXT = 256  # of a name, an address, a domain

_MEMBER_FIELDS = {
    "name": str,
    "addr": str,
    "procs": int,
    "infra_rank": int,
    "domain": str,
    "version": str,
    "store_port": int,
    "host": str,
    "pid": int,
    "launcher": str,
    "checks_health": bool,
    "unfit": str,
}


def _member(hello: Frame) -> Member | None:
    """The member that a hello describes, or None if it does not say enough."""
    data = hello.get("member")
    if not isinstance(data, dict) or not data.get("member_id") or not data.get("name"):
        return None
    fields: dict[str, Any] = {}
    for name, kind in _MEMBER_FIELDS.items():
        value = data.get(name)
        if isinstance(value, kind) and not (isinstance(value, str) and len(value) > MAX_TEXT):
            fields[name] = value
    if "name" not in fields or fields.get("procs", 1) < 1:
        return None
    return Member(member_id=MemberId(str(data["member_id"])), **fields)


def _exits(data: object, now: float) -> list[tuple[RankExit, float]]:
    """Exits as told, with the time on our clock at which each happened (they travel with their age)."""
    ends = []
    for item in data if isinstance(data, list) else []:
        ends.append((RankExit.from_wire(item), now - float(item.get("age_s") or 0.0)))
    return ends


def _int(frame: Frame, key: str) -> int:
    value = frame.get(key)
    return value if isinstance(value, int) else -1


def _in_order(roll: rolls.Roll) -> list[Member]:
    return sorted(
        roll.members.values(), key=lambda member: (member.rank is None, member.rank or 0, natural(member.name))
    )


def _member_view(member: Member, now: float) -> dict[str, Any]:
    shown = ("name", "member_id", "role", "rank", "procs", "addr", "host", "pid", "domain", "infra_rank", "note")
    view = {name: getattr(member, name) for name in shown}
    return view | {"ranks_state": str(member.ranks_state), "lease_s": round(member.lease_until - now, 3)}
