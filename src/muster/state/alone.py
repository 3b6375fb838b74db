"""State in a durable folder. Ranks read it with or without an agent; without an agent they also write it.

Without an agent nothing is copied unless it is time to write it to disk.

Several ranks have to write the same steps, and nobody of ours is there to say which. So rank 0 names a step that is
still to come in a file, and everybody looks at that file at each commit. A step that not all have written does not
count; then the next one is named further ahead.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch

from muster.errors import InvalidRequest, StateUnusable
from muster.state import content_hash, copying, disk, leaves
from muster.state.keeper import Damaged, Part
from muster.state.layout import Manifest
from muster.state.pace import Pace

NEXT = ".next.json"
LOOK_S = 1.0  # how often one looks whether all have written
PATIENCE_S = 30.0  # for the others to write, before another step is named
MOST_LEAD_S = 60.0
_MOST_NEXT = 4096


# Restoring

PAUSES_S = (0.5, 1.0, 2.0)  # between attempts to read a folder: a disk may fail for a moment
START_OVER = "MUSTER_STATE_START_OVER"
_LASTING = {
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}  # another attempt changes nothing
_SHOWN = 3
STORE_S = timedelta(seconds=30)
T = TypeVar("T")


class Parts:
    """The files of one step. A call raises Damaged for a torn or flipped file, OSError for an unreadable file."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __call__(self, rank: int) -> Part:
        path = self._paths[rank]
        with _opened(path) as file:
            manifest = file.manifest(path)
        return Part(manifest, _Pieces(path, manifest), "disk", [0] * len(manifest.every))


class _Pieces(Sequence[torch.Tensor]):
    """Each is read when it is asked for, into memory of its own: a file may change while it is looked at."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._every = manifest.every

    def __len__(self) -> int:
        return len(self._every)

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        piece = self._every[index]
        found = torch.empty(piece.length, dtype=torch.uint8)
        with _opened(self._path) as file:
            file.fill(content_hash.memory_of(found), piece.offset)
        return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[disk.Opened]:
    try:
        with disk.opened(path) as file:
            yield file
    except ValueError as error:
        raise Damaged(f"{path.name}: {error}") from None


def read_patiently(folder: Path, read: Callable[[], T], tell: Callable[[str], None] = lambda text: None) -> T:
    """Return the result of `read`. If the disk fails, retry for some seconds, then raise StateUnusable."""
    for pause_s in PAUSES_S:
        try:
            return read()
        except OSError as error:
            if error.errno in _LASTING:
                raise unreadable(folder, error) from error
            tell(f"{folder} cannot be read now; trying again: {error}")
        time.sleep(pause_s)
    try:
        return read()
    except OSError as error:
        raise unreadable(folder, error) from error


def unreadable(folder: Path, error: OSError) -> StateUnusable:
    """Return the error for a disk that fails, with advice. The steps in the folder may all be whole."""
    place = Path(error.filename) if isinstance(error.filename, str) else folder
    step = next((path for path in (place, *place.parents) if path.parent == folder), None)
    other = f" To go on without {step.name}, move it elsewhere." if step is not None else ""
    return StateUnusable(
        f"the steps in {folder} cannot be read: {error.strerror or error}. Start again when `ls -lR {folder}` works."
        f"{other} Nothing in the folder was changed. The failure: {error}",
        retryable=True,
    )


def check_beginning(folder: Path, unusable: Mapping[Path, str], start_over: bool, durable_step: int = 0) -> None:
    """Refuse to begin at step 0 where steps were kept, unless the user allows it.

    The folder may have steps that are all unusable, or no step although the run has written `durable_step`.
    """
    if not (unusable or durable_step) or start_over or os.environ.get(START_OVER, "") not in ("", "0"):
        return
    if not unusable:
        raise StateUnusable(
            f"{folder} has no steps, but this run has written step {durable_step}. Is its disk mounted? Bring the "
            f"folder back and start again, or set {START_OVER}=1 to begin at step 0",
            retryable=True,
        )
    steps = [f"{where.name}: {why}" for where, why in list(unusable.items())[:_SHOWN]]
    more = f"; {len(unusable) - _SHOWN} more" if len(unusable) > _SHOWN else ""
    raise StateUnusable(
        f"no step in {folder} can be used. Bring back what is missing, or set {START_OVER}=1 "
        f"to begin at step 0. Nothing was removed: {'; '.join(steps)}{more}"
    )


def check_same_step(step: int, ranks: int, folder: Path, tell: Callable[[str], None]) -> None:
    """Refuse a step that differs from the step of other ranks: on one machine the disk may not be mounted.

    The ranks of a first round look for the newest step themselves. The first rank that comes here writes its step into
    the round's store; no rank waits for another.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = PrefixStore("muster-state", TCPStore(*address, ranks, False, timeout=STORE_S, wait_for_workers=False))
        first = int(store.compare_set("step", "", str(step)))
    except (LookupError, ValueError, RuntimeError) as error:
        tell(f"whether all ranks read the same step in {folder} is not known: {error}")
        return
    if first != step:
        raise StateUnusable(
            f"this rank reads step {step} in {folder}, and another rank of the round step {first}: their machines do "
            f"not see the same folder. Compare `ls {folder}` on all machines, then start again"
        )


def set_aside(where: Path, why: BaseException) -> str:
    """Mark a damaged step, so that no rank uses it again. Return a sentence about it for the user."""
    try:
        disk.set_aside(where, str(why))
    except OSError as error:
        return f"The step cannot be set aside ({error.strerror or error}): move {where} elsewhere"
    return "The step is set aside, and stays where it is"


# Committing


@dataclass(frozen=True)
class Plan:
    """Which step is written next: the first one that is committed from there on."""

    step: int
    attempt: str
    base: int  # where rank 0 went on

    def text(self) -> str:
        return json.dumps({"step": self.step, "attempt": self.attempt, "base": self.base})


def _read_plan(path: Path) -> Plan | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError), path.open() as file:
        told = json.loads(file.read(_MOST_NEXT))
        plan = Plan(int(told["step"]), str(told["attempt"]), int(told["base"]))
        return plan if plan.attempt.isalnum() and plan.attempt.isascii() and len(plan.attempt) <= 64 else None
    return None


class _Slot:
    def __init__(self, keeping: Keeping, length: int) -> None:
        self._keeping = keeping
        self.memory = torch.empty(length, dtype=torch.uint8)

    def seal(self, manifest: Manifest) -> None:
        self._keeping.write(manifest, self.memory)

    def free(self) -> None:
        pass


class Keeping:
    """Where copies go: to disk, now and then."""

    def __init__(
        self,
        folder: Path | None,
        every_s: float,
        rank: int = 0,
        ranks: int = 1,
        base: int = 0,
        tell: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._every_s = every_s
        self._rank, self._ranks, self._base = rank, ranks, base
        self._tell, self._clock = tell, clock
        self._slot: _Slot | None = None
        self._attempt = os.urandom(6).hex()
        self._due = clock() + every_s
        self._last = base
        self._commits = 0
        self._stride = 1
        self._step_s: float | None = None
        self._at: float | None = None
        self._lead, self._lead_s = 2, 0.0 if _on_one_machine(ranks) else 1.0
        self._plan: Plan | None = None
        self._seen = self._signature()  # of an attempt before this one
        self._pending: tuple[Path, int, float] | None = None  # a step that others may still write
        self._look = 0.0
        self._missed = 0
        self._writing = False
        self._checked = False
        self.every = 1
        self.refused = ""
        self.safe: int | None = None
        if rank == 0 and folder is not None and ranks > 1:
            with contextlib.suppress(OSError):
                (folder / NEXT).unlink()

    # Which steps

    def wants(self, step: int) -> bool:
        """Whether this step, which is done now, is to be copied. To be asked at every commit."""
        if self._folder is None:
            return False
        now = self._clock()
        self._measure(step, now)
        self._look_around(now)
        if self._ranks == 1:
            wanted = now >= self._due and not self._writing
            plan = Plan(step, self._attempt, self._base) if wanted else None
        else:
            plan = self._named(step, now)
        before, self._last = self._last, step
        if plan is None or plan.step > step:
            return False
        self._plan = None if self._ranks > 1 else plan
        if plan.step <= before and self._ranks > 1:
            return False  # we heard of it too late
        self._attempt = plan.attempt
        self._writing = True
        self._pending = disk.step_folder(self._folder, step, plan.attempt), step, now + PATIENCE_S
        return True

    def skipped(self) -> None:
        """There was no memory for it yet."""
        self._writing = False
        self._pending = None

    def _measure(self, step: int, now: float) -> None:
        self._commits += 1
        if step > self._last:
            self._stride = step - self._last
            if self._at is not None:
                self._step_s = now - self._at
        self._at = now

    def _named(self, step: int, now: float) -> Plan | None:
        assert self._folder is not None
        if self._rank == 0:
            idle = self._plan is None and self._pending is None and not self._writing
            if idle and now >= self._due and self._commits > 1:  # by then the others are here as well
                self._plan = self._name(step)
            return self._plan
        if (signature := self._signature()) != self._seen:
            self._seen = signature
            self._plan = _read_plan(self._folder / NEXT)
            if self._plan is not None and self._plan.base != self._base:
                raise InvalidRequest(
                    f"rank 0 went on from step {self._plan.base} and rank {self._rank} from step {self._base}: "
                    f"they did not see the same in {self._folder}; start all ranks again"
                )
        return self._plan

    def _name(self, step: int) -> Plan | None:
        assert self._folder is not None
        commits = max(self._lead, math.ceil(self._lead_s / self._step_s) if self._step_s else self._lead)
        plan = Plan(step + commits * self._stride, self._attempt, self._base)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            disk.replace_text(self._folder / NEXT, plan.text())
        except OSError as error:
            self._due = self._clock() + self._every_s
            self._tell(f"nothing can be written to {self._folder}: {error.strerror}")
            return None
        return plan

    def _signature(self) -> tuple[int, int] | None:
        if self._folder is None or self._ranks == 1:
            return None
        try:
            found = os.stat(self._folder / NEXT)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def _look_around(self, now: float) -> None:
        """Have all written? Then it counts; if not after a while, rank 0 names another step, further ahead."""
        if self._pending is None or self._writing or now < self._look:
            return
        self._look = now + (LOOK_S if self._ranks > 1 else 0.0)
        where, step, until = self._pending
        try:
            written = bool(disk.whole(where))
        except OSError:
            written = False  # this rank cannot read the folder now
        if written:
            self._pending, self._missed = None, 0
            self.safe = step
        elif now >= until:
            self._pending = None
            self._due = now
            self._lead = min(self._lead * 2, 1 << 12)
            self._lead_s = min(max(self._lead_s * 2, 0.5), MOST_LEAD_S)
            self._missed += 1
            if self._missed > 1 and self._rank == 0:
                self._tell(f"step {step} was not written by all {self._ranks} ranks: does each of them call commit?")

    # Writing

    def take(self, length: int) -> _Slot | None:
        if self._slot is None or self._slot.memory.numel() < length:
            self._slot = _Slot(self, length)
        return self._slot

    def told_pace(self, pace: Pace) -> None:
        pass

    def begin(self, step: int) -> None:
        pass

    def preview(self, slot: object, manifest: Manifest, included: Sequence[int]) -> None:
        pass

    def wait_for_preview(self, step: int, timeout_s: float) -> None:
        pass

    def write(self, manifest: Manifest, memory: torch.Tensor) -> None:
        """Called beside the training."""
        assert self._folder is not None
        began = self._clock()
        marked = replace(manifest, attempt=self._attempt)
        try:
            if not self._checked:
                self._checked = True
                if odd := leaves.refused(bytes(content_hash.memory_of(copying.raw(memory, manifest.rest)))):
                    self._tell(f"what is written could not be read again: {odd}")
            disk.write(self._folder, marked, content_hash.memory_of(memory))
            if self._ranks == 1:
                self.safe = manifest.step
        except OSError as error:
            self._pending = None
            self._tell(f"nothing can be written to {self._folder}: {error.strerror or error}")
        finally:
            if manifest.rank == 0:
                self._drop_old()
            ended = self._clock()
            self._due = ended + self._every_s
            if self._pending is not None:
                self._pending = *self._pending[:2], ended + max(PATIENCE_S, 2 * (ended - began))
            self._writing = False

    def _drop_old(self) -> None:
        assert self._folder is not None
        try:
            disk.drop_old(self._folder, self._attempt)
        except OSError as error:
            self._tell(f"old steps in {self._folder} cannot be removed: {error.strerror or error}")


def _on_one_machine(ranks: int) -> bool:
    """Where what one writes is seen by all at once."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(ranks)
