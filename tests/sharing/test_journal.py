"""Does the journal give back what was written, whatever happens to its file?"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from muster.core.sharing import demand, leases
from muster.core.sharing.invariants import broken
from muster.errors import JournalUnusable
from muster.sharing import journal as journals
from muster.sharing.journal import Journal
from muster.types.sharing import Bundle, PipelineId, Pool, Priority, ProgressReport, Shares
from tests.sharing.scripted import FOUR, OTHER

POOL = Pool(gpus=4, gpus_per_node=2)
P1, P2 = PipelineId("p1"), PipelineId("p2")


def a_history() -> list[Shares]:
    """States that follow one another, with everything in them that can be written."""
    states = [Shares(POOL)]

    def then(shares: Shares) -> Shares:
        states.append(shares)
        return shares

    then(leases.registered(states[-1], P1, FOUR, 1.0))
    then(leases.registered(states[-1], P2, OTHER, 2.5))
    then(leases.admitted(leases.admitted(states[-1], P1), P2))
    wish = demand.Wish(P1, "actor_infer", Priority.GENERATION, 9, "r1")
    then(demand.requested(states[-1], wish, 1.0).shares)
    ranks = [Bundle(P1, "actor_infer", rank) for rank in range(4)]
    then(leases.expanding(states[-1], ranks, 2.0, {str(ranks[0]): "it is “free”\n"}))
    epochs = {bundle: states[-1].leases[bundle].epoch for bundle in ranks[1:]}
    then(demand.answered(leases.expanded(states[-1], epochs, 3.0), 1))
    then(demand.reported(states[-1], ProgressReport("p1", 1, 9, "a", "r1"), 3.5)[0])
    then(leases.draining(states[-1], ranks[2:], 4.0, reason="for p2"))
    then(demand.requested(states[-1], demand.Wish(P2, "actor_train", Priority.ACTOR_TRAINING), 5.0).shares)
    then(leases.measured(states[-1], P1, shrink_s=1.5))
    then(leases.vacated(states[-1], {one: states[-1].leases[one].epoch for one in ranks[2:]}, 6.0))
    then(leases.granted(states[-1], 2, 7.0))
    then(leases.quarantined(states[-1], P2, "silent"))
    then(demand.cleared(states[-1], P1))
    then(leases.node_lost(states[-1], 1, "node-lost", 8.0))
    then(leases.unregistered(states[-1], P2))
    return states


def written(path: Path, states: list[Shares]) -> None:
    journal = Journal(path)
    journal.open(Shares(POOL))
    journal.rewrite(states[0], 0.0, {})
    for at, (before, after) in enumerate(itertools.pairwise(states)):
        journal.append(before, after, float(at))
    journal.close()


def found(path: Path) -> Shares:
    journal = Journal(path)
    try:
        return journal.open(Shares(POOL)).shares
    finally:
        journal.close()


def test_every_state_of_a_history_is_found_again(tmp_path: Path) -> None:
    states = a_history()
    for count in range(1, len(states) + 1):
        written(tmp_path / "j", states[:count])
        assert found(tmp_path / "j") == states[count - 1]


def test_a_file_cut_at_any_byte_gives_a_state_that_was(tmp_path: Path) -> None:
    states = a_history()
    written(tmp_path / "j", states)
    whole = (tmp_path / "j").read_bytes()
    head = whole.index(b"\n") + 1
    seen = set()
    ends = [size + by for size, byte in enumerate(whole, 1) if byte == ord("\n") for by in (-1, 0, 1)]
    for size in sorted({*range(head, len(whole), 13), *(end for end in ends if head <= end < len(whole))}):
        (tmp_path / "cut").write_bytes(whole[:size])
        shares = found(tmp_path / "cut")
        seen.add(states.index(shares))
        assert broken(shares) == []
    assert seen == {states.index(state) for state in states}, "a last line that only lacks its end is whole"


def test_a_damaged_line_ends_what_is_believed(tmp_path: Path) -> None:
    states = a_history()
    written(tmp_path / "j", states)
    lines = (tmp_path / "j").read_bytes().split(b"\n")
    lines[7] = lines[7].replace(b"expand", b"xepand").replace(b"p1", b"p9")
    (tmp_path / "j").write_bytes(b"\n".join(lines))
    assert found(tmp_path / "j") == states[5]


def test_a_journal_that_has_grown_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "COMPACT_AFTER", 300)
    states = a_history()
    written(tmp_path / "j", states)
    assert found(tmp_path / "j") == states[-1]
    assert (tmp_path / "j").read_bytes().count(b"\n") < len(states)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ({"kind": journals.KIND, "version": 2, "gpus": 4, "gpus_per_node": 2}, "version 2"),
        ({"kind": journals.KIND, "version": 1, "gpus": 8, "gpus_per_node": 2}, "gpus=8"),
        ({"kind": "a diary"}, "not a journal"),
    ],
)
def test_a_journal_of_another_kind_is_refused_and_left_alone(tmp_path: Path, head: dict[str, object], why: str) -> None:
    path = tmp_path / "j"
    path.write_bytes(journals._line(head))
    with pytest.raises(JournalUnusable, match=why):
        Journal(path).open(Shares(POOL))
    assert path.read_bytes() == journals._line(head)


def test_two_schedulers_do_not_share_a_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path / "j")
    first.open(Shares(POOL))
    with pytest.raises(JournalUnusable, match="in use"):
        Journal(tmp_path / "j").open(Shares(POOL))
    first.close()
    assert found(tmp_path / "j") == Shares(POOL)


def test_a_write_that_fails_leaves_nothing_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = a_history()
    journal = Journal(tmp_path / "j")
    journal.open(Shares(POOL))
    journal.rewrite(states[0], 0.0, {})
    write = os.write
    calls = []

    def full(file: int, data: bytes) -> int:
        calls.append(file)
        if len(calls) == 1:
            return write(file, bytes(data)[:5])
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        journal.append(states[0], states[1], 1.0)
    monkeypatch.undo()
    journal.append(states[0], states[1], 1.0)
    journal.close()
    assert found(tmp_path / "j") == states[1]
