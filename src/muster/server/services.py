"""What the HTTP API is given by the process that serves it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from muster.core.training.metering import Rates
from muster.ports import Backend, Clock, Measured, Packages, Store
from muster.server.attempts import FailedAttempts
from muster.server.audit import Audit
from muster.server.auth import Tokens
from muster.server.metrics import Meter
from muster.server.package_checks import PackageChecks
from muster.server.quotas import Quotas
from muster.server.sealing import PageSeal
from muster.server.sign_in import SignInCodes
from muster.server.visits import Visits
from muster.sharing.service import PoolService

SENT_AT_ONCE = 16  # packages, to workers; others wait their turn


def _always() -> bool:
    return True


class IdempotencyKeys:
    """One lock per idempotency key in use: two requests with the same key never both create."""

    def __init__(self) -> None:
        self.turns = 0
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def turn(self, key: str) -> asyncio.Lock:
        self.turns += 1
        return self._locks.setdefault(key, asyncio.Lock())


@dataclass(frozen=True)
class Services:
    """Everything that a handler may use."""

    store: Store
    backends: Mapping[str, Backend]
    tokens: Tokens
    clock: Clock
    version: str
    started_at: datetime
    gauges: Callable[[], Mapping[str, float]] = dict  # more to show in /metrics: name → value
    ready: Callable[[], bool] = _always
    rates: Rates | None = None
    quotas: Quotas | None = None
    audit: Audit | None = None
    seal: PageSeal = field(default_factory=PageSeal.anew)  # of what clients carry from page to page
    visits: Visits = field(default_factory=Visits)
    attempts: FailedAttempts = field(default_factory=FailedAttempts)
    codes: SignInCodes = field(default_factory=SignInCodes)
    meter: Meter = field(default_factory=Meter)
    keys: IdempotencyKeys = field(default_factory=IdempotencyKeys)
    pools: Mapping[str, PoolService] = field(default_factory=dict)  # of shared GPUs, by name
    pooled: Mapping[str, int] = field(default_factory=dict)  # how many GPUs a pool gives to trainings, by backend
    packages: Packages | None = None  # None: no code is taken
    measured: Measured | None = None  # None: nothing is known of how trainings learn
    incoming: Path | None = None  # where it is written while it comes
    checks: PackageChecks = field(default_factory=PackageChecks)  # of packages that come
    sending: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SENT_AT_ONCE))
    place: str = ""  # which files this process sees; a client that sees the same need not send its own
