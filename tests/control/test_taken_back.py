"""A size that cannot work is taken back: the training goes on as before, and whoever asked for it is told why."""

from __future__ import annotations

import pytest

from muster import ResizeTakenBack
from tests.fleet import PROGRAMS, Fleet, eventually
from tests.plane import Plane, reasons

ONLY_TWO = str(PROGRAMS / "only_two.py")
LAST_LINE = "ValueError: a batch of 8 cannot be cut in three"


@pytest.mark.shared
@pytest.mark.scenario
def test_a_scale_that_cannot_work_is_taken_back_and_raises(plane: Plane) -> None:
    training = plane.train(script=ONLY_TWO, args=[str(plane.notes)], world=(2, 2, 4), max_restarts=0)
    training.wait_until_target_world(timeout=60)

    def makes_steps() -> bool:
        training.refresh()
        return any(rank.step for rank in training.ranks)

    eventually(makes_steps, "it makes steps")
    training.scale(target=3)
    with pytest.raises(ResizeTakenBack, match=LAST_LINE) as caught:
        training.wait_until_target_world(timeout=60)
    assert caught.value.requested == 3

    def goes_on() -> bool:
        training.refresh()
        status = training.training.status
        return status.world_size.ready == 2 and len(training.ranks) == 2 and status.phase == "ready"

    eventually(goes_on, "two train again")
    status = training.training.status
    resizing = status.condition("Resizing")
    assert resizing is not None and (resizing.status, resizing.reason) == ("False", "TakenBack")
    assert "taken back to 2: 3 workers failed without progress: exited with code 1 (rank 2)" in resizing.message
    assert LAST_LINE in resizing.message
    assert (status.restarts, training.training.spec.world_size.target, status.world_size.target) == (0, 3, 3)
    assert "ResizeTakenBack" in reasons(training)
    assert len(list(plane.notes.glob("tried-3-*"))) == 1, "it is not tried again"
    shown = plane.muster("wait", "demo", "--for", "target", "--timeout", "30s")
    assert shown.wait() == 4 and LAST_LINE in " ".join(shown.text.split())
    training.scale(target=2)
    assert training.wait_until_target_world(timeout=60).ready == 2
    training.scale(target=4)
    with pytest.raises(ResizeTakenBack):
        training.wait_until_target_world(timeout=60)
    plane.go()
    training.result(timeout=60)


def test_a_coordinator_alone_takes_a_size_back_until_it_is_asked_for_again(fleet: Fleet) -> None:
    fleet.coordinator()
    nodes = [
        fleet.node(
            name, "--nnodes", "2:3", "--target", "2", "--max-restarts", "0", program=(ONLY_TWO, str(fleet.notes))
        )
        for name in ("a", "b", "c")
    ]
    fleet.until("steps are told", lambda view: view["steps"])
    for tried in (1, 2):
        fleet.order("set-target", target=3)
        view = fleet.until("it is taken back", lambda view: view["taken_back"] and view["state"] == "training")
        assert (view["taken_back"]["target"], view["taken_back"]["size"], view["target"], view["world"]) == (3, 2, 3, 2)
        assert LAST_LINE in view["reason"] and view["restarts_used"] == 0
        assert len(list(fleet.notes.glob("tried-3-*"))) == tried
        fleet.until("steps are told", lambda view: view["steps"])
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0, 0]
