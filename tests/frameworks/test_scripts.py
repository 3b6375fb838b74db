"""Do unchanged scripts of the frameworks go on after losses and at other sizes, each from its own checkpoint?"""

from __future__ import annotations

import pytest

from tests.fleet import Fleet
from tests.frameworks.jobs import scripted

pytestmark = [pytest.mark.frameworks, pytest.mark.xdist_group("frameworks")]

SCRIPTS = (
    "ddp",
    "fsdp2_dcp",
    "hf_trainer",
    "accelerate_loop",
    "lightning_trainer",
    "deepspeed_zero",
    "trl_sft",
    "trl_grpo",
)
FIXED = {"deepspeed_zero"}  # a checkpoint of ZeRO is for the size that wrote it


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_goes_on_from_its_checkpoint_when_an_agent_and_when_a_whole_worker_is_killed(
    fleet: Fleet, script: str
) -> None:
    job = scripted(fleet, script, steps=60)
    job.start()
    job.reach(12)
    before = job.begins()
    job.lose_agent()
    first = job.reach(16, after=before)
    job.spare("d")
    again = job.begins()
    job.lose_worker()
    job.reach(first.number + 6, after=again)
    job.finish()
    begun = job.begins()
    assert [one.step for one in begun[:2]] == [0, 0]
    assert len(begun) == 6, begun
    assert all(one.step >= 10 for one in begun[2:]), "it did not begin anew"
    assert job.ends() == [60, 60]


@pytest.mark.parametrize("script", [one for one in SCRIPTS if one not in FIXED])
def test_it_goes_on_from_its_checkpoint_with_three_and_again_with_two(fleet: Fleet, script: str) -> None:
    job = scripted(fleet, script, steps=80)
    job.start("--nnodes", "2:3", "--target", "2", "--spares", "1")
    job.reach(12)
    fleet.order("set-target", target=3)
    grown = job.reach(16, world=3)
    before = job.begins()
    fleet.order("set-target", target=2)
    job.reach(grown.number + 3, after=before)
    job.finish()
    begun = job.begins()
    assert [one.world for one in begun] == [2, 2, 3, 3, 3, 2, 2]
    assert [one.step for one in begun[:2]] == [0, 0]
    assert all(one.step >= 10 for one in begun[2:]), "it did not begin anew"
    assert job.ends() == [80, 80]
