"""A batch system that ends a job sends its signal to every process of a worker at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fleet import PROGRAMS, Fleet, eventually, family, kill_all

LAST_SAVE = str(PROGRAMS / "last_save.py")


def there(fleet: Fleet, *names: str) -> None:
    eventually(lambda: all((fleet.notes / name).exists() for name in names), f"{names} are told")


@pytest.mark.parametrize("warm", ["auto", "never"])
def test_sigterm_to_every_process_leaves_ranks_their_grace(fleet: Fleet, warm: str) -> None:
    fleet.coordinator()
    options = ("--nnodes", "1", "--nproc", "2", "--warm", warm, "--stop-grace-s", "60")
    node = fleet.node("a", *options, program=(LAST_SAVE, str(fleet.notes)))
    there(fleet, "runs-0", "runs-1")
    every = family(node.pid)
    assert len(every) == 5, "agent, guard, warm parent, two ranks"
    kill_all(every, signal.SIGTERM)
    there(fleet, "asked-0", "asked-1")
    assert set(family(node.pid)) == set(every), "guard and warm parent stay for as long as ranks save"
    fleet.go()
    assert node.wait() == 143
    assert (fleet.notes / "saved-0").exists() and (fleet.notes / "saved-1").exists()


def test_the_store_of_a_round_stays_while_ranks_use_their_grace(fleet: Fleet) -> None:
    fleet.coordinator()
    asks = "import torch.distributed as d; d.init_process_group('gloo')"
    script = fleet.folder / "with_store.py"
    script.write_text(Path(LAST_SAVE).read_text().replace("signal.signal(", f"{asks}\nsignal.signal(", 1))
    node = fleet.node("a", "--nnodes", "1", "--stop-grace-s", "60", program=(str(script), str(fleet.notes)))
    there(fleet, "runs-0")
    every = family(node.pid)
    assert len(every) >= 5, "agent, guard, warm parent, store, rank, and perhaps another parent that is prepared"
    kill_all(every, signal.SIGTERM)
    there(fleet, "asked-0")
    assert set(family(node.pid)) >= set(every)
    fleet.go()
    assert node.wait() == 143


def test_a_signal_while_guard_and_warm_parent_start_does_not_end_them(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1")
    for count in (2, 3):
        eventually(lambda: len(family(node.pid)) >= count, "another one is started")  # noqa: B023
        kill_all(family(node.pid)[1:], signal.SIGTERM)
        kill_all(family(node.pid)[1:], signal.SIGINT)
    fleet.started(0, 1)
    fleet.go()
    assert node.wait() == 0
    assert "died" not in node.text


def test_a_guard_that_is_killed_takes_the_ranks_with_it(fleet: Fleet) -> None:
    """The warm parent still hears of that, though it hears no other SIGTERM."""
    fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1", "--max-restarts", "1")
    fleet.started(0, 1)
    guard, warm, rank = family(node.pid)[1:4]
    kill_all([warm], signal.SIGTERM)
    kill_all([guard])
    eventually(lambda: not {warm, rank} & set(family(node.pid)), "they are gone")
    fleet.started(1, 1)
    fleet.go()
    assert node.wait() == 0
