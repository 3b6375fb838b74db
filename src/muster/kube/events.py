"""Which entries of the journal are Kubernetes Events as well? All, as far as the cluster can bear them.

They are a copy for `kubectl describe` and are forgotten by the cluster after an hour; the journal is what counts. So
they are sent one by one in the background, at a bounded rate, namespaces in turn, and when too many wait the oldest
ordinary ones of the namespace that has most of them go.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections import deque
from collections.abc import Iterable
from datetime import UTC

from muster import errors
from muster.kube.client import Json, KubeApi
from muster.types.event import Event
from muster.types.training import API_VERSION, KIND

log = logging.getLogger("muster.kube")

PER_S = 25.0
BURST = 250
MOST_WAITING = 2000
AGAIN_S = 1.0
_LONGEST = 1024  # characters that a message may have


class EventRecorder:
    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._waiting: dict[str, deque[Event]] = {}  # namespace → its own; the first has its turn next
        self._count = 0
        self._wanted = asyncio.Event()
        self._told = ""

    def offer(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.namespace and event.training:
                self._waiting.setdefault(event.namespace, deque()).append(event)
                self._count += 1
        while self._count > MOST_WAITING:
            namespace, crowd = max(self._waiting.items(), key=lambda one: len(one[1]))
            crowd.remove(next((one for one in crowd if one.type == "Normal"), crowd[0]))
            self._count -= 1
            if not crowd:
                del self._waiting[namespace]
        self._wanted.set()

    def _next(self) -> Event:
        """Of the namespace whose turn it is."""
        namespace, own = next(iter(self._waiting.items()))
        event = own.popleft()
        self._count -= 1
        del self._waiting[namespace]
        if own:
            self._waiting[namespace] = own
        return event

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        room, at = float(BURST), loop.time()
        while True:
            if not self._waiting:
                self._wanted.clear()
                await self._wanted.wait()
                continue
            now = loop.time()
            room, at = min(float(BURST), room + (now - at) * PER_S), now
            if room < 1.0:
                await asyncio.sleep((1.0 - room) / PER_S)
                continue
            room -= 1.0
            if not await self._sent(event := self._next()):
                self._waiting.setdefault(event.namespace, deque()).appendleft(event)
                self._count += 1
                await asyncio.sleep(AGAIN_S * random.uniform(0.5, 1.5))

    async def _sent(self, event: Event) -> bool:
        """False: it is to be tried again. It has a name of its own, so that it cannot be there twice."""
        try:
            await self._api.request("POST", f"/api/v1/namespaces/{event.namespace}/events", body=rendered(event))
            self._told = ""
        except errors.AlreadyExists:
            pass
        except errors.MusterError as error:  # it is only a copy
            if error.message != self._told:
                log.warning("an event of %s/%s is not shown by kubectl: %s", event.namespace, event.training, error)
            self._told = error.message
            return not error.retryable
        return True


def rendered(event: Event) -> Json:
    assert event.at is not None
    at = event.at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    message = event.message if len(event.message) <= _LONGEST else event.message[: _LONGEST - 1] + "…"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{event.training}.{event.uid[:8] or 'x'}.{event.id}", "namespace": event.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": event.namespace,
            "name": event.training,
            "uid": event.uid,
        },
        "reason": event.reason,
        "message": message,
        "type": event.type,
        "count": 1,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "source": {"component": "muster"},
        "reportingComponent": "muster.dev/control-plane",
        "reportingInstance": socket.gethostname(),
    }
