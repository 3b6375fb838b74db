"""What is shared: a pool of GPUs, the pipelines that take turns on it, their leases, requests and demand.

Records only. `core.sharing` says how they change. Times are seconds on the scheduler's clock.
GPU sets are also kept as bit masks (bit g is GPU g): a pool of thousands is then compared in microseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Literal, NewType, NoReturn

PipelineId = NewType("PipelineId", str)
Gpu = int

GENERATION_CLUSTER = "actor_infer"
CLUSTERS = ("actor_train", "actor_infer", "critic", "reference", "reward")
WORKERS = "workers"  # in place of a cluster, of what a training holds

Elasticity = Literal["fixed", "lend", "fill"]
HolderKind = Literal["pipeline", "training", "idle", "lost"]


class Priority(IntEnum):
    """Of a request; lower comes first. All but the last are for a whole cluster and not preempted once granted."""

    INITIALIZATION = 0
    ACTOR_TRAINING = 1
    CRITIC_TRAINING = 2
    OLD_LOG_PROBS = 3
    REF_LOG_PROBS = 4
    VALUE_COMPUTE = 5
    GENERATION = 6


def mask_of(gpus: Iterable[Gpu]) -> int:
    mask = 0
    for gpu in gpus:
        mask |= 1 << gpu
    return mask


def gpus_of(mask: int) -> list[Gpu]:
    """The GPUs of a mask, lowest first."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def named(value: Any) -> Any:
    """A number as the name that it stands for; whatever else there is stays, to be checked."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


@dataclass(frozen=True)
class Pool:
    gpus: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise ValueError("a pool has at least one GPU and one GPU per node")

    def node_of(self, gpu: Gpu) -> int:
        return gpu // self.gpus_per_node

    @functools.cached_property
    def mask(self) -> int:
        return (1 << self.gpus) - 1


@dataclass(frozen=True)
class ClusterSpec:
    """A stage's GPUs. Data-parallel rank r owns `bundles[r]`, the unit of activation and of preemption."""

    gpus: Sequence[Gpu] = ()
    tp_size: int = 1
    slots_per_bundle: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpus", tuple(sorted(self.gpus)))

    @functools.cached_property
    def bundles(self) -> tuple[tuple[Gpu, ...], ...]:
        gpus, size = tuple(self.gpus), self.tp_size
        return tuple(gpus[at : at + size] for at in range(0, len(gpus), size))

    @functools.cached_property
    def masks(self) -> tuple[int, ...]:
        return tuple(mask_of(bundle) for bundle in self.bundles)

    @functools.cached_property
    def mask(self) -> int:
        return mask_of(self.gpus)

    @functools.cached_property
    def rank_at(self) -> Mapping[Gpu, int]:
        """The rank whose bundle has that GPU."""
        return {gpu: rank for rank, bundle in enumerate(self.bundles) for gpu in bundle}

    def rank_of(self, mask: int) -> int | None:
        """The rank whose bundle is just these GPUs."""
        rank = self.rank_at.get((mask & -mask).bit_length() - 1)
        return rank if rank is not None and self.masks[rank] == mask else None

    def __hash__(self) -> int:
        return hash((self.gpus, self.tp_size, self.slots_per_bundle))


@dataclass(frozen=True)
class Bundle:
    """The name of a bundle."""

    pipeline: PipelineId
    cluster: str
    rank: int

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.cluster}[{self.rank}]"


class LeaseState(StrEnum):
    GRANTING = "granting"
    HELD = "held"
    DRAINING = "draining"


@dataclass(frozen=True)
class Lease:
    """A bundle that a pipeline has, is being given, or is giving back. A reply of an older epoch changes nothing."""

    bundle: Bundle
    mask: int
    state: LeaseState
    epoch: int
    priority: Priority
    since: float  # when it entered this state
    held_since: float = 0.0  # when it was granted, for taking turns
    reason: str = ""


@dataclass(frozen=True)
class Stream:
    target: int
    completed: int = 0

    @property
    def remaining(self) -> int:
        return max(0, self.target - self.completed)


@dataclass(frozen=True)
class Rollout:
    """A pipeline's open demand, from the moment at which generation is requested until it is closed."""

    estimate: int | None
    streams: Mapping[str, Stream] = field(default_factory=dict)
    rollout_id: str | None = None
    opened_at: float = 0.0
    waiting_since: float | None = None  # since when it holds nothing, while it wants something
    rate: float | None = None  # trajectories per second and bundle, a moving average
    reported_at: float | None = None  # when its progress was last counted

    @property
    def target(self) -> int:
        """The step's target, as `snapshot().open_rollouts` shows it."""
        return sum(stream.target for stream in self.streams.values()) if self.streams else self.estimate or 0

    @property
    def remaining(self) -> int:
        """What is still to be generated; nothing is counted twice."""
        return sum(stream.remaining for stream in self.streams.values()) if self.streams else self.estimate or 0


@dataclass(frozen=True)
class Request:
    """Somebody waits for GPUs."""

    seq: int
    pipeline: PipelineId
    cluster: str
    priority: Priority
    since: float
    estimate: int | None = None
    opened: bool = False  # it opened the rollout that it asks for, which closes if the request is withdrawn
    absent: bool = False  # its caller has not asked again since a restart: its place is kept, and it gets nothing


MOST_PROCESSES = 256  # of one pipeline; with more processes its end cannot be proved


@dataclass(frozen=True)
class PipelineProcess:
    """A process on the control plane's machine. A later process with the same pid has another `started`."""

    pid: int
    started: int  # clock ticks after the boot
    space: str = ""  # the boot and the pid namespace to which the pid belongs


@dataclass(frozen=True)
class Tenant:
    """Whose process speaks for a pipeline, as it says itself. What it does not say is None."""

    process: str | None = None  # a name that each process chooses anew
    training: str | None = None  # the uid of the training of which it is a rank,
    round: int | None = None  # and in which round
    processes: tuple[PipelineProcess, ...] = ()  # confirmed by the kernel: the caller, then other ranks
    children: tuple[PipelineProcess, ...] = ()  # their descendants at the registration
    session: str = ""  # a digest of the session that controls the pipeline; "" if it registered without a session
    token: str = ""  # the name of the token that registered it

    def is_another_than(self, before: Tenant) -> bool:
        """Whether these are known to be two processes."""
        return None not in (self.process, before.process) and self.process != before.process


@dataclass(frozen=True)
class Pipeline:
    pipeline_id: PipelineId
    clusters: Mapping[str, ClusterSpec]
    weight: float = 1.0
    admitted: bool = False
    detached_since: float | None = None  # since when it has had no hooks
    quarantined: str = ""  # why, if it is
    shrink_s: float | None = None  # moving averages of what its hooks took
    expand_s: float | None = None
    last_rollout_id: str | None = None  # of the rollout before the open one: late reports for it do not count
    unsure: bool = False  # decisions about it may have been lost with its machine: it has to shrink everything first
    tenant: Tenant = Tenant()  # who registered it last
    killed: str = ""  # by whom and why, if somebody has ended it; it is quarantined, too, until its process is gone

    @property
    def movable(self) -> bool:
        """Its bundles may be shrunk and expanded now."""
        return self.detached_since is None and not self.quarantined

    @property
    def infer(self) -> ClusterSpec:
        return self.clusters[GENERATION_CLUSTER]

    @property
    def fixed(self) -> list[ClusterSpec]:
        """Of the stages that are granted whole."""
        return [spec for name, spec in self.clusters.items() if name != GENERATION_CLUSTER]


@dataclass(frozen=True)
class Crew:
    """A training's workers, as the pool knows them. One that lends gives what is above `min` to a better claim."""

    training: str  # its uid
    name: str  # for people: namespace/name
    gpus_each: int
    min: int
    wanted: int  # its target, and its spares
    most: int  # with those that only fill
    elasticity: Elasticity = "fixed"
    priority: int = 0
    created: float = 0.0  # of those with one priority the oldest comes first
    asked_at: float = 0.0  # since when the pool has known of it
    admitted: bool = False
    using: int = 0  # mask of the GPUs on which it has workers that may train
    ready: int | None = None  # of these, the ones whose workers have joined its world; None: all
    resting: int = 0  # of these, the ones whose workers are spares
    parked: int = 0  # mask of the GPUs of workers that wait for them to come back
    weight: float = 1.0
    vacate_s: float | None = None  # moving averages of what it took to leave a GPU, and to train on one again
    return_s: float | None = None
    kept_s: float | None = None  # how long it had what it filled, before somebody else got it

    @property
    def shown(self) -> PipelineId:
        """A name that no pipeline can have."""
        return PipelineId(f"training {self.name}")

    @property
    def lends(self) -> bool:
        return self.elasticity != "fixed"


@dataclass(frozen=True)
class WorkerLease:
    """GPUs that one worker of a training may use, or is about to leave."""

    training: str
    mask: int
    state: LeaseState
    since: float  # when it entered this state
    held_since: float = 0.0
    reason: str = ""

    @property
    def key(self) -> str:
        return f"{self.training}/{(self.mask & -self.mask).bit_length() - 1}"


@dataclass(frozen=True)
class Killed:
    """A process that does not come back."""

    pipeline: PipelineId
    process: str  # "" if nobody knows which
    why: str


@dataclass(frozen=True)
class Used:
    """GPU time of one holder. Its times are of a clock that goes on over restarts."""

    kind: HolderKind
    name: str = ""  # of a pipeline; of a training with its namespace
    training: str = ""  # the uid of that training, or of the one that the pipeline belongs to
    gpu_seconds: float = 0.0  # up to `at`
    held: int = 0  # how many GPUs it has had since then
    since: float = 0.0  # when it had one for the first time
    at: float = 0.0


@dataclass(frozen=True)
class Shares:
    """Everything that the scheduler knows, as one value: what the planner decides about and the journal keeps."""

    pool: Pool
    pipelines: Mapping[PipelineId, Pipeline] = field(default_factory=dict)
    leases: Mapping[Bundle, Lease] = field(default_factory=dict)
    requests: tuple[Request, ...] = ()  # in order of arrival
    rollouts: Mapping[PipelineId, Rollout] = field(default_factory=dict)
    lost_gpus: Mapping[Gpu, str] = field(default_factory=dict)  # out of use, and why (a lost node)
    epoch: int = 0
    seq: int = 0
    killed: tuple[Killed, ...] = ()  # the latest
    min_turn_s: float = 2.0
    reserve_after_s: float = 30.0
    promised: tuple[Bundle, ...] = field(default=(), compare=False)  # what the last plan vacates GPUs for
    crews: Mapping[str, Crew] = field(default_factory=dict)  # by the uid of their training
    workers: Mapping[str, WorkerLease] = field(default_factory=dict)  # what crews hold, each under its own key
    promised_seats: tuple[tuple[str, int], ...] = field(default=(), compare=False)  # of the same plan: uid and mask
    vacant_since: Mapping[Gpu, float] = field(default_factory=dict, compare=False)  # of GPUs that nobody has
    usage: Mapping[str, Used] = field(
        default_factory=dict
    )  # who had how much, each under a key of `core.sharing.usage`


@dataclass(frozen=True)
class ProgressReport:
    """Numbers are names too: a stream or a rollout may be called 3."""

    pipeline: str
    completed: int
    target: int
    stream: str | None = None
    rollout_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("stream", "rollout_id"):
            object.__setattr__(self, name, named(getattr(self, name)))


@dataclass(frozen=True)
class Holder:
    """Who has a GPU, in a snapshot."""

    pipeline: str
    cluster: str
    rank: int
    state: str
    epoch: int


@dataclass(frozen=True)
class WorkerHolder:
    """Which training has a GPU, in a snapshot."""

    training: str
    state: str


@dataclass(frozen=True)
class Pending:
    """Who waits, and for what."""

    pipeline: str
    cluster: str
    priority: Priority
    reason: str


@dataclass(frozen=True)
class Released:
    """What a release freed. `text` says so also when there was nothing to free."""

    gpus: tuple[Gpu, ...]
    text: str


@dataclass(frozen=True)
class SharingEvent:
    """Something that the scheduler decided or saw, and why."""

    at: float
    kind: str
    pipeline: str
    text: str
    cluster: str = ""
    ranks: tuple[int, ...] = ()
    gpus: tuple[Gpu, ...] = ()


class _Fixed(dict[Any, Any]):
    """A mapping that stays as it is. A proxy could not be sent to another process."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a snapshot does not change: take a new one")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[_Fixed], tuple[dict[Any, Any]]]:
        return _Fixed, (dict(self),)


@dataclass(frozen=True)
class Snapshot:
    """The scheduler as it is, for users. Equal before a stop and after a start from the journal."""

    leases: Mapping[Gpu, Holder]
    idle: tuple[Gpu, ...]
    pending: tuple[Pending, ...]
    open_rollouts: Mapping[str, int]
    quarantined: Mapping[str, str]
    workers: Mapping[Gpu, WorkerHolder] = field(default_factory=dict)  # what trainings hold

    def __post_init__(self) -> None:
        for name in ("leases", "open_rollouts", "quarantined", "workers"):
            object.__setattr__(self, name, _Fixed(getattr(self, name)))

    def __await__(self) -> Generator[Any, None, Snapshot]:
        """It is there at once, in this process; who writes for schedulers elsewhere too awaits it everywhere."""
        yield from ()
        return self
