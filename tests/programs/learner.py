"""A rank that logs its loss until it is stopped, or ends at a step. usage: learner.py [SECONDS A STEP] [STEP]"""

import itertools
import sys
import time

import muster

pause, end = float((sys.argv[1:] or ["0.05"])[0]), int((sys.argv[2:] or ["-1"])[0])
for step in itertools.count():
    if step == end:
        break
    muster.progress(step)
    muster.log(loss=2.3 / (1 + step / 40), lr=1e-4)
    if step % 10 == 0:
        muster.log(step, eval_loss=float("nan") if step == 10 else 3.0)
    time.sleep(pause)
