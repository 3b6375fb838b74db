"""`muster pool`, `describe`, `top` and `usage`: what the command line shows of GPUs that are shared."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from muster.cli import pools
from muster.types.training import Condition
from muster.types.usage import Usage
from tests.cli.conftest import Muster
from tests.cli.stand_in import StandIn, a_training
from tests.cli.test_board import a_pool

HELD: dict[str, Any] = {"gpu": 0, "device": "GPU-a", "state": "held", "reason": "it fills", "seconds": 125.0}
SHARED = a_pool(
    gpus=3,
    leases={},
    idle=[2],
    pending=[],
    quarantined={},
    workers={"0": {"training": "default/demo", "state": "held"}},
    holders=[
        {**HELD, "training": "default/demo", "worker": "demo-0"},
        {
            "gpu": 1,
            "state": "held",
            "pipeline": "p2",
            "cluster": "actor_infer",
            "rank": 1,
            "seconds": 12.0,
            "lentBy": "default/demo",
            "lentWorker": "demo-1",
        },
        {"gpu": 2, "state": "idle", "seconds": 3.0},
    ],
    waiting=[
        {"pipeline": "p2", "cluster": "actor_train", "priority": "ACTOR_TRAINING", "reason": "waits", "seconds": 1.0},
        {"training": "default/big", "state": "Queued", "workers": 0, "wanted": 4, "reason": "needs 4 GPUs"},
    ],
    waitingCount=2,
    usage=[
        {"kind": "training", "name": "default/demo", "gpuSeconds": 7200.0, "gpus": 1},
        {"kind": "idle", "name": "", "gpuSeconds": 1800.0, "gpus": 1},
        {"kind": "pipeline", "name": "", "gpuSeconds": 1800.0, "gpus": 0},
    ],
)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "asked", lambda url, token, method, path: SHARED)


def test_every_gpu_has_a_row_then_who_waits_then_sums(muster: Muster, shared: None) -> None:
    said = muster("pool")
    rows = [line.split("   ") for line in said.out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]

    assert cells[0] == ["GPU", "DEVICE", "HOLDER", "FOR", "STATE", "SINCE", "REASON"]
    assert cells[1] == ["0", "GPU-a", "training default/demo", "demo-0", "held", "2m5s", "it fills"]
    assert cells[2] == ["1", "-", "p2", "generation (rank 1)", "held", "12s", "lent by default/demo"]
    assert cells[3] == ["2", "-", "-", "-", "idle", "3s", "-"]
    assert ["p2", "actor_train (ACTOR_TRAINING)", "-", "1s", "waits"] in cells
    assert ["training default/big", "workers", "0 of 4 workers", "-", "needs 4 GPUs"] in cells
    assert ["training default/demo", "1", "2.000", "66.7%"] in cells
    assert ["nobody", "1", "0.500", "16.7%"] in cells
    assert ["former pipelines", "0", "0.500", "16.7%"] in cells
    assert cells[-1] == ["3 GPUs: 1 with pipelines, 1 with trainings, 1 lent, 1 idle, 2 waiting"]
    assert json.loads(muster("pool", "-o", "json").out) == SHARED


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pool", "-w", "-o", "json"], "--watch is for the table"),
        (["pool", "-o", "xml"], "xml"),
        (["pool", "default"], "default"),
    ],
)
def test_what_is_typed_wrongly_is_named(muster: Muster, shared: None, words: list[str], told: str) -> None:
    said = muster(*words)
    assert said.code == 2 and said.out == "" and told in said.err


def test_a_control_plane_that_does_not_tell_it_is_named(muster: Muster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "asked", lambda url, token, method, path: a_pool())
    said = muster("pool")
    assert said.code == 1 and "older" in said.err and "muster share status" in said.err


def test_describe_shows_a_worker_that_waits_for_its_gpu_as_lent(muster: Muster, control: StandIn) -> None:
    lent = Condition("TargetReached", "False", "Lent", "1 of 2 ready: GPU 1 is with p2's generation")
    control.add(a_training(spec={"elasticity": "lend", "spares": 0}, conditions=(lent,)), a_training("fixed"))
    control.pools = (SHARED,)
    text = muster("describe", "demo").out
    assert "Lent:\n  demo-1 lent: GPU 1 is with p2, generation (rank 1) since 12 s\n" in text
    assert "Lent" not in muster("describe", "fixed").out
    told = json.loads(muster("describe", "demo", "-o", "json").out)
    assert [one["lentWorker"] for one in told["lent"]] == ["demo-1"]


def test_ps_says_where_a_lent_gpu_is(muster: Muster, control: StandIn) -> None:
    lent = Condition("TargetReached", "False", "Lent", "1 of 2 ready: GPU 1 is with p2's generation")
    control.add(a_training(conditions=(lent,)))
    assert "GPU 1 is with p2's generation" in muster("ps").out


def test_top_shows_trainings_of_a_pool_and_who_of_them_waits(muster: Muster, control: StandIn) -> None:
    control.pools = (SHARED,)
    rows = [line.split() for line in muster("top").out.splitlines()]
    assert ["0", "training", "default/demo", "workers", "held", "-"] in rows
    assert ["training", "default/big", "workers", "Queued", "needs", "4", "GPUs"] in rows


def test_usage_has_rows_of_pipelines_beside_those_of_trainings(muster: Muster, control: StandIn) -> None:
    control.used = [
        Usage("default", "demo", "uid", 1, 3600.0, 3600.0, 1),
        Usage("default", "demo", "uid", gpu_seconds=1800.0, pipeline="p1"),
        Usage("", gpu_seconds=7200.0, pipeline="p2"),
    ]
    rows = [line.split() for line in muster("usage").out.splitlines()]
    assert rows[0][:3] == ["NAMESPACE", "TRAINING", "PIPELINE"]
    assert rows[1:] == [
        ["default", "demo", "-", "1", "1", "1.000", "1.000"],
        ["default", "demo", "p1", "0", "0", "0.000", "0.500"],
        ["-", "-", "p2", "0", "0", "0.000", "2.000"],
    ]
    found = list(csv.DictReader(io.StringIO(muster("usage", "-o", "csv").out)))
    assert [one["pipeline"] for one in found] == ["", "p1", "p2"]
