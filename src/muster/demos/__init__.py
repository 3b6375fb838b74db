"""What `muster share demo` plays: two small, real RL pipelines, and a training that fills what they leave of five GPUs.

`show` plays it, `pipeline` is the loop of one pipeline, `generation` and `training` are its two stages, `processes`
starts and ends their processes, `occupancy` notes who held what. `control_plane` is the demo's own, which `keeper` runs
and ends; `filling` is the training that is submitted to it, and `step_log` what its ranks say they did. `preload`,
`ranks` and `policy` run in the pipelines' processes and `filling_training` in the training's: they alone import torch.
`tasks` and `orders` are known to both sides.
"""

from __future__ import annotations

import sys
from typing import TextIO

PACE_S = 0.015  # what a digit takes in the median, in place of a GPU's decoding


def run(rollouts: int = 5, seed: int = 0, out: TextIO | None = None, *, pace_s: float = PACE_S) -> int:
    """Play the demo and return its exit code: 0 if all three improved and left nothing behind."""
    from muster.demos import show  # not at the top: the ranks' processes import this package and not that

    return show.run(rollouts, seed, pace_s, out or sys.stdout)
