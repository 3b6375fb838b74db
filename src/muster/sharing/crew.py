"""How do the ranks of one pipeline act as one? Rank 0 speaks to the scheduler, and what comes of it is on a board.

The board is a small key-value store that all ranks see: torch.distributed's own, or one that is given. No collective
is used: a rank that fails says so and goes, and whoever waits for it hears that instead of waiting for ever. Every
rank beats; one that does not for `patience_s` is dead.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from muster import errors
from muster.errors import InvalidRequest, MusterError, SharingError, Unavailable

T = TypeVar("T")

PATIENCE_S = 60.0
MEETING_S = 1800.0
BEAT_S = 2.0
FIRST_LOOK_S, LONGEST_LOOK_S = 0.002, 0.05


class Board(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def add(self, key: str, amount: int, /) -> int: ...


class Crew:
    """One rank of a pipeline, and its way to the others. All of them make the same calls in the same order."""

    def __init__(
        self, board: Board, rank: int, size: int, *, patience_s: float = PATIENCE_S, meeting_s: float = MEETING_S
    ) -> None:
        if not 0 <= rank < size:
            raise InvalidRequest(f"rank {rank} is none of a crew of {size}")
        self.board, self.rank, self.size = board, rank, size
        self.patience_s, self.meeting_s = patience_s, meeting_s

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    def beat(self) -> None:
        """This rank lives."""
        if not self.alone:
            self.add(f"beat/{self.rank}", 1)

    def led(self, key: str, work: Callable[[], T]) -> T:
        """Rank 0 does it, and every rank returns what it returned (as JSON gives it back), or raises what it raised."""
        if self.alone:
            return work()
        if self.leads:
            try:
                value = work()
            except BaseException as error:
                self.post(key, {"error": _shown(error)})
                raise
            self.post(key, {"value": value})
            return value
        told = self.read(key, of=0, within_s=None)
        if "error" in told:
            raise _read(told["error"])
        value = told["value"]
        return value

    def left(self, key: str, problem: str = "") -> None:
        """This rank has left a stage."""
        if not self.alone:
            self.post(f"{key}/{self.rank}", problem)

    def all_left(self, key: str) -> list[str]:
        """When every other rank has left it, or is dead: what they say of how it went."""
        found = []
        for rank in range(self.size):
            if rank == self.rank:
                continue
            try:
                problem = self.read(f"{key}/{rank}", of=rank, within_s=self.meeting_s)
            except Unavailable as gone:
                problem = gone.message
                if not self.is_dead(rank):
                    raise
            if problem:
                found.append(f"rank {rank}: {problem}")
        return found

    # Words on the board

    def post(self, key: str, value: object) -> None:
        with _translated():
            self.board.set(key, json.dumps(value))

    def find(self, key: str) -> Any:
        """What stands there, or None."""
        with _translated():
            return json.loads(self.board.get(key)) if self.board.check([key]) else None

    def add(self, key: str, amount: int) -> int:
        with _translated():
            return self.board.add(key, amount)

    def read(self, key: str, *, of: int, within_s: float | None) -> Any:
        """What that rank writes there, once it has. Raises Unavailable if it is dead, or takes longer."""
        began, pause = time.monotonic(), FIRST_LOOK_S
        life = _Life(self, of)
        while (found := self.find(key)) is None:
            if life.silent_s > self.patience_s:
                raise Unavailable(f"rank {of} is gone: nothing was heard of it for {self.patience_s:g} s")
            if within_s is not None and time.monotonic() - began > within_s:
                raise Unavailable(f"rank {of} has not come within {within_s:g} s: it hangs, or it took another way")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_S)
        return found

    def is_dead(self, rank: int) -> bool:
        """Whether it does not beat. Takes `patience_s` if it does not."""
        life = _Life(self, rank)
        while life.silent_s <= self.patience_s:
            if life.heard:
                return False
            time.sleep(LONGEST_LOOK_S)
        return True


class _Life:
    """Of another rank, as its beats tell."""

    def __init__(self, crew: Crew, rank: int) -> None:
        self._crew, self._key = crew, f"beat/{rank}"
        self._beats = crew.add(self._key, 0)
        self._at = time.monotonic()
        self.heard = False

    @property
    def silent_s(self) -> float:
        if time.monotonic() - self._at < min(BEAT_S, self._crew.patience_s / 4):
            return 0.0
        beats = self._crew.add(self._key, 0)
        if beats != self._beats:
            self._beats, self._at, self.heard = beats, time.monotonic(), True
        return time.monotonic() - self._at


class Nobody:
    """The board of a rank that is alone."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes:
        raise KeyError(key)

    def check(self, keys: list[str], /) -> bool:
        return False

    def add(self, key: str, amount: int, /) -> int:
        return 0


def found(name: str, env: Mapping[str, str] = os.environ) -> Crew | None:
    """The crew of this process: torch.distributed's ranks, or itself alone. None: it is to have ranks, but not yet."""
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_available() and torch_distributed.is_initialized():
        size = int(torch_distributed.get_world_size())
        if size == 1:
            return Crew(Nobody(), 0, 1)
        core: Any = importlib.import_module("torch.distributed.distributed_c10d")
        board = torch_distributed.PrefixStore(f"muster-sharing/{name}", core._get_default_store())
        return Crew(board, int(torch_distributed.get_rank()), size)
    size_told = env.get("WORLD_SIZE", "1")
    return Crew(Nobody(), 0, 1) if size_told in ("", "1") else None


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch's stores raise DistNetworkError and others, all RuntimeErrors
        raise Unavailable(f"the other ranks of this pipeline cannot be reached: {error}") from error


def _shown(error: BaseException) -> dict[str, Any]:
    if isinstance(error, MusterError):
        return {"status": error.status, "body": errors.to_wire(error, "")}
    lost = SharingError(f"rank 0 failed: {type(error).__name__}: {error}"[:500])
    return {"status": lost.status, "body": errors.to_wire(lost, "")}


def _read(told: Mapping[str, Any]) -> MusterError:
    return errors.from_wire(int(told["status"]), told["body"])
