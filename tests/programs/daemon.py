"""The control plane with times of its own, for tests that would wait for the usual ones.

usage: daemon.py OPTION…    LEASE_S: of workers. ALIVE_S: how often it leaves word that it lives.
"""

import os
import sys
from datetime import timedelta

from muster.core.training import reconcile
from muster.daemon import options, plane
from muster.daemon.local import LocalSite

reconcile.LEASE = timedelta(seconds=float(os.environ.pop("LEASE_S", reconcile.LEASE.total_seconds())))
LocalSite.alive_every_s = float(os.environ.pop("ALIVE_S", LocalSite.alive_every_s or 0))
sys.exit(plane.run(options.read()))
