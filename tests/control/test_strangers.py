"""What somebody does who may see that a training exists, and speaks to the coordinator without its token."""

from __future__ import annotations

import asyncio
import threading

import pytest

from muster.types.frames import AskFrame
from muster.types.world import RunId
from muster.world import wire
from muster.world.connection import CoordinatorRefused, ask
from tests.plane import Plane


class Viewer:
    """Tries to cancel each training from the moment at which it is seen in the list."""

    def __init__(self, plane: Plane, tries: int) -> None:
        self._address = wire.parse_address((plane.home / "coordinator.addr").read_text().strip())
        self._plane = plane
        self._tries = tries
        self._stop = threading.Event()
        self.answers: dict[str, list[str]] = {}
        self._thread = threading.Thread(target=self._attack)

    def __enter__(self) -> Viewer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _attack(self) -> None:
        while not self._stop.is_set():
            for seen in self._plane.client.list():
                answers = self.answers.setdefault(seen.training.uid, [])
                if len(answers) < self._tries:
                    answers.append(self._cancel(seen.training.uid))

    def _cancel(self, uid: str) -> str:
        try:
            asyncio.run(ask([self._address], RunId(uid), AskFrame(ask="cancel", why="a stranger"), token=None))
        except CoordinatorRefused as refused:
            return refused.code
        return "cancelled"


@pytest.mark.shared
def test_who_speaks_to_the_coordinator_before_a_token_is_stored_is_refused(plane: Plane) -> None:
    with Viewer(plane, tries=20) as viewer:
        trainings = [plane.train(f"t{index}", "exit=0", world=(1, 1, 1)) for index in range(10)]
        for training in trainings:
            training.result(timeout=60)
    assert len(viewer.answers) == len(trainings)
    assert {code for answers in viewer.answers.values() for code in answers} == {"bad_token"}


@pytest.mark.parametrize("token", ["", pytest.param("guessed", marks=pytest.mark.scenario)])
def test_whether_a_run_exists_is_told_to_nobody_without_its_token(plane: Plane, token: str) -> None:
    training = plane.train()
    training.wait_until_target_world(timeout=60)
    address = wire.parse_address((plane.home / "coordinator.addr").read_text().strip())
    told = set()
    for uid in (training.training.uid, "0" * 8, "../x"):
        with pytest.raises(CoordinatorRefused) as refused:
            asyncio.run(ask([address], RunId(uid), AskFrame(ask="show"), token=token or None))
        told.add(str(refused.value))
    assert len(told) == 1, told
    plane.go()
    training.result(timeout=60)
