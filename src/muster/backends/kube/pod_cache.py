"""Which Pods are there? A digest of each, kept up to date by a watch; whoever asked for it hears of every change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from muster.backends.kube import pods
from muster.backends.kube.pods import Json, Pod


class PodCache:
    """`tell` gets each Pod that is there as it is now, and once more, with True, when it is gone."""

    def __init__(self, tell: Callable[[Pod, bool], None]) -> None:
        self._tell = tell
        self._pods: dict[tuple[str, str], Pod] = {}

    def __iter__(self) -> Iterator[Pod]:
        return iter(list(self._pods.values()))

    def get(self, namespace: str, name: str) -> Pod | None:
        return self._pods.get((namespace, name))

    def put(self, pod: Pod) -> None:
        """What an answer said may be older than what the watch has told since."""
        known = self._pods.get(pod.place)
        if known is not None and known.version > pod.version:
            return
        if known is not None and known.uid != pod.uid:
            self.drop(known)
        elif known is not None and not pod.owner:  # a deletion that orphans takes it away: it is still the same Pod
            pod = replace(pod, owner=known.owner)
        self._pods[pod.place] = pod
        self._tell(pod, False)

    def drop(self, pod: Pod) -> None:
        known = self._pods.get(pod.place)
        if known is not None and known.uid == pod.uid:
            del self._pods[pod.place]
            self._tell(pod, True)

    # What the informer tells

    @staticmethod
    def digest(item: Json) -> Json:
        """For `listed`: thousands of whole Pods would be much."""
        return {"digest": pods.read(item)}

    def listed(self, items: Sequence[Json], version: str) -> None:
        """A Pod that was created after this list was made is not missing from it."""
        here: list[Pod] = [item["digest"] for item in items]
        uids = {pod.uid for pod in here}
        for pod in self:
            if pod.uid not in uids and pod.version <= int(version):
                self.drop(pod)
        for pod in here:
            self.put(pod)

    def changed(self, kind: str, item: Json) -> None:
        pod = pods.read(item)
        if kind == "DELETED":
            self.drop(pod)
        else:
            self.put(pod)

    def reached(self, version: str) -> None:
        """Nothing depends on it."""
