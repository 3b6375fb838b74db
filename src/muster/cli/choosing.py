"""What does a key mean to `muster top`? Which training is chosen, what is shown of it, and what is ordered.

Pure: a state and a key give the next state, and an order if one was given. Cancelling asks first, and the order names
the very training that was asked about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from muster.types import plural
from muster.types.training import Training

KEYS = "enter log, + - scale, x cancel, e hides what has ended, q quits"
_KEY = re.compile(r"\x1b[\[O][A-D]|\x1b|.", re.DOTALL)
_UP, _DOWN = ("k", "\x1b[A", "\x1bOA"), ("j", "\x1b[B", "\x1bOB")
_LOG, _QUIT, _BACK = ("\n", "\r", "l"), ("q", "Q", "\x04"), ("\x1b", "h")


@dataclass(frozen=True)
class Choice:
    """What somebody has chosen so far."""

    uid: str = ""  # of a training; empty: of none
    without_ended: bool = False
    log: bool = False  # its log is shown
    asks: bool = False  # whether it is to be cancelled
    said: str = ""  # about the last key
    quits: bool = False


@dataclass(frozen=True)
class Order:
    """What is to be done to a training."""

    verb: Literal["scale", "cancel"]
    training: Training
    target: int = 0


def keys(typed: str) -> Iterator[str]:
    """One by one what was typed at once; an arrow is one key."""
    yield from _KEY.findall(typed)


def press(choice: Choice, key: str, shown: Sequence[Training]) -> tuple[Choice, Order | None]:
    """After a key. `shown` are the trainings on the screen, from top to bottom."""
    chosen = next((one for one in shown if one.uid == choice.uid), None)
    if choice.asks:
        return _answered(replace(choice, asks=False, said=""), key, chosen)
    choice = replace(choice, said="")
    if key in _QUIT or (key in _BACK and not choice.log):
        return replace(choice, quits=key != "h"), None
    if choice.log:
        return replace(choice, log=key not in (*_LOG, *_BACK)), None
    if key in _UP or key in _DOWN:
        return _moved(choice, -1 if key in _UP else 1, shown), None
    if key == "e":
        return replace(choice, without_ended=not choice.without_ended), None
    if key in (*_LOG, "x", "+", "=", "-") and chosen is None:
        return replace(choice, said="choose a training first: j, k or the arrows"), None
    return _ordered(choice, key, chosen) if chosen is not None else (choice, None)


def _moved(choice: Choice, by: int, shown: Sequence[Training]) -> Choice:
    uids: list[str] = [one.uid for one in shown]
    if not uids:
        return choice
    at = uids.index(choice.uid) + by if choice.uid in uids else 0 if by > 0 else len(uids) - 1
    return replace(choice, uid=uids[max(0, min(at, len(uids) - 1))])


def _ordered(choice: Choice, key: str, chosen: Training) -> tuple[Choice, Order | None]:
    name, size = chosen.metadata.name, chosen.spec.world_size
    if key in _LOG:
        return replace(choice, log=True), None
    if key not in ("x", "+", "=", "-"):
        return choice, None
    if chosen.is_terminal:
        return replace(choice, said=f"{name} has already ended: {chosen.status.phase}"), None
    if key == "x":
        return replace(choice, asks=True, said=f"cancel {name}? y, or any other key"), None
    target = size.target + (-1 if key == "-" else 1)
    if not size.min <= target <= size.max:
        bound = f"{plural.workers(size.max)} at most" if target > size.max else f"{plural.workers(size.min)} at least"
        return replace(choice, said=f"{name} has {bound}"), None
    return replace(choice, said=f"{name}: {plural.workers(target)} asked for"), Order("scale", chosen, target)


def _answered(choice: Choice, key: str, chosen: Training | None) -> tuple[Choice, Order | None]:
    if key not in ("y", "Y") or chosen is None:
        return replace(choice, said="not cancelled"), None
    return replace(choice, said=f"{chosen.metadata.name}: cancel is requested"), Order("cancel", chosen)
