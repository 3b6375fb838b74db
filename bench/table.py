"""Tables of README.md and docs/benchmarks.md, made from the results stored in bench/results.

    make -s bench-world ARGS=--json > bench/results/world.json
    python -m bench.table             # writes both pages anew
    python -m bench.table --check     # exits with 1 if a page differs from the results

On a page, `<!-- bench: FILE PART … -->` stands before the table of these parts, and
`<!-- bench: summary -->` before the table of README.md.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
PAGES = (ROOT / "README.md", ROOT / "docs/benchmarks.md")
ENOUGH = 20  # samples; with fewer, a p99 says nothing that the worst sample does not say
_PLACE = re.compile(r"(<!-- bench: ([\w. -]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)

Record = dict[str, Any]  # one JSON object


class Row(NamedTuple):
    """A row of the table in README.md: a stored figure under a short name."""

    failure: str
    launcher: str
    file: str
    figure: str


_SPARE = "2 workers, 1 spare"
_GROUP = "first all-reduce of the next group"
_NODE = "muster-node"
SUMMARY = (
    Row(
        "every process of a worker killed",
        _NODE,
        "world",
        f"{_SPARE}; killed: every process of one worker → {_GROUP}",
    ),
    Row(
        "every process of a worker killed",
        "muster run",
        "world",
        f"control plane, {_SPARE}; killed: every process of one worker → {_GROUP}",
    ),
    Row("network link of a machine cut", _NODE, "world", f"{_SPARE}; lost: the link of one machine → {_GROUP}"),
    Row(
        "every process on the coordinator's machine killed",
        _NODE,
        "world",
        f"3 workers, 1 spare; killed: everything on the machine of the coordinator (store, lighthouse) → {_GROUP}",
    ),
    Row(
        "network link of the coordinator's machine cut",
        _NODE,
        "world",
        f"3 workers, 1 spare; lost: the link of the machine of the coordinator (store, lighthouse) → {_GROUP}",
    ),
    Row(
        "one of two ranks of a worker killed, no spare",
        _NODE,
        "world",
        "2 ranks of one worker; killed: one rank → the same rank is back, group ready",
    ),
    Row(
        "every process of a worker killed, 100 MB of state in memory",
        _NODE,
        "state",
        f"{_SPARE}, 100 MB of Adam state, 1 s steps; killed: every process of one worker"
        " → first all-reduce of the resumed step",
    ),
    Row(
        "every process of a worker killed on an H200, 12 GB of state in memory for each rank",
        _NODE,
        "h200-state-12gb",
        "12 GB of state for each rank; killed: every process of one worker → next step",
    ),
)


def main(*options: str) -> int:
    stale = [page for page in PAGES if filled(page.read_text()) != page.read_text()]
    if "--check" in options:
        for page in stale:
            print(f"{page.name} differs from bench/results. Run: python -m bench.table", file=sys.stderr)
        return 1 if stale else 0
    for page in stale:
        page.write_text(filled(page.read_text()))
    return 0


def filled(page: str) -> str:
    """Return the text of a page with its tables made from the stored results."""

    def replace(match: re.Match[str]) -> str:
        file, *parts = match[2].split()
        body = summary_table() if file == "summary" else caption(file) + full_table(file, parts)
        return f"{match[1]}\n{body}\n{match[3]}"

    return _PLACE.sub(replace, page)


# Stored results -----------------------------------------------------------------------------------


@cache
def stored(file: str) -> Record:
    """Return a stored result. One of bench/state_gpu.py is brought into the shape of all others."""
    result: Record = json.loads((RESULTS / f"{file}.json").read_text())
    return result if "figures" in result else result | {"figures": list(gpu_figures(result, result["goals"]))}


def figures(file: str, parts: list[str]) -> list[Record]:
    every: list[Record] = stored(file)["figures"]
    return [figure for part in parts for figure in every if figure["part"] == part] if parts else every


def gpu_figures(result: Record, goals: Mapping[str, float]) -> Iterator[Record]:
    """Yield the figures of a run of bench/state_gpu.py."""
    size = f"{result['machine']['state of a rank, GB']:g} GB of state for each rank"
    kills = result["kills"]["kills"]
    yield _gpu_figure(
        f"{size}; killed: every process of one worker → next step", [kill["first step"] for kill in kills], "s", goals
    )
    lost = [kill["lost"] for kill in kills]
    yield _gpu_figure(f"{size}; committed steps lost in one of these kills", lost, "steps", goals)
    for kind, clock in (("unsynced", "the host ahead of the GPU"), ("synced", "the host waits at each step")):
        share = 100 * result["cost"][kind]["share, wall"]
        samples = int(result["cost"][kind]["steps"])
        name = f"{size}; share of the time that commits take, {clock}"
        limit = goals["%"]
        ok = share <= limit
        yield _record(name, share, "%", f"≤ {limit:g} %", ok) | {"samples": samples}


def _gpu_figure(name: str, values: list[float], unit: str, goals: Mapping[str, float]) -> Record:
    median, worst, limit = statistics.median(values), max(values), goals[unit]
    ok = (median if unit == "s" else worst) <= limit
    goal = f"p50 ≤ {limit:g} s" if unit == "s" else f"worst ≤ {limit:g}"
    return _record(name, median, unit, goal, ok) | {"samples": len(values), "worst": worst}


def _record(name: str, value: float, unit: str, goal: str, ok: bool) -> Record:
    whole: Record = {"part": "state", "name": name, "value": value, "unit": unit, "goal": goal, "ok": ok}
    return whole | {"peers": {}, "note": "", "samples": None, "worst": None, "p99": None}


# Tables -------------------------------------------------------------------------------------------


def caption(file: str) -> str:
    """Return the line above a table: when, on what and in which environment it was measured."""
    measured = stored(file)["measured"]
    parts = [measured[key] for key in ("hardware", "backend", "environment", "remark") if measured.get(key)]
    return f"*Measured on {measured['date']}: {'; '.join(part.removeprefix('none: ') for part in parts)}.*\n\n"


def full_table(file: str, parts: list[str]) -> str:
    """Return a table with one row for each system and one value in each cell."""
    head = ("what was done", "system", "median", "p99", "worst", "unit", "samples", "goal", "met", "remark")
    body = [row for figure in figures(file, parts) for row in rows(figure)]
    used = [index for index, name in enumerate(head) if name in head[:3] or any(row[index] != "–" for row in body)]
    return _markdown([[row[index] for index in used] for row in (head, *body)])


def rows(figure: Record) -> Iterator[tuple[str, ...]]:
    """Yield a row for muster and one for each peer."""
    ours = {"p50": figure["value"], "instead": figure["note"]}
    mine = _numbers(figure | ours)
    unit, goal = figure["unit"] or "–", figure["goal"] or "–"
    yield (figure["name"], "muster", *mine[:3], unit, mine[3], goal, _met(figure), mine[4])
    for peer, measured in figure["peers"].items():
        theirs = _numbers(measured if isinstance(measured, dict) else {"p50": measured})
        yield ("the same", peer, *theirs[:3], unit, theirs[3], "–", "–", theirs[4])


def _numbers(measured: Record) -> tuple[str, str, str, str, str]:
    """Return median, p99, worst, samples and remark."""
    samples, median = measured.get("samples"), measured.get("p50")
    remark = str(measured.get("instead") or "")
    if median is None:
        shown = "never" if remark.startswith("never") else "–"
        return shown, "–", "–", str(samples or "–"), remark.removeprefix("never: ") or "–"
    many = (samples or 0) >= ENOUGH
    return (
        amount(median),
        amount(measured.get("p99")) if many else "–",
        amount(measured.get("worst")) if samples != 1 else "–",
        str(samples or "–"),
        remark or "–",
    )


def summary_table() -> str:
    """Return the table of README.md, in seconds: a row for each loss, with the best of the peers."""
    lines = [
        ["failure", "started by", "muster", "goal", "goal met", "fastest peer", "name of the peer", "unit", "samples"]
    ]
    for row in SUMMARY:
        figure = next(figure for figure in figures(row.file, []) if figure["name"] == row.figure)
        scale = 1e-3 if figure["unit"] == "ms" else 1.0
        peer, best = best_peer(figure["peers"], scale)
        goal = summary_goal(figure, scale)
        met = "no goal" if goal == "no goal" else _met(figure)
        ours = amount(figure["value"] * scale)
        lines.append([row.failure, row.launcher, ours, goal, met, best, peer, "s", str(figure["samples"])])
    return _markdown(lines)


def summary_goal(figure: Record, scale: float) -> str:
    """Return the goal of the median in seconds. A goal that is a share of torchrun's median is multiplied out."""
    match = re.match(r"p50 ≤ ([\d.]+)( × torchrun)?", figure["goal"])
    if match is None:
        return "no goal"
    limit = float(match[1]) * scale * (figure["peers"]["torchrun"]["p50"] if match[2] else 1)
    return f"≤ {amount(limit)}"


def best_peer(peers: Record, scale: float = 1.0) -> tuple[str, str]:
    """Return the name and the median of the fastest peer, also of one that did not heal each time."""
    if not peers:
        return "–", "not measured"
    healed = {name: peer["p50"] for name, peer in peers.items() if peer["p50"] is not None}
    if not healed:
        return f"all {len(peers)} peers", "never"
    name = min(healed, key=lambda peer: float(healed[peer]))
    return name, amount(healed[name] * scale)


def _met(figure: Record) -> str:
    return "yes" if figure["ok"] else "**no**"


def amount(value: float | None) -> str:
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if abs(value) < 10 else f"{value:.3g}"


def _markdown(lines: list[list[str]]) -> str:
    head, *rows = lines
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
