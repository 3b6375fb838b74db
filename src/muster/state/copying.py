"""Copies of a rank's tensors into memory that outlives the rank, made while the training continues.

Tensors that only an optimizer changes are copied during forward and backward, and the optimizer's next `step` waits for
that. All others are copied before `commit` returns. A thread does the work: hashes, copies, the manifest, the seal. On
a GPU the copies have a stream of their own.

The thread first hashes, then sends the hashes to another worker, and then copies. The hashes tell that worker which
pieces it has already, so that it can have the whole step before anything large was copied.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from muster.state import content_hash, device
from muster.state.layout import Manifest, Piece
from muster.state.pace import Pace

MOST_PREVIEWED = 4000  # pieces of a step whose hashes are sent before it is sealed
MOST_TOLD = 1 << 20  # bytes that are sent with them
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

    def wants(self, step: int) -> bool:
        """Whether this step is to be copied; asked at every commit."""

    def skipped(self) -> None:
        """It was not, because there was no memory for it yet."""

    def take(self, length: int) -> Slot | None:
        """Memory of that length. May wait; None if there is no room for it."""

    def told_pace(self, pace: Pace) -> None:
        """So often this rank can copy."""

    def begin(self, step: int) -> None:
        """Note that a copy of this step begins."""

    def preview(self, slot: Slot, manifest: Manifest, included: Sequence[int]) -> None:
        """Send another worker the hashes of a step before it is sealed, with the bytes of the pieces in `included`."""

    def wait_for_preview(self, step: int, timeout_s: float) -> None:
        """Wait until another worker has received the preview of a step."""


@dataclass
class Job:
    """One step that is being copied."""

    manifest: Manifest
    tensors: Sequence[torch.Tensor]  # this rank's own memory of each, in the order of the pieces
    copied_before: Sequence[int]  # the tensors that `commit` has copied
    slot: Slot
    preview_sent: threading.Event = field(default_factory=threading.Event)  # also if there is none to send
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
        later = bool(self._hooks)
        now = [index for index in range(len(tensors)) if not (later and steady[index])]
        remaining = self._stream.save_now(tensors, now, lambda index: view(slot.memory, manifest.pieces[index]))
        slot.memory[manifest.rest.offset :][: len(rest)] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        self._stream.mark()
        job = Job(manifest, remaining, now, slot)
        self._slots.begin(manifest.step)
        self._now = job
        self._idle.clear()
        self._jobs.put(job)
        if not later:
            job.copied.wait()

    def wait_for_preview(self, timeout_s: float) -> None:
        """Wait until another worker has received the preview of the last copy."""
        deadline = time.monotonic() + timeout_s
        if (job := self._now) is not None and job.preview_sent.wait(timeout_s):
            self._slots.wait_for_preview(job.manifest.step, deadline - time.monotonic())

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
                    job.preview_sent.set()
                    job.copied.set()
                    self._prepared.clear()
                    self._jobs.put(job.manifest.room)
                    self._idle.set()
                else:
                    self._prepared.set()

    def _carry_out(self, job: Job) -> None:
        pieces = job.manifest.every
        gpu = self._stream.start(job.tensors, lambda index: raw(job.slot.memory, pieces[index]))
        here = [index for index, tensor in enumerate(job.tensors) if not tensor.is_cuda]
        in_place = [index for index in here if _is_hashed_in_place(job.tensors[index])]
        copied_first = sorted(set(here) - set(in_place))
        self._copy(job, copied_first)
        hashes = _hashes_in_slot(job, [*copied_first, len(pieces) - 1])
        hashes |= {index: content_hash.of(_as_bytes(job.tensors[index])) for index in in_place}
        if len(hashes) == len(pieces) <= MOST_PREVIEWED:
            included = small_pieces(job.manifest, job.copied_before)
            self._slots.preview(job.slot, _with_hashes(job, hashes), included)
        job.preview_sent.set()
        self._copy(job, in_place)
        job.fence = gpu.fence
        job.copied.set()
        hashes |= gpu.wait()
        hashes |= _hashes_in_slot(job, set(range(len(pieces))) - set(hashes))
        job.slot.seal(_with_hashes(job, hashes))

    def _copy(self, job: Job, indices: Sequence[int]) -> None:
        pairs = [(view(job.slot.memory, job.manifest.pieces[index]), job.tensors[index]) for index in indices]
        outdated = [(into, tensor) for into, tensor in pairs if into.data_ptr() != tensor.data_ptr()]
        if outdated:
            torch._foreach_copy_([into for into, _ in outdated], [tensor for _, tensor in outdated])


def _hashes_in_slot(job: Job, indices: Iterable[int]) -> dict[int, str]:
    """Hash pieces that are in the slot already."""
    chosen = [(index, job.manifest.every[index]) for index in indices]
    hashes = content_hash.of_parts(job.slot.memory, [(piece.offset, piece.length) for _, piece in chosen])
    return {index: digest for (index, _), digest in zip(chosen, hashes, strict=True)}


def _with_hashes(job: Job, hashes: Mapping[int, str]) -> Manifest:
    return job.manifest.with_hashes([hashes[index] for index in range(len(hashes))])


def small_pieces(manifest: Manifest, candidates: Iterable[int]) -> list[int]:
    """Choose the pieces whose bytes are sent with a preview: the rest, and small ones that others may not have."""
    room = MOST_TOLD - manifest.rest.length
    if room < 0:
        return []
    chosen = [len(manifest.pieces)]
    for index in sorted(candidates, key=lambda index: manifest.pieces[index].length):
        if (room := room - manifest.pieces[index].length) < 0:
            break
        chosen.append(index)
    return sorted(chosen)


def _is_hashed_in_place(tensor: torch.Tensor) -> bool:
    """Return True for a large tensor with the same layout in memory as its copy."""
    return tensor.numel() * tensor.element_size() > content_hash.DIRECT and tensor.is_contiguous()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


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
