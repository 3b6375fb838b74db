from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from muster.cli.timeline import Stretch, timeline_of
from muster.types.event import Event
from tests.cli.conftest import Muster
from tests.cli.stand_in import StandIn, a_training

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


def event(at: float, reason: str, message: str = "", **fields: Any) -> Event:
    return Event(reason, message, at=BEGUN + timedelta(seconds=at), **fields)


def worker(at: float, reason: str, name: str, /, **data: Any) -> Event:
    return event(at, reason, f"{name}: …", data={"worker": name, **data})


STORY = [
    event(0, "Created"),
    worker(0, "WorkerStarted", "a"),
    worker(0, "WorkerStarted", "b"),
    event(1, "RoundReleased", "round 0: 1 worker", round=0),
    event(2, "Ready", "1 worker runs ranks", round=0),
    event(5, "WorkerLost", "a: its connection closed", type="Warning", round=0),
    event(5, "RoundRecalled", round=0),
    worker(9, "WorkerExited", "a", at="2026-01-01T00:00:05+00:00"),
    event(6, "RoundReleased", "round 1: 1 worker, after lost a", round=1),
]
ENDED = [
    *STORY,
    event(10, "OutcomeDecided", round=1),
    event(11, "Succeeded", "all ranks exited 0", round=1),
    worker(12, "WorkerExited", "b"),
    event(900, "UDTerminalState", "nothing was changed", type="Warning"),
]


def test_rounds_last_from_release_to_recall_or_outcome() -> None:
    line = timeline_of(ENDED, BEGUN + timedelta(days=1))

    assert line.rounds == (Stretch("0", 1, 5), Stretch("1", 6, 10))


def test_workers_last_from_start_to_exit_and_one_that_was_lost_is_told_from_one_that_left() -> None:
    line = timeline_of(ENDED, BEGUN + timedelta(days=1))

    assert line.workers == (Stretch("a", 0, 5, lost=True), Stretch("b", 0, 12))
    assert line.end == 12, "what comes long after the end does not stretch the picture"


def test_what_goes_on_lasts_until_now() -> None:
    line = timeline_of(STORY, BEGUN + timedelta(seconds=30))

    assert line.end == 30
    assert line.rounds[-1] == Stretch("1", 6, 30, open=True)
    assert line.workers[-1] == Stretch("b", 0, 30, open=True)


def test_marks_tell_phases_resizes_rounds_and_every_warning_with_its_reason() -> None:
    notes = timeline_of(ENDED, BEGUN).notes

    assert [(note.reason, note.text) for note in notes] == [
        ("RoundReleased", "round 0: 1 worker"),
        ("Ready", "1 worker runs ranks"),
        ("WorkerLost", "a: its connection closed"),
        ("RoundReleased", "round 1: 1 worker, after lost a"),
        ("Succeeded", "all ranks exited 0"),
        ("UDTerminalState", "nothing was changed"),
    ]


@pytest.mark.parametrize("story", [ENDED, STORY, STORY[:1], []], ids=["ended", "running", "begun", "nothing"])
def test_the_events_of_a_training_become_a_picture(
    muster: Muster, control: StandIn, tmp_path: Path, story: list[Event]
) -> None:
    control.add(a_training())
    control.journal = story
    said = muster("events", "demo", "-o", "png", "--file", "out.png")

    assert (said.code, said.out) == (0, "out.png\n")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_command_that_installs_it_is_named(
    muster: Muster, control: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    control.add(a_training())
    said = muster("events", "demo", "-o", "png")

    assert (said.code, said.out) == (1, "")
    assert said.err == "muster: pictures need matplotlib\nhint: pip install '.[plot]' in the clone of muster\n"


def test_a_file_without_a_picture_is_refused(muster: Muster, control: StandIn) -> None:
    said = muster("events", "demo", "--file", "x.png")

    assert said.code == 2
    assert said.err.splitlines()[1] == "hint: muster events demo -o png --file x.png"
