"""By which class does the cluster's scheduler learn a training's priority? By one that the cluster's owner made for it.

Classes are the whole cluster's, and preempt whoever has a lower one: muster makes none. A PriorityClass with the label
`muster.dev/priority: "10"` is for trainings of priority 10 and more, up to the next class that has such a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from muster.kube.client import KubeApi, again
from muster.ports import Clock

LABEL = "muster.dev/priority"
KEEP_S = 60.0  # classes change seldom
_PATH = "/apis/scheduling.k8s.io/v1/priorityclasses"


def chosen(classes: Iterable[Mapping[str, Any]], priority: int) -> str:
    """The class of that priority; "" where none is meant for it. A label that is no number is not meant at all."""
    known: dict[int, str] = {}
    for one in sorted(classes, key=lambda item: str(item["metadata"]["name"])):
        try:
            known.setdefault(int((one["metadata"].get("labels") or {})[LABEL]), one["metadata"]["name"])
        except (KeyError, ValueError):
            continue
    return max(((from_, name) for from_, name in known.items() if from_ <= priority), default=(0, ""))[1]


class PriorityClasses:
    def __init__(self, api: KubeApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._known: list[Mapping[str, Any]] = []
        self._asked_at: float | None = None

    async def of(self, priority: int) -> str:
        """A training that names no priority gets what the cluster gives to everybody."""
        if not priority:
            return ""
        now = self._clock.monotonic()
        if self._asked_at is None or now - self._asked_at >= KEEP_S:
            found, _ = await again(lambda: self._api.list(_PATH, {"labelSelector": LABEL}))
            self._known, self._asked_at = list(found), now
        return chosen(self._known, priority)
