"""Who keeps a copy of whose state: everybody gives and keeps one, in another failure domain where that can be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from muster.core.world import buddies
from muster.types.records import replace
from muster.types.state import Held, Holding
from muster.types.world import Seat
from tests.core.builders import a_member, a_run, an_id, with_members


def seats(domains: list[str | None]) -> list[Seat]:
    return [Seat(rank, an_id(f"w{rank}"), f"w{rank}", "h", 1, domain) for rank, domain in enumerate(domains)]


@given(st.lists(st.none() | st.sampled_from("abcd"), max_size=90))
def test_everybody_gives_and_keeps_one_in_another_domain(domains: list[str | None]) -> None:
    given_seats = seats(domains)
    chosen = buddies.choose(given_seats)
    if len(domains) < 2:
        assert not chosen
        return
    everybody = {seat.member_id for seat in given_seats}
    assert chosen.keys() == set(chosen.values()) == everybody
    assert all(giver != keeper for giver, keeper in chosen.items())
    known = {seat.member_id: seat.domain or f"of {seat.member_id}" for seat in given_seats}
    largest = max(Counter(known.values()).values())
    if 2 * largest <= len(domains):
        assert all(known[giver] != known[keeper] for giver, keeper in chosen.items())


def a_holding(port: int, **fields: int) -> Holding:
    return Holding((Held(0, 2, 0, 4, 10), Held(1, 2, 0, 4, 10)), ("h", port), **fields)  # type: ignore[arg-type]


def test_spares_have_copies_of_all() -> None:
    run = with_members(a_run("a b", max=2), a_member("c"))
    holdings = {an_id("a"): a_holding(1, every=2), an_id("b"): a_holding(2, stride=6), an_id("c"): a_holding(3)}
    found = buddies.orders(replace(run, holdings=holdings))
    assert dict(found[an_id("a")].targets) == {an_id("b"): ("h", 2), an_id("c"): ("h", 3)}
    assert dict(found[an_id("b")].targets) == {an_id("a"): ("h", 1), an_id("c"): ("h", 3)}
    assert not found[an_id("c")].targets
    assert {(one.every, one.stride, one.safe) for one in found.values()} == {(2, 6, (0, 4))}


def test_one_worker_gives_to_its_spare() -> None:
    run = with_members(a_run("a", max=1), a_member("c"))
    found = buddies.orders(replace(run, holdings={an_id("a"): a_holding(1), an_id("c"): a_holding(3)}))
    assert dict(found[an_id("a")].targets) == {an_id("c"): ("h", 3)}


def test_a_training_without_state_has_no_copies() -> None:
    assert not buddies.orders(a_run("a b", max=2))
