"""W&B continues one run over all rounds of a training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from muster.node.rank_env import tracking
from tests.fleet import eventually
from tests.plane import Plane

TRAINING = {"MUSTER_TRAINING": "demo"}
OURS = {"WANDB_RUN_ID": "uid-1", "WANDB_RESUME": "allow"}


@pytest.mark.parametrize(
    ("rank", "inherited", "added"),
    [
        (0, TRAINING, OURS),
        (1, TRAINING, {}),
        (0, {}, {}),
        (0, TRAINING | {"WANDB_RUN_ID": "mine"}, {"WANDB_RESUME": "allow"}),
        (0, TRAINING | {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, {}),
        (0, TRAINING | {"WANDB_RESUME": "never"}, {}),
        (0, TRAINING | {"WANDB_SWEEP_ID": "s"}, {}),
    ],
)
def test_rank_0_continues_the_run_unless_the_user_chose(
    rank: int, inherited: dict[str, str], added: dict[str, str]
) -> None:
    place: Any = SimpleNamespace(ranks=(rank,))
    assert tracking(place, 0, "uid-1", inherited) == added


@pytest.mark.scenario
def test_the_run_is_the_same_after_a_loss(plane: Plane) -> None:
    words = ["sh", "-c", 'echo "$RANK:$WANDB_RUN_ID:$WANDB_RESUME"; sleep 600']
    training = plane.train("demo", world=(2, 2, 2), command=words)
    training.wait_until_target_world(timeout=60)
    eventually(lambda: ":allow" in "".join(training.logs()), "rank 0 has printed its line")
    training.refresh()
    training.kill(0, worker=True)
    follow = plane.muster("logs", "-f", "demo", "--round", "1")
    follow.expect(r"(?m)0:\S+:allow$")
    lines = "".join(training.logs())
    uid = training.training.uid
    assert lines.count(f"0:{uid}:allow") == 2
    assert "1::" in lines
