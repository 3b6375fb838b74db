"""Who is let in to a run?

A connection says hello here and is welcomed, held or refused. What members bring back with them is the business of
`world.returning`; what they say afterwards, and what is decided about them, of `world.protocol`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from muster.core.succession import electorate
from muster.core.world import launches, transitions
from muster.core.world.launches import Belonging, Verdict
from muster.core.world.run import Run
from muster.types.frames import (
    MAX_TEXT,
    ElectorsFrame,
    FarewellFrame,
    HelloFrame,
    HoldFrame,
    ModulesFrame,
    Presented,
    WelcomeFrame,
)
from muster.types.run_event import Kind
from muster.types.world import Electorate, Member, MemberId, Role, Settings
from muster.world import frames_out
from muster.world.believable import usable
from muster.world.conversation import Conversation, Visitor
from muster.world.frames_out import Peer
from muster.world.returning import Returning


@dataclass
class Waiting:
    """A hello whose name is still borne by an older member."""

    peer: Peer
    hello: HelloFrame
    member: Member


def is_direct(hello: HelloFrame, peer: Peer) -> bool:
    """Else a relay is between us, whose end is not the worker's."""
    return hello.here == peer.peer


class Joining:
    """The way of connections and members into a run."""

    def __init__(self, at: Conversation, returning: Returning) -> None:
        self._at = at
        self._returning = returning
        self._asked: dict[MemberId, float] = {}  # since when each member that is held has asked for its name
        self._greeted: set[MemberId] = set()
        self._said: tuple[tuple[int, int | None, Settings, Electorate, tuple[str, ...]], bytes] | None = (
            None  # the last welcome
        )
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
        elif hello.kind == "lifeline":
            self._greet_lifeline(peer, hello, who.member_id)
        elif hello.kind == "agent":
            member = replace(who.as_member(self._asked.get(who.member_id, now)), paths=usable(who.paths))
            self._greet_agent(peer, hello, member, now)
        else:
            peer.refuse("invalid", f"unknown kind of connection {hello.kind[:MAX_TEXT]!r}")

    def _greet_lifeline(self, peer: Peer, hello: HelloFrame, member_id: MemberId) -> None:
        at = self._at
        if member_id not in at.agents:
            peer.refuse("lost", "it is not a member; its agent has to say hello first")
            return
        at.visitors[id(peer)] = Visitor("lifeline", member_id if is_direct(hello, peer) else None)
        at.send(peer, WelcomeFrame())

    def adopt_lifeline(self, peer: Peer, member_id: MemberId) -> None:
        """One that was made while somebody else led."""
        self._at.visitors[id(peer)] = Visitor("lifeline", member_id)

    def part(self, peer: Peer, now: float, *, clean: bool = False) -> None:
        """A connection ended: for an agent that is its death, and for a lifeline, if it is `clean`, everybody's."""
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
        if visitor.kind == "lifeline" and clean:
            self.all_ended(visitor.member_id, now)

    def _parted(self, member_id: MemberId, now: float) -> None:
        at = self._at
        if at.run is None or member_id not in at.run.members:
            return
        self.tell_parted(at.run, member_id, "its connection closed", now)
        at.run = transitions.disconnected(at.renewed_run(), member_id, now)
        at.probe(member_id)

    def all_ended(self, member_id: MemberId, now: float) -> None:
        """The kernel says so. Its agent's connection may have ended before, or is about to."""
        at = self._at
        if at.run is None:
            return
        run = at.renewed_run()
        if member_id in run.members:
            self.tell_parted(run, member_id, transitions.ALL_ENDED, now)
        at.run = transitions.ended(run, member_id, now)
        if run.round is not None and run.round.seat_of(member_id) and member_id not in run.round.gone:
            at.tell(Kind.GONE, f"{at.name(member_id)}: {transitions.ALL_ENDED}", now)
        at.drop(member_id)

    def tell_parted(self, run: Run, member_id: MemberId, why: str, now: float) -> None:
        leaves = run.members[member_id].role is Role.LEAVING
        kind = Kind.LEFT if run.outcome is not None or leaves else Kind.LOST
        self._at.tell(kind, f"{self._at.name(member_id)}: {why}", now)
        self._at.unsaved |= run.round is not None and member_id in run.round.finished

    def try_held(self, now: float) -> None:
        waiting, self.held = self.held, []
        for one in waiting:
            self._greet_agent(one.peer, one.hello, one.member, now, held=True)

    def held_until(self, now: float) -> list[float]:
        """Return the times at which held names may become free, or the time at which the next run may begin."""
        run = self._at.run
        assert run is not None
        if self._waits_for_next:
            return [wait.until] if (wait := launches.wait_for_ranks(run, now)) is not None else []
        names = {one.member.name for one in self.held}
        return [member.lease_until for member in run.members.values() if member.name in names]

    def end_held(self, now: float) -> None:
        """There is an outcome: nobody has to wait for a name any more."""
        if not self._at.directed:
            self.try_held(now)
            return
        for waiting in self.held:
            self._at.push_outcome([waiting.peer])
            self._at.send(waiting.peer, FarewellFrame())

    # Other runs under the same run id

    @property
    def _waits_for_next(self) -> bool:
        run = self._at.run
        return bool(self.held) and run is not None and run.outcome is not None and not self._at.directed

    def opens_next(self, now: float) -> bool:
        """Return True if workers of a new launch wait here and no rank of this run is left."""
        run = self._at.run
        return self._waits_for_next and run is not None and launches.wait_for_ranks(run, now) is None

    def hand_over(self, to: Joining, now: float) -> None:
        """Pass the hellos of held workers to the next run, and move their guards there."""
        held, self.held = self.held, []
        for waiting in held:
            to.greet(waiting.peer, waiting.hello, now)
        for member_id, guard in list(self._at.guards.items()):
            if member_id not in self._greeted:
                del self._at.guards[member_id]
                self._at.visitors.pop(id(guard), None)
                to._at.visitors[id(guard)] = Visitor("guard", member_id)
                to._at.guards[member_id] = guard

    def send_away_held(self) -> None:
        """Refuse the held workers of a new launch: this process ends with its run and cannot lead the next run."""
        held, self.held = self.held, []
        for waiting in held:
            waiting.peer.refuse("closing", "the run has ended here, and this coordinator ends with it; say hello again")

    def belonging(self, hello: HelloFrame) -> Verdict:
        """Return the run (under this run id) to which the sender of a hello belongs."""
        session, shown = self._at, hello.present
        if session.run is None or session.directed or hello.member is None or hello.kind != "agent":
            return Verdict(Belonging.HERE, "")
        return launches.judge(session.run, hello.member.launch, shown.incarnation, shown.outcome)

    def _is_elsewhere(self, waiting: Waiting, now: float, *, held: bool) -> bool:
        """Send a worker of another run the outcome, or let it wait for the next run. Return False for all others."""
        session, verdict = self._at, self.belonging(waiting.hello)
        if verdict.belonging is Belonging.HERE:
            return False
        if verdict.belonging is Belonging.NEXT:
            wait = launches.wait_for_ranks(session.renewed_run(), now)
            if wait is not None and not held:
                session.send(waiting.peer, HoldFrame(reason=wait.reason))
            self._asked[waiting.member.member_id] = waiting.member.joined_at
            self.held.append(waiting)
            return True
        session.visitors[id(waiting.peer)] = Visitor("agent", None, session.epoch)
        late = verdict.belonging is Belonging.LATE
        session.outbox.append((waiting.peer, session.moment.outcome(verdict.outcome, late=late)))
        session.send(waiting.peer, FarewellFrame())
        session.tell(Kind.LATE, f"{waiting.member.name}: {verdict.reason}", now)
        return True

    def _greet_agent(self, peer: Peer, hello: HelloFrame, member: Member, now: float, *, held: bool = False) -> None:
        at, present = self._at, hello.present
        member = replace(member, post=next(iter(usable((member.post,))), None) if member.post else None)
        known = member.member_id in self._greeted
        if electorate.can_succeed(at.electorate) and not member.takes_outline:
            peer.refuse(
                "version_mismatch", "its coordinator may be replaced, which a worker of 0.1 cannot follow; update it"
            )
            return
        if self._is_elsewhere(Waiting(peer, hello, member), now, held=held):
            return
        self._outrank(member.member_id, present.epoch)
        if not self._open(peer, hello, now):
            return
        assert at.run is not None
        has_left = not present.running and not at.run.holds_farewell
        if at.run.outcome is not None and (at.run.farewell_said or has_left):
            at.visitors[id(peer)] = Visitor("agent", None, at.epoch)
            at.outbox.append((peer, self._welcome_to(at.run.settings)))
            at.push_outcome([peer])
            at.send(peer, FarewellFrame())
            return
        match entered := transitions.join(at.renewed_run(), member, now):
            case transitions.Refusal(code=code, message=message):
                peer.refuse(code, message)
                at.tell(Kind.REFUSED, message, now)
                self._returning.out_of_round(member.member_id, running=present.running)
            case transitions.Held():
                if not held:
                    at.send(peer, HoldFrame(reason=entered.message))
                    self._returning.out_of_round(member.member_id, running=present.running)
                self._asked[member.member_id] = member.joined_at
                self.held.append(Waiting(peer, hello, member))
                at.reason = entered.message
            case Run():
                if known and (alarm := transitions.false_alarm(at.run, member.member_id, present.why, now)):
                    entered = transitions.heard_again(entered, member.member_id)
                    at.tell(Kind.FALSE_ALARM, f"{member.name}: {alarm}", now)
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
        at.outbox.append((peer, self._welcome_to(entered.settings)))
        if member.member_id in at.unaware:  # it may have missed what was announced, and has to say that it knows
            at.send(peer, ElectorsFrame(electorate=at.electorate, number=at.announced))
        if at.modules and not present.running:
            at.send(peer, ModulesFrame(modules=at.modules))
        if entered.settings.gate_timeout_s is not None:
            at.unreached.add(member.member_id)
        self._returning.enter(member.member_id, present, now)
        at.tell(Kind.JOINED, f"{member.name} from {member.host or member.addr}", now)
        if at.run.outcome is not None:
            at.push_outcome([peer])
            return
        at.outbox += [(peer, frame) for frame in frames_out.for_newcomer(at.moment, member.member_id, present, now)]

    def _welcome_to(self, settings: Settings) -> bytes:
        """The same for all who come between two rounds."""
        at = self._at
        incarnations = at.run.incarnations if at.run is not None else ()
        said_in = at.epoch, at.moment.number, settings, at.electorate, incarnations
        if self._said is None or self._said[0] != said_in:
            self._said = said_in, at.moment.encode(self._welcome_frame(settings))
        return self._said[1]

    def _welcome_frame(self, settings: Settings) -> WelcomeFrame:
        incarnations = self._at.run.incarnations if self._at.run is not None else ()
        newest = incarnations[-1] if incarnations else ""
        return WelcomeFrame(settings=settings, electorate=self._at.electorate, incarnation=newest)

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
            self._returning.follow(hello.present.record, now)
        given = {key: value for key, value in hello.settings.items() if value is not None}
        try:
            if at.run is None:
                settings = Settings.parse(given)
                if problems := settings.problems():
                    raise ValueError("; ".join(problems))
                at.run = at.opened(settings, hello.present.incarnation)
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
            self.end_held(now)
        return True
