"""What does a training lose that loses a worker, and what does it cost to lose so little? With peers in the same run.

python -m bench.state [--json] [--only PART] [--kills N] [--kills-peers N] …

bench.state_script is what trains, for all; bench.state_runs says who is compared. Peers save as often as costs no more
than 3 % of the time. `--kills-peers 0` leaves them out. What needs a GPU is bench.state_gpu.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace

from bench import report, small_commits, state_runs
from bench.report import Figure, Goal, Measured, Sample
from bench.state_marks import Taken, taken, typical
from bench.state_runs import Series

MOST_COPIES = 1.3  # of the same bytes, for one commit
MOST_SHARE = 0.03
JOBS = ((1, 0, "1 worker"), (2, 0, "2 workers"), (2, 1, "2 workers, 1 spare"))  # active workers, spares, name


def kills(given: argparse.Namespace) -> Iterator[Figure]:
    words = ("--mb", str(given.mb), "--step-s", str(given.step_s))
    muster, settings = state_runs.preloading(state_runs.muster, given.preload), (words, given.seed, given.leisure_s)
    ours = state_runs.series(muster, given.kills, *settings)
    asked = state_runs.PEERS if given.kills_peers else ()
    peers = {peer.name: state_runs.series(peer, given.kills_peers, *settings) for peer in asked}
    job = f"2 workers, 1 spare, {given.mb:g} MB of Adam state, {given.step_s:g} s steps"
    name = f"{job}; killed: every process of one worker → first all-reduce of the resumed step"
    times = {who: told.times for who, told in peers.items()}
    figure = report.compared(name, ours.times, times, "ms", Goal(p50=300, p99=600))
    way = ", ".join(f"{word} {seconds * 1000:.0f}" for word, seconds in typical(ours.healed).items())
    yield replace(figure, note="; ".join(filter(None, (figure.note, f"p50 of the way: {way}"))))
    yield lost(f"{job}; committed steps lost in those kills", ours, peers, given.step_s)
    if ours.end:
        step = max(ours.end)[0]
        alone = state_runs.undisturbed(step, ("--mb", str(given.mb)))
        yield weights(f"{job}; weights after those kills, against a run without a loss", ours.end, alone)
    name = f"{job}; a commit (a save) keeps the training waiting"
    yield report.compared(name, ours.waits, {who: waited(told) for who, told in peers.items()}, "ms", Goal())


def waited(told: Series) -> list[Sample]:
    return [*told.waits] or [*told.instead] or ["never: state lives in replicas"]


def lost(name: str, ours: Series, peers: dict[str, Series], step_s: float) -> Figure:
    """Of the steps whose commit had returned on every rank before a kill, those that were done again after it."""
    total, most = sum(ours.lost), max(ours.lost, default=0)
    hit = sum(one > 0 for one in ours.lost)
    note = ", ".join(ours.instead) or (f"{hit} kills lost some, the worst {most}" if hit else "")
    told = {who: Measured(len(peer.times), None, None, None, _lost(peer, step_s)) for who, peer in peers.items()}
    value = float(total) if ours.healed and not ours.instead else None
    return Figure(name, value, "", "0", value == 0.0, told, note, len(ours.healed))


def _lost(told: Series, step_s: float) -> str:
    if not told.healed:
        return ", ".join(told.instead)
    text = f"{statistics.mean(told.lost):.2g} a kill, worst {max(told.lost)} of {len(told.lost)}"
    if told.waits:
        share = statistics.median(told.waits) / told.every / step_s
        text += f"; a save each {told.every} steps, {share:.1%} of the time"
    return text


def weights(name: str, ended: set[tuple[int, str]], alone: set[tuple[int, str]]) -> Figure:
    equal = len(ended) == 1 and ended == alone
    found = ", ".join(f"sha256 {digest[:16]} at step {step}" for step, digest in sorted(ended))
    there = "" if equal else " instead of " + ", ".join(digest[:16] for _, digest in sorted(alone))
    return Figure(name, None, "", "equal bit by bit", equal, note=f"{'equal' if equal else 'differ'}: {found}{there}")


# A copy of each step -----------------------------------------------------------------------------


def copies(given: argparse.Namespace) -> Iterator[Figure]:
    for workers, spares, who in JOBS[: given.jobs]:
        words = ("--mb", str(given.mb), "--step-s", str(given.step_s), "--turns", str(given.turns))
        limit_s = 120 + given.turns * 12 * given.step_s * 4
        found = taken(state_runs.by_turns(workers, spares, given.preload, words, limit_s))
        yield from costs(f"a copy each step, {given.mb:g} MB, {given.step_s:g} s steps, {who}", found)


def costs(name: str, found: Taken) -> Iterator[Figure]:
    took = f"{found.commits_s * 1000:.1f} ± {found.error_s * 1000:.1f} ms"
    note = f"{took}; one memcpy {found.memcpy_s * 1000:.1f} ms, a step {found.step_s:.3f} s"
    goal, share = f"≤ {MOST_COPIES:g} × memcpy", f"≤ {MOST_SHARE:.0%} of a step"
    times, percent = found.copies, found.share * 100
    yield Figure(f"{name}: taken", times, "× memcpy", goal, times <= MOST_COPIES, note=note, samples=found.samples)
    yield Figure(f"{name}: share", percent, "%", share, found.share <= MOST_SHARE, note=note, samples=found.samples)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=200, help="samples: workers of ours that are killed (200)")
    parser.add_argument("--kills-peers", type=int, default=5, help="samples: workers of each peer; 0: none (5)")
    leisure = "seconds that a new spare has before the next kill (8)"
    parser.add_argument("--leisure-s", type=float, default=state_runs.LEISURE_S, help=leisure)
    parser.add_argument("--turns", type=int, default=10, help="of five steps with commits and five without (10)")
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="jobs of the part `copies`: the first N (3)")
    parser.add_argument("--mb", type=float, default=100.0, help="of state: weights and two moments (100)")
    parser.add_argument("--step-s", type=float, default=1.0, help="length of a step (1)")
    parser.add_argument("--small-steps", type=int, default=120, help="steps of the part `small` (120)")
    parser.add_argument("--small-step-s", type=float, default=0.17, help="length of a step of that part (0.17)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments in which workers are killed")
    parser.add_argument("--preload", action="append", default=[], metavar="MOD", help="our warm parents import this")


PARTS = {"kills": kills, "copies": copies, "small": small_commits.figures}

if __name__ == "__main__":
    sys.exit(report.run("bench state", PARTS, _options))
