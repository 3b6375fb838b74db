"""The pace of copies: how often a rank copies, so that copies take no more than their share of the time.

All ranks have to copy the same steps: each says how often it can, the slowest counts, and what is copied are the steps
that can be divided by that. It changes by doubling and halving, so that steps of before stay among those of after. A
share of 1 is all of the time: each step is copied, whatever it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_EVERY = 1 << 20
MOST_SKIPPED = 8
RELAXED = 4  # copies in a row for which there was memory, until more are tried again
_WEIGHT = 0.3  # of the newest in what is remembered


@dataclass
class Pace:
    overhead: float
    step_s: float | None = None  # one step, without what copies took from it
    copy_s: float | None = None  # what one copy takes from the training
    every: int = 1
    _skips: int = 0
    _least: int = 1  # no more often than this, for lack of memory
    _good: int = 0  # copies since then

    @property
    def left_s(self) -> float:
        """What a commit may take beyond its copy."""
        return max(0.0, self.overhead * (self.step_s or 0.0) * self.every - (self.copy_s or 0.0))

    def skipped(self) -> None:
        """There was no memory for a copy: if that goes on, fewer are taken, the same ones by all ranks."""
        self._skips += 1
        if self._skips >= 2 * self.every and self.every < MOST_SKIPPED:
            self._skips, self._good = 0, 0
            self.every = self._least = self.every * 2

    def stepped(self, took_s: float, steps: int) -> None:
        if steps > 0 and took_s >= 0:
            self.step_s = _mixed(self.step_s, took_s / steps)

    def copied(self, cost_s: float) -> None:
        self._skips = 0
        self._good += 1
        if self._good >= RELAXED and self._least > 1:
            self._good, self._least = 0, self._least // 2
        self.copy_s = _mixed(self.copy_s, cost_s)
        if not self.step_s or self.copy_s is None:
            return
        share = self.copy_s / self.step_s if self.overhead < 1 else 0.0  # at every step
        if share > self.overhead * self.every:
            self.every = min(MOST_EVERY, self.every * 2)
        elif self.every > 1 and share < self.overhead * self.every / 3:
            self.every = max(self._least, self.every // 2)


def scheduler_delay_s() -> float:
    """Return how many seconds this thread was ready while its core ran other threads; 0.0 if the kernel gives no value.

    On a busy core a commit may wait for milliseconds. The training would wait as long without the commit, so this time
    is no cost of the commit.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
