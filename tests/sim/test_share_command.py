"""`muster share` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.cli.main import call

SMALL = {"gpus": 4, "slots": 2, "pipelines": [{"batch": 8, "median_s": 10, "count": 2}]}


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def test_simulate_compares_policies_in_a_table(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["share", "simulate", "--scenario", small, "--policy", "muster,serial", "--seeds", "1-2"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["SCENARIO", "POLICY", "MAKESPAN", "BOUND", "RATIO"]
    assert [row.split()[:2] for row in rows] == [["small", "muster"], ["small", "serial"]]


def test_simulate_prints_json_for_programs(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["share", "simulate", "--scenario", small, "--policy", "gap-ratio", "--seeds", "3", "-o", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["policy"], found["seeds"]) == ("gap-ratio", 1)
    assert found["ratio"] > 1


def test_a_recorded_run_becomes_a_trace(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "run.json"
    assert call(["share", "simulate", "--scenario", small, "--seeds", "1", "--record", str(record)]) == 0
    capsys.readouterr()
    assert call(["share", "trace", str(record)]) == 0
    assert len(json.loads(capsys.readouterr().out)["traceEvents"]) > 20


def test_pictures_go_where_they_are_told(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "gpus.png"
    assert call(["share", "simulate", "--scenario", small, "--seeds", "1", "-o", "png", "--file", str(picture)]) == 0
    assert capsys.readouterr().out.strip() == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--policy", "fair"], "there is no policy 'fair'"),
        (["--policy", ","], "--policy names nothing"),
        (["--seeds", "5-1"], "--seeds 5-1 is not"),
        (["--seeds", "one"], "--seeds one is not"),
        (["--scenario", "tial"], "neither one of tail"),
    ],
)
def test_wrong_options_are_named(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["share", "simulate", *args]) == 2
    assert told in capsys.readouterr().err


def test_simulate_tells_what_a_training_that_fills_is_worth(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["share", "simulate", "--scenario", small, "--seeds", "1-2", "--fill"]
    assert call([*words, "-o", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["useful_without"] < found["useful"] <= 1.0 and found["resizes"] > 0
    assert call(words) == 0
    assert capsys.readouterr().out.startswith("SCENARIO")
