"""From which step a round goes on: only from one that is whole, never from one that failed at once."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from muster.core.world import closing, resuming
from muster.types.records import replace
from muster.types.state import EXIT_UNUSABLE, Held, Holding, Resume, Source, Tier
from muster.types.world import Cause, MemberId, Seat
from tests.core.builders import NOW, a_run, an_exit, an_id, recalled


def seats(*names: str, procs: int = 1) -> list[Seat]:
    return [Seat(rank, an_id(name), name, "127.0.0.1", procs) for rank, name in enumerate(names)]


def holding(*held: tuple[int, int, int, int], durable: int | None = None, extra: int = 0) -> Holding:
    """Each as rank, ranks, round, step."""
    kept = tuple(Held(*one, bytes=100, extra=extra) for one in held)
    return Holding(kept, ("127.0.0.1", 1), durable)


def held_by(**workers: Holding) -> Mapping[MemberId, Holding]:
    return {an_id(name): one for name, one in workers.items()}


def test_the_newest_step_that_every_rank_has() -> None:
    known = held_by(a=holding((0, 2, 0, 7), (0, 2, 0, 8)), b=holding((1, 2, 0, 7)))
    found = resuming.choose(known, seats("a", "b"))
    assert found is not None and (found.step, found.ranks) == (7, 2)
    assert [(one.rank, one.member_id, one.tier) for one in found.sources] == [
        (0, an_id("a"), Tier.OWN),
        (1, an_id("b"), Tier.OWN),
    ]
    assert found.why == "from step 7 in memory (2 own); step 8 is lost with rank 1"


def test_steps_of_two_rounds_are_not_mixed() -> None:
    known = held_by(a=holding((0, 2, 1, 7), (0, 2, 0, 6)), b=holding((1, 2, 0, 7), (1, 2, 0, 6)))
    found = resuming.choose(known, seats("a", "b"))
    assert found is not None and (found.step, found.round) == (6, 0)


def test_steps_of_two_world_sizes_are_not_mixed() -> None:
    known = held_by(a=holding((0, 1, 0, 7), (0, 2, 0, 6)), b=holding((1, 2, 0, 7), (1, 2, 0, 6)))
    assert resuming.choose(known, seats("a", "b")) == resuming.choose(held_by(a=holding((0, 1, 0, 7))), seats("a", "b"))


def test_who_gives_it_is_told() -> None:
    known = held_by(
        a=holding((0, 2, 0, 7), (1, 2, 0, 7)), c=holding((1, 2, 0, 7), extra=100), d=holding((0, 2, 0, 7), extra=100)
    )
    found = resuming.choose(known, seats("b", "d"))
    assert found is not None
    by_rank = {rank: [(one.member_id, one.tier) for one in found.sources if one.rank == rank] for rank in (0, 1)}
    assert set(by_rank[0]) == {(an_id("a"), Tier.REPLICA), (an_id("d"), Tier.BUDDY)}
    assert set(by_rank[1]) == {(an_id("a"), Tier.REPLICA), (an_id("c"), Tier.BUDDY)}


def test_the_disk_is_for_what_memory_does_not_have() -> None:
    assert resuming.choose(held_by(a=holding(durable=5)), seats("a")) == Resume(5, why="from step 5 on disk")
    newer = resuming.choose(held_by(a=holding((0, 1, 0, 6), durable=5)), seats("a"))
    assert newer is not None and newer.step == 6 and newer.sources
    older = resuming.choose(held_by(a=holding((0, 1, 0, 4), durable=5)), seats("a"))
    assert older is not None and older.step == 5 and not older.sources
    same = resuming.choose(held_by(a=holding((0, 1, 0, 5), durable=5)), seats("a"))
    assert same is not None and same.sources


def test_two_of_four_lost_is_told() -> None:
    known = held_by(a=holding((0, 4, 0, 8), (3, 4, 0, 8), durable=4), c=holding((2, 4, 0, 8)), e=holding())
    found = resuming.choose(known, seats("a", "c", "e"))
    assert found is not None
    assert found.why == "from step 4 on disk; step 8 is lost with rank 1"


def failed_at(step: int, number: int, **workers: Holding) -> int | None:
    """What is barred after a round that went on from that step has failed."""
    run = a_run("a b", max=2)
    assert run.round is not None
    resume = Resume(step, 0, 2, (Source(0, an_id("a")), Source(1, an_id("b"))))
    run = replace(run, round=replace(run.round, number=number, resume=resume), holdings=held_by(**workers))
    return resuming.barred(run, charged=True)


def test_a_step_from_which_a_round_failed_at_once_is_not_tried_again() -> None:
    both = {"a": holding((0, 2, 0, 7), (0, 2, 0, 6), durable=3), "b": holding((1, 2, 0, 7), (1, 2, 0, 6))}
    bar = failed_at(7, 1, **both)
    assert bar == 7
    found = resuming.choose(held_by(**both), seats("a", "b"), bar)
    assert found is not None and found.step == 6
    assert found.why == "from step 6 in memory (2 own), because rounds from step 7 on failed at once"
    bar = failed_at(6, 2, **both)
    assert bar == 6
    found = resuming.choose(held_by(**both), seats("a", "b"), bar)
    assert found is not None and (found.step, found.sources) == (3, ())


def test_where_all_was_tried_and_nothing_is_on_disk_nothing_is_thrown_away() -> None:
    found = resuming.choose(held_by(a=holding((0, 1, 0, 7), (0, 1, 0, 6))), seats("a"), 6)
    assert found is not None and found.step == 7 and "again: all that is in memory was tried" in found.why


def test_a_round_that_got_on_bars_nothing() -> None:
    assert failed_at(7, 1, a=holding((0, 2, 1, 8)), b=holding((1, 2, 1, 8))) is None


def test_what_cannot_be_used_costs_no_restart_and_is_not_given_again() -> None:
    run = recalled(a_run("a b", max=2), Cause.FAILURE, gone="a b")
    assert run.round is not None
    resume = Resume(7, 0, 2, (Source(0, an_id("a")), Source(1, an_id("b"))))
    ends = {1: an_exit(1, EXIT_UNUSABLE)}
    closed = replace(run.round, resume=resume, exits=ends, first_failed_at=NOW, first_failed_rank=1)
    run = replace(run, round=closed)
    assert not closing.judge(run, NOW + 9).charged
    assert resuming.barred(run, charged=False) == 7
    again = replace(run, barred=7)  # all else was tried, and it was given once more
    assert closing.judge(again, NOW + 9).charged


def test_a_killed_worker_bars_nothing() -> None:
    run = a_run("a b", max=2)
    assert run.round is not None
    resume = Resume(7, 0, 2, (Source(0, an_id("a")), Source(1, an_id("b"))))
    run = replace(run, round=replace(run.round, number=1, resume=resume), barred=9)
    assert resuming.barred(run, charged=False) == 9


def test_newer_steps_of_a_history_that_was_given_up_do_not_come_back() -> None:
    run = a_run("a b", max=2)
    assert run.round is not None
    current = replace(run.round, number=2, resume=Resume(6, 0, 2))
    late = {"a": holding((0, 2, 0, 9), (0, 2, 0, 6)), "b": holding((1, 2, 0, 9), (1, 2, 0, 6))}
    run = replace(run, round=current, holdings=held_by(**late))
    assert next(iter(resuming.complete(resuming.living(run)))) == (9, 0, 2)  # nothing was done since
    got_on = {"a": holding((0, 2, 2, 7), (0, 2, 0, 9)), "b": holding((1, 2, 2, 7), (1, 2, 0, 9))}
    run = replace(run, holdings=held_by(**got_on))
    assert list(resuming.complete(resuming.living(run))) == [(7, 2, 2)]


WORKERS = ["a", "b", "c", "d"]
HELD = st.builds(Held, st.integers(0, 2), st.integers(1, 3), st.integers(0, 1), st.integers(0, 4), st.just(10))
HOLDINGS = st.dictionaries(
    st.sampled_from([an_id(name) for name in WORKERS]),
    st.builds(Holding, st.lists(HELD, max_size=6).map(tuple), st.just(("h", 1)), st.none() | st.integers(0, 4)),
)


@given(HOLDINGS, st.lists(st.sampled_from(WORKERS), unique=True, min_size=1), st.none() | st.integers(0, 5))
def test_what_is_chosen_can_be_had(known: Mapping[MemberId, Holding], names: list[str], bar: int | None) -> None:
    found = resuming.choose(known, seats(*names), bar)
    if found is None:
        assert not resuming.complete(known) and all(one.durable is None for one in known.values())
    elif not found.sources:
        assert found.step in {one.durable for one in known.values()}
    else:
        assert {one.rank for one in found.sources} == set(range(found.ranks))
        for source in found.sources:
            have = known[MemberId(source.member_id)].held
            assert any((one.rank, one.ranks, one.round, one.step) == (source.rank, *_of(found)) for one in have)
        on_disk = max((one.durable for one in known.values() if one.durable is not None), default=None)
        assert on_disk is None or found.step >= on_disk


def _of(found: Resume) -> tuple[int, int, int]:
    return found.ranks, found.round, found.step


@given(HOLDINGS)
def test_what_is_safe_survives_any_one_if_anything_does(known: Mapping[MemberId, Holding]) -> None:
    run = replace(a_run("a b", max=2), round=None, holdings=known)
    key = resuming.safe(run)
    survivors = [resuming.complete({one: held for one, held in known.items() if one != gone}) for gone in known]
    through_all = [one for one in resuming.complete(known) if all(one in left for left in survivors)]
    if through_all and len(known) > 1:
        assert key == through_all[0]
    else:
        assert key == next(iter(resuming.complete(known)), None)
