"""Who is let in to a run, and with what have they come?

A connection says hello here and is welcomed, held or refused; a member that comes back brings its round, and perhaps
the record of a run that this coordinator has never seen. What members say afterwards, and what is decided about them,
is the protocol's business (`world.protocol`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from muster.core.world import transitions
from muster.core.world.run import Run
from muster.types.world import Member, MemberId, Outcome, Path, Role, Round, RunId, Settings
from muster.world import frames_in, frames_out, records
from muster.world.frames_in import MAX_TEXT
from muster.world.frames_out import Notice, Peer, Voice
from muster.world.wire import Frame


@dataclass
class Visitor:
    """A connection that has said hello."""

    kind: str
    member_id: MemberId | None = None
    epoch: int = 0
    told_reason: str = ""


@dataclass
class Waiting:
    """A hello whose name is still borne by an older member."""

    peer: Peer
    hello: Frame
    member: Member


class Joining(ABC):
    """A run's connections, and the run that its members enter."""

    def __init__(self, run_id: RunId, *, epoch: int, settings: Settings | None, directed: bool) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.run: Run | None = transitions.open_run(settings) if settings else None
        self.directed = directed
        self.confirmed = False  # a directed run's outcome is recorded, so members may be told
        if self.run is not None:
            self.run = replace(self.run, holds_farewell=directed)
        self.outbox: list[Notice] = []
        self.unsaved = False
        self.reason = "nobody has joined yet"
        self.ended_at: float | None = None
        self._agents: dict[MemberId, Peer] = {}
        self._guards: dict[MemberId, Peer] = {}
        self._visitors: dict[int, Visitor] = {}
        self._heard: dict[MemberId, float] = {}
        self._held: list[Waiting] = []
        self._led = False  # it has released a round of its own
        self._asked: dict[MemberId, float] = {}  # since when each member that is held has asked for its name
        self._greeted: set[MemberId] = set()
        self._peers_told: dict[MemberId, tuple[Path, ...]] = {}  # whom the members were told to reach
        self._untold: set[MemberId] = set()  # those that have not been told anything yet

    @abstractmethod
    def _tell(self, kind: str, text: str, now: float) -> None:
        """Add a line to the run's story."""

    @property
    def connected(self) -> int:
        """Members, guards and those that wait for a name; control connections do not keep a run alive."""
        return len(self._agents) + len(self._guards) + len(self._held)

    def greet(self, peer: Peer, hello: Frame, now: float) -> None:
        """A connection whose token and version are in order says who it is."""
        kind = str(hello.get("kind"))
        if kind == "control":
            self._visitors[id(peer)] = Visitor("control")
            self._send(peer, "welcome")
            return
        member = frames_in.member(hello)
        if member is None:
            peer.refuse("invalid", f"a hello must name its member_id and name, of at most {MAX_TEXT} characters")
            return
        if kind == "guard":
            self._visitors[id(peer)] = Visitor("guard", member.member_id)
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
            if self.run is not None and visitor.member_id in self.run.members:
                leaves = self.run.members[visitor.member_id].role is Role.LEAVING
                kind = "left" if self.run.outcome is not None or leaves else "lost"
                self._tell(kind, f"{self._name(visitor.member_id)}: its connection closed", now)
                self.unsaved |= self.run.round is not None and visitor.member_id in self.run.round.finished
                self.run = transitions.disconnected(self._renewed_run(), visitor.member_id, now)
                self._probe(visitor.member_id)

    def _greet_agent(self, peer: Peer, hello: Frame, member: Member, now: float, *, held: bool = False) -> None:
        present = hello.get("present") or {}
        self._outrank(member.member_id, int(present.get("epoch") or 0))
        if not self._open(peer, hello, present, now):
            return
        assert self.run is not None
        has_left = not present.get("running") and not self.run.holds_farewell
        if self.run.outcome is not None and (self.run.farewell_said or has_left):
            self._visitors[id(peer)] = Visitor("agent", None, self.epoch)
            self._send(peer, "welcome", settings=self.run.settings.to_wire())
            self._push_outcome([peer])
            self._send(peer, "farewell")
            return
        entered = transitions.join(self._renewed_run(), member, now)
        match entered:
            case transitions.Refused(code=code, message=message):
                peer.refuse(code, message)
                self._tell("refused", message, now)
                self._out_of_round(member.member_id, present)
            case transitions.Held():
                if not held:
                    self._send(peer, "hold", reason=entered.message)
                    self._out_of_round(member.member_id, present)
                self._asked[member.member_id] = member.joined_at
                self._held.append(Waiting(peer, hello, member))
                self.reason = entered.message
            case Run():
                self._welcome(peer, member, entered, present, now)

    def _try_held(self, now: float) -> None:
        waiting, self._held = self._held, []
        for one in waiting:
            self._greet_agent(one.peer, one.hello, one.member, now, held=True)

    def _held_until(self) -> list[float]:
        assert self.run is not None
        names = {one.member.name for one in self._held}
        return [member.lease_until for member in self.run.members.values() if member.name in names]

    # What they present

    def _outrank(self, member_id: MemberId, epoch: int) -> None:
        """Speak in a later epoch than any coordinator that this member knew before us."""
        if epoch > self.epoch or (epoch == self.epoch and member_id not in self._greeted):
            self.epoch = epoch + 1
        self._greeted.add(member_id)

    def _open(self, peer: Peer, hello: Frame, present: Mapping[str, Any], now: float) -> bool:
        """Make sure that there is a run, the right one, and that this member asks for nothing else."""
        if record := present.get("record"):
            self._follow(record, now)
        given = {key: value for key, value in (hello.get("settings") or {}).items() if value is not None}
        try:
            if self.run is None:
                settings = Settings.parse(given)
                if problems := settings.problems():
                    raise ValueError("; ".join(problems))
                self.run = transitions.open_run(settings)
            elif given and not self.directed and (odd := transitions.settings_differ(self.run.settings, given)):
                peer.refuse("settings_differ", f"run {self.run_id} was opened with other settings: {'; '.join(odd)}")
                return False
        except ValueError as error:
            peer.refuse("invalid", f"bad settings: {error}")
            return False
        if self.run.outcome is None and (outcome := present.get("outcome")):
            self.confirmed = True  # members are told only what was recorded
            self.run = transitions.adopt(self.run, Outcome.from_wire(outcome))
            self._ended(now)
        return True

    def _follow(self, record: Mapping[str, Any], now: float) -> None:
        """The highest round presented is the one to go on with, until this coordinator leads a round of its own."""
        if record["round"] >= 0:
            Round.from_wire(record)  # one that cannot be read is refused, whatever it is needed for
        before = self.run
        if before is not None and self._led:
            self.run = transitions.skip_past(before, record["round"])
        elif before is None or record["round"] >= before.next_round:
            self._restore(record, now, certain=False)
            if before is not None:
                self._retell(before)

    def _retell(self, before: Run) -> None:
        """Members that were here before a higher round was presented have to hear of it."""
        assert self.run is not None
        record = self._voice.record("record")
        for peer in self._agents.values():
            if before.round is not None:
                self._send(peer, "recall", round=before.round.number, grace_s=0.0, reason="a later round was presented")
            self._queue(peer, record)

    def _restore(self, record: Mapping[str, Any], now: float, *, certain: bool) -> None:
        """Take over the round that a record shows; members that are already here enter it again."""
        before = self.run
        old = before.members if before is not None else {}
        last = records.round_of(record)
        settings, target, used = Settings.parse(record["settings"]), int(record["target"]), record["restarts_used"]
        if self.directed and before is not None:
            settings, target = before.settings, before.target
        gate = records.gate_of(record)
        self.run = transitions.restored(settings, target, int(used), last, now, gate=gate, certain=certain)
        self.unsaved = True
        self.run = replace(
            self.run,
            best_step=record.get("best_step"),
            stale_rounds=record.get("stale_rounds", 0),
            holds_farewell=self.directed if before is None else before.holds_farewell,
            ordered=None if before is None else before.ordered,
        )
        if before is not None and before.outcome is not None:
            self.run = transitions.adopt(self.run, before.outcome)
        elif outcome := record.get("outcome"):
            self.run = transitions.adopt(self.run, Outcome.from_wire(outcome))
            self.ended_at = now
        for member in old.values():
            entered = transitions.join(self.run, member, now)
            if isinstance(entered, Run):
                self.run = entered
        self._untold |= self._agents.keys()  # what they reported is forgotten: being told anew, they report anew
        if last is not None:
            self._tell("recovered", f"took over round {last.number} in epoch {self.epoch}", now)

    def _welcome(self, peer: Peer, member: Member, entered: Run, present: Mapping[str, Any], now: float) -> None:
        returning = self._agents.get(member.member_id)
        if returning is not None:
            self._visitors.pop(id(returning), None)
        self.run = entered
        self._asked.pop(member.member_id, None)
        self._visitors[id(peer)] = Visitor("agent", member.member_id, self.epoch)
        self._agents[member.member_id] = peer
        self._send(peer, "welcome", settings=entered.settings.to_wire())
        if entered.settings.gate_timeout_s is not None:
            self._untold.add(member.member_id)
        self._enter_presented(member.member_id, present, now)
        self._tell("joined", f"{member.name} from {member.host or member.addr}", now)
        self._bring_up_to_date(peer, member.member_id, present, now)

    def _enter_presented(self, member_id: MemberId, present: Mapping[str, Any], now: float) -> None:
        """What a member brings from before its connection broke: exits, success, a stop."""
        assert self.run is not None
        number = present.get("round")
        if number is not None:
            self.run = transitions.exited(self.run, member_id, number, frames_in.exits(present.get("exits"), now))
            if present.get("finished"):
                self.run = transitions.finished(self.run, member_id, number)
            if present.get("running"):
                self.run = transitions.started(self.run, member_id, number)
                if present.get("up"):
                    self.run = transitions.up(self.run, member_id, number, now)
            else:
                port, why = int(present.get("store_port") or 0), str(present.get("why") or "")
                self.run = transitions.stopped(self.run, member_id, number, port, now, why)
        self._out_of_round(member_id, present)

    def _out_of_round(self, member_id: MemberId, present: Mapping[str, Any]) -> None:
        """It lost its place before the release reached it, or is not let in again: nobody else would say so."""
        assert self.run is not None
        member = self.run.members.get(member_id)
        returns = self.run.recovery_until is not None or (member is not None and member.role is Role.ACTIVE)
        if self.run.round is not None and not returns and not present.get("running"):
            self.run = transitions.gone(self.run, member_id, self.run.round.number)

    def _bring_up_to_date(self, peer: Peer, member_id: MemberId, present: Mapping[str, Any], now: float) -> None:
        assert self.run is not None
        if self.run.outcome is not None:
            self._push_outcome([peer])
            return
        for frame in frames_out.for_newcomer(self._voice, member_id, present, now):
            self._queue(peer, frame)

    # The end

    def _ended(self, now: float) -> None:
        assert self.run is not None and self.run.outcome is not None
        self.ended_at = now
        self.unsaved = True
        self._tell(str(self.run.outcome.state), self.run.outcome.message, now)
        self._push_outcome(list(self._agents.values()))
        for waiting in self._held:
            self._push_outcome([waiting.peer])
            self._send(waiting.peer, "farewell")

    def _push_outcome(self, peers: list[Peer]) -> None:
        if self.directed and not self.confirmed:
            return  # all of them will hear it when it is recorded
        outcome = self._voice.outcome()
        for peer in peers:
            self._queue(peer, outcome)

    # Leases and probes

    def _renewed_run(self) -> Run:
        """The run with all leases that were renewed since it was last looked at."""
        assert self.run is not None
        if self._heard:
            self.run = transitions.renew(self.run, self._heard)
            self._heard = {}
        return self.run

    def _probe(self, member_id: MemberId) -> None:
        """Ask the guard of a lost member whether it is there; its word comes before the clock's."""
        if guard := self._guards.get(member_id):
            self._send(guard, "probe")

    # Sending

    @property
    def _voice(self) -> Voice:
        return Voice(self.run_id, self.epoch, self.run)

    def _send(self, peer: Peer, kind: str, **fields: Any) -> None:
        self._queue(peer, self._voice.frame(kind, **fields))

    def _queue(self, peer: Peer, data: bytes) -> None:
        self.outbox.append((peer, data))

    def _name(self, member_id: MemberId) -> str:
        member = self.run.members.get(member_id) if self.run is not None else None
        if member is not None:
            return member.name
        seat = self.run.round.seat_of(member_id) if self.run is not None and self.run.round else None
        return seat.name if seat else str(member_id)
