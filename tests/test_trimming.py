"""Files that somebody appends to, and that stay small: nobody who writes or reads them notices, but what is gone."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muster import files, trimming
from muster.backends.local import log_files, logs
from muster.node import logs as agent_logs
from muster.ports import LogQuery

KEEP = 1 << 16


def cut(path: Path, keep: int = KEEP) -> int:
    with files.changing(path) as opened:
        return trimming.cut(opened, keep)


def lines(first: int, count: int) -> bytes:
    return b"".join(b"%09d\n" % number for number in range(first, first + count))


def a_file(root: Path, text: bytes, *, rank: int = 0, number: int = 0, worker: str = "demo-0") -> Path:
    folder = root / worker / f"round-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.out"
    path.write_bytes(text)
    return path


def disk(path: Path) -> int:
    return trimming.on_disk(path.stat())


def test_the_beginning_is_given_back_and_every_place_stays(tmp_path: Path) -> None:
    path = a_file(tmp_path, lines(0, 100_000))
    writer = os.open(path, os.O_WRONLY | os.O_APPEND)
    assert cut(path) > 900_000 and cut(path) == 0
    os.write(writer, b"more\n")
    os.close(writer)
    assert path.stat().st_size == 1_000_005 and disk(path) <= KEEP + 2 * trimming.BLOCK
    with files.reading(path) as opened:
        at, data = trimming.read(opened, 1 << 20, 10)
        assert at == trimming.begin(opened) and at % trimming.BLOCK == 0
        assert data == (lines(0, 100_000) + b"more\n")[at:]


def test_what_is_no_plain_file_is_left_alone(tmp_path: Path) -> None:
    """A rank put other things where its output belongs: a link or a second name of a file that matters, a pipe."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * (1 << 20))
    folder = tmp_path / "demo-0" / "round-0"
    folder.mkdir(parents=True)
    (folder / "rank-0.out").symlink_to(precious)
    os.link(precious, folder / "rank-1.out")
    os.mkfifo(folder / "rank-2.out")
    (folder / "rank-3.out").mkdir()
    (tmp_path / "demo-1").symlink_to(tmp_path / "demo-0")
    log_files.cut(tmp_path, KEEP)
    assert precious.read_bytes() == b"x" * (1 << 20) and disk(precious) >= 1 << 20


def test_the_newest_of_all_rounds_and_workers_is_kept(tmp_path: Path) -> None:
    old = a_file(tmp_path, lines(0, 100_000), number=0)
    before = a_file(tmp_path, lines(0, 4_000), number=1, worker="demo-7")
    new = a_file(tmp_path, lines(0, 4_000), number=2, worker="demo-8")
    other = a_file(tmp_path, lines(0, 4_000), rank=1, number=0)
    (tmp_path / "demo-0" / "worker.log").write_bytes(b"x" * (1 << 20))
    log_files.cut(tmp_path, KEEP)
    assert disk(old) == 0 and disk(other) >= 40_000, "each rank has its own"
    assert disk(new) >= 40_000 and 0 < disk(before) < 40_000
    assert trimming.taken(tmp_path) < 4 * KEEP
    agent = a_file(tmp_path, lines(0, 100_000), number=9).parent.parent
    neighbour = a_file(tmp_path, lines(0, 100_000), rank=1, number=9)
    trimming.cut_ranks(agent, KEEP, 9, [0])
    assert disk(agent / "round-9" / "rank-0.out") <= KEEP + 2 * trimming.BLOCK
    assert disk(neighbour) >= 1_000_000, "another worker's"
    trimming.cut_ranks(agent, KEEP, 10, [0])  # has not begun


def test_a_reader_begins_with_the_first_whole_line_that_is_left_and_is_told(tmp_path: Path) -> None:
    path = a_file(tmp_path, lines(0, 100_000))
    cut(path)

    async def run(tail: int | None = None) -> list[str]:
        found = [chunk async for chunk in logs.read(tmp_path, LogQuery(rank=0, tail=tail), lambda: True)]
        return b"".join(found).decode().splitlines()

    told, *kept = asyncio.run(run())
    gone = 1_000_000 - 10 * len(kept)
    assert told == f"(muster: {gone} bytes of older output were dropped)"
    assert kept == [f"{number:09d}" for number in range(100_000 - len(kept), 100_000)]
    assert asyncio.run(run(tail=3)) == kept[-3:]
    assert asyncio.run(run(tail=50_000)) == [told, *kept]
    assert agent_logs.whole(str(path), 0)[-1] == "000099999" and "\0" not in "".join(agent_logs.whole(str(path), 0))


def place_after(text: bytes) -> int:
    """How far a reader has come, with what it was told was dropped."""
    place = 0
    for line in text.splitlines():
        if line.startswith(b"(muster: "):
            place += int(line.split()[1])
        else:
            assert line == b"%09d" % (place // 10) and place % 10 == 0
            place += 10
    return place


@settings(deadline=None, max_examples=60)
@example([(29999, True, False), (76, False, True), (0, True, True), (0, True, True), (2194, True, False)])
@given(st.lists(st.tuples(st.integers(0, 30_000), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_whoever_follows_repeats_nothing_and_skips_nothing_silently(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool, bool]]
) -> None:
    """Random turns of a writer, of whoever keeps its file small, and of a follower."""
    root = tmp_path_factory.mktemp("logs")
    path = a_file(root, b"")
    over, written = False, 0

    async def run() -> bytes:
        nonlocal over, written
        found, follower = b"", logs.read(root, LogQuery(rank=0, follow=True), lambda: over)
        for count, cuts, reads in steps:
            with open(path, "ab") as file:
                file.write(lines(written, count))
            written += count
            if cuts:
                cut(path)
            if reads and place_after(found) < 10 * written:  # else it would wait for more
                found += await anext(follower)
        over = True
        async for chunk in follower:
            found += chunk
        return found

    assert place_after(asyncio.run(run())) == 10 * written


def test_where_it_cannot_be_done_that_is_said_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_file(tmp_path, lines(0, 100_000))

    def refuse(opened: int, keep: int) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(trimming, "cut", refuse)
    with pytest.raises(OSError, match="not supported"):
        log_files.cut(tmp_path, KEEP)
    with pytest.raises(OSError, match="not supported"):
        trimming.cut_rounds(tmp_path / "demo-0", KEEP)


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("1Gi", 1 << 30), ("500M", 500_000_000), ("65536", 65536)])
def test_sizes(text: str, size: int) -> None:
    assert trimming.read_limit(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1GiB", "12", "nan", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size like 500M|less than 64Ki"):
        trimming.read_limit(text)
