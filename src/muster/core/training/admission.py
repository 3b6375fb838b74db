"""Where does a training run, and what may it have there? Who gets which GPUs is `core.sharing.planner`'s decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from muster.types.codec import Problem
from muster.types.training import QUEUE, SUSPENDED, Spec, Training

ANYWHERE = Spec().backend  # who did not choose runs wherever there is a choice of one


@dataclass(frozen=True)
class Grant:
    """How many workers a training may have now. `message` says what is missing, for users."""

    workers: int
    admitted: bool
    reason: str
    message: str
    places: tuple[tuple[int, ...], ...] | None = None  # GPUs for each of them; None: its backend chooses
    lent: Mapping[str, str] = field(default_factory=dict)  # workers that may have no rank now, and why
    overdue: tuple[str, ...] = ()  # those of them whose ranks should long be gone
    surplus: tuple[str, ...] = ()  # those of them for whose return nobody waits


def backend_of(spec: Spec, served: Collection[str]) -> str:
    """The name under which the backend is served that a spec means; its own word, if there is none."""
    if spec.backend == ANYWHERE and len(served) == 1:
        return next(iter(served))
    return spec.backend


def suspended(training: Training) -> Grant:
    """What one may have that is not to run now, and what it waits for."""
    queue = training.metadata.labels.get(QUEUE)
    waits = f"the queue {queue!r} to admit it" if queue else "spec.suspend to be false"
    return Grant(0, False, SUSPENDED, f"suspended: it waits for {waits}")


def impossible(spec: Spec, gpus: int | None) -> Problem | None:
    """Why it could never start where there are so many GPUs in all; None: it could, or nobody counts them."""
    least, each = spec.world_size.min, spec.resources.gpus
    if gpus is None or least * each <= gpus:
        return None
    workers = f"{least} worker{'s' if least > 1 else ''} × {each}"
    there = "there is none here" if gpus == 0 else f"there {'is' if gpus == 1 else 'are'} only {gpus} here"
    needed = f"{least * each} GPU{'s' if least * each > 1 else ''}"
    return Problem("spec.resources.gpus", f"it needs {needed} ({workers}), {there}: it could never start")
