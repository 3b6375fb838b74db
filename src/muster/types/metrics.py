"""How does a training learn, and what do its workers use? As the API answers it, for whoever asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """A number over time. Its points are evenly thinned; the first and the newest are always there."""

    name: str
    points: tuple[tuple[int | None, float, float], ...] = ()  # step, seconds since 1970, value
    not_finite: int = 0  # how often it was no number that can be drawn

    @property
    def last(self) -> float | None:
        return self.points[-1][2] if self.points else None


@dataclass(frozen=True)
class WorkerMetrics:
    """What a worker uses, as it has said last."""

    name: str
    at: float
    cpu_percent: float | None = None  # 100: one core
    memory_bytes: int | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None
    recent: tuple[tuple[float, float | None, int | None, float | None, int | None], ...] = ()


@dataclass(frozen=True)
class Metrics:
    series: tuple[Series, ...] = ()
    workers: tuple[WorkerMetrics, ...] = ()

    def __getitem__(self, name: str) -> Series:
        """The curve of that name; KeyError if there is none."""
        found = next((one for one in self.series if one.name == name), None)
        if found is None:
            raise KeyError(f"{name}: there are {', '.join(one.name for one in self.series) or 'no curves yet'}")
        return found
