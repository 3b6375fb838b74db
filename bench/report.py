"""Figures: one line each, our value beside its goal and the peers' values of the same run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from muster.errors import MusterError

REPEAT = "multiplies the usual number of samples, for example 0.1 (1)"
FAILED = "failed: "  # begins the note of the row that stands for a failed part
T = TypeVar("T")
Sample = float | str  # seconds, or what came instead


@dataclass(frozen=True)
class Figure:
    name: str
    value: float | None
    unit: str
    goal: str
    ok: bool
    peers: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    samples: int | None = None  # how many the value is the median of, where it is one
    worst: float | None = None  # of them
    p99: float | None = None  # where the value is a median of enough samples


Part = Callable[[argparse.Namespace], Iterable[Figure]]


def below(name: str, value: float | None, limit: float, unit: str, **more: Any) -> Figure:
    """A figure that should be under a limit; no value is a failure."""
    return Figure(name, value, unit, f"< {limit:g} {unit}", value is not None and value < limit, **more)


def times(usual: int, factor: float) -> int:
    """Return the usual number of samples multiplied by --repeat, at least 1."""
    return max(1, round(usual * factor))


def share(seeds: Sequence[T], factor: float) -> Sequence[T]:
    """Return the first seeds if --repeat is below 1, otherwise all seeds: more seeds would be another measurement."""
    return seeds[: times(len(seeds), factor)]


def p50(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def p99(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def spread(samples: Sequence[float], scale: float = 1.0) -> dict[str, Any]:
    """What stands beside a median."""
    return {"samples": len(samples), "worst": round(max(samples) * scale, 4) if samples else None}


# Beside peers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What one of those compared did; `instead` says what came where no time did."""

    samples: int
    p50: float | None
    p99: float | None
    worst: float | None
    instead: str = ""

    def __str__(self) -> str:
        times = f"{show(self.p50)} ({self.samples}, worst {show(self.worst)})" if self.p50 is not None else ""
        return " or ".join(part for part in (times, self.instead) if part)


@dataclass(frozen=True)
class Goal:
    """At most so much, or that share of torchrun's median; without limits it is enough that it goes on every time."""

    p50: float | None = None
    p99: float | None = None
    share: float | None = None

    def said(self, unit: str) -> str:
        limits = [f"p50 ≤ {self.p50:g} {unit}"] if self.p50 is not None else []
        limits += [f"p99 ≤ {self.p99:g} {unit}"] if self.p99 is not None else []
        limits += [f"p50 ≤ {self.share:g} × torchrun"] if self.share is not None else []
        return ", ".join(limits) or "it continues"

    def met(self, ours: Measured, torchrun: Measured | None) -> bool:
        if ours.instead or ours.p50 is None or ours.p99 is None:
            return False
        limits = [(ours.p50, self.p50), (ours.p99, self.p99)]
        if self.share is not None:
            if torchrun is None:
                return False
            limits.append((ours.p50, None if torchrun.p50 is None else self.share * torchrun.p50))
        return all(limit is None or got <= limit for got, limit in limits)


def measured(samples: Sequence[Sample], unit: str = "s") -> Measured:
    scale = 1000.0 if unit == "ms" else 1.0
    taken = [sample * scale for sample in samples if isinstance(sample, float)]
    if not taken:
        return Measured(len(samples), None, None, None, _told(samples))
    return Measured(len(samples), p50(taken), p99(taken), max(taken), _told(samples))


def compared(name: str, ours: Sequence[Sample], peers: Mapping[str, Sequence[Sample]], unit: str, goal: Goal) -> Figure:
    """Our median beside theirs. One of ours without a time is a miss, and is said."""
    mine = measured(ours, unit)
    shown = {who: measured(samples, unit) for who, samples in peers.items()}
    value = mine.p50 if not mine.instead else None
    ok = goal.met(mine, shown.get("torchrun"))
    note = str(mine) if mine.instead else ""
    return Figure(name, value, unit, goal.said(unit), ok, shown, note, mine.samples, mine.worst, mine.p99)


def stories(samples: Sequence[Sample]) -> list[str]:
    return [sample for sample in samples if isinstance(sample, str)]


def _told(samples: Sequence[Sample]) -> str:
    told = Counter(stories(samples))
    return ", ".join(
        story if count == len(samples) else f"{story} ({count} of {len(samples)})" for story, count in told.items()
    )


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# Printing ----------------------------------------------------------------------------------------


def run(title: str, parts: Mapping[str, Part], options: Any = None) -> int:
    """Run the chosen parts and print a table, or one JSON object with --json.

    Return 1 if a part failed. A missed goal is a result: it is shown, and the exit code stays 0.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--only", action="append", choices=sorted(parts), help="run only this part")
    if options is not None:
        options(parser)
    given = parser.parse_args()
    # A terminated benchmark leaves its blocks, which stop the processes of the current part.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    failed = False
    shown: list[dict[str, Any]] = []
    try:
        for name, part in parts.items():
            if given.only and name not in given.only:
                continue
            progress(name)
            for figure in _figures(name, part, given):
                failed = failed or figure.note.startswith(FAILED)
                shown.append({"part": name, **asdict(figure), "value": _round(figure.value)})
                if not given.json:
                    print(_line(figure), flush=True)
    finally:  # also of a run that was stopped
        if given.json:
            print(json.dumps({"measured": machine(), "figures": shown}, indent=1, ensure_ascii=False))
    return 1 if failed else 0


def machine() -> dict[str, str]:
    """Return when and on what a run was made; a stored result carries it into the caption of its table."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = len(os.sched_getaffinity(0))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{cores} cores ({model.partition(':')[2].strip() or platform.machine()}), {gib:.0f} GiB of memory",
        "backend": "gloo",
        "environment": f"Python {platform.python_version()}, {_version('torch')}, only the packages of muster's tests",
    }


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def _figures(name: str, part: Part, given: argparse.Namespace) -> Iterator[Figure]:
    """A part that fails is said, and the others still run."""
    try:
        yield from part(given)
    except (AssertionError, OSError, MusterError, subprocess.SubprocessError) as problem:
        yield Figure(name, None, "", "it runs", False, note=f"{FAILED}{str(problem)[:300]}")


def _line(figure: Figure) -> str:
    mark = "ok  " if figure.ok else "MISS"
    value = "-" if figure.value is None else f"{show(figure.value)} {figure.unit}"
    peers = "  ".join(f"{name} {show(value)}" for name, value in figure.peers.items())
    counted = f"{figure.samples} samples" if figure.samples else ""
    high = f"p99 {show(figure.p99)}" if figure.p99 is not None else ""
    worst = f"worst {show(figure.worst)}" if figure.worst is not None else ""
    notes = ", ".join(part for part in (counted, high, worst, figure.note) if part)
    return f"{mark} {figure.name:<78} {value:>12}  goal {figure.goal:<18} {peers}" + (f"  ({notes})" if notes else "")


def show(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
