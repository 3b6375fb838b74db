"""Each part of each benchmark runs in its smallest size, as a process of its own, and prints its rows."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.bench import parsers
from tests.bench.parsers import ROOT
from tests.bench.small_runs import SMALL_RUNS, SmallRun
from tests.kube import binaries
from tests.netns.machines import why_not
from tests.sharing.ray_fixture import APART

MARKS = {
    "process": [],
    "kube": [pytest.mark.kube],
    "netns": [pytest.mark.netns],
    "pages": [pytest.mark.pages],
    "ray": [pytest.mark.ray],
    "frameworks": [pytest.mark.frameworks],
}
LIMIT_S = 600.0


def missing(tier: str) -> str:
    """Return what this machine lacks for a tier, or an empty string."""
    if tier == "netns":
        return why_not()
    if tier == "kube":
        try:
            binaries.find()
        except binaries.NotFound as problem:
            return str(problem)
    if tier == "pages" and shutil.which("chromium") is None:
        return "there is no chromium on this machine"
    if tier == "ray" and (shutil.which("unshare") is None or subprocess.run([*APART, "true"]).returncode):
        return "Ray needs a network namespace, and unshare is refused"
    return ""


def start(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark, and terminate it after the limit, so that it stops its own processes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("run", [pytest.param(run, marks=MARKS[run.tier], id=run.name) for run in SMALL_RUNS])
def test_the_smallest_run_of_a_part_prints_its_rows(run: SmallRun) -> None:
    if reason := missing(run.tier):
        pytest.skip(reason)
    done = start(*run.words, "--json")
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    result = json.loads(done.stdout)
    assert result["measured"]["date"]
    rows = result["figures"]
    names = [row["name"] for row in rows]
    assert len({*names}) == len(rows) == run.rows, names
    assert {row["part"] for row in rows} == {run.part}
    without_value = {row["name"]: row["note"] for row in rows if not is_number(row["value"])}
    assert {name: note for name, note in without_value.items() if run.may_miss not in name} == {}


@pytest.mark.usefixtures("processes")
def test_a_run_without_json_prints_one_line_for_each_row() -> None:
    (run,) = (run for run in SMALL_RUNS if run.name == "wire-connect")
    done = start(*run.words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == run.rows
    assert all(re.match(r"(ok  |MISS) connect → welcome, .+ [\d.]+ ms  goal", line) for line in lines), lines


def test_each_target_of_a_benchmark_has_a_smallest_run_of_each_part() -> None:
    recipes = re.findall(r"(?m)^bench-[-a-z]+:.*\n(?:\t.*\n)+", (ROOT / "Makefile").read_text())
    modules = {name for recipe in recipes for name in re.findall(r"-m bench\.(\w+)", recipe)}
    assert len(modules) == len(recipes)
    covered = {(run.module, run.part) for run in SMALL_RUNS}
    assert {module for module, _ in covered} == modules | {"large"}
    parts = {(module, part) for module in modules | {"large"} for part in parsers.parts(f"bench.{module}")}
    assert covered == parts and len(SMALL_RUNS) == len(parts)


@pytest.mark.parametrize("run", SMALL_RUNS, ids=lambda run: run.name)
def test_the_options_of_a_smallest_run_exist(run: SmallRun) -> None:
    module, *words = run.words
    parsers.parse(module, words)


def test_the_targets_that_name_folders_start_these_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test-ray", "test-frameworks"):
        (recipe,) = re.findall(rf"(?m)^{target}:.*\n((?:\t.*\n)+)", makefile)
        assert "tests/bench/test_small_runs.py" in recipe, target


@pytest.mark.frameworks
@pytest.mark.usefixtures("processes")
def test_two_tiny_pipelines_share_one_slot() -> None:
    """Run where transformers is installed: in the environment of the frameworks."""
    command = [sys.executable, "bench/grpo_gpu.py", "--tiny", "--steps", "2", "--batch", "4", "--tokens", "8", "--json"]
    env = {**os.environ, "PYTHONPATH": "src"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["device"] == "cpu" and result["answers from stale weights"] == 0
    assert all(is_number(result[name]) for name in ("one after the other s", "shared s", "switches"))
