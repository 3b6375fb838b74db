"""Does the measurement of engines run? On a CPU, where it measures nothing worth knowing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_modules_go_and_come_at_both_levels() -> None:
    pytest.importorskip("torch")
    asked = [sys.executable, "bench/engines_gpu.py", "--device", "cpu", "--billions", "0.001", "--times", "1", "--json"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row["level"] for row in told["levels"]] == [1, 2]
    assert told["the turn"].endswith("queue it again")


def test_the_table_has_a_row_for_each_level() -> None:
    pytest.importorskip("torch")
    from bench import engines_gpu

    levels = [{"level": level, "shrink p50 s": 0.5 * level} for level in (1, 2)]
    *values, empty, head, first, second = engines_gpu.table({"device": "CPU", "levels": levels}).splitlines()
    assert (values[0].split(), empty, head.split()) == (["device", "CPU"], "", ["level", "shrink", "p50", "s"])
    assert (first.split(), second.split()) == (["1", "0.5"], ["2", "1.0"])
