"""Which finished steps a round began without."""

from __future__ import annotations

from dataclasses import replace

from muster.core.training import state_loss
from muster.types.state import KeptState, Resume, Source
from muster.types.training import RankStatus, Status
from muster.types.world import Progress
from tests.core.builders import NOW, a_round


def a_status(names: str = "a b", step: int = 400, **kept: int) -> Status:
    ranks = tuple(RankStatus(rank, name, "", "running", 3, step=step) for rank, name in enumerate(names.split()))
    return Status(round=3, ranks=ranks, kept_state=KeptState(**{"reached": step} | kept))  # type: ignore[arg-type]


def test_without_any_copy_it_begins_at_step_0_and_says_how_to_keep_steps() -> None:
    loss = state_loss.found(a_status(), a_round("c d", number=4))
    assert loss is not None and loss.text == (
        "no copy of the state survived (2 of 2 workers lost); 400 steps are lost; begins at step 0. "
        "`durable=` keeps steps on disk"
    )
    assert loss.data == {"steps": 400, "step": 0, "workers": 2, "of": 2}


def test_a_step_on_disk_is_not_promised_before_a_rank_has_it() -> None:
    loss = state_loss.found(a_status(durable_step=360), a_round("c d", number=4))
    assert loss is not None and loss.text == (
        "no copy of the state survived in memory (2 of 2 workers lost); at least 40 steps are lost; "
        "step 360 was the newest on disk"
    )
    assert loss.data == {"steps": 40, "workers": 2, "of": 2}


def test_an_older_step_on_disk_costs_the_steps_after_it() -> None:
    resume = Resume(360, why="from step 360 on disk")
    loss = state_loss.found(a_status(durable_step=360), a_round("c d", number=4, resume=resume))
    assert loss is not None and loss.text == (
        "no copy of the state survived in memory (2 of 2 workers lost); 40 steps are lost; "
        "goes on from step 360 on disk"
    )


def test_a_survivor_without_all_ranks_has_no_whole_copy() -> None:
    loss = state_loss.found(a_status(), a_round("a d", number=4))
    assert loss is not None and loss.text.startswith("no whole copy of the state survived (1 of 2 workers lost); 400")


def test_nothing_is_lost_where_memory_has_it_or_nothing_was_finished() -> None:
    memory = Resume(399, sources=(Source(0, "a"),))
    assert state_loss.found(a_status(), a_round("a d", number=4, resume=memory)) is None
    assert state_loss.found(a_status(step=0), a_round("c d", number=4)) is None
    assert state_loss.found(a_status(), a_round("a b", number=3)) is None, "the same round"
    assert state_loss.found(replace(a_status(), kept_state=None), a_round("c d", number=4)) is None, "it keeps none"
    assert state_loss.found(a_status(durable_step=400), a_round("c d", number=4)) is None


def test_the_step_on_disk_counts_until_new_workers_begin_a_round_and_look_for_it() -> None:
    old = a_status(durable_step=360)
    state = state_loss.followed(KeptState(), old, a_round("c d", number=4))
    assert (state.durable_step, state.reached) == (None, None), "their folder may be gone"
    later = replace(old, round=4, kept_state=state)
    assert state_loss.followed(KeptState(), later, a_round("c d", number=4)).durable_step is None
    assert state_loss.followed(KeptState(durable_step=360), later, a_round("c d", number=4)).durable_step == 360
    survivor = a_round("a d", number=4, resume=Resume(360))
    assert state_loss.followed(KeptState(), old, survivor).durable_step == 360
    assert state_loss.followed(KeptState(), old, a_round("a b", number=3)).durable_step == 360
    assert state_loss.followed(KeptState(durable_step=380), old, a_round("a b", number=3)).durable_step == 380


def test_what_was_lost_stays_to_be_read_while_the_round_is_out_and_is_not_lost_twice() -> None:
    old, out = a_status(), a_round("c d", number=4)
    begun = state_loss.followed(KeptState(), old, out)
    assert begun.lost.startswith("no copy") and (begun.lost_steps, begun.reached) == (400, 0)
    later = replace(a_status("c d", step=7), round=4, kept_state=begun)
    progress = {0: Progress(7, NOW)}
    going = state_loss.followed(KeptState(newest_step=8), later, replace(out, progress=progress))
    assert going.lost == begun.lost and going.reached == 8
    again = state_loss.found(replace(later, kept_state=going), a_round("e f", number=5))
    assert again is not None and again.steps == 8
