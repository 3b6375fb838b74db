"""How much CPU, memory and GPU does this worker use, with all of its processes?

`/proc` tells of the agent and of what descends from it, the driver of the GPUs that the worker sees. It is looked at on
a thread of its own that nobody waits for: a driver may take its time, and the lease must not depend on it.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from muster.node import process_table
from muster.node.process_table import Process
from muster.types.measured import WorkerUse

EVERY_S = 5.0
SCAN_EVERY_S = 60.0
WORKERS_PER_S = 200  # that one coordinator hears of: in a large world each tells less often
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_DEVICES = 64


def every_s(workers: int) -> float:
    return max(EVERY_S, workers / WORKERS_PER_S)


class Watch:
    """Looks regularly, and has the last answer ready."""

    def __init__(self, look: Callable[[], WorkerUse] | None = None) -> None:
        self._look = look or Usage().look
        self._fresh: WorkerUse | None = None
        self._due = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="resources", daemon=True).start()

    def take(self) -> WorkerUse | None:
        """What was found since it was asked for, or None; then it is looked for now, for who asks in a moment."""
        found, self._fresh = self._fresh, None
        if found is None:
            self._due.set()
        return found

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            self._fresh = self._look()


class Usage:
    def __init__(self, pid: int | None = None, gpus: Gpus | None = None, proc: str = "/proc") -> None:
        self._pid = pid or os.getpid()
        self._proc = proc
        self._gpus = gpus or Gpus(os.environ)
        self._before: dict[int, Process] = {}
        self._before_at: float | None = None
        self._scan_at = -math.inf

    def look(self) -> WorkerUse:
        now = time.monotonic()
        mine = self._mine(now)
        percent = None
        if self._before_at is not None and now > self._before_at:
            spent = sum(_spent(process, self._before.get(pid)) for pid, process in mine.items())
            percent = round(100.0 * spent / process_table.TICKS / (now - self._before_at), 1)
        self._before, self._before_at = mine, now
        memory = sum(_private_bytes(f"{self._proc}/{pid}/statm") for pid in mine)
        gpu_percent, gpu_memory = self._gpus.look()
        return WorkerUse(percent, memory, gpu_percent, gpu_memory)

    def _mine(self, now: float) -> dict[int, Process]:
        """This process and all that descend from it.

        To look at all processes of a machine costs more than all the rest, so that is done now and then. In between
        those count that were known, and what their first threads have started since.
        """
        if now >= self._scan_at or process_table.started_by(self._pid, self._proc) is None:
            self._scan_at = now + SCAN_EVERY_S
            every = process_table.everybody(self._proc)
            children: dict[int, list[int]] = {}
            for pid, process in every.items():
                children.setdefault(process.parent, []).append(pid)
            return _tree([self._pid], every.get, lambda pid: children.get(pid, ()))
        known = [self._pid, *self._before]
        return _tree(known, self._same, lambda pid: process_table.started_by(pid, self._proc) or ())

    def _same(self, pid: int) -> Process | None:
        """That process, unless another one has its pid by now."""
        found, before = process_table.find(pid, self._proc), self._before.get(pid)
        return found if found is None or before is None or found.began == before.began else None


def _tree(
    first: list[int], process_of: Callable[[int], Process | None], children_of: Callable[[int], Iterable[int]]
) -> dict[int, Process]:
    found: dict[int, Process] = {}
    todo = [*first]
    while todo:
        pid = todo.pop()
        if pid not in found and (process := process_of(pid)) is not None:
            found[pid] = process
            todo += children_of(pid)
    return found


def _spent(process: Process, before: Process | None) -> int:
    same = before is not None and before.began == process.began
    return max(0, process.ticks - (before.ticks if before is not None and same else 0))


def _private_bytes(path: str) -> int:
    """What a process has in memory for itself: what it shares, with files or others, would count again and again."""
    try:
        with open(path, "rb") as file:
            resident, shared = file.read().split()[1:3]
        return max(0, int(resident) - int(shared)) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


# GPUs --------------------------------------------------------------------------------------------


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _OldMemory(ctypes.Structure):
    """Here what the driver has for itself counts as used."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    ]


class Gpus:
    """Those that this worker sees, by the driver's own library (NVML). Without it nothing is known of them."""

    def __init__(self, env: Mapping[str, str], library: str = "libnvidia-ml.so.1") -> None:
        self._visible = env.get("CUDA_VISIBLE_DEVICES")
        self._library = library
        self._nvml: ctypes.CDLL | None = None
        self._handles: Sequence[ctypes.c_void_p] | None = None  # None: not looked for yet

    def look(self) -> tuple[float | None, int | None]:
        """How busy they are, on average, and the memory that is used on all of them."""
        if self._handles is None:
            self._handles = self._find()
        busy, used = [], []
        for handle in self._handles:
            rates = _Utilization()
            if self._ask("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates)):
                busy.append(rates.gpu)
            if (memory := self._used(handle)) is not None:
                used.append(memory)
        return (round(sum(busy) / len(busy), 1) if busy else None), (sum(used) if used else None)

    def _used(self, handle: ctypes.c_void_p) -> int | None:
        memory, old = _Memory(ctypes.sizeof(_Memory) | 2 << 24), _OldMemory()
        if self._ask("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory)):
            return int(memory.used)
        return int(old.used) if self._ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(old)) else None

    def _ask(self, name: str, *words: object) -> bool:
        """Whether the driver answered. One that lacks the function does not."""
        function = getattr(self._nvml, name, None)
        return function is not None and function(*words) == 0

    def _find(self) -> Sequence[ctypes.c_void_p]:
        names = None if self._visible is None else [one.strip() for one in self._visible.split(",") if one.strip()]
        if names == []:
            return ()
        try:
            self._nvml = ctypes.CDLL(self._library)
        except OSError:
            return ()
        if not self._ask("nvmlInit_v2"):
            return ()
        if names is None:
            count = ctypes.c_uint()
            self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
            names = [str(index) for index in range(count.value)]
        return [handle for name in names[:_MOST_DEVICES] if (handle := self._handle(name)) is not None]

    def _handle(self, name: str) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        if name.isdecimal():
            found = self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            found = self._ask("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(handle))
        return handle if found else None
