"""Recordings as files, traces and pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from muster.sim import events, pictures, trace
from muster.sim.recording import Use
from muster.types.codec import Invalid
from muster.types.sharing import SharingEvent
from tests.sim.builders import a_recording

EVENTS = [
    SharingEvent(100.0, "requested", "p0", "GENERATION", "actor_infer"),
    SharingEvent(100.0, "expanding", "p0", "", "actor_infer", (0, 1), (0, 1)),
    SharingEvent(106.0, "expanded", "p0", "", "actor_infer", (0, 1), (0, 1)),
    SharingEvent(106.0, "granted", "p0", "GENERATION", "actor_infer", (), (0, 1)),
    SharingEvent(120.0, "shrinking", "p0", "p1/actor_train gets its GPUs", "actor_infer", (1,), (1,)),
    SharingEvent(122.0, "vacated", "p0", "", "actor_infer", (1,), (1,)),
    SharingEvent(122.0, "granted", "p1", "ACTOR_TRAINING", "actor_train", (), (1,)),
    SharingEvent(130.0, "released", "p1", "", "actor_train", (), (1,)),
]


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    trace.save(a_recording(), tmp_path / "run.json")
    assert trace.load(tmp_path / "run.json") == a_recording()


def test_a_trace_has_a_row_per_gpu_a_queue_and_decisions_with_reasons() -> None:
    found = trace.chrome(a_recording())["traceEvents"]
    rows = {event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert rows == {"GPU 0", "GPU 1", "p0", "p1"}
    served = next(event for event in found if event["name"] == "p0 serve")
    assert (served["ts"], served["dur"], served["tid"]) == (6e6, 14e6, 0)
    assert [event["ts"] for event in found if event["name"] == "actor_train OLD_LOG_PROBS"] == [3e6]
    mark = next(event for event in found if event["ph"] == "i")
    assert (mark["name"], mark["args"]["reason"]) == ("shrinking rank 1", "p1 gets its GPUs")
    assert json.loads(json.dumps(found)) == found


def test_events_of_a_pool_become_the_same_kind_of_recording(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(events.written(EVENTS))
    found = trace.load(path)
    lane = [(span.pipeline, span.use, span.start, span.end) for span in found.spans if span.gpu == 1]
    assert lane == [
        ("p0", Use.EXPAND, 0, 6),
        ("p0", Use.SERVE, 6, 20),
        ("p0", Use.SHRINK, 20, 22),
        ("p1", Use.TRAIN, 22, 30),
    ]
    assert [(wait.pipeline, wait.start, wait.end) for wait in found.waits] == [("p0", 0, 6)]
    assert found.resizes == 3
    assert "p1/actor_train gets its GPUs" in [decision.reason for decision in found.decisions]


def test_what_is_neither_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "odd.txt"
    path.write_text(f"{events.written(EVENTS[:1])}127.0.0.1 localhost\n")
    with pytest.raises(Invalid, match="line 2: is not an event"):
        trace.load(path)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace.draw([("one", a_recording()), ("two", a_recording())], tmp_path / "gpus.png")
    assert (tmp_path / "gpus.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(pictures.PlottingMissing) as caught:
        trace.draw([("one", a_recording())], tmp_path / "gpus.png")
    assert caught.value.hint == "pip install '.[plot]' in the clone of muster"
