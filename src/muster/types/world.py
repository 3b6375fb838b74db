"""What is a world made of: settings, members, seats, rounds, exits and the outcome.

Records only. How they change is the business of `core.world`, how they travel that of `types.frames`.
Times are seconds: `*_at` of a run are on its clock (monotonic), `finished_at` is wall-clock.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import signal as signals
from collections.abc import Mapping, Set
from dataclasses import field
from enum import StrEnum
from typing import Any, NewType, Self

from muster.types.codec import as_list, limited
from muster.types.many import changed
from muster.types.records import record, replace
from muster.types.state import Resume

MemberId = NewType("MemberId", str)
RunId = NewType("RunId", str)
Path = tuple[str, int]  # a host and a port
LEASE_S = 1.5  # of a worker, unless its run says otherwise: about what a machine that falls silent costs
LEAST_LEASE_S, MOST_LEASE_S = 0.3, 3600  # it is renewed three times, and a busy machine may take a tenth of a second
NEVER_S = 315_360_000.0  # of a run that is suspended: nobody is missed
LARGE = 256  # workers: in a larger world nobody is told more than it needs, or says more
MOST_WORKERS = 100_000  # of a world that is believed to be one
HELD_VARIABLE = "MUSTER_HELD_FD"  # tells an agent of a descriptor that everything of its worker is to keep open


COORDINATOR_SILENT = "the coordinator was silent for a lease"  # why a member ended its ranks by itself


class Role(StrEnum):
    ACTIVE = "active"
    SPARE = "spare"
    PARKED = "parked"  # connected, but not fit to be given a rank; `Member.note` says why
    LEAVING = "leaving"  # asked to go: it stops its ranks and disconnects


class RanksState(StrEnum):
    NONE = "none"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class OutcomeState(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Cause(StrEnum):
    """Why a round was called back."""

    LOSS = "loss"
    FAILURE = "failure"
    HANG = "hang"
    GROW = "grow"
    SHRINK = "shrink"
    DRAIN = "drain"  # a worker was asked to go

    @property
    def planned(self) -> bool:
        """Nothing has happened to it: ranks are told before, and given the time that they have on cancel."""
        return self in (Cause.GROW, Cause.SHRINK, Cause.DRAIN)


@record()
class Settings:
    """What the first member of a run (or a Training's spec) fixes for all of them."""

    min: int = 1
    max: int = 1
    target: int | None = None
    spares: int = 0
    segment: int | None = None
    max_restarts: int = 3
    last_call_s: float = 2.0
    scale_debounce_s: float = 0.5
    lease_s: float = LEASE_S
    kill_margin_s: float = 0.5
    blame_s: float = 0.3
    below_min_timeout_s: float = 300.0
    recovery_s: float = 5.0
    stop_grace_s: float = 15.0
    restart_grace_s: float = 0.2
    fail_grace_s: float = 0.5
    save_grace_s: float = 10.0  # for ranks that have files open for writing, before the first signal
    saving_timeout_s: float = 60.0  # the same for ranks inside `muster.saving()`
    farewell_s: float = 3.0
    orphan_s: float = 3600.0
    spare_orphan_s: float = 60.0  # the limit for a worker without a rank, after its lease
    hang_timeout_s: float | None = None
    no_progress_rounds: int | None = None
    gate_timeout_s: float | None = None  # hold ranks until all reach each other, at most so long; None: no gate
    store_timeout_s: float = 30.0  # limit for reaching the round's store when a rank joins its process group
    bench_s: float | None = None  # measure all-reduce before the first round's program, at most so long; None: do not

    @property
    def first_target(self) -> int:
        return self.target if self.target is not None else max(self.min, self.max - self.spares)

    def problems(self) -> list[str]:
        """Every reason why these settings cannot be used, in words for the user."""
        found = []
        if self.min < 1:
            found.append(f"min must be at least 1, not {self.min}")
        if self.min > self.max:
            found.append(f"min ({self.min}) is greater than max ({self.max})")
        elif not self.min <= self.first_target <= self.max:
            found.append(f"target ({self.first_target}) is not between min ({self.min}) and max ({self.max})")
        if self.segment is not None:
            if self.segment < 1:
                found.append(f"segment must be at least 1, not {self.segment}")
            else:
                found += [
                    f"{name} ({value}) is not a multiple of segment ({self.segment})"
                    for name, value in (("min", self.min), ("target", self.first_target))
                    if value % self.segment
                ]
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name in ("min", "max", "target", "segment") or value is None:
                continue
            if not math.isfinite(value):
                found.append(f"{item.name} must be a finite number, not {value}")
            elif value < 0:
                found.append(f"{item.name} must not be negative, not {value}")
        if self.lease_s == 0:
            found.append("lease_s must be greater than 0")
        elif 0 < self.lease_s < LEAST_LEASE_S or MOST_LEASE_S < self.lease_s < math.inf:
            found.append(f"lease_s must be between {LEAST_LEASE_S:g} and {MOST_LEASE_S:g}, not {self.lease_s:g}")
        if self.no_progress_rounds == 0:
            found.append("no_progress_rounds must be at least 1")
        return found

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> Self:
        """Settings from loosely typed values (a wire frame, an option string); ValueError says what is wrong."""
        values: dict[str, Any] = {}
        for name, raw in _known(cls, given).items():
            if raw is None:
                continue
            want: type[int] | type[float] = float if name.endswith("_s") else int
            if isinstance(raw, bool) or not isinstance(raw, int | float | str):
                raise ValueError(f"{name} must be a number, not {raw!r}")
            try:
                values[name] = want(raw)
            except ValueError:
                raise ValueError(f"{name} must be a number, not {raw!r}") from None
        return cls(**values)


@record()
class Member:
    """One worker's agent, as the coordinator knows it. `member_id` is new per process."""

    member_id: MemberId
    name: str
    addr: str = "127.0.0.1"
    procs: int = 1
    infra_rank: int | None = None
    domain: str | None = None
    joined_at: float = 0.0
    lease_until: float = math.inf
    role: Role = Role.SPARE
    rank: int | None = None
    ranks_state: RanksState = RanksState.NONE
    version: str = "1.0"
    store_port: int = 0  # a socket that it already listens on for the next round's store
    host: str = ""
    pid: int = 0
    launcher: str = "node"  # "torchrun": the restart budget is torch's, entering rendezvous confirms a stop
    checks_health: bool = False
    unfit: str = ""  # what its health check said before it joined, if it failed
    fit_for: int = 0  # the round for which its health was last confirmed
    note: str = ""  # why it is parked
    acknowledged: bool = False  # it has the outcome and its ranks are gone
    paths: tuple[Path, ...] = ()  # where peers can probe it: the way that ranks will use first, then the relay
    post: Path | None = None  # where it keeps the run's record, and can be asked who leads
    takes_outline: bool = False  # of a large world it needs no seat but its own
    takes_notice: bool = False  # its ranks can be told that they should save
    doing: str = ""  # what its ranks wait for: one of `modules.DOING`
    launch: str = ""  # the identity of the launch that started it, if there is one


@record()
class Spot:
    """Where a worker is, as whoever started it knows: its domain, and its place in the order of all."""

    domain: str | None = None
    infra_rank: int | None = None


@as_list
@record()
class Elector:
    """One who keeps the record of a run beside its coordinator, and has a voice when another has to be found."""

    member_id: MemberId
    name: str
    post: Path  # where it is asked
    returns: bool = False  # its process may end and come back with what it has kept


Group = tuple[Elector, ...]


@record()
class Electorate:
    """Who leads a run, in which term, and who has a voice if it is lost; two groups while one follows another."""

    term: int = 0
    leader: Elector | None = None
    groups: tuple[Group, ...] = ()


@record()
class Reach:
    """What one member found when it tried to reach the others."""

    open: Mapping[MemberId, float] = field(default_factory=dict)  # round-trip times in seconds
    shut: Mapping[MemberId, str] = field(default_factory=dict)  # why not


class GateState(StrEnum):
    CONVERGING = "converging"
    READY = "ready"
    DEGRADED = "degraded"


@as_list
@record()
class Pair:
    """Two workers, at least one of which does not reach the other."""

    source: str
    target: str
    why: str
    both: bool = False

    def __str__(self) -> str:
        return f"{self.source} {'↔' if self.both else '→'} {self.target} ({self.why})"


@record()
class Gate:
    """What is known of the network between the members of one round."""

    state: GateState
    size: int  # members
    since: float = 0.0  # when ranks first had to wait for it, on the coordinator's clock
    pairs: tuple[Pair, ...] = ()
    more: bool = False  # than these
    slowest_s: float = 0.0  # the longest round trip

    @property
    def is_open(self) -> bool:
        return self.state is not GateState.CONVERGING

    @property
    def named(self) -> str:
        """The pairs, as a sentence can carry them."""
        return ", ".join(map(str, self.pairs)) + (" and others" if self.more else "")


@as_list
@record()
class Seat:
    """A place in a round: which member holds which worker rank."""

    rank: int
    member_id: MemberId
    name: str
    addr: str
    procs: int
    domain: str | None = None


def unknown_seat(rank: int) -> Seat:
    """Of a round of which not everybody has told its own."""
    return Seat(rank, MemberId(f"rank {rank}"), f"rank {rank}", "", 0)


@record()
class Outline:
    """A large world, as one of its workers is told of it."""

    workers: int = limited(ge=1, le=MOST_WORKERS)
    ranks: int
    seat: Seat | None = None  # its own; None for a spare
    first_rank: int = 0  # of its own


@record()
class RankEnd:
    """How one rank ended. `signal` is the name of a signal, `exit_code` is then 128 + its number."""

    rank: int
    exit_code: int
    worker: str = ""
    signal: str | None = None
    round: int = 0
    stopped: bool = False  # muster itself asked it to stop
    hung: bool = False
    oom: bool = False  # the kernel ended it for want of memory
    step: int | None = None
    idle_s: float | None = None  # how long before its end it last advanced
    waiting: bool = False  # its stack ended inside torch: it was waiting for others
    stack: str = ""  # innermost frame of its main thread, after a hang or a crash
    finished_at: float = 0.0
    stderr_tail: tuple[str, ...] = ()
    exception: str = ""  # the line that ended its last traceback
    place: str = ""  # file and line of that traceback's last frame in the user's own code
    path: str = ""  # what its last words name of the files below its folder
    memory: str = ""  # what is known of memory where it was killed

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 and not self.stopped

    @property
    def reason(self) -> str:
        if self.hung:
            return "HangDetected"
        if self.oom:
            return "OOMKilled"
        if self.stopped:
            return "Stopped"
        return f"Signal {self.signal}" if self.signal else f"Exit {self.exit_code}"

    @classmethod
    def from_status(cls, rank: int, status: int, **known: Any) -> RankEnd:
        """From what `waitpid` gave: negative means a signal, as in `subprocess`."""
        if status < 0:
            try:
                name = signals.Signals(-status).name
            except ValueError:
                name = f"SIG{-status}"
            return cls(rank=rank, exit_code=128 - status, signal=name, **known)
        return cls(rank=rank, exit_code=status, **known)


@record()
class RunOutcome:
    """The one terminal record of a run."""

    state: OutcomeState
    reason: str
    message: str
    round: int | None = None
    first_failure: RankEnd | None = None
    finished_at: float = 0.0  # wall-clock, stamped where it is stored


@record()
class EndedRun:
    """An earlier run under the same run id."""

    incarnations: tuple[str, ...]
    launches: tuple[str, ...]
    outcome: RunOutcome


@record()
class Loss:
    """A member that left its round before the round ended, and why."""

    member_id: MemberId
    name: str
    at: float
    why: str
    planned: bool = False  # it goes, and is still there


@record()
class Notice:
    """What ranks are told before a planned recall, so that `muster.should_save()` is true for all at the same call.

    First those that ask are held at their next call and counted, then all are told the call from which it is true.
    """

    at: float
    calls: Mapping[MemberId, int] = field(default_factory=dict)  # who has answered: how often its ranks have asked
    call: int | None = None  # from which on it is true
    told_at: float = 0.0
    seen: frozenset[MemberId] = frozenset()  # all their ranks that ask have been told so
    done: bool = False  # one of them has saved since, or gone on for a step

    @property
    def asking(self) -> frozenset[MemberId]:
        return frozenset(member_id for member_id, calls in self.calls.items() if calls)


@record()
class Recall:
    """The order to end a round's ranks so that another can form."""

    cause: Cause
    reason: str
    at: float
    grace_s: float
    leavers: frozenset[MemberId] = frozenset()  # those that a smaller target sends away
    leaver_grace_s: float = 0.0
    forgiven: bool = False  # its failure is the new size's, which was taken back


@record()
class TakenBack:
    """A size that was asked for and could not work; it is not tried again before another one is asked for."""

    target: int
    size: int  # that is formed instead
    why: str


@record()
class Healing:
    """A round broke, and no step of the round that replaces it has been seen yet."""

    why: str = ""  # the reason if the round lost no worker
    size: int = 0  # workers in the world before
    since: float | None = None  # when the loss or the crash was detected; None: unknown
    top: int | None = None  # the highest step that ranks reported before; None: ranks report no steps
    lost: tuple[str, ...] = ()
    heirs: frozenset[MemberId] = frozenset()
    crashed: bool = False  # ranks ended the round themselves, so they may do so again at the same step
    settle_s: float = 0.0  # how long ranks that report no steps have to run


@record()
class Progress:
    step: int
    at: float


@record()
class Pace:
    """When any rank advanced last, and how long steps and pauses took before."""

    round: int = -1
    last_at: float = 0.0  # when a rank reported the last step
    per_step: tuple[float, ...] = ()  # the last gaps between steps, in seconds
    longest: float = 0.0  # the longest gap between two reports of steps, in seconds


class SeatIndex:
    """The seats of a round by who has them."""

    def __init__(self, seats: tuple[Seat, ...], by_id: Mapping[MemberId, Seat] | None = None) -> None:
        self.seats = seats
        self.by_id = {seat.member_id: seat for seat in seats} if by_id is None else by_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeatIndex)  # rounds are the same whatever has been looked up in them

    def __hash__(self) -> int:
        return 0


@record()
class Round:
    """One forming of the world. The first line of fields never changes; the rest is its story."""

    number: int
    seats: tuple[Seat, ...]
    store_addr: str = ""
    store_port: int = 0
    why: str = ""
    resume: Resume | None = None  # where its ranks go on, if state is kept

    recall: Recall | None = None
    gone: Set[MemberId] = frozenset()  # confirmed: no rank of theirs runs
    finished: Set[MemberId] = frozenset()  # all their ranks exited 0
    started: Set[MemberId] = frozenset()  # they have taken up their place
    up: Set[MemberId] = frozenset()  # all their ranks are running
    up_at: float | None = None  # since when everyone's are, as far as this coordinator knows
    ran_at: float | None = None  # when the last worker's began to run; None: unknown
    since: float | None = None  # the loss or the request that it follows; None: the first round, or nobody saw it
    fences: Mapping[MemberId, float] = field(default_factory=dict)  # lost: when they count as gone anyway
    losses: tuple[Loss, ...] = ()
    exits: Mapping[int, RankEnd] = field(default_factory=dict)
    first_failed_at: float | None = None
    first_failed_rank: int | None = None
    first_stopped_at: float = math.inf  # when the first rank ended because it was told to
    progress: Mapping[int, Progress] = field(default_factory=dict)
    first_step: int | None = None  # the lowest of those that ranks told first
    first_step_at: float | None = None  # when the first of them was made
    saves: Mapping[MemberId, str] = field(default_factory=dict)  # called back, they first let these saves end
    notice: Notice | None = None
    index: SeatIndex = field(default_factory=lambda: SeatIndex(()))

    def __post_init__(self) -> None:
        """Whoever has a seat is asked with every report, so it is looked up, and not looked for."""
        if self.index.seats is not self.seats:
            self.__dict__["index"] = SeatIndex(self.seats)

    @property
    def ranks_run_s(self) -> float | None:
        """Seconds from the loss or the request that the round follows until all its ranks ran; None: not known."""
        return None if self.since is None or self.ran_at is None else max(0.0, self.ran_at - self.since)

    @property
    def next_step_s(self) -> float | None:
        """The same until the first step of any of its ranks, which is never before all of them run."""
        if self.ranks_run_s is None or self.since is None or self.first_step_at is None:
            return None
        return max(self.ranks_run_s, self.first_step_at - self.since)

    @property
    def world_size(self) -> int:
        return len(self.seats)

    @property
    def rank_count(self) -> int:
        return sum(seat.procs for seat in self.seats)

    def first_rank_of(self, rank: int) -> int:
        """The global rank of local rank 0 of the worker at `rank`."""
        return sum(seat.procs for seat in self.seats[:rank])

    def seat_of(self, member_id: MemberId) -> Seat | None:
        return self.index.by_id.get(member_id)

    def with_seat(self, seat: Seat) -> Round:
        """The same with another seat in place of the one of that rank."""
        seats = list(self.seats)
        seats[seat.rank] = seat
        index = SeatIndex(tuple(seats), changed(self.index.by_id, seat.member_id, seat))
        return replace(self, seats=index.seats, index=index)

    def worker_of(self, rank: int) -> Seat | None:
        """The seat whose worker runs global rank `rank`."""
        first = 0
        for seat in self.seats:
            if first <= rank < first + seat.procs:
                return seat
            first += seat.procs
        return None


def show_round_times(ranks_run_s: float | None, next_step_s: float | None) -> str:
    """Say how long a round took to run and to make a step; empty if that is not known."""
    parts = [f"ranks run after {_shown(ranks_run_s)}"] if ranks_run_s is not None else []
    parts += [f"next step after {_shown(next_step_s)}"] if next_step_s is not None else []
    return ", ".join(parts)


def _shown(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


@record()
class Place:
    """One worker's part in a round."""

    round: Round
    seat: Seat
    restarts_used: int
    max_restarts: int
    outline: Outline | None = None  # of a large world: its round has no other seat than this one
    durable_step: int | None = None  # the newest step that a worker ever reported to be on disk

    @property
    def number(self) -> int:
        return self.round.number

    @property
    def world_size(self) -> int:
        return self.outline.workers if self.outline is not None else self.round.world_size

    @property
    def rank_count(self) -> int:
        return self.outline.ranks if self.outline is not None else self.round.rank_count

    @property
    def ranks(self) -> range:
        known = self.outline
        first = known.first_rank if known is not None else self.round.first_rank_of(self.seat.rank)
        return range(first, first + self.seat.procs)

    @property
    def hosts_store(self) -> bool:
        return self.seat.rank == 0


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Only the fields that this version knows: a newer peer may send more."""
    names = _field_names(cls)
    return {key: value for key, value in data.items() if key in names}


@functools.cache
def _field_names(cls: type) -> frozenset[str]:
    return frozenset(item.name for item in dataclasses.fields(cls))
