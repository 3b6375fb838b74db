"""Figures: one line each, our value beside its goal and the peers' values of the same run."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
    worst: float | None = None  # of them; with few samples there is no p99


def below(name: str, value: float | None, limit: float, unit: str, **more: Any) -> Figure:
    """A figure that should be under a limit; no value is a failure."""
    return Figure(name, value, unit, f"< {limit:g} {unit}", value is not None and value < limit, **more)


def p50(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def p99(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def spread(samples: Sequence[float], scale: float = 1.0) -> dict[str, Any]:
    """What stands beside a median."""
    return {"samples": len(samples), "worst": round(max(samples) * scale, 4) if samples else None}


def run(title: str, parts: Mapping[str, Callable[[argparse.Namespace], Iterable[Figure]]], options: Any = None) -> int:
    """Run the chosen parts and print a table, or one JSON object with --json."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--only", action="append", choices=sorted(parts), help="run only this part")
    if options is not None:
        options(parser)
    given = parser.parse_args()
    figures: list[Figure] = []
    for name, part in parts.items():
        if given.only and name not in given.only:
            continue
        for figure in part(given):
            figures.append(figure)
            if not given.json:
                print(_line(figure), flush=True)
    if given.json:
        shown = [{**vars(figure), "value": _round(figure.value)} for figure in figures]
        print(json.dumps({"figures": shown}))
    return 0


def _line(figure: Figure) -> str:
    mark = "ok  " if figure.ok else "MISS"
    value = "-" if figure.value is None else f"{show(figure.value)} {figure.unit}"
    peers = "  ".join(f"{name} {show(value)}" for name, value in figure.peers.items())
    counted = f"{figure.samples} samples" if figure.samples else ""
    worst = f"worst {show(figure.worst)}" if figure.worst is not None else ""
    notes = ", ".join(part for part in (counted, worst, figure.note) if part)
    return f"{mark} {figure.name:<78} {value:>12}  goal {figure.goal:<18} {peers}" + (f"  ({notes})" if notes else "")


def show(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
