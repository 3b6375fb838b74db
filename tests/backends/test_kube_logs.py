"""What of the Pods' output is shown: in which order, the last lines of all ranks, and where rounds begin."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from muster import errors
from muster.backends.kube import logs
from muster.backends.kube.pod_lines import LONGEST, RankLine, Reader
from muster.backends.kube.pods import Pod
from muster.ports import LogQuery
from muster.sim import virtual
from muster.types.training import Uid

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def at(second: int, text: str) -> str:
    return f"2026-01-31T12:00:{second:02}.054321987Z {text}\n"


WROTE = {
    "demo-0": at(0, "muster-node[x] round 0: rank 0 of 2")
    + at(1, "[0] a0")
    + at(3, "[0] a1")
    + at(10, "muster-node[x] round 1: rank 0 of 2")
    + at(12, "[0] b0")
    + at(15, "[0] b1"),
    "demo-1": at(0, "muster-node[x] round 0: rank 1 of 2")
    + at(2, "[1] c0")
    + at(10, "muster-node[x] round 1: rank 1 of 2")
    + at(11, "[1] d0")
    + at(13, "[1] d1")
    + at(14, "[1] d2").rstrip("\n"),
}
ALL = ["[0] a0", "[1] c0", "[0] a1", "[1] d0", "[0] b0", "[1] d1", "[1] d2", "[0] b1"]


class Cluster:
    """Answers for the output of Pods, a few bytes at a time."""

    piece = 7

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    async def stream(self, path: str, params: Mapping[str, str]) -> AsyncIterator[bytes]:
        assert params["timestamps"] == "true"
        name = path.split("/")[-2]
        if name == self.broken:
            raise errors.Unavailable("its node does not answer")
        text = WROTE[name].encode()
        for begin in range(0, len(text), self.piece):
            yield text[begin : begin + self.piece]


def read(broken: str = "", **asked: Any) -> list[str]:
    def find() -> list[Pod]:
        return [Pod("ns", name, name, 1, Uid("u"), "demo", "o", NOON, started_at=NOON) for name in WROTE]

    async def gather() -> bytes:
        cluster: Any = Cluster(broken)
        found = logs.read(cluster, find, logs.PodListeners(), Uid("u"), LogQuery(**asked), lambda: True)
        return b"".join([chunk async for chunk in found])

    return virtual.run(gather()).decode().splitlines()


@pytest.mark.parametrize("follow", [False, True])
def test_lines_of_all_pods_come_in_order_of_time_within_their_round(follow: bool) -> None:
    assert read(follow=follow) == ALL
    assert read(follow=follow, rank=1) == ["c0", "d0", "d1", "d2"]
    assert read(follow=follow, round=0) == ALL[:3]


def test_the_kubelets_time_is_shown_on_demand() -> None:
    assert read(timestamps=True, round=0) == [
        "2026-01-31T12:00:01.054Z [0] a0",
        "2026-01-31T12:00:02.054Z [1] c0",
        "2026-01-31T12:00:03.054Z [0] a1",
    ]
    assert read(timestamps=True, markers=True, rank=1, tail=2) == [
        "2026-01-31T12:00:13.054Z (muster: round 1)",
        "2026-01-31T12:00:13.054Z d1",
        "2026-01-31T12:00:14.054Z d2",
    ]


def test_a_node_that_does_not_answer_keeps_nobody_from_what_others_have_to_show() -> None:
    assert read("demo-0") == ["[1] c0", "[1] d0", "[1] d1", "[1] d2"]


def test_a_tail_is_of_all_ranks_together_and_goes_back_over_rounds() -> None:
    for count in range(len(ALL) + 2):
        assert read(tail=count) == ALL[max(0, len(ALL) - count) :]
        assert read(tail=count, follow=True) == ALL[max(0, len(ALL) - count) :]
    assert read(tail=2, rank=1) == ["d1", "d2"]


def test_a_long_log_of_rounds_before_leaves_room_for_the_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_TAIL", 5000)
    monkeypatch.setitem(
        WROTE, "demo-0", "".join(f"muster-node[x] round {number}: go\n" + "[0] x\n" * 10 for number in range(9))
    )
    monkeypatch.setitem(WROTE, "demo-1", "muster-node[x] round 9: go\n[1] last\n")
    assert read(tail=1000)[-1] == "[1] last"
    assert len(read(tail=1000)) > 10


def test_rounds_and_ranks_that_never_were_cost_neither_memory_nor_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_TAIL", 100_000)
    monkeypatch.setitem(WROTE, "demo-0", "".join(f"muster-node[x] round {n}: go\n[{n}] x\n" for n in range(20_000)))
    monkeypatch.setitem(WROTE, "demo-1", "".join(f"[{n}] x\n" for n in range(20_000)))
    monkeypatch.setattr(Cluster, "piece", 1 << 16)
    began = time.process_time()
    found = read(tail=1 << 50)
    assert 0 < len(found) < 1000
    assert found == [f"[{n}] x" for n in range(20_000 - len(found), 20_000)]
    assert time.process_time() - began < 5


def test_a_round_is_marked_where_it_begins() -> None:
    assert read(tail=7, markers=True)[:4] == ["(muster: round 0)", "[1] c0", "[0] a1", "(muster: round 1)"]
    assert read(rank=1, markers=True) == ["(muster: round 0)", "c0", "(muster: round 1)", "d0", "d1", "d2"]


# One Pod's lines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "time_ns"),
    [
        (b"1970-01-01T00:00:01Z [0] x", 10**9),
        (b"1970-01-01T00:00:01.5Z [0] x", 1_500_000_000),
        (b"1970-01-01T01:00:01.000000007+01:00 [0] x", 1_000_000_007),
        (b"[0] x", 0),
        (b"1970-13-99T99:00:01Z [0] x", 0),
        (b"0001-01-01T00:00:00+14:00 [0] x", 0),
    ],
)
def test_a_time_is_read_or_there_is_none(line: bytes, time_ns: int) -> None:
    assert list(Reader().take(line + b"\n")) == [RankLine(-1, 0, b"x", time_ns)]


def test_a_clock_that_is_set_back_does_not_change_the_order_of_a_pod() -> None:
    lines = Reader().take((at(9, "[0] a") + at(4, "[0] b") + at(10, "[0] c")).encode())
    assert [line.time_ns // 10**9 % 60 for line in lines] == [9, 9, 10]


def test_a_time_in_what_a_rank_wrote_is_its_own() -> None:
    text = at(1, "[0] 2026-01-31T12:00:59Z mine").encode()
    assert [line.text for line in Reader().take(text)] == [b"2026-01-31T12:00:59Z mine"]


def test_a_line_without_an_end_is_cut_and_counted_as_it_came() -> None:
    long = b"[3] " + b"x" * (3 * LONGEST)
    lines = [long, b"[3] next", b"[" + b"9" * 5000 + b"] forged"]
    text = b"".join(b"2026-01-31T12:00:01.05Z " + line + b"\n" for line in lines)
    for step in (1 << 16, len(text)):
        reader = Reader()
        pieces = [text[begin : begin + step] for begin in range(0, len(text), step)]
        first = [line for piece in pieces[: len(pieces) // 2] for line in reader.take(piece)]
        assert len(reader._rest) <= LONGEST
        reader.begin()
        second = [line for piece in pieces for line in reader.take(piece)]
        seen = [(line.rank, len(line.text)) for line in first + second]
        assert seen == [(3, LONGEST - 4), (3, 4)]
