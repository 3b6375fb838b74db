"""The same as fenced.py, with an all-reduce before each mark: only a whole world marks. usage: fenced_torch.py DIR"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from fenced import BEAT_S, Marks  # type: ignore[import-not-found]

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
marks = Marks(folder)
marks.mark("start")
while True:
    counted = torch.tensor([1.0, float((folder / "go").exists())])
    dist.all_reduce(counted)
    assert counted[0] == dist.get_world_size()
    if counted[1]:
        break
    marks.mark("beat")
    time.sleep(BEAT_S)
marks.mark("end")
dist.destroy_process_group()
