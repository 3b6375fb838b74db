"""What do workers tell of numbers that ranks logged, and of what they use?"""

from __future__ import annotations

from muster.types.codec import as_list, limited
from muster.types.records import record


@as_list
@record()
class LoggedNumber:
    """One number of a rank, as it travels: with its age, for clocks differ."""

    seq: int  # counts what the rank has logged in that round
    name: int  # its place among the names of the message
    age_s: float
    step: int | None = None
    value: float | None = None  # None: it was not finite


@record()
class WorkerUse:
    """What a worker's processes use, all of them together."""

    cpu_percent: float | None = limited(default=None, ge=0)  # 100: one core
    memory_bytes: int | None = limited(default=None, ge=0)
    gpu_percent: float | None = limited(default=None, ge=0)  # the mean of its GPUs
    gpu_memory_bytes: int | None = limited(default=None, ge=0)
