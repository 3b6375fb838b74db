"""Who has a voice? So many, and so placed, that the others can do without any one machine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.core.succession import electorate
from muster.types.world import Elector, MemberId

FIRST = Elector(MemberId("c"), "c", ("127.0.0.1", 1))


def able(*machines: str) -> list[tuple[Elector, str]]:
    names = (f"{machine}{index}" for index, machine in enumerate(machines))
    return [
        (Elector(MemberId(name), name, ("127.0.0.1", 1)), machine)
        for name, machine in zip(names, machines, strict=True)
    ]


def test_a_second_agent_on_the_machine_of_the_coordinator_has_no_voice_beside_two_others() -> None:
    """With it that machine had half of the voices and the first: lost, nobody could go on."""
    assert [one.name for one in electorate.wanted(FIRST, "a", able("a", "b", "d"), ())] == ["c", "b1", "d2"]


def test_on_two_machines_the_one_with_the_coordinator_decides() -> None:
    assert [one.name for one in electorate.wanted(FIRST, "a", able("a", "b"), ())] == ["c", "b1", "a0"]


def test_a_missing_majority_is_told_of_the_group_that_lacks_it() -> None:
    # Otherwise the message would say that two of three answered, as if that were no majority.
    _, a, b, d = (elector for elector, _ in able(*"xabd"))
    groups = (FIRST, a), (FIRST, b, d)
    assert electorate.missing(groups, {b.member_id, d.member_id, a.member_id}) == "1 of 2 electors answer, c not"
    assert electorate.missing(groups, {a.member_id}) == "1 of 4 electors answer, c, b2, d3 not"


@given(st.lists(st.sampled_from("abdefghi"), max_size=12))
def test_of_three_machines_any_one_can_be_lost(machines: list[str]) -> None:
    members = able(*machines)
    where = {FIRST.member_id: "a"} | {one.member_id: machine for one, machine in members}
    group = electorate.wanted(FIRST, "a", members, ())
    assert group[0] == FIRST and len(group) <= electorate.MOST
    if len({"a", *machines}) >= electorate.MACHINES:
        for lost in {"a", *machines}:
            assert electorate.is_enough((group,), {one.member_id for one in group if where[one.member_id] != lost})
