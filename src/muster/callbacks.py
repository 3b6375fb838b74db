"""What do the callbacks for frameworks (`muster.hf`, `muster.lightning`, `muster.accelerate`) have in common?

A framework has a loop of its own. What a callback must know before that loop begins is the step in memory; what it must
hold back until the loop is where it was are the generators.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from muster.node.saving import saving
from muster.state import randomness
from muster.state.keeper import Line
from muster.state.talk import SOCKET_VARIABLE

P = ParamSpec("P")
R = TypeVar("R")


def agent_keeps() -> bool:
    """Whether there is an agent that keeps state in memory."""
    return bool(os.environ.get(SOCKET_VARIABLE))


def offered() -> int:
    """The step in memory from which this round goes on; 0 without one, or without an agent."""
    if not agent_keeps():
        return 0
    try:
        line = Line(
            os.environ[SOCKET_VARIABLE], int(os.environ.get("RANK", "0")), int(os.environ.get("MUSTER_ROUND", "0"))
        )
        try:
            offer = line.offer(None, 0.0)
        finally:
            line.close()
    except OSError as error:
        tell(f"nothing is taken from memory: {error}")
        return 0
    return offer.step if offer.step is not None and offer.ranks else 0


class Generators:
    """Python's, numpy's and torch's of this rank: read with all the rest, given back when the loop is where it was."""

    def __init__(self) -> None:
        self._rank = int(os.environ.get("RANK", "0"))
        self._read: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self._rank, "all": randomness.take()}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self._read = kept["all"] if kept["rank"] == self._rank else None  # a rank that is new has its own

    def put(self) -> None:
        """Once; nothing if none were read."""
        read, self._read = self._read, None
        if read is not None:
            randomness.put(read)


class Apart:
    """State of something that is not to be looked into: a scheduler's optimizer may be a wrapper of the real one."""

    def __init__(self, of: Any) -> None:
        self.state_dict: Callable[[], Any] = of.state_dict
        self.load_state_dict: Callable[[Any], Any] = of.load_state_dict


def whole(save: Callable[P, R]) -> Callable[P, R]:
    """The same save, in the middle of which no rank is ended."""

    @functools.wraps(save)
    def saved(*args: P.args, **kwargs: P.kwargs) -> R:
        with saving():
            return save(*args, **kwargs)

    return saved


def tell(text: str) -> None:
    warnings.warn(f"muster: {text}", stacklevel=3)
