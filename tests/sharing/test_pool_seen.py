"""A training fills four GPUs, a pipeline takes one for a while: what do people see meanwhile? With real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muster import DistributedTraining
from muster.sharing import ClusterSpec, Priority
from muster.sharing.remote import connect
from tests.fleet import PROGRAMS, eventually
from tests.plane import Plane
from tests.sharing.scripted import Hooks

BOUND_S = 60.0
ON_3 = {"actor_train": ClusterSpec([3]), "actor_infer": ClusterSpec([3])}


@pytest.mark.pages
def test_a_gpu_that_a_training_lends_is_seen_with_whoever_has_it_and_counts_once(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    plane.env["MUSTER_GPUS"] = "4"
    try:
        plane.serve()
        words = [str(tmp_path), "0.02"]
        script = str(PROGRAMS / "filler.py")
        one = {"gpus": 1}
        training = plane.train("demo", world=(1, 3, 4), script=script, args=words, resources=one, elasticity="fill")
        _sees(plane, training, "4 workers train, 1 more than asked for, until somebody needs their GPUs")
        asyncio.run(asyncio.wait_for(_lent_and_back(plane, training), 4 * BOUND_S))
        (tmp_path / "stop").touch()
        training.wait(timeout=BOUND_S)
        _adds_up(plane)
    finally:
        plane.close()


async def _lent_and_back(plane: Plane, training: DistributedTraining) -> None:
    async with await connect(plane.url, plane.api_token) as pipeline:
        await pipeline.register_pipeline("p2", ON_3, Hooks())
        await pipeline.admit_pipeline("p2")
        assert await pipeline.request_gpus("p2", "actor_train", Priority.ACTOR_TRAINING) == [3]
        await asyncio.to_thread(_while_lent, plane, training)
        await pipeline.notify_release_gpus("p2", "actor_train")
        await asyncio.to_thread(_sees, plane, training, "4 workers train, 1 more than asked for")
        shown = await asyncio.to_thread(_ran, plane, "pool", "-o", "json")
        assert {one.get("training") for one in shown["holders"]} == {"default/demo"}
        assert not any("lentBy" in one for one in shown["holders"])


def _while_lent(plane: Plane, training: DistributedTraining) -> None:
    def seen() -> dict[str, Any]:
        shown: dict[str, Any] = _ran(plane, "pool", "-o", "json")["holders"][3]
        return shown

    _until(lambda: seen().get("lentBy") == "default/demo", "the pool says by whom it is lent")
    three = seen()
    assert (three["pipeline"], three["cluster"], three["state"]) == ("p2", "actor_train", "held")
    assert three["lentWorker"].startswith("demo-") and three["seconds"] > 0
    shown = _ran(plane, "pool", "-o", "json")
    workers = [one.get("worker") for one in shown["holders"][:3]]
    assert len(set(workers)) == 3 and three["lentWorker"] not in workers and None not in workers
    explained = _ran(plane, "explain", "demo", "-o", "json")
    told = "\n".join([explained["summary"], *explained["details"]])
    assert "GPU 3 is with p2's actor_train since " in told and "comes back when it is done" in told
    _until(lambda: " 3 of 3 workers train" in _text(plane, "explain", "demo"), "it trains with what it has")
    assert f"{three['lentWorker']} lent: GPU 3 is with p2, actor_train" in _text(plane, "describe", "demo")
    training.refresh()
    conditions = [one.message for one in training.training.status.conditions]
    assert not any("since" in message for message in conditions), "what is stored does not change with every second"
    table = _text(plane, "pool")
    assert "lent by default/demo" in table and "4 GPUs: 1 with pipelines, 3 with trainings, 1 lent, 0 idle" in table


def _adds_up(plane: Plane) -> None:
    """All sums of the pool together are GPUs × time, and the pipeline has its row in usage."""
    first, second = (_ran(plane, "pool", "-o", "json")["usage"] for _ in range(2))
    held = {one["name"]: one["gpuSeconds"] for one in second}
    assert held["p2"] > 0 and held["default/demo"] > 0
    grown = sum(one["gpuSeconds"] for one in second) - sum(one["gpuSeconds"] for one in first)
    (idle_before,) = (one["gpuSeconds"] for one in first if one["kind"] == "idle")
    assert grown == pytest.approx(held[""] - idle_before, abs=0.01), "nobody but idle GPUs counts now"
    rows = {one["pipeline"]: one for one in _ran(plane, "usage", "-o", "json")["items"] if one.get("pipeline")}
    assert rows["p2"]["gpuSeconds"] == pytest.approx(held["p2"], abs=0.01)
    before = sum(one["gpuSeconds"] for one in second)
    plane.crash()
    plane.serve()
    again = _ran(plane, "pool", "-o", "json")["usage"]
    assert {one["name"]: one["gpuSeconds"] for one in again}["p2"] == held["p2"], "a restart forgets nothing"
    assert sum(one["gpuSeconds"] for one in again) > before


def _sees(plane: Plane, training: DistributedTraining, words: str) -> None:
    _until(lambda: words in plane.client.explain(training.name).summary, f"explain says {words!r}")


def _until(look: Callable[[], bool], what: str) -> None:
    eventually(look, what, BOUND_S)


def _text(plane: Plane, *words: str) -> str:
    process = plane.muster(*words)
    assert process.wait() == 0, process.text
    return process.text


def _ran(plane: Plane, *words: str) -> Any:
    return json.loads(_text(plane, *words))
