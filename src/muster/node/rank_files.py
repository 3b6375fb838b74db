"""The files of one round's ranks: what they print, how far they are, and what those say of a rank's end."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

from muster import files
from muster.core.member.held_round import InRound
from muster.core.world import last_words
from muster.node import (
    fencing,
    first_bench,
    learning,
    logs,
    memory_signs,
    numbers,
    progress,
    rank_env,
    stacks,
    store_check,
    system,
)
from muster.node.rank_processes import Start
from muster.node.timekeeping import Timekeeper
from muster.state import talk
from muster.types.world import Place, RankEnd

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
LARGEST_STEP = 1 << 53  # what JSON carries exactly


class RankFiles:
    def __init__(
        self,
        place: Place,
        run_id: str,
        log_dir: Path,
        scratch: str,
        echo: logs.Echo,
        times: Timekeeper,
        state: str,
        bench_s: float | None = None,
        lease: str = "",
        store_timeout_s: float | None = None,
    ) -> None:
        """Makes them; OSError says why that cannot be."""
        self._place = place
        self._folder = log_dir / f"round-{place.number}"
        self._folder.mkdir(parents=True, exist_ok=True)
        with files.folder(self._folder):
            pass  # it is one, and not a link to another
        self._run_id = run_id
        self._echo = echo
        self._times = times
        self._state = state
        self._lease = lease
        self._store_timeout_s = store_timeout_s
        self._bench_s = bench_s if place.number == 0 and place.rank_count > 1 else None
        self.bench = os.path.join(scratch, f"bench-{place.number}")
        self._told_steps: dict[int, int] = {}
        self._oom_kills = system.oom_kills()  # of our memory group, as far as they are accounted for
        self._oom_kills_here = memory_signs.kills_here()
        self._log_starts = {rank: logs.size(self._log(rank, "err")) for rank in place.ranks}
        self.marks = {rank: os.path.join(scratch, f"progress-{place.number}-{rank}") for rank in place.ranks}
        self._notes = os.path.join(scratch, f"imports-{place.number}")  # of the first rank here: the others do the same
        learning.create(self._notes)
        self.numbers: numbers.Reader | None = None  # of what rank 0 logs, if it is ours
        self._numbers = os.path.join(scratch, f"numbers-{place.number}")
        if 0 in place.ranks:
            numbers.create(self._numbers)
            self.numbers = numbers.Reader(self._numbers)
        for rank in place.ranks:
            progress.create(self.marks[rank])
            for ending in ("out", "err"):
                logs.make(self._log(rank, ending))
                echo.follow(self._log(rank, ending), f"[{rank}] ", error=ending == "err")
                times.follow(self._log(rank, ending))

    def _log(self, rank: int, ending: str) -> str:
        return str(self._folder / f"rank-{rank}.{ending}")

    def starts(self) -> list[Start]:
        """What has to be started, rank by rank."""
        found = []
        for local_rank, rank in enumerate(self._place.ranks):
            env = rank_env.environment(self._place, local_rank, self._run_id) | rank_env.tracking(
                self._place, local_rank, self._run_id, os.environ
            )
            env |= {progress.FILE_VARIABLE: self.marks[rank], talk.SOCKET_VARIABLE: self._state}
            env[fencing.FILE_VARIABLE] = self._lease
            if self._store_timeout_s is not None:
                env[store_check.TIMEOUT_VARIABLE] = f"{self._store_timeout_s:g}"
            if self._bench_s:
                env |= first_bench.variables(self.bench if rank == 0 else "", self._bench_s)
            if rank == 0:
                env[numbers.FILE_VARIABLE] = self._numbers
            key = key_of(self._place.number, rank)
            notes = self._notes if local_rank == 0 else ""
            found.append(Start(key, env, self._log(rank, "out"), self._log(rank, "err"), notes))
        return found

    @property
    def measures_s(self) -> float | None:
        """How long rank 0 may take to say how fast the ways between workers are; None: it is not here, or not asked."""
        return self._bench_s if 0 in self._place.ranks else None

    def imported(self) -> tuple[str, ...]:
        """What a rank has imported by itself."""
        return learning.read(self._notes)

    def say_to(self, rank: int, text: str) -> None:
        """A line of ours where its user looks first."""
        with contextlib.suppress(OSError), files.appending(self._log(rank, "err")) as opened:
            os.write(opened, f"muster: {text}\n".encode(errors="replace"))

    def let_go(self, rank: int) -> None:
        """It prints no more."""
        for ending in ("out", "err"):
            self._echo.let_go(self._log(rank, ending))
            self._times.let_go(self._log(rank, ending))

    def fresh_steps(self) -> tuple[tuple[int, int, float], ...]:
        """Rank, step and its age, of those that have got on since the last time."""
        now, fresh = time.monotonic(), []
        for rank in self.marks:
            mark = self._mark(rank)
            if mark is not None and self._told_steps.get(rank) != mark[0]:
                self._told_steps[rank] = mark[0]
                fresh.append((rank, mark[0], round(now - mark[1], 4)))
        return tuple(fresh)

    def tell_again(self) -> None:
        """Another coordinator may not know what was told."""
        self._told_steps.clear()

    def first_step(self) -> tuple[int, float] | None:
        """Return the lowest of the steps that ranks reported first, and the age of the earliest of them in seconds."""
        reports = [report for mark in self.marks.values() if (report := progress.read_first(mark)) is not None]
        usable = [(step, at) for step, at in reports if abs(step) < LARGEST_STEP and math.isfinite(at)]
        if not usable:
            return None
        return min(step for step, _ in usable), round(max(0.0, time.monotonic() - min(at for _, at in usable)), 4)

    def _mark(self, rank: int) -> tuple[int, float] | None:
        """A rank writes it: what cannot be a step at a time is none."""
        mark = progress.read(self.marks[rank])
        return mark if mark is not None and abs(mark[0]) < LARGEST_STEP and math.isfinite(mark[1]) else None

    def describe(self, held: InRound, rank: int, status: int, worker: str) -> RankEnd:
        """How a rank ended, as far as can be told from what it left."""
        known: dict[str, Any] = {"worker": worker, "round": held.number, "finished_at": time.time()}
        if (mark := self._mark(rank)) is not None:
            known |= {"step": mark[0], "idle_s": round(time.monotonic() - mark[1], 3)}
        if held.stopping and not held.hung:
            return RankEnd.from_status(rank, status, stopped=status != 0, **known)
        if status == -signal.SIGKILL:
            known |= self._of_memory()
        if status != 0:
            known |= self._words(rank, status, hung=held.hung)
        return RankEnd.from_status(rank, status, **known)

    def _of_memory(self) -> dict[str, Any]:
        """Whether one that was killed was killed for memory, and what can be said if that is not known."""
        if oom := system.oom_kills() > self._oom_kills:
            self._oom_kills += 1
        return {"oom": oom, "memory": memory_signs.told(oom=oom, before=self._oom_kills_here)}

    def _words(self, rank: int, status: int, *, hung: bool) -> dict[str, Any]:
        """What it said last, and where it stood: faulthandler's dump is not the program's word."""
        err, start = self._log(rank, "err"), self._log_starts[rank]
        if not hung and -status not in _CRASHES:
            exception, place = last_words.exception(logs.recent(err, start))
            return {"stderr_tail": logs.tail(err, start), "exception": exception, "place": place}
        lines = logs.whole(err, start)
        stand = stacks.read(lines)
        told = {"stderr_tail": logs.last(stacks.words(lines)), "stack": stand.frame}
        return told | ({"hung": True, "waiting": stand.waiting} if hung else {})


def key_of(number: int, rank: int) -> str:
    return f"{number}.{rank}"


def rank_of(key: str) -> tuple[int, int]:
    """The round and the rank that a key names."""
    number, rank = (int(part) for part in key.split("."))
    return number, rank
