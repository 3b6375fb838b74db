"""Functions that ranks can import, for the tests of the decorator."""

from __future__ import annotations

from pathlib import Path

import muster


@muster.distributed(world_size=2, max_restarts=0)
def write(path: str, *, times: int = 1) -> None:
    Path(path).write_text("written " * times)
    if times > 1:
        write(path + ".again")  # in a rank it is a call like any other


@muster.distributed
def bare() -> int:
    return 5


def plain(path: str) -> None:
    Path(path).write_text("plain")
