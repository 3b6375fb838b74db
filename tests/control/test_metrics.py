"""How a training learns, from `muster.log` in a rank to whoever asks: over heals, restarts and removal."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
from pathlib import Path

import httpx2
import pytest

from muster import DistributedTraining
from muster.core import keeping
from muster.types.metrics import Metrics
from tests.fleet import PROGRAMS, eventually
from tests.plane import Plane, fresh

LEARNER = str(PROGRAMS / "learner.py")
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"


def steps(metrics: Metrics, name: str = "loss") -> list[int]:
    found = next((one.points for one in metrics.series if one.name == name), ())
    return [step for step, _, _ in found if step is not None]


def learns(training: DistributedTraining, step: int) -> None:
    eventually(lambda: max(steps(training.metrics("loss")), default=0) > step, f"step {step} is shown", 30)


@pytest.mark.shared
@pytest.mark.scenario
def test_what_a_rank_logs_is_shown_with_its_steps_its_size_and_its_use(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2), script=LEARNER, args=["0.02"])
    learns(training, 100)
    eventually(lambda: len(training.metrics().workers) == 2, "both workers tell what they use", 30)
    eventually(lambda: "steps_per_second" in {one.name for one in training.metrics().series}, "its speed is known", 30)
    eventually(lambda: all(one.cpu_percent is not None for one in training.metrics().workers), "and the CPU", 30)
    metrics = training.metrics()
    assert [one.name for one in metrics.series] == ["eval_loss", "loss", "lr", "step", "steps_per_second", "world_size"]
    loss = metrics["loss"]
    assert steps(metrics) == sorted(set(steps(metrics))) and loss.points[0][0] == 0, "rank 0's, and each step once"
    assert all(value == pytest.approx(2.3 / (1 + (step or 0) / 40)) for step, _, value in loss.points)
    assert metrics["eval_loss"].not_finite == 1 and metrics["eval_loss"].last == 3.0
    assert metrics["world_size"].last == 2.0
    assert 1 < (metrics["steps_per_second"].last or 0) < 60
    assert {one.name for one in metrics.workers} == {rank.worker for rank in fresh(training).ranks}
    assert all((one.memory_bytes or 0) > 1 << 20 for one in metrics.workers)
    assert [one.name for one in training.metrics("lr").series] == ["lr"]
    later = training.metrics("loss", after=loss.points[-1][1]).series[0].points
    assert all(at > loss.points[-1][1] for _, at, _ in later)


def test_curves_outlive_the_worker_the_control_plane_and_the_training_but_not_its_removal(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2), spares=1, script=LEARNER, args=["0.02", "1000000"])
    learns(training, 40)
    plane.crash()
    plane.serve()
    learns(training, 100)
    assert steps(training.metrics())[0] == 0, "what the one before had not written down was told again"
    [first] = [rank.worker for rank in fresh(training).ranks if rank.rank == 0]
    before = max(steps(training.metrics()))
    plane.kill_worker(first)
    eventually(lambda: (fresh(training).training.status.round or 0) > 0, "it heals")
    eventually(lambda: len(steps(training.metrics())) < before, "steps that are done again replace the others", 30)
    learns(training, 20)
    assert steps(training.metrics()) == sorted(set(steps(training.metrics())))
    training.cancel(grace_seconds=1)
    eventually(lambda: fresh(training).is_terminal, "it ends", 30)
    eventually(lambda: training.metrics()["world_size"].last == 0.0, "its end is on the curve")
    ended = training.metrics()
    stop(plane)
    plane.serve()
    again = training.metrics()
    assert steps(again) == steps(ended) and again.workers == ()
    assert [one.name for one in again.series] == [one.name for one in ended.series]
    training.delete()
    stop(plane)
    assert keeping.CURVES not in kinds(plane)


def stop(plane: Plane) -> None:
    assert plane.daemon is not None
    plane.daemon.kill(signal.SIGTERM)
    plane.daemon.wait()


def kinds(plane: Plane) -> set[str]:
    with sqlite3.connect(plane.home / "muster.db") as database:
        return {str(kind) for (kind,) in database.execute("SELECT DISTINCT kind FROM records")}


@pytest.mark.shared
def test_the_last_numbers_of_a_training_that_ends_at_once_are_there(plane: Plane) -> None:
    training = plane.train(world=(1, 1, 1), script=LEARNER, args=["0", "25"])
    training.result(timeout=60)
    assert steps(training.metrics())[-1] == 24


def scraped(plane: Plane) -> dict[str, set[str]]:
    """Names of metrics, each with its labels."""
    answer = httpx2.get(f"{plane.url}/metrics", headers={"Authorization": f"Bearer {plane.api_token}"})
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? ", answer.text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


@pytest.mark.shared
def test_every_query_of_the_dashboard_for_grafana_is_answered_by_a_plane_that_trains(plane: Plane) -> None:
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    variables = [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    assert len(queries) > 8 and variables
    training = plane.train(world=(1, 1, 2), script=LEARNER, args=["0.02"])
    learns(training, 20)
    wanted = {name for text in (*queries, *variables) for name in re.findall(r"\bmuster_\w+", text)}
    no_gpu = {name for name in wanted if name.startswith("muster_worker_gpu")}
    eventually(lambda: wanted - no_gpu <= scraped(plane).keys(), "each has a series", 30)
    told = scraped(plane)
    for text in queries:
        names = [name for name in re.findall(r"\bmuster_\w+", text) if name not in no_gpu]
        used = {*re.findall(r"(\w+)\s*=~?\s*\"", text), *re.findall(r"by \((\w+)\)", text)}
        assert all(used - {"le"} <= told[name] for name in names), text
