"""A durable folder under muster, after the loss of all workers: what disks refuse, damage or hide."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.state import disk
from tests.failing_disk import FailingDisk, build
from tests.fleet import Fleet, eventually
from tests.node.test_state import KEPT, STEPS, started, undisturbed

pytestmark = pytest.mark.xdist_group("state")
__all__ = ["undisturbed"]  # a fixture


@pytest.fixture
def failing(tmp_path: Path) -> FailingDisk:
    return build(tmp_path)


class Lost:
    """A training that wrote steps to `folder`, and then lost all of its workers."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet, self.folder = fleet, folder
        self._words = (f"durable={folder}", "every=0.01", "pause=0.3")
        self.run = started(fleet, 2, 0, *self._words, options=("--lease-s", "15"))
        eventually(lambda: len(disk.steps(folder)) > 1 or None, "two whole steps on disk", 120)
        for worker in list(self.run.nodes):
            self.run.kill(worker)
        fleet.run_id = "again"  # two of three electors are lost at once, so the run itself can take no more orders
        (fleet.notes / "kept.log").unlink()
        self.steps = list(disk.steps(folder))

    def start_again(
        self, name: str, *options: str, folder: Path | None = None, failing: FailingDisk | None = None
    ) -> None:
        words = (f"durable={folder}", *self._words[1:]) if folder is not None else self._words
        program = (KEPT, str(self.fleet.notes), str(STEPS), *words)
        env: dict[str, Any] = failing.env if failing is not None else {}
        self.run.nodes[name] = self.fleet.node(name, "--nnodes", "2", *options, program=program, **env)

    def begun(self) -> set[int]:
        """The steps at which ranks began after the loss."""
        return {int(step) for _, _, step, *_ in self.run.lines("begin")}


@pytest.fixture
def lost(fleet: Fleet, tmp_path: Path) -> Iterator[Lost]:
    yield Lost(fleet, tmp_path / "kept")


@pytest.mark.parametrize(("call", "part"), [("read", ".safetensors"), ("opendir", "/kept")])
def test_a_disk_that_one_worker_cannot_read_costs_no_step(
    lost: Lost, failing: FailingDisk, undisturbed: dict[int, tuple[str, ...]], call: str, part: str
) -> None:
    """The other worker reads the same folder: the world waits for the step, and begins nowhere else."""
    failing.fail(call, "EIO", part)
    for name in ("x0", "x1"):
        lost.start_again(name, "--max-restarts", "20", failing=failing if name == "x0" else None)
    lost.run.nodes["x0"].expect("StateUnusable: the steps in .* cannot be read: .*Input/output error")
    failing.recover()
    assert lost.run.ends() == undisturbed
    assert lost.begun() == {lost.steps[0]}


def test_a_disk_that_stays_unreadable_fails_the_run_with_the_reason(lost: Lost, failing: FailingDisk) -> None:
    failing.fail("read", "ESTALE", ".safetensors")
    for name in ("x0", "x1"):
        lost.start_again(name, "--max-restarts", "1", failing=failing if name == "x0" else None)
    view = lost.run.fleet.until("it has failed", lambda v: v["state"] == "failed")
    assert "cannot be read" in view["outcome"]["message"], view["outcome"]
    assert list(disk.steps(lost.folder)) == lost.steps and not lost.run.lines("step")


def test_a_damaged_step_is_set_aside_and_all_ranks_go_on_from_the_step_before(
    lost: Lost, undisturbed: dict[int, tuple[str, ...]]
) -> None:
    newest, before, *_ = lost.steps
    file = disk.steps(lost.folder)[newest][1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for name in ("x0", "x1"):
        lost.start_again(name, "--max-restarts", "3")
    assert lost.run.ends() == undisturbed
    assert lost.run.begun(1) == {0: before, 1: before}
    assert (file.parent / "damaged.txt").exists() and file.read_bytes() == data
    assert any(file.parent.name in text for text in lost.run.story("state-damaged"))


def test_a_worker_that_sees_another_folder_does_not_begin_beside_the_others(
    lost: Lost, undisturbed: dict[int, tuple[str, ...]], tmp_path: Path
) -> None:
    """The disk is not mounted on one machine, where the mount point is an empty folder."""
    (tmp_path / "empty").mkdir()
    lost.start_again("x0", "--max-restarts", "1")
    lost.start_again("x1", "--max-restarts", "1", folder=tmp_path / "empty")
    view = lost.run.fleet.until("it has failed", lambda v: v["state"] == "failed")
    assert not lost.run.lines("step"), "no rank trains"
    assert re.search("do not see the same folder|Step .* is missing", view["outcome"]["message"]), view["outcome"]
    assert list(disk.steps(lost.folder)) == lost.steps
    lost.fleet.run_id = "mounted"
    for name in ("y0", "y1"):
        lost.start_again(name)
    assert lost.run.ends() == undisturbed
