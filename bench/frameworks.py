"""How long does an unchanged script of each framework stand still that loses a worker? Killed worker to next step.

Two workers train and one stands by. The scripts of tests/frameworks go on from their own checkpoints; whose step comes
first after the loss counts, and it counts when both have made one. Beside us: torchrun, as early as it can notice.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from bench import launchers, report
from bench.launchers import Launcher
from bench.losses import Job, Strike, a_fleet, every_process, launcher_only
from bench.report import Figure, Goal, Sample, compared, progress, stories
from bench.state_runs import LEISURE_S
from tests.fleet import Fleet
from tests.frameworks.jobs import QUIET, SCRIPTS, steps_in

NAMES = {
    "ddp": "DDP",
    "fsdp2_dcp": "FSDP2 + distributed checkpoint",
    "hf_trainer": "HF Trainer",
    "accelerate_loop": "accelerate",
    "lightning_trainer": "Lightning",
    "deepspeed_zero": "DeepSpeed",
    "trl_grpo": "TRL GRPO",
    "trl_sft": "TRL SFT",
}
KINDS: dict[str, tuple[Strike, Goal]] = {
    "agent killed": (launcher_only, Goal(p50=1.0)),
    "whole worker killed": (every_process, Goal(p50=1.5)),
}
EVERY, PAUSE_S = 5, 0.2
ENDLESS = 1_000_000
TRIES = 2  # jobs of one launcher that may fail for good


class ScriptJob(Job):
    """A job whose ranks print their steps, and are ready when they have made one."""

    def __init__(self, fleet: Fleet, launcher: Launcher, script: str) -> None:
        super().__init__(fleet, launcher, 2, None)
        fleet.env |= QUIET
        words = (str(fleet.folder / "output"), str(ENDLESS), str(EVERY), str(PAUSE_S))
        self._program = (str(SCRIPTS / f"{script}.py"), *words)
        self._read: dict[int, int] = {}  # of the text of each process, by its place among all
        self._first: dict[int, tuple[float, int, int]] = {}

    def ready(self) -> list[tuple[float, int, int]]:
        for index, process in enumerate(self.fleet.processes):
            text = process.text
            whole = text.rfind("\n") + 1
            for step in steps_in(text[self._read.get(index, 0) : whole]):
                self._first.setdefault(step.pid, (step.at, step.rank, step.pid))
            self._read[index] = whole
        return sorted(self._first.values())


def series(launcher: Launcher, script: str, how: Strike, repeat: int, leisure_s: float) -> list[Sample]:
    """As many losses, in one job while it heals."""
    samples: list[Sample] = []
    while len(samples) < repeat and len(stories(samples)) < TRIES:
        with a_fleet() as fleet:
            job = ScriptJob(fleet, launcher, script)
            try:
                job.begin()
            except AssertionError as problem:
                samples.append(f"did not start: {str(problem).splitlines()[0][:80]}")
                continue
            while len(samples) < repeat:
                time.sleep(leisure_s)
                job.settle()
                place = next((place for place in job.training() if place != 0), None)
                if place is None:
                    samples.append("only the first one trains")
                    break
                samples.append(job.lose(place, how))
                progress(f"{launcher.name}, {script}: {report.show(samples[-1])}")
                if isinstance(samples[-1], str):
                    break
                job.add_spare(place)
    return samples


def part(script: str) -> report.Part:
    def measure(given: argparse.Namespace) -> Iterator[Figure]:
        for kind, (how, goal) in KINDS.items():
            settings = (script, how, given.samples, given.leisure_s)
            ours = series(launchers.muster, *settings)
            peers = {peer.name: series(peer, *settings) for peer in _peers(given)}
            yield compared(f"{NAMES[script]}: {kind} → next step", ours, peers, "s", goal)

    return measure


def _peers(given: argparse.Namespace) -> tuple[Launcher, ...]:
    return () if given.no_peers else (launchers.torchrun_tuned,)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=20, help="losses of each kind (20)")
    leisure = "seconds that a new spare has before the next loss (8)"
    parser.add_argument("--leisure-s", type=float, default=LEISURE_S, help=leisure)
    parser.add_argument("--no-peers", action="store_true", help="without torchrun")


if __name__ == "__main__":
    sys.exit(report.run(__doc__.splitlines()[0] if __doc__ else "", {name: part(name) for name in NAMES}, options))
