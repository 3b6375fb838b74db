"""What a training used: intervals in which a worker was there, and their sums."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class OpenWorker:
    worker: str
    gpus: int
    since: datetime
    lent: tuple[tuple[datetime, datetime | None], ...] = ()  # what its entries told of its GPUs' absence


@dataclass(frozen=True)
class Dropped:
    """What entries told of usage that the journal no longer has: a sum, and the workers that had not ended then."""

    entries: int
    workers: int = 0
    worker_seconds: float = 0.0
    gpu_seconds: float = 0.0
    since: datetime | None = None
    until: datetime | None = None
    running: tuple[OpenWorker, ...] = ()


@dataclass(frozen=True)
class Interval:
    """One worker from its start to its exit. `until` is None while it runs."""

    namespace: str
    training: str
    uid: str
    worker: str
    gpus: int
    since: datetime
    until: datetime | None = None
    why: str = ""  # what closed it
    dropped: Dropped | None = None  # it stands for all those, from the first start to the last end
    lent: tuple[tuple[datetime, datetime | None], ...] = ()  # when its GPUs were with somebody else


@dataclass(frozen=True)
class Usage:
    """A sum over intervals, for a training or a namespace; or what a pipeline had of a pool."""

    namespace: str
    training: str = ""
    uid: str = ""
    workers: int = 0
    worker_seconds: float = 0.0
    gpu_seconds: float = 0.0
    running: int = 0  # workers whose interval is still open; counted up to now
    cost: float | None = None
    log_bytes: int | None = None  # what its logs take on the disk, and its entries in the journal
    journal_bytes: int | None = None
    pipeline: str = ""  # whose sum this is; the training is then the one that it belongs to, if to any
