"""How long to pause before the next attempt? Twice as long after each failure, up to a bound. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    first_s: float
    longest_s: float

    def after(self, failures: int) -> float:
        """The pause after so many failures in a row; there is none before the first."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30)) if failures > 0 else 0.0
