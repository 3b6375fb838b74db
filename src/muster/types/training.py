"""What is a training: the durable object that a user submits, its status, and how it ended.

Records only, each with the limits that its fields must keep. `core.training.lifecycle` says how they may change.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, NewType

from muster.types import address, pod_template, storage
from muster.types.bench import Bench
from muster.types.codec import Invalid, Problem, from_wire, limited, to_wire
from muster.types.state import KeptState
from muster.types.storage import Storage
from muster.types.world import LEASE_S, LEAST_LEASE_S, MOST_LEASE_S

Uid = NewType("Uid", str)

API_VERSION = "muster.dev/v1alpha1"
KIND = "Training"
DEFAULT_NAMESPACE = "default"

DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_ABOUT_NAME = "is not a name: lower-case letters, digits and dashes, with a letter or digit at both ends"
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MEMORY = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")
_MEMORY_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_MEMORY_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

QUEUE = "kueue.x-k8s.io/queue-name"  # label: who queues it, so that it begins suspended
REQUEST = "muster.dev/request"  # annotation: the uid that was asked for, where the store gives its own
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"  # annotation: kubectl's copy of the whole document
UNREADABLE = "muster.dev/unreadable"  # annotation, in our eyes only: what is wrong with a spec that was not understood
MASK = "***"  # shown instead of a secret; sent back in a patch, it means "as it was"
MOST_WORKERS = 10_000
MOST_VOLUMES = 16
LEAST_MEMORY = 1 << 20
LEAST_LOG = 1 << 16
LONGEST_VARIABLE = 131_071  # bytes of NAME=value that Linux hands to a program
MOST_WORDS = 1 << 20  # bytes of all words and variables together: what the API and every store take
PACKAGE = r"sha256:[0-9a-f]{64}"

_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
Phase = Literal["pending", "ready", "succeeded", "failed", "cancelled"]
TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class Key:
    """How a training is addressed."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def mesh_prefix(self) -> str:
        """Below it are the keys that say how its mesh is."""
        return f"muster/{self}"


@dataclass(frozen=True)
class Metadata:
    name: str = limited(pattern=DNS_LABEL, max_length=52, about=_ABOUT_NAME)
    namespace: str = limited(DEFAULT_NAMESPACE, pattern=DNS_LABEL, max_length=63, about=_ABOUT_NAME)
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


def size_problem(least: int, target: int, most: int) -> str:
    """Return what is wrong with three sizes of a world, or an empty text."""
    if least < 1:
        return f"the minimum is {least}; a training needs at least 1 worker"
    if target < least:
        return f"the target ({target}) is below the minimum ({least})"
    return f"the target ({target}) is above the maximum ({most})" if most < target else ""


@dataclass(frozen=True)
class WorldSize:
    """How many workers train together: 1 ≤ min ≤ target ≤ max."""

    min: int = limited(1, ge=1, le=MOST_WORKERS)
    target: int = limited(1, ge=1, le=MOST_WORKERS)
    max: int = limited(1, ge=1, le=MOST_WORKERS)


@dataclass(frozen=True)
class Resources:
    """What each worker needs."""

    cpu: float | None = limited(None, gt=0, le=100_000)
    memory: str | None = limited(
        None, pattern=_MEMORY.pattern, max_length=20, about="is not an amount of memory like 512Mi or 4Gi"
    )
    gpus: int = limited(0, ge=0, le=1024)

    @property
    def memory_bytes(self) -> int | None:
        if self.memory is None:
            return None
        number = re.match(r"[0-9.]+", self.memory)
        assert number is not None
        return int(float(number[0]) * _MEMORY_UNITS[self.memory[number.end() :]])


@dataclass(frozen=True)
class Cancel:
    """The order to end a training; once stored it stands."""

    requested_at: datetime
    grace_seconds: float | None = limited(None, ge=0, le=86_400)


@dataclass(frozen=True)
class Mesh:
    required: bool = False
    timeout_seconds: float = limited(60.0, gt=0, le=86_400)
    probe_address: str | None = limited(None, max_length=255)


@dataclass(frozen=True)
class Spec:
    """What the user asks for."""

    command: tuple[str, ...] | None = limited(None, max_items=10_000, max_length=131_072)
    script: str | None = limited(None, max_length=4096)
    module: str | None = limited(None, pattern=_MODULE, max_length=512, about="is not a module's name")
    args: tuple[str, ...] = limited((), max_items=10_000, max_length=131_072)
    working_dir: str | None = limited(None, max_length=4096)
    interpreter: str | None = limited(None, max_length=4096, pattern=r"/.*", about="is not an absolute path")
    env: Mapping[str, str] = field(default_factory=dict)
    world_size: WorldSize = field(default_factory=WorldSize)
    spares: int = limited(0, ge=0, le=MOST_WORKERS)
    procs_per_worker: int = limited(1, ge=1, le=1024)
    resources: Resources = field(default_factory=Resources)
    max_restarts: int = limited(3, ge=0, le=1_000_000)
    lease_seconds: float = limited(LEASE_S, ge=LEAST_LEASE_S, le=MOST_LEASE_S)
    hang_timeout_seconds: float | None = limited(None, gt=0, le=31_536_000)
    no_progress_rounds: int | None = limited(None, ge=1, le=1_000_000)
    active_deadline_seconds: float | None = limited(None, gt=0, le=31_536_000)
    below_minimum_timeout_seconds: float = limited(300.0, ge=0, le=31_536_000)
    stop_grace_seconds: float = limited(15.0, ge=0, le=86_400)
    ttl_seconds_after_finished: float | None = limited(None, ge=0, le=315_360_000)
    log_bytes: int | None = limited(None, ge=0, le=1 << 50)
    warm: Literal["auto", "always", "never"] = "auto"
    preload: tuple[str, ...] = limited(
        (), pattern=_MODULE, max_items=1000, max_length=512, about="is not a module's name"
    )
    secret_env: tuple[str, ...] = limited((), max_items=1000)
    cancel: Cancel | None = None
    priority: int = limited(0, ge=-1_000_000, le=1_000_000)
    backend: str = limited("local", pattern=DNS_LABEL, max_length=63, about=_ABOUT_NAME)
    image: str | None = limited(None, max_length=512)
    package: str | None = limited(None, pattern=PACKAGE, about="is not the hash of a package, sha256:…")
    requirements: tuple[str, ...] = limited((), max_items=10_000, max_length=131_072)
    mesh: Mesh = field(default_factory=Mesh)
    segment: int | None = limited(None, ge=1, le=MOST_WORKERS)
    topology_key: str | None = limited(
        None, pattern=_LABEL_KEY.pattern, max_length=316, about="is not the name of a node's label"
    )
    template: Mapping[str, Any] | None = None
    storage: tuple[Storage, ...] = limited((), max_items=MOST_VOLUMES)
    suspend: bool = False
    elasticity: Literal["fixed", "lend", "fill"] = "fixed"
    bench: bool = False


LENT = "Lent"  # the reason of `Admitted` and `TargetReached` while workers wait for GPUs that somebody else uses
SUSPENDED = "Suspended"  # the reason of `Admitted` while `suspend` is true
TAKEN_BACK = "TakenBack"  # the reason of `Resizing` and `TargetReached` when the size asked for does not work


@dataclass(frozen=True)
class Condition:
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None
    observed_generation: int = 0


@dataclass(frozen=True)
class WorldStatus:
    """How many workers there are, beside how many there should be."""

    ready: int = 0
    target: int = 1
    min: int = 1
    max: int = 1
    below_minimum: bool = False


@dataclass(frozen=True)
class SparesStatus:
    ready: int = 0
    target: int = 0


WorkerRole = Literal["active", "spare", "lent", "parked", "starting", "leaving", "dead"]
MOST_LISTED = 256  # workers, in a status


@dataclass(frozen=True)
class WorkerStatus:
    """A worker that is there, and what it does."""

    name: str
    role: WorkerRole = "starting"
    node: str = ""
    ranks: str = ""  # that it has in the current round: "3", or "8-15"
    since: datetime | None = None  # in that role
    note: str = ""  # what it waits for, or why it gets no rank


@dataclass(frozen=True)
class RankStatus:
    """A rank of the current round."""

    rank: int
    worker: str = ""
    node: str = ""
    phase: Literal["starting", "running", "stopping", "succeeded", "failed", "lost"] = "starting"
    round: int = 0
    restarts: int = 0
    started_at: datetime | None = None
    step: int | None = None


@dataclass(frozen=True)
class RankExit:
    """How a rank of the last round ended. The code is 128+n for signal n, and None when nobody saw it."""

    rank: int
    exit_code: int | None = None
    termination_reason: str = ""
    signal: str | None = None
    worker: str = ""
    node: str = ""
    round: int = 0
    restart_count: int = 0
    finished_at: datetime | None = None
    stderr_tail: tuple[str, ...] = ()
    exception: str = ""  # the line that ended its last traceback
    place: str = ""  # file and line of that traceback's last frame in the user's own code

    @property
    def failed(self) -> bool:
        """Its end was its own doing or its node's; ranks that muster stopped did not fail."""
        return self.exit_code != 0 and self.termination_reason not in ("Stopped", "Cancelled")

    def __str__(self) -> str:
        code = "unknown" if self.exit_code is None else self.exit_code
        return f"rank {self.rank}: exit_code={code} reason={self.termination_reason}"


@dataclass(frozen=True)
class Outcome:
    """The one terminal record of a training."""

    state: Literal["succeeded", "failed", "cancelled"]
    reason: str = ""
    message: str = ""
    first_failure: RankExit | None = None
    finished_at: datetime | None = None


@dataclass(frozen=True)
class Resize:
    from_target: int
    to_target: int
    reason: str = ""
    at: datetime | None = None


@dataclass(frozen=True)
class SteadyTimes:
    """Where the time of day was set: the same moments on the clock that durations are measured with."""

    started_at: datetime | None = None
    decided_at: datetime | None = None
    finished_at: datetime | None = None
    waits_since: datetime | None = None  # of one with a deadline: since when it may begin


@dataclass(frozen=True)
class RoundTimes:
    """How long a round took, in seconds from the loss or the request that it follows."""

    round: int
    ranks_run_seconds: float  # until all its ranks ran
    next_step_seconds: float | None = None  # until the first step of any rank; None: no rank has told a step yet


@dataclass(frozen=True)
class Status:
    observed_generation: int = 0
    phase: Phase = "pending"
    conditions: tuple[Condition, ...] = ()
    world_size: WorldStatus = field(default_factory=WorldStatus)
    spares: SparesStatus = field(default_factory=SparesStatus)
    round: int | None = None
    round_times: RoundTimes | None = None  # None: the first round, or its ranks do not run yet
    rendezvous_endpoint: str | None = None  # None while no round is out
    restarts: int = 0
    ranks: tuple[RankStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()  # at most so many as `MOST_LISTED`
    rank_exits: tuple[RankExit, ...] | None = None  # None while it runs; an empty tuple is an answer
    outcome: Outcome | None = None
    last_resize: Resize | None = None
    kept_state: KeptState | None = None  # None: its program keeps none with `muster.State`
    bench: Bench | None = None  # None: not asked for, or not measured yet
    started_at: datetime | None = None
    finished_at: datetime | None = None
    steady: SteadyTimes | None = None  # None: the same as those that are shown

    def condition(self, kind: str) -> Condition | None:
        return next((one for one in self.conditions if one.type == kind), None)

    def holds(self, kind: str) -> bool:
        found = self.condition(kind)
        return found is not None and found.status == "True"


@dataclass(frozen=True)
class Training:
    metadata: Metadata
    spec: Spec
    status: Status = field(default_factory=Status)

    @property
    def key(self) -> Key:
        return Key(self.metadata.namespace, self.metadata.name)

    @property
    def uid(self) -> Uid:
        return Uid(self.metadata.uid)

    @property
    def requested_uid(self) -> str:
        """Under which uid its creator asked for it."""
        return self.metadata.annotations.get(REQUEST) or self.metadata.uid

    @property
    def generation(self) -> int:
        return self.metadata.generation

    @property
    def version(self) -> int:
        return int(self.metadata.resource_version or 0)

    @property
    def is_terminal(self) -> bool:
        return self.status.phase in TERMINAL

    def to_wire(self) -> dict[str, Any]:
        return {"apiVersion": API_VERSION, "kind": KIND, **to_wire(self)}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any], *, strict: bool = False) -> Training:
        """As stored or received. Strict reading refuses what this version does not know."""
        return from_wire(cls, {name: data[name] for name in data if name not in ("apiVersion", "kind")}, strict=strict)

    def masked(self) -> Training:
        """As it may be shown: without the values of secret variables."""
        if not self.spec.secret_env:
            return self
        hidden = {name: MASK if name in self.spec.secret_env else value for name, value in self.spec.env.items()}
        told = {name: text for name, text in self.metadata.annotations.items() if name != LAST_APPLIED}
        about = replace(self.metadata, annotations=told)
        return replace(self, metadata=about, spec=replace(self.spec, env=hidden))


def problems_of(training: Training) -> list[Problem]:
    """What is wrong with a request beyond the limits of single fields; each names its field."""
    return [*_spec_problems(training.spec), *_metadata_problems(training.metadata)]


def check(training: Training) -> Training:
    if problems := problems_of(training):
        raise Invalid(problems)
    return training


def _spec_problems(spec: Spec) -> list[Problem]:
    found = []
    programs = [name for name in ("command", "script", "module") if getattr(spec, name) is not None]
    if len(programs) != 1:
        given = f"{' and '.join(programs)} are given" if programs else "none is given"
        found.append(Problem("spec", f"exactly one of command, script and module is needed: {given}"))
    if spec.command is not None and not (spec.command and spec.command[0]):
        found.append(Problem("spec.command", "must name a program"))
    if spec.script is not None and not spec.script:
        found.append(Problem("spec.script", "must not be empty"))
    if spec.image and re.search(r"\s", spec.image):
        found.append(Problem("spec.image", f"{spec.image!r} is not an image's name: there are spaces in it"))
    if spec.mesh.probe_address is not None:
        try:
            address.read(spec.mesh.probe_address)
        except ValueError as error:
            found.append(Problem("spec.mesh.probeAddress", str(error)))
    size = spec.world_size
    if not size.min <= size.target <= size.max:
        found.append(Problem("spec.worldSize", size_problem(size.min, size.target, size.max)))
    found += _segment_problems(spec) + _size_problems(spec) + _preload_problems(spec)
    found += _package_problems(spec) + _pod_problems(spec)
    for name, value in spec.env.items():
        if not _ENV_KEY.fullmatch(name):
            found.append(Problem(f"spec.env.{name[:80]}", "is not a name for a variable"))
        elif name.startswith("MUSTER_"):
            found.append(Problem(f"spec.env.{name[:80]}", "is muster's own: choose another name"))
        if "\0" in value:
            found.append(Problem(f"spec.env.{name[:80]}", "must not contain a NUL character"))
    found += [
        Problem("spec.secretEnv", f"{name[:80]!r} is not a key of env")
        for name in spec.secret_env
        if name not in spec.env
    ]
    return found


def _segment_problems(spec: Spec) -> list[Problem]:
    size, each = spec.world_size, spec.segment
    found = []
    if spec.elasticity != "fixed" and each is not None:
        found.append(Problem("spec.elasticity", f"{spec.elasticity} does not go with segment: workers come one by one"))
    if spec.elasticity != "fixed" and spec.resources.gpus == 0:
        found.append(Problem("spec.elasticity", f"{spec.elasticity} needs resources.gpus: there is nothing to lend"))
    return found + [
        Problem(f"spec.worldSize.{name}", f"{value} is not a multiple of segment, which is {each}")
        for name, value in (("min", size.min), ("target", size.target))
        if each is not None and value % each
    ]


def _pod_problems(spec: Spec) -> list[Problem]:
    found = storage.problems(spec.storage)
    if spec.template is None:
        return found
    mounts = {posixpath.normpath(one.mount): f"is the mount of spec.storage[{one.name}]" for one in spec.storage}
    mounts[pod_template.HOME] = mounts[pod_template.AGENT] = pod_template.OWN
    return found + pod_template.problems(spec.template, env=spec.env, mounts=mounts)


def _preload_problems(spec: Spec) -> list[Problem]:
    if "none" in spec.preload and len(spec.preload) > 1:
        return [Problem("spec.preload", "none excludes others")]
    return []


def _package_problems(spec: Spec) -> list[Problem]:
    found = [
        Problem(f"spec.requirements[{index}]", "must be one line")
        for index, line in enumerate(spec.requirements)
        if not line.strip() or any(ord(char) < 32 and char != "\t" for char in line)
    ]
    if spec.package is not None:
        for name, path in (("script", spec.script), ("workingDir", spec.working_dir)):
            parts = path.split("/") if path is not None else []
            if path is not None and (path.startswith("/") or ".." in parts):
                found.append(Problem(f"spec.{name}", f"{path!r} is not within the package"))
    return found


def _size_problems(spec: Spec) -> list[Problem]:
    found = []
    if spec.log_bytes is not None and 0 < spec.log_bytes < LEAST_LOG:
        found.append(Problem("spec.logBytes", f"{spec.log_bytes} is less than {LEAST_LOG}; 0 keeps everything"))
    memory = spec.resources.memory_bytes
    if memory is not None and memory < LEAST_MEMORY:
        found.append(
            Problem("spec.resources.memory", f"{spec.resources.memory!r} is less than 1Mi: is its unit missing?")
        )
    variables = {name: len(f"{name}={value}".encode()) for name, value in spec.env.items()}
    found += [
        Problem(f"spec.env.{name[:80]}", f"has {size} bytes, at most {LONGEST_VARIABLE} are possible")
        for name, size in variables.items()
        if size > LONGEST_VARIABLE
    ]
    words = (*(spec.command or ()), *spec.args, *spec.requirements)
    size = sum(variables.values()) + sum(len(word.encode()) for word in words)
    if size > MOST_WORDS:
        found.append(
            Problem(
                "spec.args", f"args, command, env and requirements hold {size} bytes, at most {MOST_WORDS} are possible"
            )
        )
    return found


def _metadata_problems(metadata: Metadata) -> list[Problem]:
    found = []
    if told := metadata.annotations.get(UNREADABLE):
        field, _, message = told.partition(": ")
        found.append(Problem(field, message))
    for name, value in metadata.labels.items():
        if not _LABEL_KEY.fullmatch(name) or len(name) > 253:
            found.append(Problem(f"metadata.labels.{name[:80]}", "is not a label's name"))
        elif not _LABEL_VALUE.fullmatch(value):
            found.append(Problem(f"metadata.labels.{name[:80]}", f"{value[:80]!r} is not a label's value"))
    found += [
        Problem(f"metadata.annotations.{name[:80]}", "is not an annotation's name")
        for name in metadata.annotations
        if not _LABEL_KEY.fullmatch(name) or len(name) > 253
    ]
    return found
