"""Where does a training run, and what may it have there? Who gets which GPUs is `core.sharing.planner`'s decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

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
