"""What do agents, guards and coordinators say to each other? One record per message.

Each class is a message: its `type` on the wire, who sends it, and its fields, read and written by `types.codec` with
names as Python spells them. What a field means stands beside it; `docs/protocol.md` lists the same and is tested
against this. Unknown types and fields come from a newer version and are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, ClassVar, Literal

from muster.types import codec, numbers
from muster.types.bench import Bench
from muster.types.codec import limited
from muster.types.measured import LoggedNumber, WorkerUse
from muster.types.modules import LONGEST, MAX_NAMES
from muster.types.records import record, replace
from muster.types.state import Holding, Resume
from muster.types.world import (
    Elector,
    Electorate,
    EndedRun,
    Gate,
    Healing,
    Member,
    MemberId,
    Outline,
    Pace,
    Path,
    Place,
    RankEnd,
    Round,
    RunId,
    RunOutcome,
    Seat,
    Settings,
    TakenBack,
    unknown_seat,
)

LARGEST = 1 << 53  # what JSON carries exactly
MAX_TEXT = 256  # of a name, an address, a domain
MAX_REMARK = 2048
FEW_ENDS, MOST_ENDS = 256, 4096  # of ranks, in a record that has to fit into a frame
Sender = Literal["coordinator", "agent", "guard", "control", "member", "elector"]

TYPES: dict[str, type[Frame]] = {}


@record(kw_only=True)
class Frame:
    """What every message carries: from the coordinator the current round, unless the message is about another one."""

    type: ClassVar[str]
    sender: ClassVar[Sender]

    epoch: int | None = None
    round: int | None = None

    def __init_subclass__(cls, type: str, sender: Sender = "coordinator") -> None:
        cls.type, cls.sender = type, sender
        TYPES[type] = cls


@record(kw_only=True)
class UnknownFrame(Frame, type="", sender="member"):
    """A type that this version does not know."""

    name: str


def read(data: Mapping[str, Any]) -> Frame:
    """The message that a JSON object is; `codec.Invalid` says what is wrong with it."""
    found = TYPES.get(data["type"])
    if found is None or found is UnknownFrame:
        return UnknownFrame(name=str(data["type"])[:MAX_TEXT])
    told = {key: value for key, value in data.items() if value is not None and key != "type"}
    return codec.from_wire(found, told, strict=False, names=codec.plain)


def write(frame: Frame) -> dict[str, Any]:
    return {"type": frame.type, **codec.to_wire(frame, names=codec.plain)}


def prepare() -> None:
    """For those who must be quick when the first of its type comes."""
    codec.prepare(TYPES.values(), names=codec.plain)


# What messages are made of ------------------------------------------------------------------------


@record()
class RunRecord:
    """All that another coordinator needs to go on with a run. It is kept before it is told, and every agent has it."""

    settings: Settings
    target: int
    restarts_used: int
    run_id: RunId | None = None
    epoch: int = 0
    round: int = -1  # none yet
    seats: tuple[Seat, ...] = ()
    store: Path | None = None
    why: str = ""
    resume: Resume | None = None
    best_step: int | None = None
    stale_rounds: int = 0
    outcome: RunOutcome | None = None
    exits: tuple[RankEnd, ...] = ()  # ends that stand whatever comes
    finished: tuple[MemberId, ...] = ()
    gate: Gate | None = None
    electorate: Electorate = Electorate()
    revision: int = 0  # how often it was written, by all who have led
    promised: int = 0  # the last term in which its keeper gave its voice: only in a file
    outline: Outline | None = None  # of a large world: instead of its seats, and of all that is known of each
    proven: int | None = None  # the size that worked before another one was asked for
    taken_back: TakenBack | None = None
    lent: Mapping[str, str] = field(default_factory=dict)  # workers that get no rank, by name, with the reason
    hopeless: str = ""  # the last line of the round before, if no restart can change what it says
    incarnations: tuple[str, ...] = ()  # ids of this run, among all runs that had its run id
    launches: tuple[str, ...] = ()  # identities of the launches that had members in it
    earlier: tuple[EndedRun, ...] = ()  # runs that had its run id before
    clock: str = limited(default="", max_length=MAX_TEXT)  # the clock of its times; empty: not known
    since: float | None = None  # the loss or the request that its round follows
    ran_at: float | None = None  # when all ranks of its round ran first
    healing: Healing | None = None  # a loss or a crash that was not made good yet
    pace: Pace = Pace()  # the usual time per step
    durable_step: int | None = None  # the newest step that a worker ever reported to be on disk

    @property
    def told_seats(self) -> tuple[Seat, ...]:
        """All seats of its round, or of a large world the one that is known."""
        if self.outline is None:
            return self.seats
        return (self.outline.seat,) if self.outline.seat is not None else ()

    def shortened(self) -> RunRecord:
        """As electors keep it: where very many ranks have ended, those that failed first, and nobody's last words."""
        if len(self.exits) <= FEW_ENDS:
            return self
        worst = sorted(self.exits, key=lambda end: (not end.failed, end.rank))[:MOST_ENDS]
        return replace(
            self, exits=tuple(replace(end, stderr_tail=(), stack="", exception="", place="") for end in worst)
        )

    def as_round(self) -> Round | None:
        """The round that it shows, with what was known of its ranks' ends. Not every seat of an outline is known."""
        if self.outline is not None and self.store is not None:
            known = {seat.rank: seat for seat in self.told_seats}
            seats = tuple(known.get(rank) or unknown_seat(rank) for rank in range(self.outline.workers))
            return self._timed(Round(self.round, seats, *self.store, why=self.why, resume=self.resume))
        if not self.seats or self.store is None:
            return None
        ends, finished = {end.rank: end for end in self.exits}, frozenset(self.finished)
        return self._timed(
            Round(self.round, self.seats, *self.store, why=self.why, resume=self.resume, exits=ends, finished=finished)
        )

    def _timed(self, formed: Round) -> Round:
        return replace(formed, since=self.since, ran_at=self.ran_at)

    def place_of(self, member_id: MemberId) -> Place | None:
        """The place that a release gives to a member, if any."""
        if self.outline is not None and self.store is not None:
            formed: Round | None = Round(self.round, self.told_seats, *self.store, why=self.why, resume=self.resume)
        else:
            formed = self.as_round()
        seat = formed.seat_of(member_id) if formed is not None else None
        if formed is None or seat is None:
            return None
        restarts = self.restarts_used, self.settings.max_restarts
        return Place(formed, seat, *restarts, self.outline, self.durable_step)

    def outlined(self, member_id: MemberId | None = None) -> RunRecord:
        """The same without what grows with the world, for one of its members, or for any without a seat."""
        formed = self.as_round()
        if self.outline is not None or formed is None:
            return self
        seat = formed.seat_of(member_id) if member_id is not None else None
        first = formed.first_rank_of(seat.rank) if seat is not None else 0
        outline = Outline(formed.world_size, formed.rank_count, seat, first)
        resume = self.resume
        if resume is not None:
            resume = resume.of_ranks(range(first, first + seat.procs) if seat is not None else range(0))
        return replace(self, seats=(), exits=(), finished=(), resume=resume, outline=outline, healing=None, pace=Pace())


@record()
class ReportedEnd(RankEnd):
    """How a rank ended, as it travels: with its age, for clocks differ."""

    age_s: float = 0.0


def report(end: RankEnd, age_s: float, *, tail: bool = True) -> ReportedEnd:
    known = vars(end) if tail else {**vars(end), "stderr_tail": ()}
    return ReportedEnd(**known, age_s=round(age_s, 4))


def reported(ends: tuple[ReportedEnd, ...], now: float) -> list[tuple[RankEnd, float]]:
    """Ends as told, with the time on our clock at which each happened."""
    names = [one.name for one in fields(RankEnd)]
    return [(RankEnd(**{name: getattr(end, name) for name in names}), now - end.age_s) for end in ends]


@record()
class Introduction:
    """Who says hello. A guard and a lifeline tell the first two."""

    member_id: MemberId = limited(max_length=MAX_TEXT)
    name: str = limited(max_length=MAX_TEXT)
    addr: str = limited(default="127.0.0.1", max_length=MAX_TEXT)
    procs: int = limited(default=1, ge=1)
    infra_rank: int | None = None
    domain: str | None = limited(default=None, max_length=MAX_TEXT)
    version: str = limited(default="1.0", max_length=MAX_TEXT)
    store_port: int = 0
    host: str = limited(default="", max_length=MAX_TEXT)
    pid: int = 0
    launcher: str = limited(default="node", max_length=MAX_TEXT)
    checks_health: bool = False
    unfit: str = ""
    paths: tuple[Path, ...] = ()
    post: Path | None = None
    takes_outline: bool = False  # of a large world it needs no seat but its own; 0.1 needs all
    takes_notice: bool = False
    launch: str = limited(default="", max_length=MAX_TEXT)  # the identity of its launch; empty: it has none

    def as_member(self, joined_at: float) -> Member:
        return Member(**{**vars(self), "unfit": self.unfit[:MAX_TEXT]}, joined_at=joined_at)


@record()
class Presented:
    """Everything that a coordinator which knows nothing of a member needs to know."""

    epoch: int = 0
    record: RunRecord | None = None
    store_port: int = 0
    outcome: RunOutcome | None = None
    round: int | None = None
    running: bool = False
    up: bool = False
    finished: bool = False
    exits: tuple[ReportedEnd, ...] = ()
    why: str = ""
    electorate: Electorate = Electorate()
    holding: Holding | None = None  # whoever decides upon a stop that it shows has to know what was kept before it
    incarnation: str = limited(default="", max_length=MAX_TEXT)  # the id of its run; empty: it is a member of none


# Opening ------------------------------------------------------------------------------------------


@record(kw_only=True)
class ChallengeFrame(Frame, type="challenge"):
    """The first word: the versions that the coordinator speaks, and a number to prove the token with"""

    nonce: str = ""
    low: object | None = None
    high: object | None = None
    tls: bool = False  # it has a token: it proves that, and can go on in TLS. 0.1 does neither
    peer: str = ""  # whom it sees at the other end: another address than the member's own says that there is a relay


@record(kw_only=True)
class TlsFrame(Frame, type="tls", sender="member"):
    """Go on in TLS, with a key that follows from the token of that run; said back, TLS comes next, and another
    `challenge` in it"""

    run_id: str = ""
    proof: str = ""


@record(kw_only=True)
class HelloFrame(Frame, type="hello", sender="member"):
    """Who is there (`kind`: `agent`, `guard`, `lifeline`, `control`, or `keep` from one who leads or wants to), for
    which run, with what proof"""

    v: object | None = None
    low: object | None = None
    high: object | None = None
    kind: str = ""
    run_id: str = ""
    proof: str = ""
    nonce: str = limited(default="", max_length=MAX_TEXT)  # for the coordinator's proof; 0.1 asks for none
    here: str = limited(default="", max_length=MAX_TEXT)  # of a lifeline: its own end, which tells a relay
    elector: MemberId | None = None  # of `keep`: whom it wants; somebody else may listen there by now
    member: Introduction | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # only those that its user gave
    present: Presented = Presented()


@record(kw_only=True)
class ProofFrame(Frame, type="proof"):
    """The coordinator knows the token, too: the first answer to a hello with a `nonce`"""

    proof: str = ""


@record(kw_only=True)
class WelcomeFrame(Frame, type="welcome"):
    """The hello is accepted, and these are the run's settings"""

    settings: Settings | None = None
    electorate: Electorate = Electorate()
    incarnation: str = ""  # the id of this run, among all runs that had its run id; a member presents it again


@record(kw_only=True)
class HoldFrame(Frame, type="hold"):
    """Wait: the name's old bearer has a lease left, or the last run's ranks are still ending"""

    reason: str = ""


@record(kw_only=True)
class ErrorFrame(Frame, type="error"):
    """Refused; the connection ends, unless this answers an `ask`"""

    code: str = ""
    message: str = ""
    seq: int | None = None


@record(kw_only=True)
class PartFrame(Frame, type="part", sender="member"):
    """A part of a frame that is too long for one, from either side and only after the proofs; the last has no `more`"""

    text: str = ""
    more: bool = False


# From the coordinator -----------------------------------------------------------------------------


@record(kw_only=True)
class ReleaseFrame(Frame, type="release"):
    """This round is out; the receiver finds its seat in the record. Repeated after a reconnect; harmless"""

    record: RunRecord


@record(kw_only=True)
class RecordFrame(Frame, type="record"):
    """The same for those without a seat, so that they can bring it back"""

    record: RunRecord


@record(kw_only=True)
class NoticeFrame(Frame, type="notice"):
    """A recall is planned: hold ranks that ask `muster.should_save()` for at most `for_s`, and answer how often they
    have asked; with `call`, it is true from that call on; withdrawn, it is not planned any more"""

    call: int | None = None
    for_s: float = 0.0
    withdrawn: bool = False


@record(kw_only=True)
class RecallFrame(Frame, type="recall"):
    """End the ranks of that round and confirm; with `dump`, leave their stacks in the log"""

    grace_s: float = 0.0
    cause: str = ""
    reason: str = ""
    dump: bool = False


@record(kw_only=True)
class RenewedFrame(Frame, type="renewed"):
    """The lease is renewed; the reason when it has changed"""

    reason: str | None = None


@record(kw_only=True)
class ReachFrame(Frame, type="reach"):
    """Probe these until told otherwise: `[member, [[host, port], …]]` each. Without `gone` these and nobody else, after
    each hello; with it these too, and no longer those that are gone. Only in a run with a gate"""

    peers: tuple[tuple[MemberId, tuple[Path, ...]], ...] = ()
    gone: tuple[MemberId, ...] | None = None


@record(kw_only=True)
class CopiesFrame(Frame, type="copies"):
    """Give these a copy of what ranks commit: `[member, [host, port]]` each; the `buddy` hears
    of each step before it is sealed. `safe` is the newest round and step that
    no loss of one worker costs. Copies are taken of steps that `every` divides, and given of those that `stride`
    divides; the first from `write_at` on is written to disk"""

    targets: tuple[tuple[MemberId, Path], ...] = ()
    buddy: MemberId | None = None
    safe: tuple[int, int] | None = None
    every: int = 1
    stride: int = 1
    write_at: int | None = None


@record(kw_only=True)
class CheckFrame(Frame, type="check"):
    """Run the health check and answer `fit` or `unfit`"""


@record(kw_only=True)
class DismissFrame(Frame, type="dismiss"):
    """Leave with exit code 0"""

    reason: str = ""


@record(kw_only=True)
class OutcomeFrame(Frame, type="outcome"):
    """The run has ended: stop, `ack`, wait for `farewell`"""

    outcome: RunOutcome
    grace_s: float = 0.0
    farewell_s: float | None = None
    late: bool = False  # the receiver came after the end of the run, and was no member of it


@record(kw_only=True)
class FarewellFrame(Frame, type="farewell"):
    """Everyone knows; exit"""


@record(kw_only=True)
class ProbeFrame(Frame, type="probe"):
    """To a guard: are you there?"""


@record(kw_only=True)
class StaleFrame(Frame, type="stale"):
    """The message spoke of an old round; this is the current one"""

    seq: int | None = None


@record(kw_only=True)
class GotFrame(Frame, type="got"):
    """An `exits` message was entered"""

    seq: int | None = None


@record(kw_only=True)
class AnswerFrame(Frame, type="answer"):
    """What `ask` wanted to see"""

    seq: int | None = None
    view: Mapping[str, Any] = field(default_factory=dict)


@record(kw_only=True)
class ModulesFrame(Frame, type="modules"):
    """To one without a rank: what ranks of this run import by themselves, so that it can be ready when it gets one"""

    modules: tuple[str, ...] = limited(default=(), max_items=MAX_NAMES, max_length=LONGEST)


# Between those who may lead a run ------------------------------------------------------------------


@record(kw_only=True)
class ElectorsFrame(Frame, type="electors"):
    """To all agents: these have a voice now, or soon will"""

    electorate: Electorate
    number: int = 0


@record(kw_only=True)
class MovedFrame(Frame, type="moved"):
    """Somebody else leads this run, or nobody yet: ask there, the first one first"""

    posts: tuple[Path, ...] = ()


@record(kw_only=True)
class KeepFrame(Frame, type="keep"):
    """To an elector: I lead in that term. Keep this record if there is one, and give nobody your voice for a lease"""

    term: int
    stamp: float  # when it was said, on the leader's clock
    leader: Elector
    record: RunRecord | None = None


@record(kw_only=True)
class KeptFrame(Frame, type="kept", sender="elector"):
    """Promised for a lease, and kept up to that revision; or a later term than the leader's, whose time is over"""

    term: int
    stamp: float = 0.0
    revision: int = 0


@record(kw_only=True)
class VoteFrame(Frame, type="vote", sender="elector"):
    """To an elector: let me lead in that term, going on from the record of that term and revision"""

    term: int
    candidate: Elector
    last: tuple[int, int]
    sounding: bool = False  # would you? One who cannot win must not begin a term, for that would end another's


@record(kw_only=True)
class VoiceFrame(Frame, type="voice", sender="elector"):
    """Given, or why not; with the last term that the speaker knows of"""

    term: int
    given: bool = False
    sounding: bool = False  # it would be
    why: str = ""
    behind: bool = False  # the asker's record is older than the speaker's
    leader: Elector | None = None  # whom the speaker follows, or is


# From an agent ------------------------------------------------------------------------------------


@record(kw_only=True)
class AwareFrame(Frame, type="aware", sender="agent"):
    """It knows those `electors`"""

    number: int = 0


@record(kw_only=True)
class PostFrame(Frame, type="post", sender="agent"):
    """Where it can keep records, and be asked who leads (a later `hello` has it, too)"""

    path: Path


@record(kw_only=True)
class RenewFrame(Frame, type="renew", sender="agent"):
    """Every third of a lease, with `[rank, step, age]` of each rank that has got on"""

    steps: tuple[tuple[int, int, float], ...] = ()
    first_step: int | None = None  # the lowest of those that its ranks told first in this round
    first_step_age: float | None = None  # of the earliest of them, in seconds
    doing: str = limited(default="", max_length=MAX_TEXT)  # what its ranks wait for there: one of `modules.DOING`


@record(kw_only=True)
class StartedFrame(Frame, type="started", sender="agent"):
    """The place in that round is taken"""


@record(kw_only=True)
class UpFrame(Frame, type="up", sender="agent"):
    """All its ranks run"""


@record(kw_only=True)
class ExitsFrame(Frame, type="exits", sender="agent"):
    """Ranks have ended"""

    seq: int | None = None
    exits: tuple[ReportedEnd, ...] = ()


@record(kw_only=True)
class FinishedFrame(Frame, type="finished", sender="agent"):
    """All its ranks have exited 0"""


@record(kw_only=True)
class SavingFrame(Frame, type="saving", sender="agent"):
    """Called back, it lets a save end first"""

    what: str = ""


@record(kw_only=True)
class NoticedFrame(Frame, type="noticed", sender="agent"):
    """How often its ranks have asked, at most; all that ask have been told to save, and one has (or has made a step)"""

    calls: int = limited(default=0, ge=0, le=LARGEST)
    seen: bool = False
    done: bool = False


@record(kw_only=True)
class StoppedFrame(Frame, type="stopped", sender="agent"):
    """Nothing of that round is left; it listens on `store_port` for the next round's store"""

    store_port: int = 0
    why: str = ""
    exits: tuple[ReportedEnd, ...] = ()


@record(kw_only=True)
class LeavingFrame(Frame, type="leaving", sender="agent"):
    """It is about to go; planned, its ranks go on until the round is called back"""

    why: str = ""
    planned: bool = False


@record(kw_only=True)
class FailedFrame(Frame, type="failed", sender="agent"):
    """A launcher with a budget of its own gave up"""

    message: str = ""
    exits: tuple[ReportedEnd, ...] = ()


@record(kw_only=True)
class FitFrame(Frame, type="fit", sender="agent"):
    """Its health check passed"""


@record(kw_only=True)
class UnfitFrame(Frame, type="unfit", sender="agent"):
    """Its health check failed"""

    why: str = ""


@record(kw_only=True)
class ListensFrame(Frame, type="listens", sender="agent"):
    """Where it can be probed: the way of its ranks first, then the relay (a later `hello` has them, too)"""

    paths: tuple[Path, ...] = ()


@record(kw_only=True)
class HoldsFrame(Frame, type="holds", sender="agent"):
    """All the state that it has in memory; before `stopped`, and when it has changed"""

    holding: Holding = field(default_factory=Holding)


@record(kw_only=True)
class ReachedFrame(Frame, type="reached", sender="agent"):
    """What it found: `[member, seconds or null, why not]` each; all that it knows after a `reach`, then what has
    changed"""

    peers: tuple[tuple[MemberId, float | None, str], ...] = ()


@record(kw_only=True)
class LearnedFrame(Frame, type="learned", sender="agent"):
    """What its ranks import by themselves; from the worker of rank 0"""

    modules: tuple[str, ...] = limited(default=(), max_items=MAX_NAMES, max_length=LONGEST)


@record(kw_only=True)
class MeasuredFrame(Frame, type="measured", sender="agent"):
    """How fast all-reduce is between the workers of the first round, or why that was not measured; from the worker of
    rank 0, in a run with `bench_s`"""

    bench: Bench = Bench()


@record(kw_only=True)
class RemarkFrame(Frame, type="remark", sender="agent"):
    """What its user should know of the program; from the worker of rank 0"""

    text: str = limited(default="", max_length=MAX_REMARK)


@record(kw_only=True)
class MetricsFrame(Frame, type="metrics", sender="agent"):
    """What rank 0 logged in that round: `[count, place among names, age, step, value]` each, without a value if it was
    not finite; and what the worker uses. After a reconnect all that it still has"""

    names: tuple[str, ...] = limited(default=(), max_items=numbers.MAX_NAMES, max_length=numbers.LONGEST)
    points: tuple[LoggedNumber, ...] = limited(default=(), max_items=numbers.MAX_POINTS)
    use: WorkerUse | None = None


@record(kw_only=True)
class AckFrame(Frame, type="ack", sender="agent"):
    """It has the outcome, and its ranks are gone"""

    exits: tuple[ReportedEnd, ...] = ()


# From a guard, and from a control connection ------------------------------------------------------


@record(kw_only=True)
class GoneFrame(Frame, type="gone", sender="guard"):
    """No process of that round is left here"""


@record(kw_only=True)
class AliveFrame(Frame, type="alive", sender="guard"):
    """The answer to a probe while it is still at work"""


@record(kw_only=True)
class AskFrame(Frame, type="ask", sender="control"):
    """`show`, `set-target` or `cancel`; answered with `answer` or `error`"""

    ask: str = ""
    seq: int | None = None
    target: int | None = None
    remove: tuple[str, ...] = ()
    why: str = ""
