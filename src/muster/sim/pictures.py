"""How does a picture come into a file? With matplotlib, which is an optional extra, and without a display."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muster.errors import MusterError, how_to_install
from muster.types.codec import Invalid, Problem

DOTS_PER_INCH = 110


class PlottingMissing(MusterError):
    """Pictures need matplotlib, which is an optional extra."""

    code = "missing_extra"

    def __init__(self) -> None:
        super().__init__("pictures need matplotlib", hint=how_to_install("plot"))


def figure(width_inches: float, height_inches: float) -> Any:
    """An empty one."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise PlottingMissing() from None
    made = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(drawn: Any, path: Path) -> None:
    try:
        drawn.savefig(path, dpi=DOTS_PER_INCH, format="png")
    except OSError as error:
        raise Invalid([Problem("FILE", f"{path} cannot be written: {error.strerror}")]) from error


def fits(text: str, inches: float, size: float) -> bool:
    """Whether a text of that size in points has room."""
    return len(text) * size * 0.62 / 72 + 0.04 < inches
