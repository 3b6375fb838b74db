"""What does the fork server have in memory? Imported there and nowhere else: the import is what does it."""

from __future__ import annotations

import importlib
import os

from muster.node import system

system.die_with_parent(os.getppid())
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")  # read when torch is imported
importlib.import_module("muster.demos.processes")  # where a new process begins
importlib.import_module("muster.demos.ranks").warm_up()
