"""The GPU's side of a copy: a stream of its own, a ring of registered memory, and the hashes that the GPU computes.

Kept memory is not registered with CUDA: to take that back when a rank ends would take longer than all else in a
restart. Bytes go through a ring of registered buffers, which a few threads empty and fill. For tensors on the CPU the
same calls copy plainly.
"""

from __future__ import annotations

# mypy: disable-error-code=no-untyped-call
import ctypes
import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from muster.state import content_hash

LARGE = 4 << 20  # bytes from which on a GPU hashes a piece itself: below that, asking it takes longer
CHUNK = 8 << 20
BUFFERS = 32
THREADS = max(2, min(12, (os.cpu_count() or 1) // 2))
AHEAD = 3 * BUFFERS // 4  # buffers that are read before they are asked for

Place = Callable[[int], torch.Tensor]
Chunk = tuple[int, int, int]  # descriptor, offset, length


def in_use() -> bool:
    """Whether this process has touched a GPU; to ask torch for one would be to start it."""
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


@dataclass
class Buffer:
    memory: torch.Tensor
    event: torch.cuda.Event | None = None  # until then the GPU uses it

    def bytes(self, length: int) -> memoryview:
        return content_hash.memory_of(self.memory[:length])


class Ring:
    """Buffers that the GPU may read and write by itself, and the threads that work on them."""

    def __init__(self) -> None:
        whole = torch.empty(BUFFERS * CHUNK, dtype=torch.uint8, pin_memory=True)
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for one in whole.split(CHUNK):
            self._free.put(Buffer(one))
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]]] = queue.SimpleQueue()
        for _ in range(THREADS):
            threading.Thread(target=self._work, name="muster-state", daemon=True).start()

    def _work(self) -> None:
        while True:
            future, work = self._jobs.get()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  whoever waits for it hears of it
                future.set_exception(error)

    def submit(self, work: Callable[..., None], *args: Any) -> Future[None]:
        """On one of our threads. Python's own pools take nothing any more when a script ends, and we do."""
        future: Future[None] = Future()
        self._jobs.put((future, functools.partial(work, *args)))
        return future

    def take(self) -> Buffer:
        buffer = self._free.get()
        if buffer.event is not None:
            buffer.event.synchronize()
            buffer.event = None
        return buffer

    def give(self, buffer: Buffer) -> None:
        self._free.put(buffer)


@functools.cache
def ring() -> Ring:
    return Ring()


def _chunks(length: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, length, CHUNK):
        yield begin, min(CHUNK, length - begin)


class Upload:
    """Kept memory on its way to a GPU, in the order in which it is expected; what came is checked there."""

    def __init__(self) -> None:
        self._plan: deque[Chunk] = deque()
        self._ahead: deque[tuple[Chunk, Buffer, Future[None]]] = deque()
        self._came: list[tuple[torch.Tensor, str, str]] = []

    def expect(self, pieces: Iterable[Chunk]) -> None:
        """These will be wanted, in this order: they are read before they are."""
        for fd, offset, length in pieces:
            self._plan.extend((fd, offset + begin, size) for begin, size in _chunks(length))

    def bring(self, fd: int, offset: int, like: torch.Tensor, expected: str, what: str) -> torch.Tensor:
        """Bytes of a file into a tensor on a GPU, which is returned."""
        flat = like.view(-1).view(torch.uint8)
        for begin, size in _chunks(flat.numel()):
            buffer = self._read((fd, offset + begin, size))
            flat[begin : begin + size].copy_(buffer.memory[:size], non_blocking=True)
            buffer.event = torch.cuda.Event()
            buffer.event.record()
            ring().give(buffer)
        self._came.append((flat, expected, what))
        return like

    def _read(self, wanted: Chunk) -> Buffer:
        if not (self._ahead and self._ahead[0][0] == wanted) and not (self._plan and self._plan[0] == wanted):
            self._forget()
            self._plan.append(wanted)
        while self._plan and len(self._ahead) < AHEAD:
            chunk = self._plan.popleft()
            buffer = ring().take()
            self._ahead.append((chunk, buffer, ring().submit(_read_into, buffer, *chunk)))
        _, buffer, read = self._ahead.popleft()
        read.result()
        return buffer

    def _forget(self) -> None:
        """It was expected in another order."""
        self._plan.clear()
        while self._ahead:
            _, buffer, read = self._ahead.popleft()
            read.exception()
            ring().give(buffer)

    def damaged(self) -> tuple[str, str, int] | None:
        """Wait for all pieces. Return name, expected hash and length of the first one that is damaged, or None."""
        self._forget()
        condensed = [(content_hash.condense(flat), flat.numel()) for flat, _, _ in self._came]
        for (data, length), (_, expected, name) in zip(condensed, self._came, strict=True):
            if content_hash.digest(data, length) != expected:
                return name, expected, length
        return None


def _read_into(buffer: Buffer, fd: int, offset: int, length: int) -> None:
    into = buffer.bytes(length)
    while into:
        count = os.preadv(fd, [into], offset)
        if not count:
            raise OSError("kept memory is shorter than it should be")
        into, offset = into[count:], offset + count


class Fence:
    """Whatever is asked of the GPU after this waits there, not here."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event
        self._waited: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @staticmethod
    def now() -> torch.cuda.Event:
        """All that was asked of the GPU up to here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def hold_up(self, since: torch.cuda.Event) -> None:
        """`since`: when the training came here, and would have gone on."""
        torch.cuda.current_stream().wait_event(self._event)
        self._waited = since, self.now()

    def held_up_s(self) -> float | None:
        """How long the GPU stood still for it; None while that is not known."""
        if self._waited is None or not self._waited[1].query():
            return None
        return float(self._waited[0].elapsed_time(self._waited[1])) / 1000


@dataclass
class GpuCopies:
    """Copies from a GPU that are under way, and the condensed content of the large ones."""

    fence: Fence | None = None
    _event: torch.cuda.Event | None = None
    _condensed: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    _writes: Sequence[Future[None]] = ()

    def wait(self) -> dict[int, str]:
        """Wait until all copies are in memory. Return the hashes that the GPU has computed."""
        if self._event is not None:
            self._event.synchronize()
        hashes = {index: content_hash.digest(data, length) for index, (data, length) in self._condensed.items()}
        for write in self._writes:
            write.result()
        return hashes


class Stream:
    """The copies of one rank."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._begun: torch.cuda.Event | None = None

    def save_now(self, tensors: Sequence[torch.Tensor], now: Sequence[int], place: Place) -> list[torch.Tensor]:
        """Copy those: from a GPU first within it, which is quick; what is left to copy afterwards."""
        left = list(tensors)
        for index in now:
            if left[index].is_cuda:
                left[index] = left[index].clone()
            else:
                place(index).copy_(left[index])
                left[index] = place(index)
        return left

    def mark(self) -> None:
        """All that was asked of the GPU up to here comes before the copy."""
        if in_use():
            self._begun = torch.cuda.Event()
            self._begun.record()

    def start(self, tensors: Sequence[torch.Tensor], raw: Place) -> GpuCopies:
        """Start to copy the tensors that are on a GPU. `raw` returns where the bytes of a tensor go."""
        there = [index for index, tensor in enumerate(tensors) if tensor.is_cuda]
        if not there:
            return GpuCopies()
        where = tensors[there[0]].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(where)
        condensed: dict[int, tuple[torch.Tensor, int]] = {}
        writes: list[Future[None]] = []
        with torch.cuda.device(where), torch.cuda.stream(self._stream):
            if self._begun is not None:
                self._stream.wait_event(self._begun)
            for index in there:
                tensors[index].record_stream(self._stream)
                flat = tensors[index].contiguous().view(-1).view(torch.uint8)
                if flat.numel() >= LARGE:
                    condensed[index] = content_hash.condense(flat), flat.numel()
                for begin, size in _chunks(flat.numel()):
                    buffer = ring().take()
                    buffer.memory[:size].copy_(flat[begin : begin + size], non_blocking=True)
                    buffer.event = torch.cuda.Event()
                    buffer.event.record(self._stream)
                    writes.append(ring().submit(_put, buffer, raw(index)[begin : begin + size]))
            done = torch.cuda.Event()
            done.record(self._stream)
        return GpuCopies(Fence(done), done, condensed, writes)


def _put(buffer: Buffer, into: torch.Tensor) -> None:
    try:
        assert buffer.event is not None
        buffer.event.synchronize()
        buffer.event = None
        ctypes.memmove(into.data_ptr(), buffer.memory.data_ptr(), into.numel())  # torch would use all its threads
    finally:
        ring().give(buffer)
