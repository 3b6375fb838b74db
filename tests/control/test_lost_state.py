"""A power loss: every process of all workers is killed at once. What was finished and is gone is reported as lost."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from muster import DistributedTraining
from muster.types.event import STATE_LOST
from tests.fleet import PROGRAMS, Process, eventually, family, kill_all
from tests.plane import Plane, fresh

KEPT = str(PROGRAMS / "kept.py")


def keeping(plane: Plane, *words: str) -> DistributedTraining:
    args = [str(plane.notes), "100000", "pause=0.02", *words]
    return advanced(plane.train("keeping", script=KEPT, args=args, world=(2, 2, 2)))


def followed(plane: Plane) -> tuple[DistributedTraining, Process]:
    """The same, with a person who reads what `muster run` prints."""
    run = plane.muster(
        "run", KEPT, "--name", "keeping", "--workers", "2", "--", str(plane.notes), "100000", "pause=0.02"
    )
    run.expect("keeping")
    eventually(lambda: "keeping" in [one.name for one in plane.client.list()], "it is submitted", 60)
    return advanced(plane.client.get("keeping")), run


def advanced(training: DistributedTraining) -> DistributedTraining:
    eventually(lambda: (newest(training) or 0) >= 30, "thirty steps are in memory", 60)
    return training


def newest(training: DistributedTraining) -> int | None:
    state = fresh(training).training.status.kept_state
    return state.newest_step if state is not None else None


def power_loss(plane: Plane, *, all_of_it: bool) -> None:
    pids = [pid for agent in plane.worker_pids().values() for pid in family(agent)]
    if all_of_it:
        assert plane.daemon is not None
        os.kill(plane.daemon.pid, signal.SIGKILL)
    kill_all(pids)
    if all_of_it:
        assert plane.daemon is not None
        plane.daemon.wait()
        plane.serve()


@pytest.mark.parametrize("all_of_it", [False, True], ids=["workers", "machine"])
def test_steps_of_which_no_copy_survived_are_reported_as_lost(plane: Plane, all_of_it: bool) -> None:
    # A reader would start the control plane again by itself, beside the test.
    training, reader = (keeping(plane), None) if all_of_it else followed(plane)
    before = newest(training) or 0
    power_loss(plane, all_of_it=all_of_it)
    eventually(lambda: any(event.reason == STATE_LOST for event in training.events()), "the loss is reported", 60)
    (loss,) = [event for event in training.events() if event.reason == STATE_LOST]
    said = re.fullmatch(
        r"no copy of the state survived \(2 of 2 workers lost\); (\d+) steps are lost; begins at step 0\. "
        r"`durable=` keeps steps on disk",
        loss.message,
    )
    assert said and loss.type == "Warning" and loss.data["steps"] == int(said[1]) >= before, loss
    described = plane.muster("describe", "keeping")
    assert described.wait() == 0
    assert re.search(r"Lost: +no copy of the state survived", described.text), described.text
    assert re.search(r"! StateLost: no copy", described.text), described.text
    if reader is not None:
        reader.expect(r"keeping  no copy of the state survived \(2 of 2 workers lost\)")
    eventually(lambda: (newest(training) or 0) >= 1, "it trains again", 60)
    state = fresh(training).training.status.kept_state
    assert state is not None and state.lost == loss.message, "it stays to be read while the round is out"


def test_steps_after_the_newest_on_disk_are_reported_as_lost(plane: Plane, tmp_path: Path) -> None:
    training = keeping(plane, f"durable={tmp_path / 'disk'}", "every=1")

    def ahead() -> bool:
        state = fresh(training).training.status.kept_state
        assert state is not None
        return bool(state.durable_step and state.newest_step and state.newest_step > state.durable_step + 5)

    eventually(ahead, "memory is ahead of the disk", 60)
    power_loss(plane, all_of_it=False)
    eventually(lambda: any(event.reason == STATE_LOST for event in training.events()), "the loss is reported", 60)
    (loss,) = [event for event in training.events() if event.reason == STATE_LOST]
    said = re.search(
        r"in memory \(2 of 2 workers lost\); at least (\d+) steps? (is|are) lost; step (\d+) was the newest on disk",
        loss.message,
    )
    assert said, loss.message
    eventually(lambda: (newest(training) or 0) > int(said[3]), "it trains again", 60)
    begins = [line.split() for line in (plane.notes / "kept.log").read_text().splitlines() if line.startswith("begin")]
    assert {int(words[3]) for words in begins if int(words[1]) == loss.round} == {int(said[3])}, "where it really began"


def test_a_durable_folder_that_disappeared_is_refused(plane: Plane, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    training = keeping(plane, f"durable={folder}", "every=1")

    def on_disk() -> int | None:
        state = fresh(training).training.status.kept_state
        return state.durable_step if state is not None else None

    eventually(on_disk, "a step is on disk", 60)
    power_loss(plane, all_of_it=False)
    folder.rename(tmp_path / "away")  # before new workers look for it
    finished = eventually(lambda: fresh(training).training.status.outcome, "the training has failed", 120)
    assert re.search(r"has no steps, but this run has written step \d+", finished.message), finished
    begins = [line.split() for line in (plane.notes / "kept.log").read_text().splitlines() if line.startswith("begin")]
    assert {words[1] for words in begins} == {"0"}, "no rank begins at step 0 again"
    assert on_disk() is None and not folder.exists()
