"""One rank sleeps for ever before a collective in round 0. usage: hang.py DIR"""

import os
import time

import torch
import torch.distributed as dist

import muster

dist.init_process_group("gloo")
for step in range(5):
    muster.progress(step)
    if step == 3 and dist.get_rank() == 1 and os.environ["MUSTER_ROUND"] == "0":
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
