"""How long, since when or how much did the user mean? 90, 5m, 1h30m; 24h or 2026-01-31T12:00:00Z; 500M, 1Gi."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import typer

from muster import trimming

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_PART = r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)"
_LONGEST_S = 10 * 365 * 86_400


def seconds(text: str) -> float:
    """A duration in seconds. A bare number is seconds; parts go from large to small, each unit once."""
    text = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return _bounded(float(text), text)
    parts = re.findall(_PART, text)
    sizes = [_UNITS[unit] for _, unit in parts]
    if not parts or not re.fullmatch(f"(?:{_PART})+", text) or sizes != sorted(set(sizes), reverse=True):
        raise ValueError(f"{text!r} is not a duration like 90, 90s, 5m or 1h30m")
    return _bounded(sum(float(number) * size for (number, _), size in zip(parts, sizes, strict=True)), text)


def moment(text: str, now: datetime) -> datetime:
    """A time that was given as itself or as how long ago it is."""
    try:
        return now - timedelta(seconds=seconds(text))
    except ValueError:
        pass
    try:
        read = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"{text!r} is neither a duration like 24h nor a time like 2026-01-31T12:00:00Z") from None
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).astimezone(UTC)


def option(text: str | float) -> float:
    """`seconds`, for a parameter of a command."""
    try:
        return seconds(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def size(text: str | int) -> int:
    """A number of bytes, for a parameter of a command."""
    try:
        return trimming.read_limit(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _bounded(value: float, text: str) -> float:
    if value > _LONGEST_S:
        raise ValueError(f"{text!r} is longer than ten years")
    return value
