"""Several RL pipelines on the same GPUs: the scheduler, and what pipelines need to take part.

Public names are loaded on first use. `scheduler` holds the operations, `execution` calls hooks, `waiters` holds who
waits, `journal` and `records` keep the state, `hooks` is the pipeline's side. Decisions are in `core.sharing`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.errors import GrantTimeout as GrantTimeout
    from muster.errors import JournalUnusable as JournalUnusable
    from muster.errors import PipelineKilled as PipelineKilled
    from muster.errors import PipelineQuarantined as PipelineQuarantined
    from muster.errors import RequestRefused as RequestRefused
    from muster.errors import SchedulerStopped as SchedulerStopped
    from muster.errors import SharingError as SharingError
    from muster.errors import WouldDeadlock as WouldDeadlock
    from muster.sharing.hooks import PipelineClient as PipelineClient
    from muster.sharing.hooks import PipelineHooks as PipelineHooks
    from muster.sharing.scheduler import Scheduler as Scheduler
    from muster.types.sharing import ClusterSpec as ClusterSpec
    from muster.types.sharing import Holder as Holder
    from muster.types.sharing import Pending as Pending
    from muster.types.sharing import Pool as Pool
    from muster.types.sharing import Priority as Priority
    from muster.types.sharing import ProgressReport as ProgressReport
    from muster.types.sharing import Released as Released
    from muster.types.sharing import SharingEvent as SharingEvent
    from muster.types.sharing import Snapshot as Snapshot
    from muster.types.sharing import Tenant as Tenant

_PLACES = {
    "muster.errors": (
        "GrantTimeout JournalUnusable PipelineKilled PipelineQuarantined RequestRefused SchedulerStopped SharingError "
        "WouldDeadlock"
    ),
    "muster.sharing.hooks": "PipelineClient PipelineHooks",
    "muster.sharing.scheduler": "Scheduler",
    "muster.types.sharing": (
        "ClusterSpec Holder Pending Pool Priority ProgressReport Released SharingEvent Snapshot Tenant"
    ),
}
_LAZY = {name: module for module, names in _PLACES.items() for name in names.split()}

__all__ = [*_LAZY]  # noqa: PLE0604  # the names are those above, written once


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value  # found at once the next time
        return value
    raise AttributeError(f"module 'muster.sharing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
