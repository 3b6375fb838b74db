"""What do a pool's server and a pipeline in another process say to each other?

One record per body, used by both sides and by the published schema. `types.codec` reads and writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from muster.types.codec import Problem, from_wire, limited, to_wire
from muster.types.sharing import ClusterSpec, HolderKind, Priority, Snapshot

NAME = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}"  # of a pipeline, and of an idempotency key
LONGEST_WAIT_S = 60.0
MOST_GPUS = 65_536
_MOST = 1 << 31  # trajectories of a step, GPUs of a bundle: beyond it somebody has made a mistake

Deed = Literal["shrink", "expand", "vacated"]


@dataclass(frozen=True)
class ClusterForm:
    gpus: tuple[int, ...] = limited((), max_items=MOST_GPUS)
    tp_size: int = limited(1, ge=1, le=MOST_GPUS)
    slots_per_bundle: int | None = limited(None, ge=1, le=_MOST)

    @classmethod
    def of(cls, spec: ClusterSpec) -> ClusterForm:
        return cls(tuple(spec.gpus), spec.tp_size, spec.slots_per_bundle)

    @property
    def spec(self) -> ClusterSpec:
        return ClusterSpec(self.gpus, self.tp_size, self.slots_per_bundle)


@dataclass(frozen=True)
class Registration:
    """A pipeline makes itself known, or comes back."""

    clusters: Mapping[str, ClusterForm]
    weight: float = limited(1.0, gt=0)
    admit: bool = True
    vacated: bool = False  # it can tell whether its GPUs are empty, and is asked after each shrink
    only_attach: bool = False  # come back to what is held, or be refused: it would not survive a new beginning

    @property
    def specs(self) -> dict[str, ClusterSpec]:
        return {name: form.spec for name, form in self.clusters.items()}


@dataclass(frozen=True)
class Why:
    why: str = limited("", max_length=500)


@dataclass(frozen=True)
class KillOrder:
    why: str = limited("", max_length=400)
    force: bool = False  # free its GPUs at once, whoever uses them


@dataclass(frozen=True)
class NodeState:
    """Whether a node's GPUs can be used."""

    state: Literal["lost", "present"]
    why: str = limited("node-lost", max_length=500)


@dataclass(frozen=True)
class GpuRequest:
    cluster: str = limited(max_length=64)
    priority: Any = None  # a name or a number; `priority_problems` says what is wrong with it
    step_target_estimate: int | None = limited(None, ge=1, le=_MOST)
    release: str | None = limited(None, max_length=64)  # a cluster to give back in the same step
    rollout_id: str | None = limited(None, max_length=255)


@dataclass(frozen=True)
class ReleaseOrder:
    cluster: str = limited(max_length=64)
    wait: bool = False  # until everything is really vacated; for generation only


@dataclass(frozen=True)
class ProgressForm:
    """Either counts, or `clear`."""

    completed: int | None = limited(None, ge=0, le=_MOST)
    target: int | None = limited(None, ge=0, le=_MOST)
    stream: str | None = limited(None, max_length=255)
    rollout_id: str | None = limited(None, max_length=255)
    clear: bool = False


@dataclass(frozen=True)
class Action:
    """Something that the scheduler wants of a pipeline."""

    id: str
    epoch: int
    do: Deed
    ranks: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    bundles: Mapping[str, tuple[int, ...]] | None = None  # of an expand: rank → GPUs

    @property
    def by_rank(self) -> dict[int, list[int]]:
        return {int(rank): list(gpus) for rank, gpus in (self.bundles or {}).items()}


@dataclass(frozen=True)
class ActionAnswer:
    epoch: int = limited(ge=0)
    ok: bool = limited()
    error: str | None = limited(None, max_length=4096)


@dataclass(frozen=True)
class PoolEvent:
    """Something that the scheduler decided or saw. Ids grow, also over a restart of the server."""

    id: int
    at: str
    kind: str
    pipeline: str
    text: str
    cluster: str = ""
    ranks: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class PipelineView:
    """A pipeline, as others may see it."""

    id: str
    state: Literal["attached", "detached", "quarantined"]
    admitted: bool
    weight: float
    held: tuple[int, ...]
    remaining: int | None = None  # of its open rollout
    target: int | None = None
    due: float | None = None  # GPUs that its generation should have, while it is open
    quarantine: str = ""  # why
    silent_seconds: float | None = None  # since when nothing was heard, of one in another process
    training: str | None = None  # the uid of the training that it belongs to,
    round: int | None = None  # and with which round it ends
    process: int | None = None  # the pid whose end frees its GPUs; None where that end cannot be proved


@dataclass(frozen=True)
class GpuView:
    """One GPU of a pool: who has it, since when and for what."""

    gpu: int
    state: Literal["idle", "granting", "held", "draining", "lost"]
    device: str = ""
    pipeline: str | None = None
    cluster: str | None = None
    rank: int | None = None
    training: str | None = None  # namespace/name
    worker: str | None = None
    lent_by: str | None = None  # the training whose worker waits for it,
    lent_worker: str | None = None  # and that worker
    reason: str = ""
    since: datetime | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class WaitingView:
    """A pipeline or a training that lacks GPUs, and why."""

    reason: str
    pipeline: str | None = None
    cluster: str | None = None
    priority: str | None = None
    training: str | None = None  # namespace/name
    state: str | None = None  # of a training: Queued, InsufficientGPUs, Lent
    workers: int | None = None  # that it has of
    wanted: int | None = None  # so many
    since: datetime | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class UsedView:
    """GPU time of a holder, or of nobody (`idle`, `lost`). All of them together are GPUs × time."""

    kind: HolderKind
    name: str
    gpu_seconds: float
    gpus: int  # that it has now
    since: datetime | None = None


# Priorities --------------------------------------------------------------------------------------


def priority_problems(value: object) -> tuple[Problem, ...]:
    if read_priority(value) is not None:
        return ()
    names = ", ".join(f"{one.name} ({one.value})" for one in Priority)
    told = "is required" if value is None else f"must be one of {names}, not {str(value)[:80]!r}"
    return (Problem("priority", told),)


def read_priority(value: object) -> Priority | None:
    """The priority of that name, in either case, or of that number."""
    if isinstance(value, str):
        return Priority.__members__.get(value.upper())
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(Priority):
        return Priority(value)
    return None


def progress_problems(form: ProgressForm) -> tuple[Problem, ...]:
    """What of it contradicts itself, or is missing."""
    given = [name for name in ("completed", "target", "stream", "rollout_id") if getattr(form, name) is not None]
    if form.clear:
        return tuple(Problem(_WIRE_NAMES.get(name, name), "does not go with clear") for name in given)
    missing = [name for name in ("completed", "target") if getattr(form, name) is None]
    return tuple(Problem(name, "is required, unless clear is true") for name in missing)


_WIRE_NAMES = {"rollout_id": "rolloutId"}


# Snapshots ---------------------------------------------------------------------------------------


def show_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """As JSON; priorities by their names."""
    pending = [{**to_wire(one), "priority": one.priority.name} for one in snapshot.pending]
    return {**to_wire(snapshot), "pending": pending}


def read_snapshot(data: Mapping[str, Any]) -> Snapshot:
    pending = [{**one, "priority": Priority[one["priority"]].value} for one in data["pending"]]
    return from_wire(Snapshot, {**data, "pending": pending}, strict=False)
