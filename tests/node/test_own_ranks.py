"""A rank whose own processes wait for ever is found out by what the kernel tells of them; others are left in peace."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from muster.node import own_ranks
from muster.node.own_ranks import Seen
from muster.node.process_table import TICKS

SPAWNS = """\
import multiprocessing, socket, sys, time


def child(method, up):
    up.put(1)
    while method == "busy":
        pass
    time.sleep(600)


if __name__ == "__main__":
    method, count, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = socket.create_connection(("127.0.0.1", port)) if port else None
    own = multiprocessing.get_context("fork" if method == "fork" else "spawn")
    up = own.Queue()
    started = [own.Process(target=child, args=(method, up), daemon=True) for _ in range(count)]
    for one in started:
        one.start()
    for one in started:
        up.get()
    print("up", flush=True)
    [one.join() for one in started] or time.sleep(600)
"""


@contextmanager
def a_rank(folder: Path, how: str, count: int, store: int = 0) -> Iterator[int]:
    (folder / "rank.py").write_text(SPAWNS)
    words = [sys.executable, str(folder / "rank.py"), how, str(count), str(store)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as rank:
        try:
            assert rank.stdout is not None and rank.stdout.readline() == b"up\n"
            yield rank.pid
        finally:
            os.killpg(rank.pid, 9)


@pytest.fixture
def a_store() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_ranks, "LOOK_S", 0.2)


def found(pid: int, port: int, looks: int = 1000) -> str:
    """What is told of it, if it runs for so many looks."""
    left = iter(range(looks))
    return asyncio.run(own_ranks.found(lambda: None if next(left, None) is None else pid, port))


@pytest.mark.parametrize(("how", "count", "whom"), [("spawn", 2, "2 processes"), ("fork", 1, "a process")])
def test_processes_that_wait_below_a_rank_that_waits(
    tmp_path: Path, a_store: int, how: str, count: int, whom: str
) -> None:
    with a_rank(tmp_path, how, count) as pid:
        line = found(pid, a_store)
    assert line.startswith(f"rank 0 has started {whom} by itself") and "\n" not in line


def test_whoever_works_or_has_started_nobody_is_left_in_peace(tmp_path: Path, a_store: int) -> None:
    with a_rank(tmp_path, "busy", 1) as pid:
        assert found(pid, a_store, looks=5) == ""
    with a_rank(tmp_path, "spawn", 0) as pid:
        assert found(pid, a_store, looks=5) == ""


def test_a_rank_that_has_come_to_the_store_may_have_processes_that_wait(tmp_path: Path, a_store: int) -> None:
    with a_rank(tmp_path, "spawn", 2, a_store) as pid:
        assert found(pid, a_store, looks=5) == ""
        assert found(pid, 1), "that was another port"


def test_one_process_that_has_come_to_the_store_stands_for_its_rank(tmp_path: Path, a_store: int) -> None:
    with a_rank(tmp_path, "spawn", 1, a_store) as pid:
        assert own_ranks.takes_part(1 << 30, Seen(frozenset({(pid, 0)})), a_store) is False, "there is no such rank"
        assert own_ranks.takes_part(os.getpid(), Seen(frozenset({(pid, 0)})), a_store)
        both = Seen(frozenset({(pid, 0), (pid, 1)}))
        assert not own_ranks.takes_part(os.getpid(), both, a_store), "two are more than one rank"


@pytest.mark.parametrize(
    ("before", "now", "idle"),
    [
        (Seen(), Seen(), False),
        (Seen(), Seen(frozenset({(7, 1)}), 0), False),
        (Seen(frozenset({(7, 1)}), 5), Seen(frozenset({(7, 1)}), 5), True),
        (Seen(frozenset({(7, 1)}), 5), Seen(frozenset({(7, 2)}), 5), False),
        (Seen(frozenset({(7, 1)}), 5), Seen(frozenset({(7, 1)}), 5 + TICKS), False),
    ],
)
def test_the_same_processes_without_work_are_idle(before: Seen, now: Seen, idle: bool) -> None:
    assert own_ranks.idles(before, now) is idle
