"""What may be said of a run, and when?

A record is kept before anything that follows from it is sent: here, and by enough electors where the run has any.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Protocol

from muster.types.frames import RunRecord
from muster.types.world import Electorate, RunId
from muster.world.posts import Posts
from muster.world.protocol import RunProtocol

HELD_S = 0.5  # that ranks wait at most until nothing is told any more of the mesh of the round before


class Keeps(Protocol):
    """Where records outlive this process."""

    def records(self) -> Mapping[RunId, Mapping[str, Any]]:
        """As they were kept, perhaps by an older version: `world.records` reads them."""

    def save(self, run_id: RunId, record: RunRecord) -> None: ...
    def forget(self, run_id: RunId) -> None: ...


class Director(Protocol):
    """Whoever opens runs here and wants to know when they change."""

    def token_of(self, run_id: RunId) -> str | None: ...
    def settled(self, run_id: RunId) -> None: ...
    def before_release(self, run_id: RunId) -> asyncio.Future[None] | None:
        """What has to be done before the ranks of a new round may start; they do not wait for it for long."""


class Outgoing:
    def __init__(
        self, posts: Posts, led: Mapping[RunId, RunProtocol], state: Keeps | None, director: Director | None
    ) -> None:
        self._posts = posts
        self._led = led
        self._state = state
        self._director = director
        self._holding: set[RunId] = set()  # whose frames wait for `Director.before_release`
        posts.announce, posts.remember, posts.speak = self._announce, self.remember, self._speak

    def flush(self, protocol: RunProtocol) -> None:
        at = protocol.at
        if self._led.get(protocol.run_id, protocol) is not protocol:
            at.outbox.clear()  # the run id belongs to a newer run now, so this run sends and keeps nothing more
            return
        self._keep(protocol)
        post = self._posts.get(protocol.run_id)
        if post is not None and not post.may_speak():
            return
        if protocol.run_id in self._holding or self._is_to_be_held(protocol):
            return
        outbox, at.outbox = at.outbox, []
        for peer, data in outbox:
            peer.send_raw(data)

    def _keep(self, protocol: RunProtocol) -> None:
        at, post = protocol.at, self._posts.get(protocol.run_id)
        unled = post is None and at.run is not None and not at.directed
        if not at.unsaved and not unled:
            return
        record = protocol.orders.record(time.time())
        if unled:
            record = self._posts.found(protocol, record)
        elif post is not None:
            record = post.state.write(record, post.now)
        self.remember(protocol.run_id, record)
        at.unsaved = False
        if post is not None:
            post.tick()  # electors are told at once

    def remember(self, run_id: RunId, record: RunRecord) -> None:
        if self._state is not None:
            self._state.save(run_id, record)

    def _is_to_be_held(self, protocol: RunProtocol) -> bool:
        """Ranks of a new round may ask how their mesh is: the answer must not be that of the round before."""
        released, protocol.released = protocol.released, False
        gated = protocol.run is not None and protocol.run.settings.gate_timeout_s is not None
        if not released or not gated or self._director is None:
            return False
        ready = self._director.before_release(protocol.run_id)
        if ready is None:
            return False

        def let_go(_: object = None) -> None:
            timer.cancel()
            if protocol.run_id in self._holding:
                self._holding.discard(protocol.run_id)
                if self._led.get(protocol.run_id) is protocol:
                    self.flush(protocol)

        self._holding.add(protocol.run_id)
        timer = asyncio.get_running_loop().call_later(HELD_S, let_go)
        ready.add_done_callback(let_go)
        return True

    # For posts

    def _announce(self, run_id: RunId, electorate: Electorate) -> None:
        if (protocol := self._led.get(run_id)) is not None:
            protocol.at.announce(electorate)
            self.flush(protocol)

    def _speak(self, run_id: RunId) -> None:
        """What was held back may be said now, perhaps."""
        if (protocol := self._led.get(run_id)) is not None:
            self.flush(protocol)
            protocol.show()
            self._posts.widen(protocol)
