"""May this process talk to its peers yet? Asks the keys that the mesh gate writes. Standard library only.

    muster.mesh_wait(timeout=60)      # before torch.distributed.init_process_group()

It never raises and never fails the workload: whatever is wrong with the settings, the network or the server, it
returns, at the latest when the time is up. One thread, sockets that never block; nothing is left behind but, where a
name server hangs, the daemon thread that asked it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from muster.mesh import settings
from muster.mesh.asking import Addresses, Exchange
from muster.mesh.settings import Target, Unusable

Verdict = Literal["ready", "degraded"]
Status = Literal["ready", "degraded", "timeout"]

HANDED_ON = "MUSTER_MESH_STATUS"  # how `python -m muster.mesh wait -- command` tells the command
FIRST_S = 0.25  # for the first answer, however short the timeout
ONCE_S = 2.0  # for `python -m muster.mesh status`
MOST_LOOKS = 4  # under way at once, where answers do not come
LOOK_S = 2.0  # that a look is given at least
QUICK_S = 1.0  # a long poll that ends sooner may be of a server that cannot wait
FIRST_PAUSE_S = 0.01
RESTART_S = 10.0  # so long a server may be away and be noticed soon after it is back
RESTART_PAUSE_S = 0.05
READY, DEGRADED = "mesh-ready", "mesh-degraded"

_last: Status | None = None
_waited = False


def mesh_wait(timeout: float | timedelta | None = None) -> None:
    """Wait until the mesh is ready or given up on, or the time is up: by default MUSTER_MESH_TIMEOUT_S, else 60 s."""
    global _last, _waited
    begun = time.monotonic()
    found: Status | None = None
    try:
        found = _wait(timeout, begun)
    except Exception as why:  # noqa: BLE001  # a workload must not fail because of a wait
        found = "timeout"
        _log(f"GAVE UP after={time.monotonic() - begun:.3f}s {type(why).__name__}: {why}")
    _last, _waited = found, True


def mesh_status() -> Status | None:
    """How the last `mesh_wait` of this process ended; None when there was nothing to wait for. Asks nobody.

    Without one, what `python -m muster.mesh wait -- command` found before it became this process.
    """
    if _waited:
        return _last
    handed: dict[str, Status] = {"ready": "ready", "degraded": "degraded", "timeout": "timeout"}
    return handed.get(os.environ.get(HANDED_ON, ""))


def _wait(timeout: object, begun: float) -> Status | None:
    try:
        target = settings.read(os.environ, timeout)
    except Unusable as why:
        _log(f"SKIPPED {why}")
        return None
    if target is None:
        return None
    _log(f"BEGIN host={target.node} endpoint={target.endpoint} timeout={target.timeout_s:g}")
    with contextlib.closing(Watch(target)) as watch:
        verdict = watch.run(begun + max(target.timeout_s, FIRST_S))
    after = f"after={time.monotonic() - begun:.3f}s"
    _log({"ready": f"OK {after}", "degraded": f"DEGRADED {after}", None: f"TIMEOUT {after}"}[verdict])
    return verdict or "timeout"


def ask_once() -> tuple[Verdict | Literal["waiting", "none"], str]:
    """What the keys say now, and why nothing better. Raises nothing that `mesh_wait` would not."""
    try:
        target = settings.read(os.environ)
    except Unusable as why:
        return "none", str(why)
    if target is None:
        return "none", "no node name or no endpoint in the environment"
    with contextlib.closing(Watch(target)) as watch:
        return watch.run(time.monotonic() + ONCE_S, once=True) or "waiting", f"{target.endpoint}: {watch.why}"


def _log(text: str) -> None:
    with contextlib.suppress(Exception):  # there may be no stderr, or one that takes nothing
        sys.stderr.write(f"mesh-wait: {text}\n")
        sys.stderr.flush()


@dataclass
class KeyLook:
    """Both keys, asked at the same time."""

    ready: Exchange
    degraded: Exchange

    @property
    def over(self) -> bool:
        return self.ready.over and self.degraded.over

    @property
    def verdict(self) -> Verdict | None:
        """Ready wins: degraded counts only when it is known that ready is not there."""
        if self.ready.status == 200:
            return "ready"
        return "degraded" if self.degraded.status == 200 and self.ready.status else None


class Watch:
    """Looks at once, every so often, and whenever a long poll says that something may have happened."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._addresses = Addresses(target.host, target.port)
        self._selector.register(self._addresses.bell, selectors.EVENT_READ)
        self._looks: list[KeyLook] = []
        self._polls: dict[str, Exchange] = {}
        self._pause_s = 0.0
        self._look_at = time.monotonic()
        self._answered = False  # for both keys, at least once
        self._away_since: float | None = None  # when a look first failed
        self._degraded = False  # seen, though ready was not heard of
        self.why = "no answer"

    def run(self, deadline: float, *, once: bool = False) -> Verdict | None:
        while True:
            now = time.monotonic()
            verdict = self._harvest(now)
            if verdict or (once and self._answered):
                return verdict
            if now >= deadline:
                seen = self._degraded or any(look.degraded.status == 200 for look in self._looks)
                return "degraded" if seen else None
            self._look_if_due(now)
            # What failed on the spot has no socket to wait for.
            at_once = any(look.over for look in self._looks) or any(poll.over for poll in self._polls.values())
            self._turn(0.0 if at_once else min(deadline, self._look_at) - time.monotonic())

    def close(self) -> None:
        for exchange in [*self._polls.values(), *(one for look in self._looks for one in (look.ready, look.degraded))]:
            self._drop(exchange)
        self._selector.close()
        self._addresses.close()

    # What came

    def _turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.data is None:
                self._addresses.heard()
                if self._addresses.failure:
                    self._again(time.monotonic())
                else:
                    self._look_at = time.monotonic()
                continue
            exchange: Exchange = key.data
            exchange.step()
            if exchange.over:
                self._drop(exchange)
            elif exchange.interest != key.events:
                self._selector.modify(key.fileobj, exchange.interest, exchange)

    def _harvest(self, now: float) -> Verdict | None:
        for look in self._looks:
            if look.verdict:
                return look.verdict
        for look in [look for look in self._looks if look.over]:
            self._end(look, now)
        for key, poll in [(key, poll) for key, poll in self._polls.items() if poll.over]:
            self._drop(self._polls.pop(key))
            if now - poll.began >= QUICK_S:
                self._pause_s = 0.0
            self._again(now)
        return None

    def _end(self, look: KeyLook, now: float) -> None:
        """Nothing yet. Wait for each key from where it was seen; where there was no answer, ask again soon."""
        self._looks.remove(look)
        self._drop(look.ready)
        self._drop(look.degraded)
        self._degraded = self._degraded or look.degraded.status == 200
        failure = look.ready.failure or look.degraded.failure
        self._answered = self._answered or not failure
        self.why = failure or f"HTTP {look.ready.status}"
        if failure:
            self._addresses.failed()
            self._again_after_a_failure(now)
        else:
            self._away_since = None
        for key, asked in ((READY, look.ready), (DEGRADED, look.degraded)):
            if asked.status and key not in self._polls:
                index = "" if asked.index is None else f"&waitIndex={asked.index + 1}"
                self._polls[key] = self._ask(f"{self._target.path(key)}?wait=true{index}", now, poll=True)

    # What is asked

    def _again(self, now: float) -> None:
        """Look soon: at once the first time, later and later if that goes on."""
        self._look_at = min(self._look_at, now + self._pause_s)
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), self._target.poll_s)

    def _again_after_a_failure(self, now: float) -> None:
        """A server that restarts is back in seconds, and what is written then should be seen at once."""
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since < RESTART_S:
            self._pause_s = min(self._pause_s, RESTART_PAUSE_S)
        self._again(now)

    def _look_if_due(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + self._target.poll_s
        if self._addresses.current() is None:
            self.why = self._addresses.failure or "the name of the host is being looked up"
            self._addresses.look_up()
            return
        if len(self._looks) >= MOST_LOOKS:
            oldest = self._looks[0]
            if now - oldest.ready.began < LOOK_S:
                self._look_at = oldest.ready.began + LOOK_S
                return
            self._give_up_on(oldest)
        path = self._target.path
        self._looks.append(KeyLook(self._ask(path(READY), now), self._ask(path(DEGRADED), now)))

    def _give_up_on(self, look: KeyLook) -> None:
        self._degraded = self._degraded or look.degraded.status == 200
        self._looks.remove(look)
        self._drop(look.ready)
        self._drop(look.degraded)
        self._addresses.failed()

    def _ask(self, path: str, now: float, *, poll: bool = False) -> Exchange:
        address = self._addresses.current()
        assert address is not None
        exchange = Exchange(self._target, path, address, now, poll=poll)
        if exchange.sock is not None and not exchange.failure:
            self._selector.register(exchange.sock, exchange.interest, exchange)
        return exchange

    def _drop(self, exchange: Exchange) -> None:
        if exchange.sock is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(exchange.sock)
            exchange.close()
