"""How does a Pod go? It is asked to, in its time or at once; is forced when its node does not answer; and is released.

Its finalizer holds it until its end is in the store: who releases it says so.
"""

from __future__ import annotations

import asyncio
import functools
import logging

from muster import errors
from muster.backends.kube import render
from muster.backends.kube.pod_cache import PodCache
from muster.backends.kube.pods import Pod
from muster.background import Tasks
from muster.kube.client import MERGE_PATCH, KubeApi, passes
from muster.ports import until_answered

log = logging.getLogger("muster.kube")

OVERDUE_S = 10.0  # beyond its grace, a node that has not ended a Pod does not answer
KILL_GRACE_S = 1


class PodRemoval:
    def __init__(self, api: KubeApi, cache: PodCache, tasks: Tasks) -> None:
        self._api = api
        self._cache = cache
        self._tasks = tasks
        self._releasing: set[str] = set()
        self._ending: set[str] = set()
        self._overdue: dict[tuple[str, str], tuple[int, asyncio.TimerHandle]] = {}  # by the place of a Pod

    async def ask(self, pod: Pod, *, kill: bool) -> None:
        """Once. In its own time, or nearly at once."""
        try:
            await self._api.request("DELETE", _path(pod), body=_deletion(pod, KILL_GRACE_S if kill else None))
        except errors.NotFound:
            self._cache.drop(pod)

    def kill(self, pod: Pod, grace_s: int = KILL_GRACE_S) -> None:
        """Nobody would ask for it again."""
        self._tasks.start(self._insist("DELETE", pod, _deletion(pod, grace_s)))

    def watch(self, pod: Pod) -> None:
        """A node that does not end a Pod in its time does not answer: the Pod is then removed by force."""
        before = self._overdue.get(pod.place)
        if pod.grace_s is None or not pod.ours or (before is not None and before[0] <= pod.grace_s):
            return
        self.forget(*pod.place)
        alarm = asyncio.get_running_loop().call_later(pod.grace_s + OVERDUE_S, self._force, pod)
        self._overdue[pod.place] = (pod.grace_s, alarm)

    def _force(self, pod: Pod) -> None:
        self.forget(*pod.place)
        self.kill(pod, 0)

    def forget(self, namespace: str, name: str) -> None:
        """It has gone in time."""
        if (before := self._overdue.pop((namespace, name), None)) is not None:
            before[1].cancel()

    def release(self, pod: Pod) -> None:
        """Let it go: nothing is lost with it any more. What runs beside an ended worker is ended, too."""
        if pod.lingers and pod.uid not in self._ending:
            self._ending.add(pod.uid)
            self._tasks.start(self._end_others(pod))
        if render.FINALIZER in pod.finalizers and pod.uid not in self._releasing:
            self._releasing.add(pod.uid)
            self._tasks.start(self._release(pod))

    async def _end_others(self, pod: Pod) -> None:
        try:
            await self._insist("DELETE", pod, _deletion(pod, None))
        finally:
            self._ending.discard(pod.uid)

    async def _release(self, pod: Pod) -> None:
        left = [one for one in pod.finalizers if one != render.FINALIZER]
        try:
            await self._insist("PATCH", pod, {"metadata": {"uid": pod.uid, "finalizers": left or None}})
        finally:
            self._releasing.discard(pod.uid)

    async def remove(self, pod: Pod) -> None:
        """At once, whatever becomes of it."""
        if render.FINALIZER in pod.finalizers:
            await self._release(pod)
        await self._insist("DELETE", pod, _deletion(pod, 0))

    async def _insist(self, method: str, pod: Pod, body: render.Json) -> None:
        """A Pod that is no more, or another one by now, is left alone."""
        kind = MERGE_PATCH if method == "PATCH" else "application/json"
        try:
            ask = functools.partial(self._api.request, method, _path(pod), body=body, content_type=kind)
            await until_answered(f"{pod.namespace}/{pod.name}", ask, passes)
        except (errors.NotFound, errors.InvalidRequest):
            self._cache.drop(pod)

    def close(self) -> None:
        for _, alarm in self._overdue.values():
            alarm.cancel()


def tell(error: BaseException) -> None:
    log.error("%s", error, exc_info=None if isinstance(error, errors.MusterError) else error)


def _path(pod: Pod) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"


def _deletion(pod: Pod, grace_s: int | None) -> render.Json:
    """This one only, and in its own time unless told otherwise."""
    given = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
    return {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": pod.uid}, **given}
