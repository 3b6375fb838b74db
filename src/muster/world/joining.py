"""Who is let in to a run, and with what have they come?

A connection says hello here and is welcomed, held or refused; a member that comes back brings its round, and perhaps
the record of a run that this coordinator has never seen. What members say afterwards, and what is decided about them,
is the business of `world.protocol`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from muster.core.world import transitions
from muster.core.world.run import Run
from muster.types.frames import (
    MAX_TEXT,
    FarewellFrame,
    HelloFrame,
    HoldFrame,
    Presented,
    RecallFrame,
    RunRecord,
    WelcomeFrame,
    reported,
)
from muster.types.run_event import Kind
from muster.types.world import Member, MemberId, Path, Role, Settings
from muster.world import frames_out
from muster.world.conversation import Conversation, Visitor
from muster.world.frames_out import Peer

MAX_PATHS = 4


@dataclass
class Waiting:
    """A hello whose name is still borne by an older member."""

    peer: Peer
    hello: HelloFrame
    member: Member


def usable(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Where a member can be probed; what is no host and port was not said."""
    return tuple((host, port) for host, port in paths[:MAX_PATHS] if 0 < len(host) <= MAX_TEXT and 0 < port < 65536)


class Joining:
    """The way of connections and members into a run."""

    def __init__(self, at: Conversation) -> None:
        self._at = at
        self._asked: dict[MemberId, float] = {}  # since when each member that is held has asked for its name
        self._greeted: set[MemberId] = set()
        self.held: list[Waiting] = []

    def greet(self, peer: Peer, hello: HelloFrame, now: float) -> None:
        """A connection whose token and version are in order says who it is."""
        at = self._at
        if hello.kind == "control":
            at.visitors[id(peer)] = Visitor("control")
            at.send(peer, WelcomeFrame())
            return
        who = hello.member
        if who is None or not who.member_id or not who.name:
            peer.refuse("invalid", f"a hello must name its member_id and name, of at most {MAX_TEXT} characters")
        elif hello.kind == "guard":
            at.visitors[id(peer)] = Visitor("guard", who.member_id)
            at.guards[who.member_id] = peer
            at.send(peer, WelcomeFrame())
        elif hello.kind == "agent":
            member = replace(who.as_member(self._asked.get(who.member_id, now)), paths=usable(who.paths))
            self._greet_agent(peer, hello, member, now)
        else:
            peer.refuse("invalid", f"unknown kind of connection {hello.kind[:MAX_TEXT]!r}")

    def part(self, peer: Peer, now: float) -> None:
        """A connection ended: for an agent that is its death."""
        at = self._at
        self.held = [waiting for waiting in self.held if waiting.peer is not peer]
        visitor = at.visitors.pop(id(peer), None)
        if visitor is None or visitor.member_id is None:
            return
        if visitor.kind == "guard" and at.guards.get(visitor.member_id) is peer:
            del at.guards[visitor.member_id]
        if visitor.kind == "agent" and at.agents.get(visitor.member_id) is peer:
            del at.agents[visitor.member_id]
            self._parted(visitor.member_id, now)

    def _parted(self, member_id: MemberId, now: float) -> None:
        at = self._at
        if at.run is None or member_id not in at.run.members:
            return
        leaves = at.run.members[member_id].role is Role.LEAVING
        kind = Kind.LEFT if at.run.outcome is not None or leaves else Kind.LOST
        at.tell(kind, f"{at.name(member_id)}: its connection closed", now)
        at.unsaved |= at.run.round is not None and member_id in at.run.round.finished
        at.run = transitions.disconnected(at.renewed_run(), member_id, now)
        at.probe(member_id)

    def try_held(self, now: float) -> None:
        waiting, self.held = self.held, []
        for one in waiting:
            self._greet_agent(one.peer, one.hello, one.member, now, held=True)

    def held_until(self) -> list[float]:
        """When names that others wait for may become free."""
        assert self._at.run is not None
        names = {one.member.name for one in self.held}
        return [member.lease_until for member in self._at.run.members.values() if member.name in names]

    def end_held(self) -> None:
        """There is an outcome: nobody has to wait for a name any more."""
        for waiting in self.held:
            self._at.push_outcome([waiting.peer])
            self._at.send(waiting.peer, FarewellFrame())

    def _greet_agent(self, peer: Peer, hello: HelloFrame, member: Member, now: float, *, held: bool = False) -> None:
        at, present = self._at, hello.present
        self._outrank(member.member_id, present.epoch)
        if not self._open(peer, hello, now):
            return
        assert at.run is not None
        has_left = not present.running and not at.run.holds_farewell
        if at.run.outcome is not None and (at.run.farewell_said or has_left):
            at.visitors[id(peer)] = Visitor("agent", None, at.epoch)
            at.send(peer, WelcomeFrame(settings=at.run.settings))
            at.push_outcome([peer])
            at.send(peer, FarewellFrame())
            return
        match entered := transitions.join(at.renewed_run(), member, now):
            case transitions.Refusal(code=code, message=message):
                peer.refuse(code, message)
                at.tell(Kind.REFUSED, message, now)
                self.out_of_round(member.member_id, running=present.running)
            case transitions.Held():
                if not held:
                    at.send(peer, HoldFrame(reason=entered.message))
                    self.out_of_round(member.member_id, running=present.running)
                self._asked[member.member_id] = member.joined_at
                self.held.append(Waiting(peer, hello, member))
                at.reason = entered.message
            case Run():
                self._welcome(peer, member, entered, present, now)

    def _welcome(self, peer: Peer, member: Member, entered: Run, present: Presented, now: float) -> None:
        at = self._at
        returning = at.agents.get(member.member_id)
        if returning is not None:
            at.visitors.pop(id(returning), None)
        at.run = entered
        self._asked.pop(member.member_id, None)
        at.visitors[id(peer)] = Visitor("agent", member.member_id, at.epoch)
        at.agents[member.member_id] = peer
        at.send(peer, WelcomeFrame(settings=entered.settings))
        if entered.settings.gate_timeout_s is not None:
            at.unreached.add(member.member_id)
        self._enter_presented(member.member_id, present, now)
        at.tell(Kind.JOINED, f"{member.name} from {member.host or member.addr}", now)
        if at.run.outcome is not None:
            at.push_outcome([peer])
            return
        at.outbox += [(peer, frame) for frame in frames_out.for_newcomer(at.moment, member.member_id, present, now)]

    # What they present

    def _outrank(self, member_id: MemberId, epoch: int) -> None:
        """Speak in a later epoch than any coordinator that this member knew before us."""
        at = self._at
        if epoch > at.epoch or (epoch == at.epoch and member_id not in self._greeted):
            at.epoch = epoch + 1
        self._greeted.add(member_id)

    def _open(self, peer: Peer, hello: HelloFrame, now: float) -> bool:
        """Make sure that there is a run, the right one, and that this member asks for nothing else."""
        at = self._at
        if hello.present.record is not None:
            self._follow(hello.present.record, now)
        given = {key: value for key, value in hello.settings.items() if value is not None}
        try:
            if at.run is None:
                settings = Settings.parse(given)
                if problems := settings.problems():
                    raise ValueError("; ".join(problems))
                at.run = transitions.open_run(settings)
            elif given and not at.directed and (odd := transitions.settings_differ(at.run.settings, given)):
                peer.refuse("settings_differ", f"run {at.run_id} was opened with other settings: {'; '.join(odd)}")
                return False
        except ValueError as error:
            peer.refuse("invalid", f"bad settings: {error}")
            return False
        if at.run.outcome is None and (outcome := hello.present.outcome) is not None:
            at.confirmed = True  # members are told only what was recorded
            at.run = transitions.adopt(at.run, outcome)
            at.ended(now)
            self.end_held()
        return True

    def _follow(self, record: RunRecord, now: float) -> None:
        """The highest round presented is the one to go on with, until this coordinator leads a round of its own."""
        at = self._at
        if record.round >= 0 and record.as_round() is None:
            raise ValueError("a record shows a round without its seats")  # whatever it is needed for
        before = at.run
        if before is not None and at.led:
            at.run = transitions.skip_past(before, record.round)
        elif before is None or record.round >= before.next_round:
            self.restore(record, now, certain=False)
            if before is not None:
                self._retell(before)

    def _retell(self, before: Run) -> None:
        """Members that were here before a higher round was presented have to hear of it."""
        if before.round is not None:
            self._at.send_all(RecallFrame(round=before.round.number, reason="a later round was presented"))
        self._at.send_record()

    def restore(self, record: RunRecord, now: float, *, certain: bool) -> None:
        """Take over the round that a record shows; members that are already here enter it again."""
        at = self._at
        before, last = at.run, record.as_round()
        settings, target = record.settings, record.target
        if at.directed and before is not None:
            settings, target = before.settings, before.target
        run = transitions.restored(settings, target, record.restarts_used, last, now, gate=record.gate, certain=certain)
        at.unsaved = True
        run = replace(
            run,
            best_step=record.best_step,
            stale_rounds=record.stale_rounds,
            holds_farewell=at.directed if before is None else before.holds_farewell,
            ordered=None if before is None else before.ordered,
        )
        if before is not None and before.outcome is not None:
            run = transitions.adopt(run, before.outcome)
        elif record.outcome is not None:
            run = transitions.adopt(run, record.outcome)
            at.ended_at = now
        for member in before.members.values() if before is not None else ():
            entered = transitions.join(run, member, now)
            if isinstance(entered, Run):
                run = entered
        at.run = run
        at.unreached |= at.agents.keys()  # what they reported is forgotten: being told anew, they report anew
        if last is not None:
            at.tell(Kind.RECOVERED, f"took over round {last.number} in epoch {at.epoch}", now)

    def _enter_presented(self, member_id: MemberId, present: Presented, now: float) -> None:
        """What a member brings from before its connection broke: exits, success, a stop."""
        assert self._at.run is not None
        run, number = self._at.run, present.round
        if number is not None:
            run = transitions.exited(run, member_id, number, reported(present.exits, now))
            if present.finished:
                run = transitions.finished(run, member_id, number)
            if present.running:
                run = transitions.started(run, member_id, number)
                if present.up:
                    run = transitions.up(run, member_id, number, now)
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
