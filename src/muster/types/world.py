"""What is a world made of: settings, members, seats, rounds, exits and the outcome.

Records only. How they change is the business of `core.world`, how they travel that of `types.frames`.
Times are seconds: `*_at` of a run are on its clock (monotonic), `finished_at` is wall-clock.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import signal as signals
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any, NewType, Self

from muster.types.codec import as_list
from muster.types.records import record

MemberId = NewType("MemberId", str)
RunId = NewType("RunId", str)
Path = tuple[str, int]  # a host and a port
HELD_VARIABLE = "MUSTER_HELD_FD"  # tells an agent of a descriptor that everything of its worker is to keep open


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
    lease_s: float = 2.0
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
    hang_timeout_s: float | None = None
    no_progress_rounds: int | None = None
    gate_timeout_s: float | None = None  # hold ranks until all reach each other, at most so long; None: no gate

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
    stack: str = ""  # innermost frame of its main thread, after a hang
    finished_at: float = 0.0
    stderr_tail: tuple[str, ...] = ()

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
class Loss:
    """A member that left its round before the round ended, and why."""

    member_id: MemberId
    name: str
    at: float
    why: str


@record()
class Recall:
    """The order to end a round's ranks so that another can form."""

    cause: Cause
    reason: str
    at: float
    grace_s: float
    leavers: frozenset[MemberId] = frozenset()  # those that a smaller target sends away
    leaver_grace_s: float = 0.0


@record()
class Progress:
    step: int
    at: float


@record()
class Round:
    """One forming of the world. The first line of fields never changes; the rest is its story."""

    number: int
    seats: tuple[Seat, ...]
    store_addr: str = ""
    store_port: int = 0
    why: str = ""

    recall: Recall | None = None
    gone: frozenset[MemberId] = frozenset()  # confirmed: no rank of theirs runs
    finished: frozenset[MemberId] = frozenset()  # all their ranks exited 0
    started: frozenset[MemberId] = frozenset()  # they have taken up their place
    up: frozenset[MemberId] = frozenset()  # all their ranks are running
    up_at: float | None = None  # since when everyone's are
    fences: Mapping[MemberId, float] = field(default_factory=dict)  # lost: when they count as gone anyway
    losses: tuple[Loss, ...] = ()
    exits: Mapping[int, RankEnd] = field(default_factory=dict)
    first_failed_at: float | None = None
    first_failed_rank: int | None = None
    first_stopped_at: float = math.inf  # when the first rank ended because it was told to
    progress: Mapping[int, Progress] = field(default_factory=dict)
    saves: Mapping[MemberId, str] = field(default_factory=dict)  # called back, they first let these saves end

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
        return next((seat for seat in self.seats if seat.member_id == member_id), None)

    def worker_of(self, rank: int) -> Seat | None:
        """The seat whose worker runs global rank `rank`."""
        first = 0
        for seat in self.seats:
            if first <= rank < first + seat.procs:
                return seat
            first += seat.procs
        return None


@record()
class Place:
    """One worker's part in a round."""

    round: Round
    seat: Seat
    restarts_used: int
    max_restarts: int

    @property
    def number(self) -> int:
        return self.round.number

    @property
    def ranks(self) -> range:
        first = self.round.first_rank_of(self.seat.rank)
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
