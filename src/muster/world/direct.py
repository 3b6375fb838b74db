"""The coordinator behind the port through which a control plane directs runs.

It runs on a thread with a loop of its own: a worker's lease must not depend on what the API is doing. What is ordered
here is done there before the order returns; what is looked at is what the last decision left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from muster.background import LoopThread
from muster.ports import RunView
from muster.types.training import Uid
from muster.types.world import OutcomeState, RunId, RunOutcome, Settings, Spot
from muster.world.protocol import RunProtocol
from muster.world.service import Coordinator


class DirectedWorlds:
    def __init__(self, coordinator: Coordinator, thread: LoopThread) -> None:
        self._coordinator = coordinator
        self._thread = thread

    def look(self, uid: Uid) -> RunView | None:
        protocol = self._coordinator.protocol(RunId(uid))
        seen = None if protocol is None else protocol.seen
        return None if seen is None else RunView(*seen)

    def open(self, uid: Uid, settings: Settings, target: int, lent: Mapping[str, str] | None = None) -> None:
        def opened() -> None:
            protocol = self._coordinator.open_run(RunId(uid), settings)
            protocol.orders.reconfigure(settings, target, self._thread.loop.time(), lent)
            protocol.show()

        self._thread.do(opened)

    def end(self, uid: Uid, state: OutcomeState, reason: str, message: str) -> None:
        self._order(uid, lambda protocol: protocol.orders.end(RunOutcome(state, reason, message)))

    def mark_dead(self, uid: Uid, names: Sequence[str]) -> None:
        self._order(uid, lambda protocol: protocol.orders.mark_dead(names))

    def place(self, uid: Uid, spots: Mapping[str, Spot]) -> None:
        self._order(uid, lambda protocol: protocol.orders.place(spots))

    def confirm(self, uid: Uid, outcome: RunOutcome) -> None:
        self._order(uid, lambda protocol: protocol.orders.confirm(outcome))

    def let_go(self, uid: Uid) -> None:
        self._order(uid, lambda protocol: protocol.orders.let_go())

    def close(self, uid: Uid) -> None:
        self._thread.do(lambda: self._coordinator.close_run(RunId(uid)))

    def _order(self, uid: Uid, order: Callable[[RunProtocol], None]) -> None:
        def ordered() -> None:
            if (protocol := self._coordinator.protocol(RunId(uid))) is not None:
                order(protocol)
                protocol.show()
                self._coordinator.touch(protocol)

        self._thread.do(ordered)
