"""muster: an elastic control plane for distributed training.

Public names are loaded on first use, so that a training process pays only for what it calls.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster import accelerate as accelerate
    from muster import hf as hf
    from muster import lightning as lightning
    from muster.core.training.explain import Explanation as Explanation
    from muster.errors import AlreadyExists as AlreadyExists
    from muster.errors import BelowMinimumWorld as BelowMinimumWorld
    from muster.errors import Compacted as Compacted
    from muster.errors import Conflict as Conflict
    from muster.errors import DistributedError as DistributedError
    from muster.errors import Forbidden as Forbidden
    from muster.errors import GrantTimeout as GrantTimeout
    from muster.errors import InternalError as InternalError
    from muster.errors import InvalidRequest as InvalidRequest
    from muster.errors import JournalUnusable as JournalUnusable
    from muster.errors import MusterError as MusterError
    from muster.errors import NotFound as NotFound
    from muster.errors import PipelineQuarantined as PipelineQuarantined
    from muster.errors import QuotaExceeded as QuotaExceeded
    from muster.errors import RendezvousUnavailable as RendezvousUnavailable
    from muster.errors import RequestRefused as RequestRefused
    from muster.errors import ResizeTakenBack as ResizeTakenBack
    from muster.errors import ScaleSuperseded as ScaleSuperseded
    from muster.errors import SchedulerStopped as SchedulerStopped
    from muster.errors import SharingError as SharingError
    from muster.errors import StateUnusable as StateUnusable
    from muster.errors import TooLarge as TooLarge
    from muster.errors import TooManyRequests as TooManyRequests
    from muster.errors import TrainingCancelled as TrainingCancelled
    from muster.errors import TrainingFailed as TrainingFailed
    from muster.errors import UDTerminalState as UDTerminalState
    from muster.errors import Unauthenticated as Unauthenticated
    from muster.errors import Unavailable as Unavailable
    from muster.errors import WaitTimeout as WaitTimeout
    from muster.errors import WorldSizeOutOfBounds as WorldSizeOutOfBounds
    from muster.errors import WouldDeadlock as WouldDeadlock
    from muster.mesh.wait import mesh_status as mesh_status
    from muster.mesh.wait import mesh_wait as mesh_wait
    from muster.node.numbers import log as log
    from muster.node.progress import progress as progress
    from muster.node.saving import saving as saving
    from muster.node.word import should_save as should_save
    from muster.sdk.client import Change as Change
    from muster.sdk.client import Client as Client
    from muster.sdk.functions import distributed as distributed
    from muster.sdk.functions import distributed_async as distributed_async
    from muster.sdk.training import DistributedTraining as DistributedTraining
    from muster.state.state import State as State
    from muster.types.bench import Bench as Bench
    from muster.types.bench import BenchSize as BenchSize
    from muster.types.event import Event as Event
    from muster.types.metrics import Metrics as Metrics
    from muster.types.training import Condition as Condition
    from muster.types.training import Mesh as Mesh
    from muster.types.training import Outcome as Outcome
    from muster.types.training import RankExit as RankExit
    from muster.types.training import RankStatus as RankStatus
    from muster.types.training import Resources as Resources
    from muster.types.training import Training as Training
    from muster.types.training import WorldSize as WorldSize
    from muster.types.training import WorldStatus as WorldStatus
    from muster.types.usage import Usage as Usage

__version__ = "0.2.0"

_PLACES = {
    "muster.core.training.explain": "Explanation",
    "muster.errors": (
        "AlreadyExists BelowMinimumWorld Compacted Conflict DistributedError Forbidden GrantTimeout "
        "InternalError InvalidRequest JournalUnusable MusterError NotFound PipelineKilled PipelineQuarantined "
        "QuotaExceeded RendezvousUnavailable RequestRefused ResizeTakenBack ScaleSuperseded SchedulerStopped "
        "SharingError StateUnusable TooLarge TooManyRequests TrainingCancelled TrainingFailed UDTerminalState "
        "Unauthenticated Unavailable WaitTimeout WorldSizeOutOfBounds WouldDeadlock"
    ),
    "muster.mesh.wait": "mesh_status mesh_wait",
    "muster.node.numbers": "log",
    "muster.node.progress": "progress",
    "muster.node.saving": "saving",
    "muster.node.word": "should_save",
    "muster.sdk.client": "Change Client",
    "muster.sdk.functions": "distributed distributed_async",
    "muster.sdk.training": "DistributedTraining",
    "muster.state.state": "State",
    "muster.types.bench": "Bench BenchSize",
    "muster.types.event": "Event",
    "muster.types.metrics": "Metrics",
    "muster.types.training": ("Condition Mesh Outcome RankExit RankStatus Resources Training WorldSize WorldStatus"),
    "muster.types.usage": "Usage",
}
_LAZY = {name: module for module, names in _PLACES.items() for name in names.split()}

_MODULES = ("accelerate", "hf", "lightning")  # each needs what it is for: they are not in __all__

__all__ = ["__version__", *_LAZY]  # noqa: PLE0604  # the names are those above, written once


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value  # found at once the next time
        return value
    if name in _MODULES:
        return importlib.import_module(f"muster.{name}")
    raise AttributeError(f"module 'muster' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *_MODULES])
