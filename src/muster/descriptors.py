"""How many files may this process open, and who may use them? Connections are files too.

A control plane takes as many as the system lets it have; each kind of connection that strangers can make is bounded to
a share, so that the rest stays for workers, the database and logs. Programs that it starts get what it was given
itself: some count on a small limit.
"""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 1 << 20
_given: list[tuple[int, int]] = []  # the limits from before they were raised


def limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else min(soft, ENOUGH)


def share(part: int, most: int) -> int:
    """One of so many parts of the limit, but no more than `most`."""
    return max(1, min(limit() // part, most))


def raise_limit() -> tuple[int, int]:
    """Have as many as may be had; returns the limit before and now."""
    before = limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            _given[:] = [(soft, hard)]
    return before, limit()


def restore_for(pid: int) -> None:
    """Give a program that was just started the limit that we were given."""
    for limits in _given:
        with contextlib.suppress(OSError, ValueError):  # it has ended already
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
