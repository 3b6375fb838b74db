"""What does an agent learn from the kernel about its own control group, on a machine and in a container?"""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.node import system

V1 = "5:memory:{group}\n4:pids:{group}\n0::/\n"
V2 = "0::{group}\n"


@pytest.mark.parametrize(
    ("groups", "group", "counter"),
    [
        (V1, "/pods/one", "memory/pods/one/memory.oom_control"),  # on a machine
        (V1, "/pods/one", "memory/memory.oom_control"),  # in a container, which sees nothing but its own group
        (V1, "/", "memory/memory.oom_control"),
        (V2, "/pods/one", "pods/one/memory.events"),
        (V2, "/", "memory.events"),
        (V2, "/pods/one", "memory.events"),
    ],
)
def test_kills_for_want_of_memory_are_counted_wherever_the_group_is_seen(
    tmp_path: Path, groups: str, group: str, counter: str
) -> None:
    (tmp_path / "groups").write_text(groups.format(group=group))
    place = tmp_path / "tree" / counter
    place.parent.mkdir(parents=True)
    place.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert system.oom_kills(str(tmp_path / "groups"), str(tmp_path / "tree")) == 3


def test_where_nothing_can_be_told_nothing_is(tmp_path: Path) -> None:
    assert system.oom_kills(str(tmp_path / "none"), str(tmp_path)) == 0
    (tmp_path / "groups").write_text(V1.format(group="/x"))
    assert system.oom_kills(str(tmp_path / "groups"), str(tmp_path)) == 0
