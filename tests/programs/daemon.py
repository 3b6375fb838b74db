"""The control plane with times of its own, for tests that would wait for the usual ones.

usage: daemon.py OPTION…    ALIVE_S: how often it leaves word that it lives.
DRAIN_S: how long open requests may take to end at a stop.
TIME_SET: a file with the seconds by which its time of day is off; it may be written to at any time.

On SIGUSR1 everything that runs on its main thread stands still for STALL_S.
"""

import os
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from muster.clock import SystemClock
from muster.daemon import options, plane
from muster.daemon.local import LocalSite

LocalSite.alive_every_s = float(os.environ.pop("ALIVE_S", LocalSite.alive_every_s or 0))
plane.DRAIN_S = float(os.environ.pop("DRAIN_S", plane.DRAIN_S))
stall_s = float(os.environ.pop("STALL_S", "0"))
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(stall_s))
if told := os.environ.pop("TIME_SET", ""):
    SystemClock.now = lambda self: datetime.now(UTC) + timedelta(seconds=float(Path(told).read_text() or 0))  # type: ignore[method-assign]
sys.exit(plane.run(options.read()))
