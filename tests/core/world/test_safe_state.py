"""What is said of a training's state: never safer than it is, and in words that say against what."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given as hypothesis_given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from muster.core.training import state_words
from muster.core.world import resuming, safe_state, transitions
from muster.core.world.run import Run, lose
from muster.core.world.safe_state import Kept
from muster.core.world.views import view
from muster.types.state import Held, Holding, KeptState, Resume, Source
from muster.types.world import MemberId, Progress, RunId
from muster.world.believable import believable
from tests.core.builders import NOW, a_run, an_id, with_members

NAMES = ("a", "b", "c", "d")


def holding(*held: tuple[int, int], ranks: int = 2, size: int = 10, **known: object) -> Holding:
    """Rank and step each, of round 0."""
    return replace(Holding(tuple(Held(rank, ranks, 0, step, size) for rank, step in held)), **known)  # type: ignore[arg-type]


def told(given: Run, at: float = NOW, **holdings: Holding) -> Run:
    for name, one in holdings.items():
        given = transitions.holds(given, an_id(name), one, at)
    return given


def stepping(given: Run, step: int) -> Run:
    assert given.round is not None
    ranks = range(given.round.rank_count)
    return replace(given, round=replace(given.round, progress={rank: Progress(step, NOW) for rank in ranks}))


def looked_at(given: Run, now: float = NOW) -> KeptState:
    return known(given, now).state


def known(given: Run, now: float = NOW) -> Kept:
    found = safe_state.kept(given, now)
    assert found is not None
    return found


def test_a_training_that_keeps_no_state_looks_as_before() -> None:
    given = a_run("a b", "c")
    assert safe_state.kept(given, NOW) is None
    shown = view(RunId("run"), 1, given, "", NOW)
    assert "kept_state" not in shown and all("holds" not in member for member in shown["members"])


def test_each_with_its_buddy_and_on_a_spare_survives_a_worker() -> None:
    both = holding((0, 8), (1, 8), commit_s=0.02, step_s=0.5, every=2, taken=100)
    given = stepping(told(a_run("a b", "c"), a=both, b=both, c=both), 9)
    found = looked_at(given)
    assert (found.step, found.round, found.survives, found.copies) == (8, 0, "worker", 3)
    assert found.where == (
        "2 of 2 ranks in the memory of their own worker, 2 copies with other workers, 2 copies with spares"
    )
    assert (found.bytes, found.memory_bytes, found.worker_memory_bytes) == (20, 300, 100)
    assert (found.commit_seconds, found.step_seconds, found.overhead) == (0.02, 0.5, 0.02)
    assert found.loss == "the loss of any one worker now costs 1 step (0.5 s): it goes on from step 8 in memory"
    assert (found.loss_steps, found.loss_seconds) == (1, 0.5)
    facts = state_words.facts(found, "3s")
    assert facts["Safe"] == "step 8 is safe against the loss of any one worker, for 3s"
    assert facts["Copies"] == "every 2 steps, 20 ms each, 2 % of the time"


def test_a_newer_step_that_one_worker_alone_has_is_not_called_safe_against_its_loss() -> None:
    older = ((0, 8), (1, 8))
    given = stepping(told(a_run("a b"), a=holding(*older, (0, 9)), b=holding(*older, (1, 9))), 9)
    found = looked_at(given)
    assert (found.step, found.newest_step, found.survives) == (8, 9, "worker")
    assert found.loss == "the loss of any one worker now costs 1 step: it goes on from step 8 in memory"


def test_state_without_copies_survives_ranks_only_and_a_loss_leads_to_disk_or_to_the_beginning() -> None:
    given = stepping(told(a_run("a b"), a=holding((0, 9), step_s=2.0), b=holding((1, 9), step_s=2.0)), 9)
    found = looked_at(given)
    assert (found.step, found.survives, found.copies) == (9, "ranks", 1)
    torn = "what is left in memory would not be whole"
    assert found.loss == f"the loss of any one worker now costs 9 steps (18 s): {torn}, it begins again"
    given = told(given, a=holding((0, 9), durable=5, step_s=2.0))
    found = looked_at(given)
    assert found.loss == f"the loss of any one worker now costs 4 steps (8 s): {torn}, it goes on from step 5 on disk"
    assert found.durable_step == 5


def test_the_worker_whose_loss_costs_most_is_named() -> None:
    given = stepping(told(a_run("a b"), a=holding((0, 9)), b=holding((0, 9), (1, 9))), 9)
    found = looked_at(given)
    assert found.survives == "ranks"
    assert found.loss.startswith("the loss of b now costs 9 steps: what is left in memory would not be whole")


def test_a_newer_step_on_disk_is_gone_on_from() -> None:
    both = holding((0, 8), (1, 8), durable=9)
    found = looked_at(stepping(told(a_run("a b"), a=both, b=both), 9))
    assert found.loss == "the loss of any one worker now costs no finished step: it goes on from step 9 on disk"


def test_a_domain_is_survived_only_if_each_rank_is_in_two_of_them() -> None:
    both = holding((0, 8), (1, 8))
    given = a_run("a b", "c")
    east = [replace(given.members[an_id(name)], domain="east") for name in "ab"]
    given = told(with_members(given, *east), a=both, b=both)
    assert looked_at(given).survives == "worker"
    west = with_members(given, replace(given.members[an_id("c")], domain="west"))
    assert looked_at(told(west, c=holding((0, 8)))).survives == "worker", "rank 1 is in the east only"
    assert looked_at(told(west, c=both)).survives == "domain"


def test_its_age_is_since_the_copy_that_made_it_safe_came() -> None:
    both = holding((0, 8), (1, 8))
    given = told(told(a_run("a b"), NOW, a=both), NOW + 1, b=holding((1, 8)))
    assert looked_at(given).survives == "ranks"
    assert known(given, NOW + 3).age_s == 3, "it was whole from the first word on"
    given = told(given, NOW + 2, b=both)
    assert looked_at(given).survives == "worker"
    given = told(given, NOW + 4, a=both)  # said again: it had it before
    assert known(given, NOW + 5).age_s == 3
    assert known(lose(given, an_id("b"), NOW + 5, "gone"), NOW + 6).age_s == 6


def test_what_is_refused_and_where_it_went_on_are_told() -> None:
    resume = Resume(7, 0, 2, (Source(0, "id-a"),), "from step 7 in memory")
    given = told(a_run("a b"), a=holding(refused="64 MiB of state do not fit"), b=holding())
    assert given.round is not None
    found = looked_at(replace(given, round=replace(given.round, resume=resume)))
    assert (found.step, found.survives) == (None, "nothing")
    assert found.refused == "a: 64 MiB of state do not fit"
    assert found.resumed == "from step 7 in memory"
    assert state_words.facts(found)["Safe"] == "no step is whole in memory"


def test_what_a_worker_says_of_itself_is_bounded() -> None:
    said = holding((0, 1), (2, 1), durable=-4, refused="x" * 9999, damage="y" * 9999, commit_s=-1.0, step_s=1e-300)
    found = believable(replace(said, taken=-1, limit=1 << 52))
    assert [one.rank for one in found.held] == [0], "there is no rank 2 of 2"
    assert (found.durable, len(found.refused), len(found.damage)) == (None, 256, 256)
    assert (found.commit_s, found.step_s, found.taken, found.limit) == (0.0, 0.0, 0, 1 << 50)


# Properties --------------------------------------------------------------------------------------

held_by_one = st.lists(
    st.builds(
        lambda rank, step, number: Held(rank, 3, number, step, 1),
        st.integers(0, 2),
        st.integers(1, 3),
        st.integers(0, 1),
    ),
    max_size=10,
)
durables = st.none() | st.integers(1, 3)
holdings = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(lambda held, durable: Holding(tuple(held), durable=durable), held_by_one, durables),
)
domains = st.lists(st.sampled_from([None, "east", "west"]), min_size=4, max_size=4)


def after_loss(given: Run, lost: set[MemberId]) -> dict[MemberId, Holding]:
    return {member_id: one for member_id, one in resuming.living(given).items() if member_id not in lost}


@hypothesis_settings(max_examples=200, deadline=None)
@hypothesis_given(holdings, domains)
def test_nothing_is_called_safe_that_a_loss_could_take(given: dict[str, Holding], where: list[str | None]) -> None:
    run = a_run("a b c", "d")
    people = [replace(run.members[an_id(name)], domain=domain) for name, domain in zip(NAMES, where, strict=True)]
    run = told(with_members(run, *people), NOW, **given)
    found = safe_state.kept(run, NOW)
    if found is None:
        assert not given
        return
    state = found.state
    if state.step is None:
        assert not resuming.complete(resuming.living(run)) and state.survives == "nothing"
        return
    key = (state.step, state.round, 3)
    assert key == resuming.safe(run), "as workers are told it"
    ranks = {one.rank for held in given.values() for one in held.held if (one.step, one.round) == key[:2]}
    assert ranks == {0, 1, 2}
    by_domain: dict[str | None, set[MemberId]] = {}
    for member in people:
        by_domain.setdefault(member.domain or member.member_id, set()).add(member.member_id)
    losses = {"ranks": [], "worker": [{member.member_id} for member in people], "domain": list(by_domain.values())}
    for lost in losses[state.survives]:
        assert key in resuming.complete(after_loss(run, lost)), (state, lost)
    if state.survives == "ranks":  # nor is it called less safe than it is
        assert any(key not in resuming.complete(after_loss(run, {member.member_id})) for member in people)


@hypothesis_settings(max_examples=200, deadline=None)
@hypothesis_given(holdings, st.integers(0, 5))
def test_the_cost_of_a_loss_is_what_the_next_round_would_go_back(given: dict[str, Holding], step: int) -> None:
    run = stepping(told(a_run("a b c", "d"), NOW, **given), step)
    found = safe_state.kept(run, NOW)
    if found is None:
        return
    assert run.round is not None
    goes_on = []
    for seat in run.round.seats:
        resume = resuming.choose(after_loss(run, {seat.member_id}), run.round.seats)
        shared = [one.durable for one in run.holdings.values() if one.durable is not None]  # a disk outlives a worker
        goes_on.append(max([resume.step if resume is not None else 0, *shared]))
    newest = max([step, *(key[0] for key in resuming.complete(resuming.living(run)))])
    assert found.state.loss_steps == max(0, newest - min(goes_on))
