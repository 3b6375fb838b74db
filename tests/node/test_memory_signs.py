"""What the kernel counts tells whether a rank may have been killed for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.node import memory_signs
from muster.node.memory_signs import Use

GIB = 1 << 30


@pytest.mark.parametrize(
    ("oom", "use", "kills", "told"),
    [
        (False, Use(), 0, "no sign of memory pressure"),
        (
            False,
            Use(GIB, 2 * GIB, 4 * GIB),
            0,
            "no sign of memory pressure (its memory group used up to 2.0 GiB of 4.0 GiB)",
        ),
        (False, Use(GIB, 3 * GIB, 0), 0, "no sign of memory pressure"),
        (
            False,
            Use(GIB, 4 * GIB, 4 * GIB),
            0,
            "its memory group used up to 4.0 GiB of 4.0 GiB: memory may have run short",
        ),
        (False, Use(), 1, "the kernel has meanwhile killed a process on this machine for want of memory"),
        (False, Use(), 3, "the kernel has meanwhile killed 3 processes on this machine for want of memory"),
        (True, Use(GIB, 4 * GIB, 4 * GIB), 1, "its memory group used up to 4.0 GiB of 4.0 GiB"),
        (True, Use(), 1, ""),
    ],
)
def test_one_clause_says_what_is_known(oom: bool, use: Use, kills: int, told: str) -> None:
    assert memory_signs.told(oom=oom, before=5, use=use, kills=5 + kills) == told


def test_both_versions_of_control_groups_are_read(tmp_path: Path) -> None:
    groups, tree = tmp_path / "cgroup", tmp_path / "tree"
    (tree / "memory" / "a").mkdir(parents=True)
    (tree / "b").mkdir()
    names = {"memory.usage_in_bytes": 7, "memory.max_usage_in_bytes": 9, "memory.limit_in_bytes": 9223372036854771712}
    for name, number in names.items():
        (tree / "memory" / "a" / name).write_text(f"{number}\n")
    for name, word in {"memory.current": "7", "memory.max": "max"}.items():
        (tree / "b" / name).write_text(f"{word}\n")
    groups.write_text("4:memory:/a\n0::/\n")
    assert memory_signs.used(str(groups), str(tree)) == Use(7, 9, 0)
    groups.write_text("0::/b\n")
    assert memory_signs.used(str(groups), str(tree)) == Use(7, 7, 0)
    (tree / "b" / "memory.max").write_text("12\n")
    assert memory_signs.used(str(groups), str(tree)) == Use(7, 7, 12)
    assert memory_signs.used(str(tmp_path / "none"), str(tree)) == Use()


def test_the_machines_count_is_read(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    assert memory_signs.kills_here(str(counters)) == 0
    counters.write_text("oom_kill_other 9\noom_kill 4\n")
    assert memory_signs.kills_here(str(counters)) == 4
