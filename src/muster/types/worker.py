"""A worker as its backend knows it, and what a backend has to give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from muster.types.training import Uid

OOM_KILLED = "OOMKilled"
SHORTAGE = 71  # it could not be started now (files, memory, disk, quota): trying again may help
KILLED = 137  # the exit code of what SIGKILL ended


@dataclass(frozen=True)
class Worker:
    """One that runs, or that ended. Its times are of the clock that durations are measured with."""

    name: str
    uid: Uid  # the training that it works for
    node: str
    started_at: datetime
    gpus: tuple[int, ...] = ()
    pid: int = 0
    stopping: bool = False  # it was asked to leave
    ended_at: datetime | None = None
    exit_code: int | None = None  # None while it runs, and when nobody saw its end
    why_ended: str = ""
    last_words: str = ""  # what it said before it ended, if it failed
    reason: str = ""  # in the platform's word why it ended (OOMKilled, Evicted, NodeLost, Preempted, Error)
    cleared: bool = False  # with its end, its platform says that nothing which it started runs any more
    waiting: str = ""  # why it does not run yet, though it was ordered
    domain: str | None = None  # where it is, as its platform knows; "": nowhere in particular; None: not known (yet)
    mesh_name: str = ""  # its NODE_NAME, under which its ranks wait for their mesh, where that is not its own name

    @property
    def alive(self) -> bool:
        return self.ended_at is None


@dataclass(frozen=True)
class Capacity:
    """How many GPUs there are, and which are taken: index → worker name."""

    gpus: int
    taken: Mapping[int, str] = field(default_factory=dict)

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(index for index in range(self.gpus) if index not in self.taken)
