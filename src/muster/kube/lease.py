"""Which of several control planes is the one that acts? The one that holds the Lease.

The holder renews it and stops acting by its own clock a while before anyone else may take it: `check` stands before
every request that writes. Another takes it when it has not seen it renewed for as long as the holder asked for,
again by its own clock, so that clocks need not agree. Whoever has lost it once must end: what it knows is old.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from muster import errors
from muster.kube.client import Json, KubeApi

log = logging.getLogger("muster.kube")

NAME = "muster"
DURATION_S = 8.0  # unrenewed for so long, it may be taken
GIVE_UP_S = 5.0  # the holder stops acting this long after the last renewal that succeeded
RENEW_EVERY_S = 1.5
RETRY_S = 0.5
LOOK_EVERY_S = 1.0


def boot_time() -> float:
    """Seconds that also pass while the process, or the machine, is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class _Seen:
    """A lease as it was last found, and since when it has been like that."""

    mark: tuple[str, str]  # holder and time of renewal: another one means that it was renewed
    since: float


class Leadership:
    """`api` should be one of its own: a renewal must not wait for other requests."""

    def __init__(self, api: KubeApi, namespace: str, identity: str) -> None:
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._identity = identity
        self._seen: _Seen | None = None
        self._lease: Json = {}
        self._until = 0.0

    @property
    def held(self) -> bool:
        return boot_time() < self._until

    def check(self) -> None:
        if not self.held:
            raise errors.Unavailable("this control plane no longer leads: another one may act", retryable=False)

    async def acquire(self) -> None:
        """Until it is ours."""
        told = ""
        while True:
            try:
                holder = await self._try_to_take()
                if holder is None:
                    return
            except errors.MusterError as error:
                holder = f"nobody can tell who leads: {error}{error.hint and f' ({error.hint})'}"
            if holder != told:
                log.info("standing by: %s", holder)
                told = holder
            await asyncio.sleep(LOOK_EVERY_S)

    async def _try_to_take(self) -> str | None:
        """None: it is ours. Otherwise why it is not."""
        asked = boot_time()
        try:
            found = await self._api.request("GET", f"{self._path}/{NAME}")
        except errors.NotFound:
            return await self._write("POST", self._path, self._fresh({}))
        spec = found.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        mark = (holder, str(spec.get("renewTime")))
        if self._seen is None or self._seen.mark != mark:
            self._seen = _Seen(mark, asked)
        # Our own name: the process that had it before us in this Pod is gone.
        free = holder in ("", self._identity) or asked - self._seen.since >= float(
            spec.get("leaseDurationSeconds") or DURATION_S
        )
        if not free:
            return f"{holder} leads"
        return await self._write("PUT", f"{self._path}/{NAME}", self._fresh(found))

    def _fresh(self, found: Json) -> Json:
        spec = found.get("spec") or {}
        now = _stamp()
        lease: dict[str, Any] = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        lease["metadata"] = found.get("metadata") or {"name": NAME}
        turns = int(spec.get("leaseTransitions") or 0) + 1
        lease["spec"] = {"holderIdentity": self._identity, "leaseDurationSeconds": int(DURATION_S)}
        lease["spec"] |= {"acquireTime": now, "renewTime": now, "leaseTransitions": turns}
        return lease

    async def _write(self, method: str, path: str, lease: Json) -> str | None:
        asked = boot_time()
        try:
            self._lease = await self._api.request(method, path, body=lease)
        except (errors.Conflict, errors.AlreadyExists):
            return "somebody else was quicker"
        self._until = asked + GIVE_UP_S  # counted from before the request: it cannot be too long
        return None

    async def hold(self) -> str:
        """Renew it until that fails for too long; returns why it was lost."""
        told = ""
        while True:
            left = self._until - boot_time()
            await asyncio.sleep(RETRY_S if told else max(0.0, left - GIVE_UP_S + RENEW_EVERY_S))
            left = self._until - boot_time()
            if left <= 0:
                return f"the lease could not be renewed in time{told and f': {told}'}"
            try:
                async with asyncio.timeout(left):
                    if (why := await self._renew()) is not None:
                        return why
                told = ""
            except TimeoutError:
                return "the Kubernetes API did not answer in time to renew the lease"
            except errors.MusterError as error:
                if str(error) != told:
                    log.warning("the lease cannot be renewed, trying again: %s", error)
                told = str(error)

    async def _renew(self) -> str | None:
        asked = boot_time()
        lease = {**self._lease, "spec": {**self._lease["spec"], "renewTime": _stamp()}}
        try:
            self._lease = await self._api.request("PUT", f"{self._path}/{NAME}", body=lease)
        except errors.Conflict:  # our own renewal whose answer was lost, or somebody who took it
            found = await self._api.request("GET", f"{self._path}/{NAME}")
            if (found.get("spec") or {}).get("holderIdentity") != self._identity:
                self._until = 0.0
                return f"{(found.get('spec') or {}).get('holderIdentity')} has taken the lease"
            self._lease = found
            raise
        self._until = asked + GIVE_UP_S
        return None

    async def release(self) -> None:
        """Let somebody else have it at once."""
        if not self.held:
            return
        spec = {**self._lease["spec"], "holderIdentity": "", "renewTime": _stamp()}
        self._until = 0.0
        try:
            async with asyncio.timeout(2.0):
                await self._api.request("PUT", f"{self._path}/{NAME}", body={**self._lease, "spec": spec})
        except (errors.MusterError, TimeoutError) as error:
            log.info("the lease ends by itself: %s", error)


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
