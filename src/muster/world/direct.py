"""The coordinator behind the port through which a control plane directs runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from muster.ports import RunView
from muster.types.training import Uid
from muster.types.world import OutcomeState, RunId, RunOutcome, Settings
from muster.world.protocol import RunProtocol
from muster.world.service import Coordinator


class DirectedWorlds:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def look(self, uid: Uid) -> RunView | None:
        protocol = self._protocol(uid)
        return (
            None
            if protocol is None or protocol.run is None
            else RunView(protocol.run, protocol.at.reason, protocol.at.confirmed)
        )

    def open(self, uid: Uid, settings: Settings, target: int) -> None:
        protocol = self._coordinator.open_run(RunId(uid), settings)
        protocol.orders.reconfigure(settings, target, asyncio.get_running_loop().time())

    def end(self, uid: Uid, state: OutcomeState, reason: str, message: str) -> None:
        if (protocol := self._protocol(uid)) is not None:
            protocol.orders.end(RunOutcome(state, reason, message))
            self._coordinator.touch(protocol)

    def mark_dead(self, uid: Uid, names: Sequence[str]) -> None:
        if (protocol := self._protocol(uid)) is not None:
            protocol.orders.mark_dead(names)
            self._coordinator.touch(protocol)

    def confirm(self, uid: Uid, outcome: RunOutcome) -> None:
        if (protocol := self._protocol(uid)) is not None:
            protocol.orders.confirm(outcome)
            self._coordinator.touch(protocol)

    def let_go(self, uid: Uid) -> None:
        if (protocol := self._protocol(uid)) is not None:
            protocol.orders.let_go()
            self._coordinator.touch(protocol)

    def close(self, uid: Uid) -> None:
        self._coordinator.close_run(RunId(uid))

    def _protocol(self, uid: Uid) -> RunProtocol | None:
        return self._coordinator.protocol(RunId(uid))
