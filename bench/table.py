"""What do README and pages say of a run? Tables of Markdown, made from what `--json` printed.

    python -m bench.table world.json README.md docs/comparison.md

replaces what stands between `<!-- bench: PART … -->` and `<!-- /bench -->` by the figures of those parts.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ENOUGH = 20  # samples, from which on a p99 is more than the worst of them
_PLACE = re.compile(r"(<!-- bench: ([a-z -]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)

Record = dict[str, Any]  # a figure or a peer's part of it, as JSON has it


def main(result: str, *pages: str) -> None:
    figures = json.loads(Path(result).read_text())["figures"]
    for page in map(Path, pages):
        page.write_text(filled(page.read_text(), figures))


def filled(page: str, figures: list[Record]) -> str:
    """The page with its tables made anew; one whose parts were not run stays as it is."""

    def again(found: re.Match[str]) -> str:
        parts = found[2].split()
        rows = [figure for part in parts for figure in figures if figure["part"] == part]
        return f"{found[1]}\n{table(rows)}\n{found[3]}" if rows else found[0]

    return _PLACE.sub(again, page)


def table(figures: list[Record]) -> str:
    peers = list(dict.fromkeys(peer for figure in figures for peer in figure["peers"]))
    lines = [["", "muster", "goal", *peers], ["---"] * (3 + len(peers))]
    for figure in figures:
        theirs = [_cell(figure["peers"].get(peer), figure["unit"]) for peer in peers]
        goal = figure["goal"] if figure["ok"] else f"{figure['goal']} (missed)"
        lines.append([figure["name"], f"**{_ours(figure)}**", goal, *theirs])
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def _ours(figure: Record) -> str:
    mine = {"p50": figure["value"], "instead": figure["note"] if figure["value"] is None else ""}
    return _cell(figure | mine, figure["unit"])


def _cell(told: Record | None, unit: str) -> str:
    """Median, spread and count, or what came instead."""
    if told is None:
        return "–"
    if told["p50"] is None:
        return str(told["instead"])
    parts = [f"{_amount(told['p50'], unit)}"]
    many = (told["samples"] or 0) >= ENOUGH
    high = told["p99"] if many else told["worst"]
    if high is not None and told["samples"] > 1:
        parts.append(f"{'p99' if many else 'worst'} {_amount(high, unit)}")
    shown = ", ".join(parts) + (f" of {told['samples']}" if told["samples"] else "")
    return f"{shown}; {told['instead']}" if told.get("instead") else shown


def _amount(value: float, unit: str) -> str:
    if unit == "ms" and value >= 1000:
        value, unit = value / 1000, "s"
    digits = f"{value:.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.3g}"
    return f"{digits} {unit}".strip()


if __name__ == "__main__":
    main(*sys.argv[1:])
