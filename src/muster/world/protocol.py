"""What does the coordinator say and do for one run, without sockets and without a clock?

Frames come in through `greet`, `hear` and `part`; `settle` lets `core.world` decide until it has nothing more to do.
What has to be sent gathers in the conversation's outbox. The service drives this with real connections and time, the
simulator with virtual ones. Hellos are dealt with by `world.joining`, orders from outside by `world.orders`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from muster.core.world import decisions, heals, last_words, launches, pace, safe_state, transitions
from muster.core.world import run as runs
from muster.core.world.launches import Belonging
from muster.types import bench
from muster.types.frames import (
    MAX_TEXT,
    AckFrame,
    AliveFrame,
    AskFrame,
    AwareFrame,
    CheckFrame,
    DismissFrame,
    ExitsFrame,
    FailedFrame,
    FarewellFrame,
    FinishedFrame,
    FitFrame,
    Frame,
    GoneFrame,
    GotFrame,
    HelloFrame,
    HoldsFrame,
    LearnedFrame,
    LeavingFrame,
    ListensFrame,
    MeasuredFrame,
    MetricsFrame,
    NoticedFrame,
    NoticeFrame,
    PostFrame,
    ReachedFrame,
    RemarkFrame,
    RenewedFrame,
    RenewFrame,
    RunRecord,
    SavingFrame,
    StaleFrame,
    StartedFrame,
    StoppedFrame,
    UnfitFrame,
    UpFrame,
    reported,
)
from muster.types.modules import DOING
from muster.types.run_event import Kind
from muster.types.state import Holding
from muster.types.world import (
    Electorate,
    Gate,
    MemberId,
    OutcomeState,
    Progress,
    Reach,
    Role,
    Round,
    RunId,
    RunOutcome,
    Settings,
)
from muster.world import frames_out
from muster.world.believable import believable, usable
from muster.world.conversation import Conversation, Visitor
from muster.world.copies import CopiesTold
from muster.world.frames_out import Peer
from muster.world.joining import Joining
from muster.world.orders import Orders
from muster.world.peers import PeersTold
from muster.world.returning import Returning

MOST_REMARKS = 8
PACE_S = 1.0  # the shortest time between two comparisons of the pace with the record
Seen = tuple[runs.Run, str, bool]  # the run, the reason, and whether its members were told the outcome

# Reports about a round: what they say of an older one than the current is not entered.
_OF_A_ROUND = (StartedFrame, UpFrame, ExitsFrame, FinishedFrame, NoticedFrame, SavingFrame, StoppedFrame, FailedFrame)


class RunProtocol:
    def __init__(
        self,
        run_id: RunId,
        *,
        epoch: int = 1,
        settings: Settings | None = None,
        directed: bool = False,
        clock: str = "",
    ) -> None:
        """A `directed` run takes its settings, its outcome's confirmation and its farewell from outside.

        `clock` names the clock of every `now`, so that a later process on this machine can use the times in a record.
        """
        self.at = Conversation(run_id, epoch=epoch, settings=settings, directed=directed, clock=clock)
        self.orders = Orders(self.at)
        self._returning = Returning(self.at)
        self._joining = Joining(self.at, self._returning)
        self._renewed: tuple[tuple[int | None, int], bytes] | None = None  # the answer to most renewals
        self._peers = PeersTold()
        self.on_decision: Callable[[runs.Run, runs.Decision, runs.Run], None] | None = None
        self._copies = CopiesTold()
        self._kept_limit_s: float | None = None  # the limit for a stall that the record's pace gives
        self._pace_at = -math.inf  # when the pace was last compared with the record
        self._remarks: set[str] = set()  # of workers about the program, each told once
        self.wake_at = math.inf
        self.released = False  # a round, whose frames are in the outbox
        self.news = False  # a report that comes with every step, and mostly changes nothing, this time did
        self.seen: Seen | None = None
        self.show()

    @classmethod
    def from_record(
        cls, run_id: RunId, record: RunRecord, now: float, *, directed: bool = False, clock: str = ""
    ) -> RunProtocol:
        """For a run whose coordinator died: same round, next epoch."""
        made = cls(run_id, epoch=record.epoch + 1, directed=directed, clock=clock)
        made._returning.restore(record, now, certain=True)
        made.show()
        return made

    @property
    def run_id(self) -> RunId:
        return self.at.run_id

    @property
    def run(self) -> runs.Run | None:
        return self.at.run

    def show(self) -> None:
        """Let other threads see the run as it is now; in the middle of a decision they see it as it was before."""
        self.seen = None if self.at.run is None else (self.at.run, self.at.reason, self.at.confirmed)

    @property
    def connected(self) -> int:
        """Members, guards and those that wait for a name; control connections do not keep a run alive."""
        return len(self.at.agents) + len(self.at.guards) + len(self._joining.held)

    def take_over(self, lifelines: Iterable[tuple[Peer, MemberId]], ended: Iterable[MemberId], now: float) -> None:
        """What was known here of members while somebody else led."""
        for peer, member_id in lifelines:
            self._joining.adopt_lifeline(peer, member_id)
        for member_id in ended:
            self._joining.all_ended(member_id, now)

    # Other runs under the same run id

    def is_of_earlier_run(self, hello: HelloFrame) -> bool:
        """Return True if the record and electorate in a hello are those of an earlier run."""
        return self._joining.belonging(hello).belonging is Belonging.EARLIER

    def opens_next(self, now: float) -> bool:
        """Return True if a new launch waits for the next run under this run id and no rank of this run is left."""
        return self._joining.opens_next(now)

    def next_run(self, electorate: Electorate, now: float) -> RunProtocol | None:
        """Return the next run under this run id, with the workers that wait for it; None if it refused them all."""
        session = self.at
        assert session.run is not None
        following = RunProtocol(session.run_id, epoch=session.epoch + 1, clock=session.clock)
        following.at.electorate = electorate
        following.at.earlier = launches.earlier_runs(session.run)
        following.at.is_settled = session.is_settled
        following.at.on_event, following.at.on_metrics = session.on_event, session.on_metrics
        following.on_decision = self.on_decision
        self._joining.hand_over(following._joining, now)
        if following.run is None:
            return None
        following.at.tell(Kind.OPENED, "a new launch begins the next run under this run id", now)
        following.show()
        return following

    @property
    def peers(self) -> list[Peer]:
        """Connections of agents and guards."""
        return [*self.at.agents.values(), *self.at.guards.values(), *(one.peer for one in self._joining.held)]

    def send_away_held(self) -> None:
        self._joining.send_away_held()

    # What they say

    def greet(self, peer: Peer, hello: HelloFrame, now: float) -> None:
        self._joining.greet(peer, hello, now)

    def part(self, peer: Peer, now: float, *, clean: bool = False) -> None:
        """A connection ended; `clean`: the other side closed it, and nothing of what it sent is missing."""
        self._joining.part(peer, now, clean=clean)

    def hear(self, peer: Peer, frame: Frame, now: float) -> None:
        visitor = self.at.visitors.get(id(peer))
        if visitor is None:
            return
        if isinstance(frame, AskFrame) and (self.at.run is None or visitor.kind == "control"):
            if self.orders.take(peer, frame, now):
                self.settle(now)
                self.orders.answer(peer, frame, now)
        elif self.at.run is None or visitor.member_id is None or visitor.kind == "lifeline":
            return
        elif visitor.kind == "guard":
            self._hear_guard(peer, visitor.member_id, frame, now)
        else:
            self.at.heard[visitor.member_id] = now
            self._hear_agent(peer, visitor, visitor.member_id, frame, now)

    def _hear_guard(self, peer: Peer, member_id: MemberId, frame: Frame, now: float) -> None:
        at = self.at
        assert at.run is not None
        if isinstance(frame, GoneFrame):
            is_its_guard = at.guards.get(member_id) is peer
            if is_its_guard and member_id in at.run.members:  # the end of its agent's connection was not seen yet
                self._joining.tell_parted(at.run, member_id, transitions.GUARD_ENDED, now)
            at.tell(Kind.GONE, f"the guard of {at.name(member_id)} ended its ranks", now)
            if not is_its_guard:  # its word comes late: the agent lives and has another
                at.run = transitions.gone(at.run, member_id, _number(frame))
                return
            at.run = transitions.guard_cleared(at.renewed_run(), member_id, _number(frame), now)
            at.drop(member_id)
        elif isinstance(frame, AliveFrame):
            at.run = transitions.guard_alive(at.run, member_id, now)

    def _hear_agent(self, peer: Peer, visitor: Visitor, member_id: MemberId, frame: Frame, now: float) -> None:
        at = self.at
        assert at.run is not None
        if isinstance(frame, RenewFrame):
            self._renew(peer, visitor, member_id, frame, now)
            return
        if isinstance(frame, MetricsFrame):  # nothing is decided by it
            if at.on_metrics is not None:
                at.on_metrics(at.name(member_id), frame)
            return
        current = at.run.round.number if at.run.round else -1
        if isinstance(frame, _OF_A_ROUND) and (_number(frame) < current or (frame.epoch or -1) < visitor.epoch):
            seq = frame.seq if isinstance(frame, ExitsFrame) else None
            at.send(peer, StaleFrame(round=current, seq=seq))
            if isinstance(frame, StoppedFrame):  # one that has lost its place ran something older all the while
                self._returning.out_of_round(member_id)
            return
        if isinstance(frame, AwareFrame) and frame.number == at.announced:
            at.unaware.discard(member_id)
        if isinstance(frame, ExitsFrame):
            at.send(peer, GotFrame(seq=frame.seq))
        elif isinstance(frame, LearnedFrame):
            at.learn(frame.modules)
        elif isinstance(frame, FailedFrame):
            self._fail(member_id, frame, now)
        self._tell_of(member_id, frame, now)
        before, at.run = at.run, _entered(at.run, member_id, frame, now)
        # New workers need the step when all others are lost. Electors get it with the next record of another reason:
        # a run whose electors are lost while a record is under way stands still.
        at.unsaved |= at.directed and at.run.durable_step != before.durable_step
        if at.run.bench is not before.bench:
            at.tell(Kind.MEASURED, str(at.run.bench), now)
        if isinstance(frame, HoldsFrame):
            self._copies.say(at, peer, visitor, member_id, now)
        if isinstance(frame, UpFrame) and (current_round := at.run.round) is not None:
            # A later coordinator reports how long the round took.
            at.unsaved |= current_round.since is not None and current_round.ran_at == now
        at.unsaved |= isinstance(frame, AckFrame) and at.directed  # it may be gone before its exits are kept elsewhere

    def _tell_of(self, member_id: MemberId, frame: Frame, now: float) -> None:
        at, name = self.at, self.at.name(member_id)
        match frame:
            case ExitsFrame(exits=ends):
                for end in ends:
                    if end.failed:
                        data = {"rank": end.rank, "worker": end.worker, "cause": last_words.cause(end)}
                        at.tell(Kind.EXIT, last_words.report(end), now, data)
            case SavingFrame(what=what):
                at.tell(Kind.SAVING, f"{name}: {what[:MAX_TEXT]}", now)
            case LeavingFrame(why=why):
                at.tell(Kind.LEAVING, f"{name}: {why or 'it leaves'}", now)
            case UnfitFrame(why=why):
                at.tell(Kind.UNFIT, f"{name}: {why}", now)
            case RemarkFrame(text=text) if text not in self._remarks and len(self._remarks) < MOST_REMARKS:
                self._remarks.add(text)
                at.tell(Kind.REMARK, text, now)
            case HoldsFrame(holding=holding):
                self._tell_of_state(member_id, believable(holding), now)

    def _tell_of_state(self, member_id: MemberId, holding: Holding, now: float) -> None:
        """What a worker has in memory changes with every step: only its troubles are told, each once."""
        at = self.at
        assert at.run is not None
        known = at.run.holdings.get(member_id)
        current = at.run.running
        calm = current is not None and current.world_size == at.run.target == len(current.up)
        self.news |= not calm or known is None or not known.held or known.refused != holding.refused
        if holding.refused and not (known is not None and known.refused):
            at.tell(Kind.STATE_REFUSED, f"{at.name(member_id)}: {holding.refused}", now)
        if holding.damage and (known is None or known.damage != holding.damage):
            at.tell(Kind.STATE_DAMAGED, f"{at.name(member_id)}: {holding.damage}", now)

    def _renew(self, peer: Peer, visitor: Visitor, member_id: MemberId, frame: RenewFrame, now: float) -> None:
        at = self.at
        assert at.run is not None
        if frame.steps:
            marks = [(rank, Progress(step, now - age)) for rank, step, age in frame.steps]
            known = len(at.run.round.progress) if at.run.round else 0
            at.run = transitions.advanced(at.run, member_id, _number(frame), marks, _first_step(frame, now))
            self.news |= at.run.round is not None and len(at.run.round.progress) > known
            self._keep_pace(at.run, now)
        before, doing = at.run, frame.doing if frame.doing in DOING else ""
        at.run = transitions.does(before, member_id, doing)
        self.news |= at.run is not before
        self._copies.say(at, peer, visitor, member_id, now)
        if visitor.told_reason != at.reason:
            visitor.told_reason = at.reason
            at.send(peer, RenewedFrame(reason=at.reason))
            return
        said_in = at.run.round.number if at.run.round else None, at.epoch
        if self._renewed is None or self._renewed[0] != said_in:
            self._renewed = said_in, at.moment.encode(RenewedFrame())
        at.outbox.append((peer, self._renewed[1]))

    def _keep_pace(self, run: runs.Run, now: float) -> None:
        """Write the record again if the pace changed: after a hang, ranks make no step from which to learn it."""
        if now < self._pace_at + PACE_S:
            return
        self._pace_at = now
        if pace.has_changed(self._kept_limit_s, run.pace):
            self._kept_limit_s = pace.limit_s(run.pace)
            self.at.unsaved = True

    def _fail(self, member_id: MemberId, frame: FailedFrame, now: float) -> None:
        """A launcher with a budget of its own (torchrun) has given up."""
        at = self.at
        assert at.run is not None
        if at.run.outcome is None:
            number = at.run.round.number if at.run.round else None
            message = f"{at.name(member_id)}: {frame.message or 'its launcher gave up'}"
            ends = reported(frame.exits, now)
            outcome = RunOutcome(OutcomeState.FAILED, "rank_failed", message, number, ends[0][0] if ends else None)
            at.run = decisions.carry_out(at.run, runs.Finish(outcome), now)
            self._ended(now)

    # Deciding

    def settle(self, now: float) -> float:
        """Carry out decisions until there is only waiting left; returns when to ask again."""
        at = self.at
        if at.run is None:
            return math.inf
        self._joining.try_held(now)
        while True:
            before = transitions.tell_time(at.renewed_run(), now)
            decision = decisions.decide(before, now)
            at.reason = decision.reason
            at.run = decisions.carry_out(before, decision.action, now)
            if self.on_decision is not None:
                self.on_decision(before, decision, at.run)
            if isinstance(decision.action, runs.Stay):
                self._peers.say(self.at)
                held = self._joining.held_until(now) if self._joining.held else ()
                self.wake_at = min([decision.wake_at, *held])
                return self.wake_at
            self._effects(before, decision, now)

    def stood_still(self, by_s: float) -> None:
        """The coordinator's own process was stopped or starved: that silence is not the members'."""
        if self.at.run is not None:
            self.at.run = transitions.extend_leases(self.at.renewed_run(), by_s)

    def _effects(self, before: runs.Run, decision: runs.Decision, now: float) -> None:
        at = self.at
        match decision.action:
            case runs.Lose(members=ids):
                for member_id in ids:
                    at.tell(Kind.LOST, f"{before.members[member_id].name}: silent for a lease", now)
                    at.drop(member_id)
                    at.probe(member_id)
            case runs.CallBack():
                at.tell(Kind.RECALL, decision.reason, now)
                at.outbox += frames_out.recalls(at.moment, at.agents)
            case runs.GiveNotice(call=call, for_s=for_s):
                at.outbox += frames_out.notices(at.moment, at.agents, NoticeFrame(call=call, for_s=for_s))
            case runs.WithdrawNotice():
                at.outbox += frames_out.notices(at.moment, at.agents, NoticeFrame(withdrawn=True))
            case runs.TakeBack():
                at.tell(Kind.TAKEN_BACK, decision.reason, now)
            case runs.TellStall(stall=stall):
                at.tell(Kind.STALLED if stall is not None else Kind.STEPS_AGAIN, decision.reason, now)
            case runs.TellUnwatched():
                at.tell(Kind.UNWATCHED, decision.reason, now)
            case runs.ReportHeal(data=data):
                at.unsaved = True  # a later coordinator must not report it again
                at.tell(Kind.HEALED, decision.reason, now, data)
            case runs.CheckHealth(members=ids):
                for member_id in ids:
                    at.send_to(member_id, CheckFrame())
            case runs.TurnGate(gate=gate):
                self._turned(before.coming or before.gate, gate, decision.reason, now)
            case runs.KeepOut():
                at.tell(Kind.KEPT_OUT, decision.reason, now)
            case runs.Heal(gate=gate):
                at.unsaved = True
                self._turned(before.gate, gate, decision.reason, now)
            case runs.Release(round=formed):
                self._release(before, formed, now)
            case runs.Dismiss(members=ids):
                at.tell(Kind.DISMISSED, decision.reason, now)
                for member_id in ids:
                    at.send_to(member_id, DismissFrame(reason=decision.reason))
            case runs.Finish(outcome=outcome):
                if outcome.state is OutcomeState.SUCCEEDED and (report := heals.report(before)) is not None:
                    at.tell(Kind.HEALED, report.text, now, report.data)
                self._ended(now)
            case runs.Farewell():
                at.tell(Kind.FAREWELL, decision.reason, now)
                at.send_all(FarewellFrame())
            case runs.GiveUpOn(members=missing):
                at.unsaved = True  # not all seats may have been known when it was restored
                at.tell(Kind.RECOVERED, decision.reason, now)
                if not missing:
                    at.outbox += frames_out.releases_to_idle(at.moment, at.agents)

    def _ended(self, now: float) -> None:
        self.at.ended(now)
        self._joining.end_held(now)

    def _release(self, before: runs.Run, formed: Round, now: float) -> None:
        at = self.at
        assert at.run is not None
        at.unsaved = at.led = self.released = True
        at.tell(Kind.RELEASE, formed.why, now)
        if formed.resume is not None:
            fell_back = before.round is not None and (at.run.barred is not None or not formed.resume.sources)
            at.tell(Kind.FELL_BACK if fell_back else Kind.RESUMED, safe_state.went_on(before, formed), now)
        at.outbox += frames_out.releases(at.moment, at.agents)
        for member_id, member in at.run.members.items():
            if member.role is Role.PARKED and before.members[member_id].role is not Role.PARKED:
                at.tell(Kind.PARKED, f"{member.name}: {member.note}", now)

    def _turned(self, before: Gate | None, gate: Gate | None, reason: str, now: float) -> None:
        if gate is not None and (before is None or before.state is not gate.state):
            self.at.tell(Kind(f"mesh-{gate.state}"), reason, now)

    def probe_lost(self) -> None:
        """Keep asking while a guard is busy ending ranks."""
        current = self.at.run.round if self.at.run is not None else None
        for member_id in current.fences if current is not None else ():
            if current is not None and member_id not in current.gone:
                self.at.probe(member_id)


def _first_step(frame: RenewFrame, now: float) -> Progress | None:
    """Return the first step in a renewal with its time; a worker may send any age."""
    if frame.first_step is None:
        return None
    age = frame.first_step_age or 0.0
    return Progress(frame.first_step, now - age if 0 <= age < math.inf else now)


def _number(frame: Frame) -> int:
    """The round that a report is about; -1 where it names none."""
    return -1 if frame.round is None else frame.round


def _entered(run: runs.Run, member_id: MemberId, frame: Frame, now: float) -> runs.Run:
    """The run after a report of one of its agents."""
    number = _number(frame)
    match frame:
        case StartedFrame():
            return transitions.started(run, member_id, number)
        case UpFrame():
            return transitions.up(run, member_id, number, now)
        case ExitsFrame(exits=ends):
            return transitions.exited(run, member_id, number, reported(ends, now))
        case FinishedFrame():
            return transitions.finished(run, member_id, number)
        case StoppedFrame(exits=ends):
            run = transitions.exited(run, member_id, number, reported(ends, now))
            return transitions.stopped(run, member_id, number, frame.store_port, now, frame.why)
        case SavingFrame(what=what):
            return transitions.saves(run, member_id, number, what[:MAX_TEXT])
        case NoticedFrame(calls=calls, seen=seen, done=done):
            return transitions.noticed(run, member_id, number, calls, seen=seen, done=done)
        case LeavingFrame(why=why, planned=planned):
            return transitions.leaving(run, member_id, why or "it leaves", now, planned=planned)
        case UnfitFrame(why=why):
            return transitions.unfit(run, member_id, why, now)
        case FitFrame():
            return transitions.fit(run, member_id)
        case ListensFrame(paths=paths):
            return transitions.listens(run, member_id, usable(paths))
        case HoldsFrame(holding=holding):
            return transitions.holds(run, member_id, believable(holding), now)
        case PostFrame(path=path):
            found = usable((path,))
            return transitions.posted(run, member_id, found[0]) if found else run
        case ReachedFrame(peers=rows):
            return transitions.reached(run, member_id, _reach(rows))
        case MeasuredFrame(bench=found):
            return transitions.measured(run, member_id, number, bench.believable(found))
        case AckFrame(exits=ends):
            return transitions.acknowledge(transitions.exited(run, member_id, number, reported(ends, now)), member_id)
    return run


def _reach(rows: tuple[tuple[MemberId, float | None, str], ...]) -> Reach:
    is_open = {member_id: rtt for member_id, rtt, _ in rows if rtt is not None and rtt >= 0}
    shut = {member_id: why[:MAX_TEXT] for member_id, _, why in rows if member_id not in is_open}
    return Reach(is_open, shut)
