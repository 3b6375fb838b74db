"""Counts in messages: "1 worker", "2 workers"."""

from __future__ import annotations


def counted(count: int, noun: str, before: str = "") -> str:
    """Return a number with its noun, given for one. `before` stands in front of the number, like "2 of "."""
    return f"{before}{count} {noun}" if count == 1 else f"{before}{count} {noun}s"


def workers(count: int, before: str = "") -> str:
    return counted(count, "worker", before)


def workers_train(count: int, before: str = "") -> str:
    """Return a number of workers with the verb "train"."""
    return f"{workers(count, before)} {'trains' if count == 1 else 'train'}"
