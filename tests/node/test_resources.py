"""What a worker uses is counted over all of its processes, by what the kernel and the driver say."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.node import process_table, resources
from muster.node.resources import Gpus, Usage, Watch
from muster.types.measured import WorkerUse
from tests.fleet import eventually

BUSY = """\
data = bytearray(64 << 20)
data[::4096] = b"x" * len(data[::4096])
print("up", flush=True)
while True:
    pass
"""


def a_process(
    proc: Path, pid: int, parent: int, *, ticks: int = 0, began: int = 1, private: int = 0, children: str | None = None
) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    rest = ["S", str(parent), *["0"] * 9, str(ticks), "0", *["0"] * 6, str(began)]
    (folder / "stat").write_text(f"{pid} (a ) name) {' '.join(rest)}")
    (folder / "statm").write_text(f"999 {private + 5} 5 0 0 0 0")
    if children is not None:
        (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        (folder / "task" / str(pid) / "children").write_text(children)


def a_usage(proc: Path, monkeypatch: pytest.MonkeyPatch, times: list[float]) -> Usage:
    monkeypatch.setattr("muster.node.resources.time", SimpleNamespace(monotonic=lambda: times.pop(0)))  # ours alone
    return Usage(10, Gpus({"CUDA_VISIBLE_DEVICES": ""}), str(proc))


def test_all_that_descend_from_the_agent_count_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = a_usage(tmp_path, monkeypatch, [0.0, 2.0])
    for pid, parent in ((1, 0), (10, 1), (11, 10), (12, 11), (20, 1)):
        a_process(tmp_path, pid, parent, ticks=100, private=3)
    assert usage.look() == WorkerUse(None, 9 * resources._PAGE, None, None), "one look says nothing of speed"
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1)):
        a_process(tmp_path, pid, parent, ticks=100 + process_table.TICKS, private=3)
    assert usage.look().cpu_percent == pytest.approx(150.0), "three seconds of a core in two"


def test_one_that_ended_or_has_another_ones_pid_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = a_usage(tmp_path, monkeypatch, [0.0, 1.0])
    a_process(tmp_path, 10, 1)
    a_process(tmp_path, 11, 10, ticks=500)
    usage.look()
    a_process(tmp_path, 11, 10, ticks=process_table.TICKS // 2, began=9)
    assert usage.look().cpu_percent == pytest.approx(50.0)


def test_between_two_looks_at_the_whole_machine_those_count_that_are_known_or_were_started_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = a_usage(tmp_path, monkeypatch, [0.0, 1.0, 2.0, resources.SCAN_EVERY_S])
    a_process(tmp_path, 10, 1, private=1, children="11")
    a_process(tmp_path, 11, 10, private=1)
    a_process(tmp_path, 12, 11, private=1)  # of a thread that is not its first
    assert usage.look().memory_bytes == 3 * resources._PAGE
    a_process(tmp_path, 11, 10, private=1, children="13")
    a_process(tmp_path, 13, 11, private=1)
    a_process(tmp_path, 14, 11, private=1)
    assert usage.look().memory_bytes == 4 * resources._PAGE
    a_process(tmp_path, 12, 99, private=1, began=7)
    assert usage.look().memory_bytes == 3 * resources._PAGE, "somebody else has its pid"
    assert usage.look().memory_bytes == 4 * resources._PAGE, "and now 14 is seen"


def test_without_a_proc_nothing_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert a_usage(tmp_path / "none", monkeypatch, [0.0]).look().memory_bytes == 0


def test_a_busy_process_is_seen_as_such() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            usage = Usage(process.pid, Gpus({"CUDA_VISIBLE_DEVICES": ""}))
            usage.look()
            eventually(lambda: (usage.look().cpu_percent or 0) > 5, "its loop is seen")
            assert 64 << 20 <= (usage.look().memory_bytes or 0) < 1 << 30
        finally:
            process.kill()


@pytest.mark.parametrize("visible", ["", "0"])
def test_without_a_driver_nothing_is_known_of_gpus(visible: str) -> None:
    gpus = Gpus({"CUDA_VISIBLE_DEVICES": visible}, library="libthere-is-no-such-driver.so.1")
    assert gpus.look() == (None, None)


class Driver:
    """NVML with two GPUs, of which the first is busy; an old one tells of memory in one way only."""

    def __init__(self, *, old: bool) -> None:
        if not old:
            self.nvmlDeviceGetMemoryInfo_v2 = self._memory

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 100 + index.value
        return 0 if index.value < 2 else 6

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        handle._obj.value = 101
        return 0 if name == b"GPU-second" else 6

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        rates._obj.gpu = 90 if handle.value == 100 else 20
        return 0

    def _memory(self, handle: Any, memory: Any) -> int:
        assert memory._obj.version == 0x02000028
        memory._obj.used = handle.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.used = handle.value
        return 0


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, (55.0, 201)),
        ("0", (90.0, 100)),
        ("GPU-second", (20.0, 101)),
        ("1, 0", (55.0, 201)),
        ("7", (None, None)),
        ("GPU-other", (None, None)),
    ],
)
def test_only_the_gpus_that_the_worker_sees_count(
    visible: str | None, found: tuple[float | None, int | None], old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.node.resources.ctypes.CDLL", lambda name: Driver(old=old))
    assert Gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}).look() == found


def test_a_driver_that_hangs_holds_nobody_up() -> None:
    asked, answer = threading.Event(), threading.Event()

    def look() -> WorkerUse:
        asked.set()
        answer.wait(10)
        return WorkerUse(cpu_percent=1.0)

    watch = Watch(look)
    watch.start()
    assert watch.take() is None
    assert asked.wait(10)
    assert watch.take() is None, "it is still looking"
    answer.set()
    eventually(lambda: watch._fresh is not None, "it has looked")
    assert watch.take() == WorkerUse(cpu_percent=1.0)


def test_in_a_large_world_each_tells_less_often() -> None:
    assert resources.every_s(8) == 5.0
    assert resources.every_s(4000) == 20.0
