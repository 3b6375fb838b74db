"""When is a round over for those who gave GPUs to its ranks? In doubt it is not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from muster.control.loop import TOKEN_KIND
from muster.core.world.run import Run
from muster.daemon.rounds import TrainingRounds
from muster.ports import Record, RunView, Write
from muster.types.training import Key
from tests.core.builders import a_round, a_run, all_gone, recalled
from tests.memory_store import MemoryStore
from tests.training_builders import a_training

UID = "uid-of-it"


def asked(
    number: int, *, phase: str | None = "ready", run: Run | None = None, alive: bool = False, known: bool = True
) -> str:
    """What is said of a round of a training in that phase (None: there is none), with or without living workers."""

    async def ask() -> str:
        store = MemoryStore()
        if phase is not None:
            await store.write(Write(put=a_training("rl", uid=UID, phase=phase), expect=0))
        worlds: Any = SimpleNamespace(look=lambda uid: None if run is None else RunView(run, "", confirmed=False))
        backend: Any = SimpleNamespace(workers=lambda uid: [SimpleNamespace(alive=alive)])
        key = Key("default", "rl") if known else None
        return TrainingRounds(store, worlds, {"local": backend}, lambda uid: key).over(UID, number)

    return asyncio.run(ask())


def test_a_round_that_the_coordinator_knows_to_be_over_is_over_while_workers_go_on() -> None:
    followed, told = a_run("a", last=a_round("a", number=4)), "round 3 of its training is over"
    assert asked(3, run=followed, alive=True) == told, "and nothing of why: whoever reads this may not read that"
    assert asked(0, run=all_gone(recalled(a_run("a b"))), alive=True) == "round 0 of its training is over"


def test_a_round_that_runs_or_is_being_stopped_is_not_over() -> None:
    assert asked(0, run=a_run("a b"), alive=True) == ""
    assert asked(0, run=recalled(a_run("a b"), gone="a"), alive=True) == ""


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("phase", ["succeeded", "failed", "cancelled"])
def test_a_training_that_has_ended_is_over_once_no_worker_of_it_is_left(phase: str, known: bool) -> None:
    assert asked(0, phase=phase, known=known) == "its training has ended"
    assert asked(0, phase=phase, known=known, alive=True) == ""


def test_a_training_that_was_removed_is_over_once_no_worker_of_it_is_left() -> None:
    assert asked(0, phase=None) == "its training is gone"
    assert asked(0, phase=None, alive=True) == ""


@pytest.mark.parametrize("phase", ["pending", "ready"])
def test_a_living_training_of_whose_run_nothing_is_known_is_not_over(phase: str) -> None:
    assert asked(0, phase=phase) == asked(0, phase=phase, known=False) == ""


def test_only_trainings_for_which_workers_were_started_are_known() -> None:
    async def ask() -> None:
        store = MemoryStore()
        await store.write(Write(records=(Record(TOKEN_KIND, UID, {"token": "t"}),)))
        nothing: Any = None
        rounds = TrainingRounds(store, nothing, {}, nothing)
        assert rounds.knows(UID) and not rounds.knows("another")

    asyncio.run(ask())
