"""Counts of workers in messages: "1 worker", "2 workers"."""

from __future__ import annotations


def workers(count: int, before: str = "") -> str:
    """Return a number with its noun. `before` stands in front of the number, like "2 of "."""
    return f"{before}{count} worker" if count == 1 else f"{before}{count} workers"


def workers_train(count: int, before: str = "") -> str:
    """Return a number of workers with the verb "train"."""
    return f"{workers(count, before)} {'trains' if count == 1 else 'train'}"
