"""What a simulated worker is, and what it knows about the round that it is in. Records only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from muster.types.world import RankExit, Round, Seat

Then = Callable[[], None]


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


@dataclass
class InRound:
    """The round that this worker has, or last had, a place in."""

    formed: Round
    seat: Seat
    exits: dict[int, tuple[RankExit, float]] = field(default_factory=dict)
    told_steps: dict[int, int] = field(default_factory=dict)
    running: bool = True
    stopping: bool = False
    sweeping: bool = False
    kill_at: float | None = None
    hung: bool = False
    finished: bool = False
    why_stopped: str = ""
    afterwards: list[Then] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.formed.number

    @property
    def first_rank(self) -> int:
        return self.formed.first_rank_of(self.seat.rank)
