"""What a worker keeps of its ranks' state and of others', and what it lets go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.node import previews
from muster.node import shelf as shelves
from muster.node.lending import Borrowers, Lender
from muster.node.memory import Memory, NoRoom, Segment, room
from muster.node.previews import Preview
from muster.node.shelf import Copy, Shelf, superfluous
from muster.state.layout import Manifest, Piece
from muster.types.state import Held
from muster.types.world import MemberId

KIB = 1 << 10


def a_memory(limit: int = 64 << 20) -> Memory:
    return Memory(lambda: limit)


def a_manifest(rank: int, step: int, *hashes: str, number: int = 0, length: int = 100) -> Manifest:
    pieces = tuple(
        Piece(f"p{index}", "uint8", (length,), index * 256, length, digest) for index, digest in enumerate(hashes)
    )
    return Manifest(rank, 2, number, step, pieces, Piece("", "uint8", (8,), len(hashes) * 256, 8, f"rest{rank}.{step}"))


class Kept:
    """A shelf and its memory."""

    def __init__(self, limit: int = 64 << 20) -> None:
        self.memory = a_memory(limit)
        self.shelf = Shelf(self.memory)

    def put(self, manifest: Manifest, segment: Segment | None = None, *, own: bool = True) -> Copy:
        taken = segment or self.take()
        copy = self.shelf.put(manifest, [(taken, piece.offset) for piece in manifest.every], own=own)
        if segment is None:
            self.memory.let_go(taken)
        return copy

    def take(self, size: int = 1000) -> Segment:
        return asyncio.run(self.memory.take(size, self.shelf.let_one_go))

    def steps(self, rank: int = 0) -> list[int]:
        return sorted(copy.manifest.step for copy in self.shelf if copy.manifest.rank == rank)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if copies were large: two of each are kept."""
    monkeypatch.setattr(shelves, "SMALL", 0)


def test_two_sealed_steps_stay_and_the_memory_of_others_is_used_again() -> None:
    kept = Kept()
    for step in range(1, 6):
        kept.put(a_manifest(0, step, f"a{step}"))
    assert kept.steps() == [4, 5]
    assert len(kept.memory.numbers()) == 3  # two sealed, and the one that the next copy goes to


def test_what_all_have_stays_and_what_was_told_before_it() -> None:
    kept = Kept()
    for step in range(1, 9):
        kept.put(a_manifest(0, step, f"a{step}"))
        if step in (2, 4):
            kept.shelf.tell_safe((0, step))
    assert kept.steps() == [2, 4, 7, 8]
    kept.shelf.tell_safe((0, 8))
    kept.put(a_manifest(0, 9, "a9"))
    assert kept.steps() == [4, 8, 9]


def test_of_others_large_copies_no_more_is_kept_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "LARGE", 10)
    kept = Kept()
    for step in range(1, 6):
        kept.put(a_manifest(0, step, f"a{step}"))
        kept.put(a_manifest(1, step, f"b{step}"), own=False)
        if step == 2:
            kept.shelf.tell_safe((0, 2))
    assert kept.steps() == [2, 4, 5] and kept.steps(1) == [2, 5]


def test_equal_pieces_lie_in_one_place() -> None:
    kept = Kept()
    kept.put(a_manifest(0, 1, "same"))
    spot = kept.shelf.spot(Piece("other name", "uint8", (100,), 0, 100, "same"))
    assert spot is not None
    small = kept.take()
    kept.shelf.put(a_manifest(1, 1, "same"), [spot, (small, 0)], own=False)
    kept.memory.let_go(small)
    held = {one.rank: one for one in kept.shelf.held()}
    assert held[1] == Held(1, 2, 0, 1, 108, 8)  # only its rest is kept for it alone
    assert kept.shelf.spot(Piece("", "uint8", (99,), 0, 99, "same")) is None


def test_damage_takes_all_that_lies_there() -> None:
    kept = Kept()
    first = kept.put(a_manifest(0, 1, "same"))
    kept.shelf.put(a_manifest(1, 1, "same"), [first.spots[0], first.spots[1]], own=False)
    kept.put(a_manifest(0, 2, "new"))
    assert sorted(kept.shelf.discard("same", 100)) == [(0, 0, 1), (1, 0, 1)]
    assert kept.steps() == [2]
    assert kept.shelf.discard("same", 100) == []


def test_memory_that_is_used_is_not_given_to_others() -> None:
    kept = Kept()
    segments = {kept.take().number for _ in range(4)}
    assert len(segments) == 4


def test_where_there_is_no_room_old_copies_go_first_and_the_newest_stay() -> None:
    kept = Kept(3 * 64 * KIB)
    kept.put(a_manifest(0, 1, "a1"))
    kept.put(a_manifest(1, 1, "b1"), own=False)
    kept.put(a_manifest(0, 2, "a2"))
    kept.take()  # there is no room for a fourth
    assert kept.steps() == [2] and kept.steps(1) == [1]
    kept.shelf.drop((1, 0, 1))
    kept.take()
    with pytest.raises(NoRoom, match="do not fit: 0 of 0 MiB are taken"):
        kept.take()
    assert kept.steps() == [2]


def test_a_given_up_history_goes() -> None:
    kept = Kept()
    kept.put(a_manifest(0, 8, "a"))
    kept.put(a_manifest(0, 9, "b"))
    kept.shelf.abandon(1, 8)
    assert kept.steps() == [8]


KEYS = st.sets(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 9)))


@given(KEYS, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=2), st.integers(1, 4))
def test_at_least_two_stay_of_each_rank(
    keys: Iterable[tuple[int, int, int]], safe: list[tuple[int, int]], stride: int
) -> None:
    keys = set(keys)
    left = keys - set(superfluous(keys, 0, safe, stride))
    mine = sorted(key for key in keys if key[0] == 0)
    assert set(mine[-2:]) <= left
    assert {key for key in mine if key[1:] in safe} <= left
    assert {key for key in keys if key[0] == 1} <= left
    assert len([key for key in left if key[0] == 0]) <= 6


def test_room_is_a_share_of_what_is_free_or_what_was_set() -> None:
    assert 0 < room(0) < 1 << 50
    assert room(0, 1000) == 1000
    assert room(0, 1 << 60) < 1 << 50  # nobody has that much


# Previews


def adopted(kept: Kept, preview: Preview) -> Copy | None:
    async def work() -> None:
        received = previews.Previews()
        received.keep(preview)
        await previews.adopt(received, kept.shelf, kept.memory.take)

    asyncio.run(work())
    manifest = preview.manifest
    return kept.shelf.get((manifest.rank, manifest.round, manifest.step))


def a_preview(step: int, *hashes: str) -> Preview:
    """Rank 1 has sent the bytes of its rest, and the hashes of all pieces."""
    return Preview(a_manifest(1, step, *hashes), (len(hashes),), b"its rest")


def rank_0_at_step_2(*hashes: str) -> Kept:
    kept = Kept()
    kept.put(a_manifest(0, 2, *hashes))
    return kept


def test_a_previewed_step_is_put_together_from_equal_pieces_of_another_rank() -> None:
    kept = rank_0_at_step_2("a", "b")
    copy = adopted(kept, a_preview(2, "b", "a"))
    twin = kept.shelf.get((0, 0, 2))
    assert copy is not None and twin is not None and not copy.own
    assert [piece.hash for piece in copy.manifest.every] == ["b", "a", "rest1.2"]
    assert copy.spots[:2] == (twin.spots[1], twin.spots[0])
    segment, offset = copy.spots[2]
    assert segment.memory[offset : offset + 8] == b"its rest"


def test_a_previewed_step_with_a_piece_that_is_nowhere_is_not_put_together() -> None:
    """It does not matter that both ranks had equal pieces at the step before."""
    kept = rank_0_at_step_2("a", "b")
    kept.put(a_manifest(0, 1, "a", "x"))
    kept.put(a_manifest(1, 1, "a", "x"), own=False)
    assert adopted(kept, a_preview(2, "a", "c")) is None
    assert adopted(Kept(), a_preview(2, "a")) is None


def test_a_preview_does_not_take_the_place_of_a_sealed_step() -> None:
    kept = rank_0_at_step_2("a")
    sealed = kept.put(a_manifest(1, 2, "sealed"), own=False)
    assert adopted(kept, a_preview(2, "a")) is sealed


H = "0" * 32


def written(*hashes: str) -> tuple[bytes, int, int]:
    """Return a rank's memory with a manifest behind its pieces, and the place of the manifest."""
    pieces = tuple(Piece(f"p{index}", "uint8", (100,), index * 256, 100, one) for index, one in enumerate(hashes))
    text = Manifest(1, 2, 0, 2, pieces, Piece("", "uint8", (8,), len(hashes) * 256, 8, H)).write()
    begin = (len(hashes) + 1) * 256
    return bytes(range(250)).ljust(begin, b".") + text, begin, len(text)


def test_a_preview_is_read_with_the_bytes_of_the_pieces_that_it_names() -> None:
    preview = previews.read(*written(H, H), [1, 2])
    assert preview.included == (1, 2) and len(preview.data) == 108


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ([3], "does not have"),
        ([-1], "does not have"),
        ([1, 1], "does not have"),
        ([1, 0], "does not have"),
        (["1"], "by their indices"),
        ([True], "by their indices"),
        ({"0": 1}, "by their indices"),
        (None, "by their indices"),
    ],
)
def test_a_preview_that_names_no_pieces_of_its_step_is_refused(told: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        previews.read(*written(H, H), told)


def test_a_preview_without_all_hashes_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the hash of a piece"):
        previews.read(*written(H, ""), [2])
    with pytest.raises(ValueError, match="p0 has no content hash"):
        previews.read(*written("no hash"), [1])


# Lending


def test_memory_is_lent_to_another_worker_and_outlives_the_lender() -> None:
    async def work() -> None:
        lender, borrower = Kept(), Kept()
        door = MemberId(f"test-{os.getpid()}")
        Lender(door, lender.shelf, lender.memory)
        made = a_manifest(0, 1, "a1")
        mine = await lender.memory.take(1000)
        mine.memory[:5] = b"bytes"
        lender.shelf.put(made, [(mine, piece.offset) for piece in made.every], own=True)
        lender.memory.let_go(mine)
        others = Borrowers(borrower.memory)
        assert await others.borrow(door, (0, 0, 7)) is None
        spots = await others.borrow(door, (0, 0, 1))
        again = await others.borrow(door, (0, 0, 1))
        assert spots is not None and again is not None and spots[0][0] is again[0][0]
        assert spots[0][0].lent and spots[0][0].memory[:5] == b"bytes"
        borrower.shelf.put(made, spots, own=False)
        lender.shelf.drop((0, 0, 1))
        assert mine.users == 1  # nobody writes to it as long as another has it
        assert not borrower.shelf.let_one_go()  # that would make no room here
        borrower.shelf.drop((0, 0, 1))
        while mine.users:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(work(), 30))


def test_who_is_not_here_lends_nothing() -> None:
    async def work() -> None:
        assert await Borrowers(a_memory()).borrow(MemberId("nobody"), (0, 0, 1)) is None

    asyncio.run(work())
