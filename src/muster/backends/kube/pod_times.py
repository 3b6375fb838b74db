"""When did that happen to a Pod, on the clock that durations are measured with?

The cluster tells the time of day of its own machines. That, and ours, may be wrong or set.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from muster.backends.kube.pods import Pod
from muster.ports import Clock
from muster.types.training import Uid

SEEN_WITHIN = timedelta(seconds=10)  # of a Pod's end: without the cluster for so long, no control plane goes on


class PodTimes:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: dict[tuple[Uid, str], datetime] = {}  # when containers began to run: found once, clocks may be set

    def at(self, told: datetime) -> datetime:
        """What the cluster's clock says, and nothing that has not happened yet."""
        now = self._clock.steady()
        return min(now, told + (now - self._clock.now()))

    def of(self, pod: Pod, *, watched: bool) -> Pod:
        """The Pod with these times. `watched`: what happens to it is seen as it happens."""
        place = (pod.training, pod.name)
        if pod.started_at is not None and place not in self._began:
            self._began[place] = self.at(pod.started_at)
        ended = None if pod.ended_at is None else self.at(pod.ended_at)
        if ended is not None and watched:
            ended = max(ended, self._clock.steady() - SEEN_WITHIN)
        return replace(pod, started_at=self._began.get(place), ended_at=ended)

    def forget(self, uid: Uid, name: str) -> None:
        self._began.pop((uid, name), None)
