"""Does the journal give back what was written, whatever happens to its file?"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from muster.core.sharing import demand, leases
from muster.errors import JournalUnusable
from muster.sharing import journal as journals
from muster.sharing.journal import FileJournal
from muster.types.sharing import Bundle, PipelineId, Pool, Priority, ProgressReport, Shares, Tenant
from tests.core.sharing.invariants import broken
from tests.sharing.scripted import FOUR, OTHER, restart_the_machine

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
    then(leases.occupied(states[-1], P1, Tenant("a-process", "a-training", 3)))
    then(leases.occupied(states[-1], P2, Tenant("another")))
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
    then(demand.requested(states[-1], demand.Wish(P1, "actor_train", Priority.ACTOR_TRAINING), 5.5).shares)
    then(leases.detached(states[-1], 5.5, unsure=True))
    then(leases.attached(leases.attached(states[-1], P1, 5.5), P2, 5.5))
    wish = demand.Wish(P2, "actor_train", Priority.ACTOR_TRAINING)
    then(demand.requested(states[-1], wish, 5.5, orphans={2}).shares)
    then(demand.withdrawn(states[-1], 3))
    then(leases.measured(states[-1], P1, shrink_s=1.5))
    then(leases.vacated(states[-1], {one: states[-1].leases[one].epoch for one in ranks[2:]}, 6.0))
    then(leases.granted(states[-1], 2, 7.0))
    then(leases.quarantined(states[-1], P2, "silent"))
    then(demand.cleared(states[-1], P1))
    then(leases.node_lost(states[-1], 1, "node-lost", 8.0))
    then(leases.unregistered(states[-1], P2))
    return states


def written(path: Path, states: list[Shares]) -> None:
    journal = FileJournal(path)
    journal.open(Shares(POOL))
    journal.rewrite(states[0], 0.0, {})
    for at, (before, after) in enumerate(itertools.pairwise(states)):
        journal.append(before, after, float(at))
    journal.close()


def found(path: Path) -> Shares:
    journal = FileJournal(path)
    try:
        return journal.open(Shares(POOL)).shares
    finally:
        journal.close()


# Written by muster 0.1.0, which knew nothing of tenants.
OLD_JOURNAL = """\
a572ef48 {"kind":"muster-sharing","version":1,"gpus":4,"gpus_per_node":2,"boot":"0ece83d8-5bee-4e27-bd69-b25256233538"}
1fe76c18 {"epoch":0,"seq":0,"t":2497.261461183,"reasons":[]}
21df48ca {"epoch":0,"seq":0,"pipelines":{"p1":[{"actor_train":["3",1,null],"actor_infer":["f",1,null]},1.0,true,null,\
"",null,null,null,false]},"t":2497.262907599}
978e61c8 {"epoch":2,"seq":1,"leases":[["p1","actor_train",0,"held",1,1,2497.263151291,2497.263151291,"request #1"],\
["p1","actor_train",1,"held",2,1,2497.263151291,2497.263151291,"request #1"]],"requests":{"gone":[1],"new":[]},\
"t":2497.275245938}
"""


def test_a_journal_of_the_first_version_is_read_and_nobody_is_known_behind_its_pipelines(tmp_path: Path) -> None:
    (tmp_path / "j").write_text(OLD_JOURNAL)
    shares = found(tmp_path / "j")
    assert shares.pipelines[P1].tenant == Tenant() and shares.pipelines[P1].clusters == FOUR
    assert len(shares.leases) == 2 and not broken(shares)


def test_a_journal_of_the_first_version_is_written_anew_with_the_same_state(tmp_path: Path) -> None:
    (tmp_path / "j").write_text(OLD_JOURNAL)
    before = found(tmp_path / "j")
    journal = FileJournal(tmp_path / "j")
    journal.rewrite(journal.open(Shares(POOL)).shares, 0.0, {})
    journal.close()
    assert '"version":2' in (tmp_path / "j").read_text() and found(tmp_path / "j") == before


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


def damage(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[7] = lines[7].replace(b"p1", b"p9")
    path.write_bytes(b"\n".join(lines))


def test_a_line_that_was_damaged_later_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    written(tmp_path / "j", a_history())
    damage(tmp_path / "j")
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(JournalUnusable, match="line 8 is damaged"):
        found(tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == before


def test_after_a_crash_of_the_machine_what_follows_a_hole_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = a_history()
    written(tmp_path / "j", states)
    damage(tmp_path / "j")
    restart_the_machine(tmp_path, monkeypatch)
    kept = FileJournal(tmp_path / "j").open(Shares(POOL))
    assert kept.shares == states[5]
    assert kept.may_lack_its_end


def test_a_journal_that_has_grown_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "COMPACT_AFTER", 300)
    states = a_history()
    written(tmp_path / "j", states)
    assert found(tmp_path / "j") == states[-1]
    assert (tmp_path / "j").read_bytes().count(b"\n") < len(states)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ({"kind": journals.KIND, "version": 3}, "version 3"),
        ({"kind": journals.KIND, "version": 1, "gpus": 4}, "gpus_per_node"),
        ({"kind": journals.KIND, "version": 1, "gpus": 8, "gpus_per_node": 2}, "gpus=8"),
        ({"kind": "a diary"}, "not a journal"),
    ],
)
def test_a_journal_of_another_kind_is_refused_and_left_alone(tmp_path: Path, head: dict[str, object], why: str) -> None:
    path = tmp_path / "j"
    path.write_bytes(journals._line(head))
    with pytest.raises(JournalUnusable, match=why):
        FileJournal(path).open(Shares(POOL))
    assert path.read_bytes() == journals._line(head)


def test_two_schedulers_do_not_share_a_journal(tmp_path: Path) -> None:
    first = FileJournal(tmp_path / "j")
    first.open(Shares(POOL))
    with pytest.raises(JournalUnusable, match="in use"):
        FileJournal(tmp_path / "j").open(Shares(POOL))
    first.close()
    assert found(tmp_path / "j") == Shares(POOL)


def test_a_write_that_fails_leaves_nothing_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = a_history()
    journal = FileJournal(tmp_path / "j")
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
    with pytest.raises(JournalUnusable, match="cannot be written: no space"):
        journal.append(states[0], states[1], 1.0)
    monkeypatch.undo()
    journal.append(states[0], states[1], 1.0)
    journal.close()
    assert found(tmp_path / "j") == states[1]


@pytest.mark.parametrize("what", ["a directory", "under a file", "garbage", "a read-only file system"])
def test_what_cannot_be_a_journal_is_refused_and_not_kept_locked(tmp_path: Path, what: str) -> None:
    path = tmp_path / "j"
    if what == "a directory":
        path.mkdir()
    elif what == "under a file":
        path.write_text("")
        path = path / "j"
    elif what == "garbage":
        path.write_bytes(os.urandom(100))
    else:
        path = Path("/proc/j")
    for _ in range(2):
        with pytest.raises(JournalUnusable, match=str(path)):
            FileJournal(path).open(Shares(POOL))


def test_a_forked_child_keeps_nobody_out(tmp_path: Path) -> None:
    """Workers are often forked, and may outlive the scheduler's process for a while."""
    journal = FileJournal(tmp_path / "j")
    journal.open(Shares(POOL))
    (ready, say_ready), (go, say_go) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(say_go)
        os.write(say_ready, b"r")
        os.read(go, 1)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"r"
        journal.close()
        assert found(tmp_path / "j") == Shares(POOL)
    finally:
        for end in (ready, say_ready, go, say_go):
            os.close(end)
        assert os.waitpid(child, 0)[1] == 0
