"""The cost of a world with very many workers, on virtual time and with the real decisions and frames of all processes.

python -m bench.large [--json] [WORKERS]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from bench import report
from bench.report import Figure
from tests.simulator.large import LEASE_S, LargeFleet, Took
from tests.simulator.worker import SimulatedWorker


def world(options: argparse.Namespace) -> Iterator[Figure]:
    large = LargeFleet(options.workers, spent=time.process_time)
    name = f"{options.workers:,} simulated workers"
    yield from _figures(f"{name} form", large.form())
    yield from _figures(f"{name}, 1 % is killed and their guards report it", large.lose_some(1, SimulatedWorker.kill))
    lost = large.lose_some(2, SimulatedWorker.power_off)
    yield from _figures(f"{name}, 1 % falls silent, lease {LEASE_S:g} s", lost)


def _figures(name: str, took: Took) -> Iterator[Figure]:
    yield Figure(f"{name}: virtual time", took.virtual_s, "s", "-", True)
    yield Figure(f"{name}: CPU time of the coordinator", took.coordinator_s, "s", "-", True)
    yield Figure(f"{name}: CPU time of all processes", took.all_s, "s", "-", True)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workers", type=int, nargs="?", default=10_000, metavar="WORKERS", help="workers (10000)")


if __name__ == "__main__":
    sys.exit(report.run("bench large", {"world": world}, _options))
