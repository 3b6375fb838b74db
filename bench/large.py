"""What does a world of very many workers cost? On virtual time, with the real decisions and frames of everybody.

python -m bench.large [WORKERS]
"""

from __future__ import annotations

import sys
import time

from tests.simulator.large import LEASE_S, LargeFleet
from tests.simulator.worker import SimulatedWorker


def main(workers: int) -> None:
    large = LargeFleet(workers, spent=time.process_time)
    print(f"{workers} form: {large.form()}")
    print(f"1 % of them is killed, their guards tell: {large.lose_some(1, SimulatedWorker.kill)}")
    print(f"1 % falls silent, lease {LEASE_S:g} s: {large.lose_some(2, SimulatedWorker.power_off)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 10_000)
