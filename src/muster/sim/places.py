"""What a simulated worker is, and what it knows about the round that it is in: exits, and the steps of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from muster.sim.machine import Rank
from muster.types.world import RankExit, Round, Seat, Settings

STEP_S = 0.5

Then = Callable[[], None]


@lru_cache(maxsize=16)
def parsed(given: tuple[tuple[str, object], ...]) -> Settings:
    """Members of a run give and get the same settings many times."""
    return Settings.parse(dict(given))


@dataclass(frozen=True)
class Config:
    name: str
    settings: dict[str, object] = field(default_factory=dict)
    procs: int = 1
    infra_rank: int | None = None
    domain: str | None = None
    checks_health: bool = False
    stubborn: bool = False
    term_s: float = 0.01

    def to_wire(self) -> dict[str, Any]:
        """The part of a hello that says who it is."""
        return {
            "name": self.name,
            "addr": self.name,
            "procs": self.procs,
            "infra_rank": self.infra_rank,
            "domain": self.domain,
            "version": "1.0",
            "host": self.name,
            "pid": 1,
            "launcher": "node",
            "checks_health": self.checks_health,
        }


@dataclass
class InRound:
    """The round that this worker has, or last had, a place in."""

    formed: Round
    seat: Seat
    counts_steps: bool = False
    exits: dict[int, tuple[RankExit, float]] = field(default_factory=dict)
    told_steps: dict[int, int] = field(default_factory=dict)
    running: bool = True
    stopping: bool = False
    sweeping: bool = False
    kill_at: float | None = None
    hung: bool = False
    up: bool = False
    finished: bool = False
    why_stopped: str = ""
    afterwards: list[Then] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.formed.number

    @property
    def state(self) -> tuple[int, bool, bool]:
        """What a hello presents of it; if it changes before the welcome, that has to be told again."""
        return len(self.exits), self.up, self.running

    @property
    def first_rank(self) -> int:
        return self.formed.first_rank_of(self.seat.rank)

    # Exits

    def note_exit(self, rank: Rank, status: int, worker: str, now: float) -> None:
        known: dict[str, Any] = {"worker": worker, "round": self.number}
        if self.counts_steps and (self.hung or not self.stopping):
            idle = 0.0 if rank.hung_at is None else now - rank.hung_at
            known |= {"step": _step(rank, now), "idle_s": round(idle, 3)}
        if status != 0:
            known["stderr_tail"] = (f"rank {rank.rank} gives up",)
            if self.hung:
                known |= {"hung": True, "waiting": rank.waiting, "stack": "train.py:7 in step"}
            elif self.stopping:
                known["stopped"] = True
        self.exits[rank.rank] = (RankExit.from_status(rank.rank, status, **known), now)

    def exits_to_wire(self, now: float, only: int | None = None) -> list[dict[str, Any]]:
        return [
            {**end.to_wire(), "age_s": round(now - at, 4)}
            for rank, (end, at) in self.exits.items()
            if only is None or rank == only
        ]

    # Progress

    def fresh_steps(self, ranks: list[Rank], now: float) -> list[list[float]]:
        fresh: list[list[float]] = []
        for rank in ranks:
            step = _step(rank, now)
            if rank.hung_at is None and self.told_steps.get(rank.rank) != step:
                self.told_steps[rank.rank] = step
                fresh.append([rank.rank, step, round(now - max(step * STEP_S, rank.born_at), 4)])
        return fresh


def _step(rank: Rank, now: float) -> int:
    return int((now if rank.hung_at is None else rank.hung_at) / STEP_S)
