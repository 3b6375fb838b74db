"""The coordinator behind the port through which a control plane directs runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from muster.coordinator.desk import Desk
from muster.coordinator.service import Coordinator
from muster.ports import Run
from muster.types.training import Uid
from muster.types.world import Outcome, OutcomeState, RunId, Settings


class DirectedWorlds:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def look(self, uid: Uid) -> Run | None:
        desk = self._desk(uid)
        return None if desk is None or desk.roll is None else Run(desk.roll, desk.reason, desk.confirmed)

    def open(self, uid: Uid, settings: Settings, target: int) -> None:
        desk = self._coordinator.open_run(RunId(uid), settings)
        desk.reconfigure(settings, target, asyncio.get_running_loop().time())

    def end(self, uid: Uid, state: OutcomeState, reason: str, message: str) -> None:
        if (desk := self._desk(uid)) is not None:
            desk.order(Outcome(state, reason, message))
            self._coordinator.touch(desk)

    def bury(self, uid: Uid, names: Sequence[str]) -> None:
        if (desk := self._desk(uid)) is not None:
            desk.bury(names)
            self._coordinator.touch(desk)

    def confirm(self, uid: Uid, outcome: Outcome) -> None:
        if (desk := self._desk(uid)) is not None:
            desk.confirm(outcome)
            self._coordinator.touch(desk)

    def let_go(self, uid: Uid) -> None:
        if (desk := self._desk(uid)) is not None:
            desk.let_go()
            self._coordinator.touch(desk)

    def close(self, uid: Uid) -> None:
        self._coordinator.close_run(RunId(uid))

    def _desk(self, uid: Uid) -> Desk | None:
        return self._coordinator.desk(RunId(uid))
