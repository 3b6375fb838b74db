"""What rank 0 wrote down before its program began, and whether the coordinator hears of it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from muster.node import first_bench, measured
from muster.types import frames
from muster.types.frames import Frame, MeasuredFrame, WelcomeFrame

SECONDS = {"p10": 0.001, "p50": 0.002, "p90": 0.003}
GOOD = {"via": "gloo", "workers": 2, "ranks": 2, "sizes": [{"bytes": 1024, "count": 9, "seconds": SECONDS}]}


def test_what_was_measured_is_understood() -> None:
    found = measured.understood(json.dumps(GOOD), 0)
    assert (found.error, found.ranks, found.latency_seconds) == ("", 2, 0.002)


@pytest.mark.parametrize(
    "told",
    [
        {},
        [],
        7,
        {**GOOD, "sizes": 3},
        {**GOOD, "sizes": [{"bytes": "many", "count": 1, "seconds": SECONDS}]},
        {**GOOD, "ranks": float("inf")},
        {**GOOD, "sizes": [{"bytes": 1, "count": 1, "seconds": {}}]},
        {**GOOD, "sizes": [{"bytes": 1 << 50, "count": 1, "seconds": SECONDS}]},
        {**GOOD, "sizes": [{"bytes": 1024, "count": -1, "seconds": SECONDS}]},
        {**GOOD, "workers": -1},
        {**GOOD, "via": "\ud800"},
    ],
)
def test_what_cannot_be_understood_is_an_error(told: Any) -> None:
    assert measured.understood(json.dumps(told), 0).error == "what was written down cannot be understood"


@pytest.mark.parametrize("text", ["[" * 32_768, "\0 no\x1b torch", "\0", json.dumps({**GOOD, "via": "a\0b"})])
def test_whatever_rank_0_writes_the_coordinator_can_read_what_it_is_told(text: str) -> None:
    """A message that cannot be read costs the worker its connection, and it would be told again on the next."""
    told = MeasuredFrame(round=0, bench=measured.understood(text, 0))
    read = frames.read(frames.write(told))
    assert isinstance(read, MeasuredFrame) and read.bench == told.bench and read.bench.error


def test_a_line_is_the_reason_why_there_is_nothing() -> None:
    assert measured.understood("ModuleNotFoundError:  No module\nnamed 'torch'", 0).error == (
        "ModuleNotFoundError: No module named 'torch'"
    )
    assert len(measured.understood("x" * 10_000, 0).error) == 400
    assert measured.understood("", 0).error


def test_it_is_told_once_it_is_there_and_again_to_another_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "LOOK_S", 0.001)
    told: list[Frame] = []
    path, one = tmp_path / "bench", measured.Measured(told.append)

    def runs() -> bool:
        if not told:
            path.write_text(json.dumps(GOOD))
        return True

    one.hear(WelcomeFrame())
    assert told == []
    asyncio.run(one.follow(str(path), 0, 1.0, runs))
    one.hear(WelcomeFrame())
    assert [type(frame) for frame in told] == [MeasuredFrame] * 2 and told[0] is told[1]
    assert told[0].round == 0


def test_nobody_waits_for_ranks_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "LOOK_S", 0.001)
    told: list[Frame] = []
    asyncio.run(measured.Measured(told.append).follow(str(tmp_path / "none"), 0, 60.0, lambda: None))
    assert told == []


def test_a_rank_that_is_not_asked_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_bench, "_result", lambda seconds: pytest.fail("it was not asked"))
    monkeypatch.delenv(first_bench.TIME_VARIABLE, raising=False)
    first_bench.measure()


def test_only_the_rank_with_a_file_writes_and_its_program_sees_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_bench, "_result", lambda seconds: f"after {seconds}")
    for path in ("", str(tmp_path / "bench")):
        for name, value in first_bench.variables(path, 3.0).items():
            monkeypatch.setenv(name, value)
        first_bench.measure()
        assert not {first_bench.FILE_VARIABLE, first_bench.TIME_VARIABLE} & set(os.environ)
    assert [one.name for one in tmp_path.iterdir()] == ["bench"]
    assert (tmp_path / "bench").read_text() == "after 3.0"
