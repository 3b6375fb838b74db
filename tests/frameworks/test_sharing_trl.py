"""Do two GRPO runs of TRL, each with three changed lines, take turns on the GPUs of one pool?"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import Process
from tests.frameworks.jobs import QUIET, SCRIPTS
from tests.plane import Plane
from tests.sharing.blocking import pool_of_four

pytestmark = [pytest.mark.frameworks, pytest.mark.xdist_group("frameworks")]

SCRIPT = SCRIPTS / "trl_shared.py"
STEPS = 6
BOUND_S = 240.0


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    plane = Plane(tmp_path)
    plane.env |= QUIET
    plane.env.pop("PYTHONDONTWRITEBYTECODE", None)
    pool_of_four(plane)
    try:
        plane.serve()
        plane.env |= {"MUSTER_URL": plane.url, "MUSTER_TOKEN": plane.api_token}
        yield plane
    finally:
        plane.close()


def _run(plane: Plane, name: str) -> Process:
    return plane.start(sys.executable, str(SCRIPT), name, str(plane.folder), str(STEPS))


def _ended(process: Process) -> dict[str, object]:
    assert process.wait(BOUND_S) == 0, process.text[-6000:]
    found = re.search(r"^ends (.*)$", process.text, re.M)
    assert found, process.text[-6000:]
    told: dict[str, object] = json.loads(found[1])
    return told


def _used(plane: Plane, name: str) -> list[tuple[float, float, str]]:
    lines = (plane.folder / f"{name}.used").read_text().splitlines()
    return [(*json.loads(line), name) for line in lines]


def test_two_grpo_runs_share_one_gpu_slot(plane: Plane) -> None:
    runs = [_run(plane, name) for name in ("p1", "p2")]
    for run in runs:
        told = _ended(run)
        rewards = told["rewards"]
        assert told["step"] == STEPS and isinstance(rewards, list) and len(rewards) == STEPS
        assert all(reward > 0 for reward in rewards)
    used = sorted([*_used(plane, "p1"), *_used(plane, "p2")])
    for (_, end, one), (begin, _, other) in itertools.pairwise(used):
        assert one == other or end <= begin, f"{one} and {other} computed on GPU 0 at once"
    order = [name for _, _, name in used]
    changes = sum(one != other for one, other in itertools.pairwise(order))
    assert changes >= STEPS, "they took turns, and did not run one after the other"
    events = plane.muster("share", "events", "-o", "json")
    assert events.wait() == 0
    items = json.loads(events.text)["items"]
    kinds = [one["kind"] for one in items]
    assert "quarantined" not in kinds and "hook-failed" not in kinds
    assert kinds.count("unregistered") == 2, "both have left the pool"
    for name in ("p1", "p2"):
        granted = [one["text"] for one in items if (one["kind"], one["pipeline"]) == ("granted", name)]
        assert granted.count("GENERATION") >= STEPS and granted.count("ACTOR_TRAINING") >= STEPS
