"""Reading folders that ranks write: whatever lies there, of whatever size, the event loop goes on."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from muster import trimming
from muster.backends.local import log_files, log_keeping, logs, processes
from muster.backends.local.backend import LocalBackend
from muster.backends.local.log_tails import Tail
from muster.clock import SystemClock
from muster.node import logs as agent_logs
from muster.ports import LogQuery
from muster.types.training import Uid
from tests.backends.test_local import read, written
from tests.contract.test_backend import until
from tests.memory_store import MemoryStore
from tests.training_builders import a_training

HUGE = 15 << 30
BOUND_S = 20.0


def within(seconds: float, work: Callable[[], object]) -> object:
    """What it returns or raises; one that never ends fails the test instead of holding it up."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"it did not return in {seconds:g} s"
    return found[0]


@asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """The times between the turns that a task gets which wants one all the time."""
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    task = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    try:
        yield gaps
        await asyncio.sleep(0.01)  # the last one is told when it is over
    finally:
        task.cancel()


def a_huge_file(root: Path, *lines: tuple[int, bytes]) -> Path:
    """15 GB that take no room, with lines here and there."""
    written(root, "demo-0", 0, 0, "")
    path = root / "demo-0" / "round-0" / "rank-0.out"
    os.truncate(path, HUGE)
    with open(path, "r+b") as file:
        for at, text in lines:
            file.seek(at)
            file.write(text)
    return path


@pytest.mark.parametrize("lines", [(), ((1 << 20, b"\n"), (1 << 21, b"\n" * (1 << 20)), (1 << 26, b"a\nb\n"))])
def test_a_reader_of_a_huge_file_leaves_the_loop_to_others(
    tmp_path: Path, lines: tuple[tuple[int, bytes], ...]
) -> None:
    a_huge_file(tmp_path, (0, b"a"), *lines)  # nothing of it was dropped

    async def run() -> tuple[float, int]:
        largest, until = 0, time.monotonic() + 2
        async with ticking() as gaps:
            async for chunk in logs.read(tmp_path, LogQuery(), lambda: True):
                largest = max(largest, len(chunk))
                if time.monotonic() > until:
                    break
        return max(gaps), largest

    gap, largest = asyncio.run(run())
    assert gap < 0.5
    assert largest < 8 << 20, "a line without an end is cut"


def test_the_tail_of_a_huge_file_is_found_from_its_end(tmp_path: Path) -> None:
    a_huge_file(tmp_path, (HUGE - 12, b"\nlast\nwords\n"))
    assert within(BOUND_S, lambda: read(tmp_path, LogQuery(rank=0, tail=2))) == ["last", "words"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_tail_longer_than_a_piece_is_whole(tmp_path: Path, whole: bool) -> None:
    lines = [f"{number:07}" for number in range(200_000)]
    written(tmp_path, "demo-0", 0, 0, "\n".join(lines) + ("\n" if whole else ""))
    assert read(tmp_path, LogQuery(rank=0, tail=150_000)) == lines[-150_000:]


def test_a_file_that_grows_while_it_is_read_has_an_end(tmp_path: Path) -> None:
    written(tmp_path, "demo-0", 0, 0, "line\n")

    async def run() -> int:
        count = 0
        async for _ in logs.read(tmp_path, LogQuery(), lambda: True):
            count += 1
            with open(tmp_path / "demo-0" / "round-0" / "rank-0.out", "a") as file:
                file.write("line\n")
            if count > 10:
                break
        return count

    assert asyncio.run(run()) == 1


def test_what_is_followed_comes_round_by_round_with_unfinished_lines_where_they_belong(tmp_path: Path) -> None:
    async def run() -> list[str]:
        seen, over = b"", asyncio.Event()
        written(tmp_path, "demo-0", 0, 0, "one\nunfinished")
        async with asyncio.timeout(BOUND_S):
            async for chunk in logs.read(tmp_path, LogQuery(follow=True), over.is_set):
                seen += chunk
                if seen.endswith(b"one\n"):
                    written(tmp_path, "demo-1", 1, 0, "two\n")
                if seen.endswith(b"two\n"):
                    written(tmp_path, "demo-1", 7, 0, "three")
                    over.set()
        return seen.decode().splitlines()

    assert asyncio.run(run()) == ["[0] one", "[0] unfinished", "[0] two", "[0] three"]


# What else may lie there --------------------------------------------------------------------------


def a_pipe(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def a_link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def a_second_name(path: Path, secret: Path) -> None:
    path.hardlink_to(secret)


def a_socket(path: Path, secret: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def a_device(path: Path, secret: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        open(path, "rb").close()
    except OSError:
        pytest.skip("only root may make devices")


def a_folder(path: Path, secret: Path) -> None:
    path.mkdir()


PLANTED = [a_pipe, a_link, a_second_name, a_socket, a_device, a_folder]


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("query", [LogQuery(), LogQuery(tail=5), LogQuery(follow=True)])
def test_only_regular_files_are_read(tmp_path: Path, plant: Callable[[Path, Path], None], query: LogQuery) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret\n")
    root = tmp_path / "logs"
    written(root, "demo-0", 0, 1, "good\n")
    plant(root / "demo-0" / "round-0" / "rank-0.out", secret)
    assert within(BOUND_S, lambda: read(root, query)) == ["[1] good"]


@pytest.mark.parametrize("link", ["demo-1", "demo-0/round-1", "."])
def test_no_folder_is_entered_through_a_link(tmp_path: Path, link: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    written(elsewhere, "demo-9", 1, 0, "secret\n")
    root = tmp_path / "logs"
    target = {"demo-1": elsewhere / "demo-9", "demo-0/round-1": elsewhere / "demo-9" / "round-1", ".": elsewhere}[link]
    if link != ".":
        written(root, "demo-0", 0, 0, "good\n")
    (root / link).symlink_to(target) if link != "." else root.symlink_to(target)
    assert read(root, LogQuery()) == ([] if link == "." else ["[0] good"])


def test_a_look_over_very_many_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MOST_ENTRIES", 50)
    for rank in range(120):
        written(tmp_path, "demo-0", 0, rank, "x\n")
    assert len(read(tmp_path, LogQuery())) == 50


def test_which_of_very_many_files_a_tail_is_of_is_not_the_loop_s_to_find_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank can make a hundred thousand of them."""
    found_by: list[str] = []

    def turn(tail: Tail) -> bool:
        found_by.append(threading.current_thread().name)
        return go_on(tail)

    go_on = Tail.turn
    monkeypatch.setattr(Tail, "turn", turn)
    for rank in range(3):
        written(tmp_path, "demo-0", 0, rank, "x\n")
    assert len(read(tmp_path, LogQuery(tail=2))) == 2
    assert [name.startswith("logs") for name in found_by] == [True]


# Workers and agents -------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", [a_pipe, a_link, a_second_name, a_socket])
def test_a_worker_is_not_started_with_anything_but_a_file_for_its_log(
    tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    plant(tmp_path / "worker.log", kept)
    tried = within(BOUND_S, lambda: processes.spawn(("/bin/echo", "x"), {}, "/", tmp_path / "worker.log"))
    assert isinstance(tried, OSError)
    assert kept.read_text() == "as it was"


@pytest.mark.usefixtures("processes")
def test_the_last_words_of_a_worker_are_its_own(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "coordinator.addr").write_text("127.0.0.1:9\n")
    (home / "token").write_text("secret\n")

    async def run() -> str:
        backend = LocalBackend(home, MemoryStore(), SystemClock())
        training = a_training(command=("/bin/true",), working_dir=str(tmp_path))
        worker = await backend.start(training, "demo-0", (), "token")
        path = home / "logs" / training.uid / "demo-0" / "worker.log"
        path.unlink()
        path.symlink_to(home / "token")
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(BOUND_S):
            await until(lambda: not backend.workers(training.uid)[0].alive)
        await backend.close()
        ended = backend.workers(training.uid)[0]
        assert ended.exit_code == -signal.SIGKILL
        return ended.last_words

    assert asyncio.run(run()) == ""


def test_an_agent_reads_only_the_end_of_what_a_rank_left(tmp_path: Path) -> None:
    path = a_huge_file(tmp_path, (HUGE - 6, b"\nlast\n"))
    assert within(BOUND_S, lambda: agent_logs.whole(str(path), 0)[-1]) == "last"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert within(BOUND_S, lambda: agent_logs.tail(str(pipe), 0)) == ()
    assert isinstance(within(BOUND_S, lambda: agent_logs.make(str(pipe))), OSError)


# Keeping them small -------------------------------------------------------------------------------


def test_logs_of_workers_that_are_gone_are_kept_small(tmp_path: Path) -> None:
    for uid in ("small", "all"):
        written(tmp_path / "logs" / uid, "demo-0", 0, 0, ("x" * 99 + "\n") * 10_000)
    limits = {Uid("small"): 1 << 16, Uid("all"): 0}

    async def run() -> None:
        task = asyncio.create_task(log_keeping.keep_small(tmp_path, limits, set, limits.__getitem__))
        await until(lambda: trimming.taken(tmp_path) < 1_500_000)
        task.cancel()

    asyncio.run(run())
    assert trimming.taken(tmp_path / "logs" / "small") < 100_000 < 900_000 < trimming.taken(tmp_path / "logs" / "all")


def test_where_logs_cannot_be_kept_small_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(root: Path, keep: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(log_files, "cut", refuse)
    asyncio.run(log_keeping.keep_small(tmp_path, [Uid("a"), Uid("b")], set, lambda uid: 1 << 16))
    assert [record.message for record in caplog.records] == [
        f"logs under {tmp_path} cannot be kept small: Operation not supported"
    ]
