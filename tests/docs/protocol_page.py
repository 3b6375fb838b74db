"""What do the tables of `docs/protocol.md` say? They are made from `types/frames.py`, so they cannot drift from it.

python -m tests.docs.protocol_page
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from muster.types import frames
from muster.types.frames import Frame, Introduction, Presented, ReportedEnd, RunRecord
from muster.types.world import Elector, Electorate, Gate, Outline, RunOutcome, Seat, Settings

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
OPENING = ("challenge", "tls", "hello", "proof", "welcome", "hold", "error", "part")
RECORDS = (
    Introduction,
    Presented,
    RunRecord,
    Seat,
    Outline,
    Elector,
    Electorate,
    Gate,
    RunOutcome,
    ReportedEnd,
    Settings,
)
_TABLE = re.compile(r"(<!-- made from the code: (\w+) -->\n)(?:\|.*\n)*")


def page(text: str) -> str:
    """The same with every table as the code would have it."""
    return _TABLE.sub(lambda found: found[1] + "".join(f"{line}\n" for line in _table(found[2])), text)


def _table(name: str) -> Iterator[str]:
    if name == "records":
        yield from ("| record | fields |", "|---|---|")
        for record in RECORDS:
            yield f"| {record.__name__} | {', '.join(f'`{field}`' for field in _fields(record))} |"
        return
    yield from ("| type | meaning |", "|---|---|")
    for kind, frame in frames.TYPES.items():
        if (kind in OPENING) if name == "opening" else (frame.sender == name and kind not in OPENING):
            told = f" {{{', '.join(_fields(frame))}}}" if _fields(frame) else ""
            yield f"| `{kind}{told}` | {' '.join((frame.__doc__ or '').split())} |"


def _fields(record: type) -> list[str]:
    """Names on the wire; `?` after one that may be missing because it is not known. Every frame may have the first."""
    every = {field.name for field in dataclasses.fields(Frame)} if issubclass(record, Frame) else set()
    known = [field for field in dataclasses.fields(record) if field.name not in every]
    return [f"{field.name}{'?' if field.default is None else ''}" for field in known]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
