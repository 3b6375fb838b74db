"""Where memory is bounded by others: a small /dev/shm, and the limit of a container."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import Fleet, eventually
from tests.node.test_state import KEPT, Run

pytestmark = pytest.mark.xdist_group("state")
SMALL_SHM = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
JOIN = 'echo $$ > "$1" && shift && exec "$@"'


def joined(fleet: Fleet, before: tuple[str, ...], *words: str, steps: int, workers: int, spares: int = 0) -> Run:
    """Workers that are each started by those words."""
    fleet.coordinator()
    program = (KEPT, str(fleet.notes), str(steps), *words)
    size = ("--nnodes", str(workers), "--spares", str(spares), "--log-dir", str(fleet.folder / "logs"))
    where = ("--coordinator", fleet.address, "--run-id", fleet.run_id)
    nodes = {}
    for name in [f"w{number}" for number in range(workers + spares)]:
        command = (sys.executable, "-m", "muster.node.cli", *where, "--name", name, *size, *program)
        nodes[name] = fleet.start(*before, *command)
    return Run(fleet, nodes)


def test_a_small_shared_memory_folder_does_not_matter(fleet: Fleet) -> None:
    before = ("unshare", "--mount", "sh", "-c", SMALL_SHM, "sh")
    if shutil.which("unshare") is None or subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("a /dev/shm of its own needs a mount namespace, and unshare is refused")
    run = joined(fleet, before, "mib=48", "wait=1", "pause=0.1", steps=12, workers=2, spares=1)
    run.reaches(3)
    run.is_held(min(run.steps(0).values()), 1)
    committed = min(run.steps(0).values())
    run.kill(run.worker_of(1))
    run.ends()
    assert min(run.begun(1).values()) >= committed
    assert not run.story("state-refused")


def removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:  # somebody is about to leave
        return False
    return True


@pytest.fixture
def group(fleet: Fleet) -> Iterator[Path]:
    """A memory group with a limit, as a container has it."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((Path("/sys/fs/cgroup/memory" + path) for _, kinds, path in lines if kinds == "memory"), None)
    made = own / f"muster-{os.getpid()}" if own is not None else Path("/nonexistent/group")
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(850 << 20))
    except OSError as error:
        pytest.skip(f"needs memory groups of version 1, to which it may write: {error}")
    yield made
    fleet.close()
    eventually(lambda: removed(made), "its last process has left it")


def test_the_limit_of_a_container_is_kept(fleet: Fleet, group: Path) -> None:
    """Twice 96 MiB of state do not fit into half of what it leaves. Nothing is killed for it, and it is said."""
    before = ("sh", "-c", JOIN, "sh", str(group / "cgroup.procs"))
    run = joined(fleet, before, "mib=96", "wait=1", steps=4, workers=1)
    run.ends()
    assert "do not fit" in run.story("state-refused")[0]
    assert "oom_kill 0" in (group / "memory.oom_control").read_text()
