"""The names and defaults of distributed trainings in Basilica's SDK, implemented with `muster`.

`distributed` returns when the minimum of workers trains, waits have timeouts, and the end of a `with` block deletes.
Arguments about machines for rent have no effect on one's own machines; a warning names them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast, overload

from muster.compat import launchers
from muster.compat.handle import BenchResult, DistributedMetrics, DistributedTraining, RankStatus
from muster.errors import (
    BelowMinimumWorld,
    DistributedError,
    Forbidden,
    InvalidRequest,
    MusterError,
    NotFound,
    QuotaExceeded,
    RendezvousUnavailable,
    ResizeTakenBack,
    ScaleSuperseded,
    TooManyRequests,
    UDTerminalState,
    Unauthenticated,
    Unavailable,
    WorldSizeOutOfBounds,
)
from muster.mesh.wait import mesh_status, mesh_wait
from muster.sdk import functions
from muster.sdk.client import Client, default_client
from muster.sdk.submission import SubmitOptions
from muster.types import training as ours
from muster.types.codec import Problem
from muster.types.training import RankExit, WorldStatus

BasilicaError = MusterError
ValidationError = InvalidRequest
AuthenticationError = Unauthenticated
AuthorizationError = Forbidden
DeploymentNotFound = NotFound
NetworkError = Unavailable
RateLimitError = TooManyRequests

__all__ = [
    "AuthenticationError",
    "AuthorizationError",
    "BasilicaError",
    "BelowMinimumWorld",
    "BenchResult",
    "DeploymentNotFound",
    "DistributedError",
    "DistributedFunction",
    "DistributedMetrics",
    "DistributedTraining",
    "NetworkError",
    "ProviderFilter",
    "QuotaExceeded",
    "RankExit",
    "RankStatus",
    "RateLimitError",
    "RendezvousUnavailable",
    "ResizeTakenBack",
    "ScaleSuperseded",
    "UDTerminalState",
    "ValidationError",
    "WorldSize",
    "WorldSizeOutOfBounds",
    "WorldStatus",
    "distributed",
    "distributed_async",
    "mesh_status",
    "mesh_wait",
]

DEPLOY_S, TTL_S = 600, 86_400
NO_EFFECT = frozenset(
    [
        "port",
        "gpu_models",
        "min_gpu_memory_gb",
        "provider_filter",
        "topology_spread",
        "bench_placement",
        "rendezvous_backend",
        "enable_billing",
        "wait_for_bench",
        "bench_timeout",
    ]
)


@dataclass(frozen=True)
class WorldSize(ours.WorldSize):
    """1 ≤ min ≤ target ≤ max, or `WorldSizeOutOfBounds` at once."""

    min: int
    target: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.target <= self.max:
            told = ours.size_problem(self.min, self.target, self.max)
            raise WorldSizeOutOfBounds(told, requested=self.target, min=self.min, max=self.max)


@dataclass(frozen=True)
class ProviderFilter:
    """From whom to rent. It has no effect here."""

    include: Sequence[str] = field(default_factory=list)
    exclude: Sequence[str] = field(default_factory=list)


class DistributedFunction:
    """A function that runs as a training when it is called, which comes back when the minimum of workers trains."""

    def __init__(
        self, function: Callable[..., Any], client: Client | None, timeout: float, options: SubmitOptions
    ) -> None:
        self._submits = functions.Submits(function, client, None, options)
        self._timeout = timeout
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if functions.in_rank:
            return self._submits.local(*args, **kwargs)
        return self.deploy(*args, **kwargs)

    def deploy(self, *args: Any, **kwargs: Any) -> DistributedTraining:
        return _begun(DistributedTraining(self._submits(*args, **kwargs)), self._timeout)

    async def deploy_async(self, *args: Any, **kwargs: Any) -> DistributedTraining:
        handle = await self._submits.submit_async(*args, **kwargs)
        return await _begun_async(DistributedTraining(handle), self._timeout)


@overload
def distributed(
    *, command: Sequence[str], timeout: float = ..., client: Client | None = ..., **given: Any
) -> DistributedTraining: ...


@overload
def distributed(
    *, timeout: float = ..., client: Client | None = ..., **given: Any
) -> Callable[[Callable[..., Any]], DistributedFunction]: ...


def distributed(
    *,
    command: Sequence[str] | None = None,
    timeout: float = DEPLOY_S,
    client: Client | None = None,
    **given: Any,
) -> Any:
    """Run a command as a training and return it when the minimum of workers trains; or decorate a function.

    If that takes longer than `timeout`, it is deleted and `BelowMinimumWorld` is raised.
    """
    if command is None:
        made = options_of(given, ranks_each=None)
        return functools.partial(DistributedFunction, client=client, timeout=timeout, options=made)
    program, options = of_command(command, given, options_of(given, ranks_each=1))
    return _begun(DistributedTraining((client or default_client()).train(**program, **options)), timeout)


async def distributed_async(
    *, command: Sequence[str], timeout: float = DEPLOY_S, client: Client | None = None, **given: Any
) -> DistributedTraining:
    """The twin of `distributed` with a command."""
    program, options = of_command(command, given, options_of(given, ranks_each=1))
    handle = await (client or default_client()).train_async(**program, **options)
    return await _begun_async(DistributedTraining(handle), timeout)


def _begun(training: DistributedTraining, timeout: float) -> DistributedTraining:
    try:
        training.wait_until_min_world(timeout)
    except BaseException:
        training.clean_up()  # nobody will have a handle on it
        raise
    return training


async def _begun_async(training: DistributedTraining, timeout: float) -> DistributedTraining:
    try:
        await training.wait_until_min_world_async(timeout)
    except BaseException:
        await training.clean_up_async()
        raise
    return training


# What is asked for -------------------------------------------------------------------------------


def of_command(
    command: Sequence[str], arguments: Mapping[str, Any], options: SubmitOptions
) -> tuple[dict[str, Any], SubmitOptions]:
    """Return the program of each rank and the other options. A leading torchrun is replaced by muster's launcher."""
    launch = launchers.read(
        command,
        gpus=int(arguments.get("gpu_count", 1) or 0),
        size=arguments["world_size"],
        names=sorted(options.get("env") or {}),
        refuse=_refuse_command,
    )
    if launch.dropped:
        text = f"torchrun {', '.join(launch.dropped)}: no effect, because muster starts the ranks and keeps their logs"
        warnings.warn(text, UserWarning, stacklevel=3)
    args = [*launch.args, *(options.get("args") or ())]
    changed = {**options, **launch.limits, "procs_per_worker": launch.ranks_each, "args": args}
    return launch.program, cast(SubmitOptions, changed)


def _refuse_command(message: str) -> NoReturn:
    raise _refused("command", message)


def options_of(given: Mapping[str, Any], *, ranks_each: int | None) -> SubmitOptions:
    """Their arguments as ours. `ranks_each`: per worker; None: as many as it has GPUs, as torchrun is told there."""
    asked = dict(given)
    _warn_of(asked)
    size = asked.pop("world_size", None)
    if size is None:
        raise _refused("world_size", "is required: WorldSize(min, target, max)")
    gpus, cpu, ttl = asked.pop("gpu_count", 1), asked.pop("cpu", None), asked.pop("ttl_seconds", TTL_S)
    variables = {**(asked.pop("env", None) or {}), **(asked.pop("nccl_env", None) or {})}
    made = SubmitOptions(
        name=asked.pop("name", None),
        args=asked.pop("args", None) or (),
        world_size=size,
        env=variables,
        procs_per_worker=max(1, gpus) if ranks_each is None else ranks_each,
        resources={"gpus": gpus, "cpu": _cpus(cpu), "memory": asked.pop("memory", None)},
        image=asked.pop("image", None),
        requirements=list(asked.pop("pip_packages", None) or ()),
        bench=asked.pop("bench", False),
        active_deadline_seconds=ttl,
        ttl_seconds_after_finished=ttl,
    )
    if asked:
        raise TypeError(f"distributed() got an unexpected keyword argument {min(asked)!r}")
    return made


def _warn_of(asked: dict[str, Any]) -> None:
    idle = sorted(name for name in NO_EFFECT & asked.keys() if asked.pop(name) is not None)
    if idle and not functions.in_rank:
        warnings.warn(f"{', '.join(idle)}: no effect on one's own machines", UserWarning, stacklevel=4)


def _cpus(cpu: str | float | None) -> float | None:
    """As Kubernetes writes it: 8, "8" or "500m"."""
    if cpu is None or not isinstance(cpu, str):
        return cpu
    number, milli = cpu.removesuffix("m"), cpu.endswith("m")
    try:
        return float(number) / 1000 if milli else float(number)
    except ValueError as wrong:
        raise _refused("cpu", f"{cpu[:80]!r} is not a number of CPUs like 8 or 500m") from wrong


def _refused(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {message}", problems=(Problem(name, message),))
