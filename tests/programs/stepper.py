"""A rank that makes steps until it is stopped, or exits at a step. usage: stepper.py [SECONDS A STEP] [STEP] [CODE]"""

import itertools
import os
import sys
import time

import muster

pause, end, code = (
    float((sys.argv[1:] or ["0.05"])[0]),
    int((sys.argv[2:] or ["-1"])[0]),
    int((sys.argv[3:] or ["0"])[0]),
)
rank = os.environ["RANK"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']} begins round {os.environ['MUSTER_ROUND']}", flush=True)
for step in itertools.count():
    if step == end:
        print(f"rank {rank} ends at step {step}", file=sys.stderr)
        sys.exit(code)
    muster.progress(step)
    if step % 10 == 0:
        print(f"step {step} loss {2.3 / (1 + step / 40):.4f}", flush=True)
    time.sleep(pause)
