"""A rank that needs seconds before the first step of each round but the first, as one that imports does.

usage: slow_start.py SECONDS
"""

import itertools
import os
import sys
import time

import muster

if os.environ["MUSTER_ROUND"] != "0":
    time.sleep(float(sys.argv[1]))
for step in itertools.count(1):
    time.sleep(0.02)
    muster.progress(step)
