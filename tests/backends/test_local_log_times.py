"""Lines of several ranks in order of time: whole, the last of them, and as they are written; whatever marks say."""

from __future__ import annotations

import asyncio
import os
import random
import re
import struct
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import log_times
from muster.backends.local import log_streams, log_tails, logs
from muster.log_times import Mark
from muster.ports import LogQuery
from tests.backends.test_local import NOON, read

MS = 10**6
STAMP = re.compile(r"(2026-01-31T12:\d\d:\d\d\.\d{3}Z|-) ")
Written = tuple[int, str]  # milliseconds after noon, and what was written then


def a_rank(root: Path, rank: int, pieces: list[Written], *, kind: str = "out", number: int = 0) -> Path:
    """A file with a mark for each piece, as an agent that looks often enough leaves it."""
    folder = root / "demo-0" / f"round-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.{kind}"
    data, marks = b"", [Mark(NOON, 0)]
    for at, text in pieces:
        data += text.encode()
        marks.append(Mark(NOON + at * MS, len(data)))
    path.write_bytes(data)
    Path(log_times.beside(str(path))).write_bytes(b"".join(struct.pack("<QQ", *mark) for mark in marks))
    os.utime(path, ns=(marks[-1].time_ns, marks[-1].time_ns))
    return path


def test_ranks_and_their_errors_are_merged_in_order_of_time(tmp_path: Path) -> None:
    a_rank(tmp_path, 0, [(1, "a\n"), (4, "d\ne\n")])
    a_rank(tmp_path, 1, [(2, "b\n"), (4, "f\n"), (9, "unfinished")])
    a_rank(tmp_path, 0, [(3, "c\n")], kind="err")
    a_rank(tmp_path, 1, [(0, "g\n")], number=1)
    expected = ["[0] a", "[1] b", "[0] c", "[0] d", "[0] e", "[1] f", "[1] unfinished", "[1] g"]
    assert read(tmp_path, LogQuery()) == expected
    assert read(tmp_path, LogQuery(follow=True)) == expected
    for count in range(10):
        assert read(tmp_path, LogQuery(tail=count)) == expected[max(0, 8 - count) :]
    assert read(tmp_path, LogQuery(rank=0)) == ["a", "c", "d", "e"]
    assert read(tmp_path, LogQuery(timestamps=True, markers=True, tail=2)) == [
        "2026-01-31T12:00:00.009Z (muster: round 0)",
        "2026-01-31T12:00:00.009Z [1] unfinished",
        "2026-01-31T12:00:00.000Z (muster: round 1)",
        "2026-01-31T12:00:00.000Z [1] g",
    ]


def test_a_line_is_as_old_as_its_end(tmp_path: Path) -> None:
    a_rank(tmp_path, 0, [(1, "one "), (2, "li"), (3, "ne\ntwo"), (9, "\n")])
    a_rank(tmp_path, 1, [(2, "between\n")])
    assert read(tmp_path, LogQuery(timestamps=True)) == [
        "2026-01-31T12:00:00.002Z [1] between",
        "2026-01-31T12:00:00.003Z [0] one line",
        "2026-01-31T12:00:00.009Z [0] two",
    ]


def test_what_came_after_the_last_mark_is_as_old_as_the_last_write(tmp_path: Path) -> None:
    path = a_rank(tmp_path, 0, [(1, "noted\n")])
    with open(path, "ab") as file:
        file.write(b"its agent was killed\n")
    os.utime(path, ns=(NOON + 7 * MS, NOON + 7 * MS))
    assert read(tmp_path, LogQuery(timestamps=True)) == [
        "2026-01-31T12:00:00.001Z [0] noted",
        "2026-01-31T12:00:00.007Z [0] its agent was killed",
    ]


def test_a_log_of_an_older_version_has_no_times_and_an_order_that_is_a_guess(tmp_path: Path) -> None:
    for rank, last in ((0, 1000), (1, 500)):
        path = a_rank(tmp_path, rank, [(0, "".join(f"{number}\n" for number in range(4)))])
        Path(log_times.beside(str(path))).unlink()
        os.utime(path, ns=(NOON + last * MS, NOON + last * MS))
        os.utime(path.parent, ns=(NOON, NOON))
    lines = read(tmp_path, LogQuery(timestamps=True))
    assert sorted(lines) == sorted(f"- [{rank}] {number}" for rank in (0, 1) for number in range(4))
    assert lines[-2:] == ["- [0] 2", "- [0] 3"]
    assert read(tmp_path, LogQuery(tail=2)) == ["[0] 2", "[0] 3"]


PIECES = st.lists(st.tuples(st.integers(0, 9), st.text("ab\n", min_size=1, max_size=5)), max_size=8).map(
    lambda found: sorted(found, key=lambda piece: piece[0])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=4), st.integers(0, 12), st.sampled_from([1, 3, 1 << 18]))
def test_each_line_comes_once_in_order_and_a_tail_is_the_end_of_that(
    ranks: list[list[Written]], count: int, room: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_streams, "AHEAD", room)
        patch.setattr(log_streams, "MARKS", room)
        patch.setattr(log_streams, "FEWEST_MARKS", 2)
        root = Path(folder)
        for rank, pieces in enumerate(ranks):
            a_rank(root, rank, pieces)
        shown = read(root, LogQuery(timestamps=True))
        times = [line.split(" ")[0] for line in shown]
        assert times == sorted(times)
        bare = [STAMP.sub("", line, count=1) for line in shown]
        for rank, pieces in enumerate(ranks):
            text = "".join(part for _, part in pieces)
            expected = text.removesuffix("\n").split("\n") if text else []
            assert [line.partition(" ")[2] for line in bare if line.startswith(f"[{rank}]")] == expected
        assert read(root, LogQuery()) == bare == read(root, LogQuery(follow=True))
        assert read(root, LogQuery(tail=count)) == bare[max(0, len(bare) - count) :]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 60)), max_size=9))
def test_whatever_stands_where_marks_are_every_line_comes_once(noise: bytes, marks: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        texts = {rank: [f"{rank}.{number}" for number in range(8)] for rank in (0, 1)}
        for rank, lines in texts.items():
            a_rank(root, rank, [(rank, "\n".join(lines) + "\n")])
        beside = root / "demo-0" / "round-0" / "rank-0.out.times"
        for hostile in (noise, b"".join(struct.pack("<QQ", *mark) for mark in marks)):
            beside.write_bytes(hostile)
            for query in (LogQuery(), LogQuery(follow=True), LogQuery(tail=16), LogQuery(timestamps=True)):
                shown = [STAMP.sub("", line, count=1) for line in read(root, query)]
                shown = [re.sub(r"^\S+Z ", "", line) for line in shown]
                for rank, lines in texts.items():
                    assert [line for line in shown if line.startswith(f"[{rank}]")] == [f"[{rank}] {x}" for x in lines]
            assert len(read(root, LogQuery(tail=5))) == 5


def test_a_time_in_the_future_is_nobodys(tmp_path: Path) -> None:
    path = a_rank(tmp_path, 0, [(1, "a\n"), (10**12, "b\n")])
    os.utime(path, ns=(4 * 10**18, 4 * 10**18))
    before = time.time_ns()
    first, second = read(tmp_path, LogQuery(timestamps=True))
    assert first == "2026-01-31T12:00:00.001Z [0] a"
    assert log_times.stamp(before).decode() <= second.removesuffix("[0] b") <= log_times.stamp(time.time_ns()).decode()


def test_lines_longer_than_a_piece_are_cut_where_they_always_were(tmp_path: Path) -> None:
    long = "x" * (log_streams.CHUNK + 10)
    a_rank(tmp_path, 0, [(1, "first\n" + long[:1000]), (2, long[1000:] + "\nlast\n")])
    assert read(tmp_path, LogQuery(rank=0)) == ["first", long[: log_streams.CHUNK], long[log_streams.CHUNK :], "last"]


def test_memory_does_not_grow_with_logs_or_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_streams, "AHEAD", 1 << 18)
    monkeypatch.setattr(log_streams, "MARKS", 1 << 12)
    chance = random.Random(7)
    for rank in range(40):
        at, pieces = 0, []
        for number in range(150):
            at += chance.randrange(20)
            pieces.append((at, f"{number:05} {'x' * chance.randrange(4000)}\n"))
        assert a_rank(tmp_path, rank, pieces).stat().st_size * 40 > 10 << 20

    async def count(query: LogQuery) -> int:
        found = 0
        async for chunk in logs.read(tmp_path, query, lambda: True):
            found += chunk.count(b"\n")
        return found

    tracemalloc.start()
    try:
        assert asyncio.run(count(LogQuery())) == 6_000
        assert asyncio.run(count(LogQuery(tail=5_000))) == 5_000
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = log_streams.AHEAD + log_streams.MARKS * 150
    assert most < held + (2 << 20) < (3 << 20)


# Following ----------------------------------------------------------------------------------------


def test_what_is_followed_is_in_order_although_a_later_line_was_seen_first(tmp_path: Path) -> None:
    def append(rank: int, text: str, at_ns: int) -> None:
        path = tmp_path / "demo-0" / "round-0" / f"rank-{rank}.out"
        with open(path, "a") as file:
            file.write(text)
        log_times.note(str(path), Mark(at_ns, path.stat().st_size))

    async def run() -> list[str]:
        seen, over = b"", asyncio.Event()
        for rank in (0, 1):
            a_rank(tmp_path, rank, [(rank, f"begins {rank}\n")])
        async with asyncio.timeout(20):
            async for chunk in logs.read(tmp_path, LogQuery(follow=True), over.is_set):
                seen += chunk
                if seen.count(b"\n") == 2:
                    now_ns = time.time_ns()
                    append(1, "second\n", now_ns)
                    append(0, "first\n", now_ns - 5 * MS)
                if seen.count(b"\n") == 4:
                    over.set()
        return seen.decode().splitlines()

    assert asyncio.run(run()) == ["[0] begins 0", "[1] begins 1", "[0] first", "[1] second"]


def test_nothing_waits_for_marks_that_do_not_come(tmp_path: Path) -> None:
    """An agent of an older version, and a rank that never pauses."""

    async def run() -> int:
        path, over, count = a_rank(tmp_path, 0, []), asyncio.Event(), 0
        os.unlink(log_times.beside(str(path)))

        async def talk() -> None:
            while not over.is_set():
                with open(path, "a") as file:
                    file.write("more\n")
                await asyncio.sleep(0.005)

        talking = asyncio.create_task(talk())
        async with asyncio.timeout(20):
            async for chunk in logs.read(tmp_path, LogQuery(follow=True), over.is_set):
                count += chunk.count(b"\n")
                if count > 20:
                    over.set()
        await talking
        return count

    assert asyncio.run(run()) > 20


def test_a_clock_that_is_set_back_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [time.time_ns()]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])

    async def run() -> list[str]:
        path, over, seen = a_rank(tmp_path, 0, [(1, "before\n")]), asyncio.Event(), b""
        with open(path, "a") as file:
            file.write("now\n")
        async with asyncio.timeout(20):
            async for chunk in logs.read(tmp_path, LogQuery(follow=True), over.is_set):
                seen += chunk
                if seen.endswith(b"before\n"):
                    clock[0] += 10**9
                elif seen.endswith(b"now\n"):
                    clock[0] -= 3600 * 10**9
                    os.utime(path, ns=(clock[0] - 10**9, clock[0] - 10**9))
                    with open(path, "a") as file:
                        file.write("an hour ago\n")
                    os.utime(path, ns=(clock[0] - 10**9, clock[0] - 10**9))
                elif seen.endswith(b"ago\n"):
                    over.set()
        return seen.decode().splitlines()

    assert asyncio.run(run()) == ["[0] before", "[0] now", "[0] an hour ago"]


def test_the_end_of_very_many_files_is_found_in_turns(tmp_path: Path) -> None:
    for rank in range(300):
        a_rank(tmp_path, rank, [(rank, f"{rank}\n"), (1000 + rank, f"{rank}\n")])
    assert read(tmp_path, LogQuery(tail=301)) == ["[299] 299", *(f"[{rank}] {rank}" for rank in range(300))]
    assert log_tails.A_TURN // log_tails.A_LOOK < 301
