"""Who sits where: tables for the rules, properties for what must hold of any world."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.world import seating
from muster.core.world.seating import Place
from muster.types.world import Member
from tests.core.builders import a_member, a_seat, members, names

# Order


@pytest.mark.parametrize(
    ("given_names", "ordered"),
    [
        ("w10 w9 w2", "w2 w9 w10"),
        ("b a", "a b"),
        ("rack2-w1 rack10-w1 rack2-w10", "rack2-w1 rack2-w10 rack10-w1"),
        ("w01 w1 w001", "w001 w01 w1"),
        ("10 9 a", "9 10 a"),
    ],
)
def test_names_are_ordered_as_people_count(given_names: str, ordered: str) -> None:
    assert names(seating.roll_order(members(given_names))) == ordered.split()


@given(st.lists(st.text(max_size=8)))
def test_any_names_can_be_ordered(texts: list[str]) -> None:
    people = [a_member(text) for text in texts]
    assert names(seating.roll_order(people)) == names(seating.roll_order(reversed(people)))


def test_infra_ranks_count_only_where_all_have_one() -> None:
    some = [a_member("a", infra_rank=5), a_member("b", infra_rank=1), a_member("c", infra_rank=3)]
    assert names(seating.roll_order(some)) == ["b", "c", "a"]
    assert names(seating.roll_order([*some, a_member("0")])) == ["0", "a", "b", "c"]


# The first world


def test_the_first_world_takes_the_lowest_up_to_the_target() -> None:
    assert names(seating.first(members("c a b d"), 3, None).order) == ["a", "b", "c"]


def thirteen() -> list[Member]:
    domains = ["A"] * 6 + ["B"] * 4 + ["C"] * 3
    return [a_member(f"w{i}", infra_rank=i, domain=domain) for i, domain in enumerate(domains)]


def test_13_members_in_domains_of_6_4_and_3_give_two_whole_segments_of_4() -> None:
    seats = seating.first(thirteen(), 12, 4)
    assert names(seats.order) == [f"w{i}" for i in (0, 1, 2, 3, 6, 7, 8, 9)]


def test_domains_are_taken_in_order_of_their_lowest_infra_rank() -> None:
    people = [a_member(f"w{i}", infra_rank=i, domain=domain) for i, domain in enumerate("BAABB")]
    assert [member.domain for member in seating.first(people, 4, 2).order] == ["B", "B", "A", "A"]


# The next world


def places(kept: str, domains: str = "") -> list[Place]:
    """`a - c`: a and c still hold ranks 0 and 2, the holder of rank 1 is gone."""
    homes: list[str | None] = list(domains) if domains else [None] * len(kept.split())
    found: list[Place] = []
    for rank, (name, home) in enumerate(zip(kept.split(), homes, strict=True)):
        holder = None if name == "-" else a_member(name, domain=home)
        found.append((a_seat(rank, name if holder else f"lost{rank}", domain=home), holder))
    return found


@pytest.mark.parametrize(
    ("kept", "spares", "target", "order", "vacant"),
    [
        ("a b c", "", 3, "a b c", 0),
        ("a - c", "x", 3, "a x c", 0),
        ("a - c", "", 3, "a c", 1),
        ("- - c", "x y", 3, "x y c", 0),
        ("- - c", "x", 3, "x c", 1),
        ("a b", "x", 3, "a b x", 0),
        ("a b", "x y z", 3, "a b x", 0),
        ("a b c d", "", 2, "a b", 0),
        ("a - c d", "", 2, "a c", 0),  # the gap is closed first, then the highest rank goes
        ("a - c d", "x", 4, "a x c d", 0),
        ("a - - d", "x", 3, "a x d", 0),  # one gap is closed by the smaller target, the other filled
    ],
)
def test_survivors_keep_their_places_and_spares_fill_the_gaps(
    kept: str, spares: str, target: int, order: str, vacant: int
) -> None:
    seats = seating.again(places(kept), members(spares), target, None)
    assert (names(seats.order), seats.vacant) == (order.split(), vacant)


def test_a_gap_goes_to_the_same_domain_first_then_to_the_lowest_infra_rank_then_to_the_longest_waiting() -> None:
    gap = places("a -", "DE")
    local = a_member("local", domain="E", infra_rank=9, joined_at=50.0)
    low = a_member("low", domain="D", infra_rank=2, joined_at=50.0)
    early = a_member("early", domain="D", joined_at=1.0)
    late = a_member("late", domain="D", joined_at=2.0)
    for chosen, spares in (("local", [low, local, early]), ("low", [early, low, late]), ("early", [late, early])):
        assert names(seating.again(gap, spares, 2, None).order) == ["a", chosen]


def test_a_member_that_was_lost_and_is_chosen_again_gets_its_own_place() -> None:
    kept: list[Place] = [(a_seat(rank, name), None) for rank, name in enumerate("abc")]
    back = [a_member(name, joined_at=at) for name, at in (("c", 1.0), ("x", 2.0), ("a", 3.0))]
    assert names(seating.again(kept, back, 3, None).order) == ["a", "x", "c"]


def local(text: str) -> list[Member]:
    """`A1 A2 B1`: the letter is the domain."""
    return [a_member(name, domain=name[0]) for name in text.split()]


@pytest.mark.parametrize(
    ("kept", "domains", "spares", "target", "order"),
    [
        ("A1 A2 B1 B2", "AABB", "", 4, "A1 A2 B1 B2"),
        ("A1 - B1 B2", "AABB", "A3", 4, "A1 A3 B1 B2"),
        ("A1 - B1 B2", "AABB", "B3", 4, "B1 B2"),  # another domain's spare does not help
        ("A1 - B1 B2", "AABB", "C1 C2", 4, "C1 C2 B1 B2"),  # the next whole segment takes the ranks
        ("A1 - A2 -", "AAAA", "", 4, "A2 A1"),  # two broken halves of one domain make one whole
        ("A1 A2 B1 B2", "AABB", "C1 C2", 6, "A1 A2 B1 B2 C1 C2"),
        ("A1 A2 B1 -", "AABB", "", 2, "A1 A2"),
    ],
)
def test_segments_stay_whole(kept: str, domains: str, spares: str, target: int, order: str) -> None:
    seats = seating.again(places(kept, domains), local(spares), target, 2)
    assert names(seats.order) == order.split()


# Properties


@st.composite
def a_situation(draw: st.DrawFn) -> tuple[list[Place], list[Member], int, int | None]:
    segment = draw(st.sampled_from([None, None, 2, 3]))
    blocks = draw(st.integers(0, 4))
    found: list[Place] = []
    for _ in range(blocks):
        home = draw(st.sampled_from("ABC"))
        for _ in range(segment or 1):
            rank = len(found)
            domain = home if segment else draw(st.sampled_from("ABC"))
            holder = a_member(f"w{rank}", domain=domain) if draw(st.booleans()) else None
            found.append((a_seat(rank, f"w{rank}", domain=home if segment else domain), holder))
    spares = [
        a_member(f"s{i}", domain=draw(st.sampled_from("ABC")), joined_at=float(i))
        for i in range(draw(st.integers(0, 5)))
    ]
    target = draw(st.integers(0, 4)) * (segment or 1)
    return found, spares, target, segment


@given(a_situation())
def test_nobody_sits_twice_and_the_world_is_no_larger_than_the_target(
    situation: tuple[list[Place], list[Member], int, int | None],
) -> None:
    found, spares, target, segment = situation
    order = seating.again(found, spares, target, segment).order
    assert len({member.member_id for member in order}) == len(order) <= target
    here = {member.member_id for _, member in found if member} | {member.member_id for member in spares}
    assert {member.member_id for member in order} <= here


@given(a_situation())
def test_survivors_keep_their_ranks_unless_the_world_shrinks_and_their_order_always(
    situation: tuple[list[Place], list[Member], int, int | None],
) -> None:
    found, spares, target, segment = situation
    order = seating.again(found, spares, target, segment).order
    size = segment or 1
    whole = {
        seat.rank
        for start in range(0, len(found), size)
        for seat, _ in found[start : start + size]
        if all(member for _, member in found[start : start + size])
    }
    rank_of = {member.member_id: rank for rank, member in enumerate(order)}
    moves = [
        (seat.rank, rank_of[seat.member_id]) for seat, _ in found if seat.rank in whole and seat.member_id in rank_of
    ]
    assert moves == sorted(moves, key=lambda move: move[1])
    if len(order) >= len(found):
        assert all(old == new for old, new in moves)


@given(a_situation())
def test_segments_are_whole_and_of_one_domain(situation: tuple[list[Place], list[Member], int, int | None]) -> None:
    found, spares, target, segment = situation
    if segment is not None:
        order = seating.again(found, spares, target, segment).order
        assert len(order) % segment == 0
        for start in range(0, len(order), segment):
            assert len({member.domain for member in order[start : start + segment]}) == 1


@given(a_situation())
def test_no_spare_is_left_while_a_place_is_empty(
    situation: tuple[list[Place], list[Member], int, int | None],
) -> None:
    found, spares, target, segment = situation
    seats = seating.again(found, spares, target, segment)
    if segment is None and seats.size < target:
        assert {member.member_id for member in spares} <= {member.member_id for member in seats.order}


@given(st.lists(st.sampled_from("ABC"), max_size=12), st.integers(1, 4), st.sampled_from([None, 1, 2, 3]))
def test_a_first_world_is_as_large_as_it_can_be(domains: list[str], blocks: int, segment: int | None) -> None:
    people = [a_member(f"w{i}", domain=domain) for i, domain in enumerate(domains)]
    target = blocks * (segment or 1)
    able = len(people) if segment is None else sum(domains.count(home) // segment for home in "ABC") * segment
    assert seating.first(people, target, segment).size == min(target, able)
