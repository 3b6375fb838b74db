"""What does `/metrics` tell of each training that runs? Its size, its steps, what it logs, what its workers use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from muster.ports import Measured, Stored
from muster.server.metrics import Labels, family
from muster.types.numbers import DERIVED
from muster.types.training import Training

# Of each training: what it is called, what it says, and where it is read from.
_OF_STATUS: Mapping[str, tuple[str, Callable[[Training], float | None]]] = {
    "workers_ready": ("Workers whose ranks all run.", lambda one: one.status.world_size.ready),
    "workers_target": ("Workers that it should have.", lambda one: one.status.world_size.target),
    "workers_min": ("Fewest workers that it may have.", lambda one: one.status.world_size.min),
    "workers_max": ("Most workers that it may have.", lambda one: one.status.world_size.max),
    "spares_ready": ("Spares that are ready to take a rank.", lambda one: one.status.spares.ready),
    "round": ("Number of the round that is out.", lambda one: one.status.round),
    "restarts": ("Restarts that failed ranks have used.", lambda one: one.status.restarts),
}
_OF_CURVES = {
    "step": "Step that its first rank has reached.",
    "steps_per_second": "Steps per second, lately.",
}
_OF_WORKERS = {
    "cpu_percent": "CPU that a worker uses; 100 is one core.",
    "memory_bytes": "Memory that a worker's processes have for themselves.",
    "gpu_percent": "How busy a worker's GPUs are, on average.",
    "gpu_memory_bytes": "Memory that is used on a worker's GPUs.",
}
MOST_WORKERS = 5_000  # that have series of their own, over all trainings


def latest(running: Iterable[Stored], most: int) -> list[Stored]:
    """Those that were started last, by namespace and name. What was stored says when, before it is read as a whole."""
    by_start = sorted(running, key=lambda one: _started(one.raw), reverse=True)[:most]
    return sorted(by_start, key=lambda one: (one.key.namespace, one.key.name))


def _started(raw: bytes) -> bytes:
    """The status comes last, and in it the time of its start; a text has its quotes escaped."""
    return raw.rpartition(b'"startedAt":"')[2][:24] if b'"startedAt":"' in raw else b""


def lines(shown: Iterable[Stored], measured: Measured | None) -> Iterable[str]:
    trainings = [one.training for one in shown]
    for name, (about, value_of) in _OF_STATUS.items():
        told = {_labels(one): float(value) for one in trainings if (value := value_of(one)) is not None}
        yield from family(f"muster_training_{name}", "gauge", about, told)
    if measured is not None:
        yield from _learned(trainings, measured)
        yield from _used(trainings, measured)


def _learned(trainings: Iterable[Training], measured: Measured) -> Iterable[str]:
    found: dict[str, dict[Labels, float]] = {name: {} for name in (*_OF_CURVES, "logged", "not_finite")}
    for training in trainings:
        labels = _labels(training)
        for name, curve in measured.curves(training.uid).items():
            if name in _OF_CURVES and curve.last is not None:
                found[name][labels] = curve.last.value
            elif name not in DERIVED:
                named = (*labels, ("name", name))
                found["not_finite"][named] = float(curve.not_finite)
                if curve.last is not None:
                    found["logged"][named] = curve.last.value
    for name, about in _OF_CURVES.items():
        yield from family(f"muster_training_{name}", "gauge", about, found[name])
    yield from family("muster_training_logged", "gauge", "Numbers that it logs, as they were last.", found["logged"])
    odd = "How often a number that it logs was not finite."
    yield from family("muster_training_not_finite_total", "counter", odd, found["not_finite"])


def _used(trainings: Iterable[Training], measured: Measured) -> Iterable[str]:
    found: dict[str, dict[Labels, float]] = {name: {} for name in _OF_WORKERS}
    left = MOST_WORKERS
    for training in trainings:
        for worker, reading in sorted(measured.workers(training.uid).items())[: max(0, left)]:
            left -= 1
            use: Any = reading.use
            for name, told in found.items():
                if (value := getattr(use, name)) is not None:
                    told[(*_labels(training), ("worker", worker))] = float(value)
    for name, about in _OF_WORKERS.items():
        yield from family(f"muster_worker_{name}", "gauge", about, found[name])


def _labels(training: Training) -> Labels:
    return (("namespace", training.key.namespace), ("training", training.key.name))
