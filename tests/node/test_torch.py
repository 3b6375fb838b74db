"""Worlds of real torch ranks: growing and shrinking from a checkpoint, hangs, lost nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fleet import PROGRAMS, Fleet

# One at a time: several imports of torch starve everything else.
pytestmark = [pytest.mark.torches, pytest.mark.xdist_group("torch")]

DDP = str(PROGRAMS / "ddp.py")
HANG = str(PROGRAMS / "hang.py")


def test_a_ddp_training_grows_by_joining_and_shrinks_by_target(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--nnodes", "2:4", "--last-call-s", "0.5")
    program = (DDP, str(fleet.notes))
    nodes = {name: fleet.node(name, *options, program=program) for name in ("a", "b")}
    fleet.training(0, 2)
    first = fleet.started(0, 2)
    fleet.until("it has trained", lambda v: v["steps"].get("0", 0) > 3)
    nodes |= {name: fleet.node(name, *options, program=program) for name in ("c", "d")}
    view = fleet.until("four train", lambda v: v["state"] == "training" and v["world"] == 4)
    grown = fleet.started(view["round"], 4)
    assert [note["RANK"] for note in grown] == [0, 1, 2, 3]
    fleet.until("four have trained", lambda v: len(v["steps"]) == 4)
    fleet.order("set-target", target=2)
    view = fleet.until("two train", lambda v: v["state"] == "training" and v["world"] == 2)
    assert [m["name"] for m in view["members"] if m["role"] == "active"] == ["a", "b"], "the highest ranks leave"
    assert nodes["c"].wait() == nodes["d"].wait() == 0, "a leaver's exit code is 0"
    shrunk = fleet.started(view["round"], 2)
    assert first[0]["from_step"] == 0 < grown[0]["from_step"] < shrunk[0]["from_step"]
    fleet.go()
    assert nodes["a"].wait() == nodes["b"].wait() == 0
    view = fleet.until("it ended", lambda v: v["outcome"])
    assert view["restarts_used"] == 0


def test_a_killed_node_whose_peers_fail_first_costs_no_restart(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--nnodes", "2", "--spares", "1", "--max-restarts", "0")
    nodes = [fleet.node(name, *options, program=(DDP, str(fleet.notes))) for name in ("a", "b", "c")]
    fleet.until("it has trained", lambda v: v["steps"].get("0", 0) > 3)
    nodes[1].kill()
    view = fleet.training(1, 2)
    assert [(m["name"], m["rank"]) for m in view["members"]] == [("a", 0), ("c", 1)]
    assert fleet.started(1, 2)[1]["from_step"] > 0
    fleet.go()
    assert (nodes[0].wait(), nodes[2].wait()) == (0, 0), nodes[0].text + nodes[2].text


def test_a_hang_dumps_every_stack_names_the_guilty_rank_and_restarts(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--nnodes", "2", "--hang-timeout", "5", "--max-restarts", "1")
    nodes = [fleet.node(name, *options, program=(HANG, str(fleet.notes))) for name in ("a", "b")]
    assert [node.wait() for node in nodes] == [0, 0]
    for node in nodes:
        assert "rank 1 on b stopped first" in node.text
    for rank, where in ((0, "all_reduce"), (1, "hang.py")):
        log = Path(fleet.folder / "logs" / "round-0" / f"rank-{rank}.err").read_text()
        assert "most recent call first" in log and where in log


def test_the_same_hang_without_a_restart_left_fails_and_names_the_line(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--nnodes", "2", "--hang-timeout", "3", "--max-restarts", "0")
    nodes = [fleet.node(name, *options, program=(HANG, str(fleet.notes))) for name in ("a", "b")]
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        assert re.search(r"HangDetected at .*hang\.py:.*\(rank 1\); worker b", node.text)
