"""How do tensors get into memory that outlives the rank, without stopping the training?

What only an optimizer changes is copied beside forward and backward, and its next `step` waits for that; what anybody
may change is copied at once. A thread does the work: copies, sums, the manifest, the seal. On a GPU the copies have a
stream of their own, into memory that is registered once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from muster.state import device, glances, layout, sums
from muster.state.layout import Manifest, Piece
from muster.state.pace import Pace

MOST_MARKED = 4000  # pieces, at which a glance takes milliseconds
MOST_AT_ONCE = 1 << 20
SOON_S = 0.02  # memory that was used before comes at once; what is new takes seconds, and nobody waits for that
SMALL, SMALL_S = 256 << 20, 1.0  # so little comes at once always, unless the machine is very busy


class Slot(Protocol):
    """Memory for one step, as bytes; `seal` makes it count."""

    memory: torch.Tensor

    def seal(self, manifest: Manifest) -> None: ...

    def free(self) -> None:
        """It is not used after all."""


class Keeping(Protocol):
    """Where copies go."""

    every: int  # a copy is taken of steps that can be divided by this
    refused: str  # why there is no memory for one
    safe: int | None  # the newest step that is known to be safe
    waited_s: float  # for others to hear of the last one

    def wants(self, step: int) -> bool:
        """Whether this step is to be copied; asked at every commit."""

    def skipped(self) -> None:
        """It was not, because there was no memory for it yet."""

    def take(self, length: int) -> Slot | None:
        """Memory of that length. May wait; None if there is no room for it."""

    def told_pace(self, pace: Pace) -> None:
        """So often this rank can copy."""

    def begin(self, slot: Slot, manifest: Manifest) -> None:
        """A copy begins. What has no sum yet may have been glanced at."""


@dataclass
class Job:
    """One step that is being copied."""

    manifest: Manifest
    rest: bytes
    tensors: Sequence[torch.Tensor]  # this rank's own memory of each, in the order of the pieces
    steady: Sequence[bool]
    slot: Slot
    copied: threading.Event = field(default_factory=threading.Event)
    fence: device.Fence | None = None


class Copier:
    def __init__(
        self, slots: Keeping, optimizers: Iterable[torch.optim.Optimizer], fail: Callable[[BaseException], None]
    ) -> None:
        self._slots = slots
        self._fail = fail
        self._jobs: queue.SimpleQueue[Job | int | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._ready: Slot | None = None
        self._prepared = threading.Event()
        self._prepared.set()
        self._now: Job | None = None
        self._hooks = [one.register_step_pre_hook(self._before_update) for one in optimizers]
        self._stream = device.Stream()
        self._waited_s = 0.0
        self._fences: list[device.Fence] = []
        self._thread = threading.Thread(target=self._work, name="muster-state", daemon=True)
        self._thread.start()

    def prepare(self, length: int) -> bool:
        """Whether there is memory for so much now; else it is asked for, which can take long and holds up nobody."""
        slot = self._ready
        if slot is not None and slot.memory.numel() >= length:
            return True
        if self._prepared.is_set():
            self._prepared.clear()
            self._jobs.put(length)
        if self._prepared.wait(SOON_S if length > SMALL else SMALL_S):
            slot = self._ready
            return slot is not None and slot.memory.numel() >= length
        return False

    def copy(self, manifest: Manifest, rest: bytes, tensors: Sequence[torch.Tensor], steady: Sequence[bool]) -> None:
        """Returns when nothing of it can be changed any more but by an optimizer's step. `prepare` was true."""
        slot, self._ready = self._ready, None
        assert slot is not None
        job = Job(manifest, rest, tensors, steady, slot)
        later = bool(self._hooks)
        now = [index for index in range(len(tensors)) if not (later and steady[index])]
        job.tensors = self._stream.save_now(tensors, now, lambda index: view(slot.memory, manifest.pieces[index]))
        slot.memory[manifest.rest.offset :][: len(rest)] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        self._stream.mark()
        job.manifest = _glanced(job, now)
        self._slots.begin(slot, job.manifest)
        self._now = job
        self._idle.clear()
        self._jobs.put(job)
        if not later:
            job.copied.wait()

    def finish(self, timeout_s: float | None = None) -> None:
        """Until all that was begun is sealed."""
        self._idle.wait(timeout_s)

    def taken_wait(self) -> float:
        """For how long optimizers have waited since this was last asked, here and on the GPU."""
        waited, self._waited_s = self._waited_s, 0.0
        known = [(fence, held) for fence in self._fences if (held := fence.held_up_s()) is not None]
        self._fences = [fence for fence in self._fences if fence not in [one for one, _ in known]]
        return waited + sum(held for _, held in known)

    def close(self, timeout_s: float | None = None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _before_update(self, *_: Any) -> None:
        job, self._now = self._now, None
        if job is None:
            return
        since = device.Fence.now() if any(one.is_cuda for one in job.tensors) else None
        began = time.monotonic()
        job.copied.wait()
        if job.fence is not None and since is not None:  # while we waited the GPU had work to do
            job.fence.hold_up(since)
            self._fences = [*self._fences[-8:], job.fence]
        else:
            self._waited_s += time.monotonic() - began

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, int):
                    self._ready = self._slots.take(job)
                else:
                    self._carry_out(job)
            except BaseException as error:  # noqa: BLE001  whoever trains must not end for it
                self._fail(error)
                if isinstance(job, Job):
                    with contextlib.suppress(Exception):
                        job.slot.free()
            finally:
                if isinstance(job, Job):
                    job.copied.set()
                    self._prepared.clear()
                    self._jobs.put(job.manifest.room)
                    self._idle.set()
                else:
                    self._prepared.set()

    def _carry_out(self, job: Job) -> None:
        memory, pieces = job.slot.memory, job.manifest.pieces
        made = self._stream.copy(
            job.tensors, lambda index: view(memory, pieces[index]), lambda index: raw(memory, pieces[index])
        )
        job.fence = made.fence
        job.copied.set()
        made.wait()
        found = [
            piece.sum or (made.sums[index] if index in made.sums else sums.of(raw(memory, piece)))
            for index, piece in enumerate(pieces)
        ]
        found.append(sums.of(raw(memory, job.manifest.rest)))
        job.slot.seal(job.manifest.summed(found))


def _glanced(job: Job, now: Sequence[int]) -> Manifest:
    """With the sums of what is copied, and a glance at the rest, as far as that takes no time."""
    pieces, memory = job.manifest.pieces, job.slot.memory
    left = MOST_AT_ONCE - job.manifest.rest.length
    if len(pieces) > MOST_MARKED or left < 0 or any(one.is_cuda for one in job.tensors):
        return job.manifest
    summed = set()
    for index in sorted(now, key=lambda index: pieces[index].length):
        if (left := left - pieces[index].length) < 0:
            break
        summed.add(index)
    known = [
        replace(piece, sum=sums.of(raw(memory, piece)))
        if index in summed
        else replace(piece, glance=glances.of(job.tensors[index]))
        for index, piece in enumerate(pieces)
    ]
    rest = replace(job.manifest.rest, sum=sums.of(raw(memory, job.manifest.rest)))
    return replace(job.manifest, pieces=tuple(known), rest=rest)


def raw(memory: torch.Tensor, piece: Piece) -> torch.Tensor:
    return memory[piece.offset : piece.offset + piece.length]


def view(memory: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece as the tensor that it is."""
    dtype = getattr(torch, piece.dtype)
    return raw(memory, piece).view(dtype).view(piece.shape) if piece.length else torch.empty(piece.shape, dtype=dtype)


def piece_of(name: str, tensor: torch.Tensor) -> Piece:
    from muster.state import shards

    own = shards.local(tensor)
    begin, whole = (shards.box_of(tensor)[0], tuple(tensor.shape)) if shards.is_part(tensor) else ((), None)
    length = own.numel() * own.element_size()
    return Piece(
        name,
        str(own.dtype).removeprefix("torch."),
        tuple(own.shape),
        0,
        length,
        "",
        whole,
        tuple(begin),
        own.device.type,
    )


def plan(
    rank: int, ranks: int, number: int, step: int, names: Sequence[str], tensors: Sequence[torch.Tensor], rest: bytes
) -> Manifest:
    pieces, last = layout.placed([piece_of(*one) for one in zip(names, tensors, strict=True)], len(rest))
    return Manifest(rank, ranks, number, step, pieces, last)
