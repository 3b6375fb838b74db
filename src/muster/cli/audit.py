"""`muster audit`: who changed what, and who was refused? Reads the files of this machine, so it needs no server."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import typer

from muster import files
from muster.cli import durations, exits
from muster.cli.output import Report, write_data, write_table
from muster.cli.safe_text import shown
from muster.errors import MusterError
from muster.sdk import home
from muster.server.audit import AUDIT_FILE, numbered, read_line
from muster.types.audit import AuditEntry
from muster.types.codec import show_time, to_wire

app = typer.Typer(rich_markup_mode=None)

_COLUMNS = ("TIME", "DECISION", "WHO", "ROLE", "FROM", "STATUS", "WHAT")
_LINE = "{:<24}   {:<8}   {:<12}   {:<6}   {:<15}   {:<6}   {}"
_LOOK_EVERY_S = 0.3
_UNANSWERED = ("refused", "ended")

Takes = Callable[[AuditEntry], bool]


@app.command(epilog="Example: muster audit --since 1h --refused")
def audit(
    since: str | None = typer.Option(None, metavar="TIME", help="Only from then on: 24h, or 2026-01-31T12:00:00Z."),
    who: str | None = typer.Option(None, metavar="NAME", help="Only of this token; - is nobody known."),
    refused: bool = typer.Option(False, "--refused", help="Only what was refused, or ended with its token."),
    lines: int = typer.Option(50, "-n", "--lines", min=0, metavar="N", help="Only the last N (50); 0 is all."),
    follow: bool = typer.Option(False, "-f", "--follow", help="Go on with what comes."),
    output: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print it."),
) -> None:
    """Show who changed what on this machine's control plane, and who was refused; the newest last."""
    takes = _filter(_moment(since), who, refused)
    home.must_be_here(files.home())
    path = files.home() / AUDIT_FILE
    with ExitStack() as held:
        opened = _opened(path, held)
        found = deque((one for file in opened for one in _entries(file) if takes(one)), maxlen=lines or None)
        if follow:
            for entry in found:
                _show(entry, output)
            for entry in _coming(path, opened[-1] if opened else None):
                if takes(entry):
                    _show(entry, output)
        elif output is not Report.TABLE:
            write_data({"items": [to_wire(one) for one in found]}, output)
        elif found:
            write_table(_COLUMNS, [_row(one) for one in found])
        else:
            typer.echo(f"nothing like that is in {path}" if opened else f"there is no {path} yet", err=True)


def _filter(since: datetime | None, who: str | None, refused: bool) -> Takes:
    def takes(entry: AuditEntry) -> bool:
        if since is not None and entry.at < since:
            return False
        return who in (None, entry.who) and (not refused or entry.decision in _UNANSWERED)

    return takes


def _moment(since: str | None) -> datetime | None:
    try:
        return None if since is None else durations.moment(since, datetime.now(UTC))
    except ValueError as error:
        raise exits.Misused(f"--since: {error}", hint="muster audit --since 1h") from None


# Files -------------------------------------------------------------------------------------------


def _opened(path: Path, held: ExitStack) -> list[BinaryIO]:
    """All of them, the oldest first. The newest is opened first, so that a rotation meanwhile hides nothing."""
    found: dict[int, BinaryIO] = {}
    number = 0
    while (file := _open(numbered(path, number), held)) is not None:
        found.setdefault(os.fstat(file.fileno()).st_ino, file)
        number += 1
    return list(reversed(found.values()))


def _open(path: Path, held: ExitStack) -> BinaryIO | None:
    try:
        return held.enter_context(os.fdopen(os.dup(held.enter_context(files.reading(path))), "rb"))
    except FileNotFoundError:
        return None
    except OSError as error:
        hint = f"ls -l {path} shows whose it is"
        raise MusterError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error


def _entries(file: BinaryIO) -> Iterator[AuditEntry]:
    """What is there now. A line that is being written is left for the next time."""
    while line := file.readline():
        if not line.endswith(b"\n"):
            file.seek(-len(line), os.SEEK_CUR)
            return
        if (entry := read_line(line)) is not None:
            yield entry


def _coming(path: Path, file: BinaryIO | None) -> Iterator[AuditEntry]:
    """What is written from now on, for ever, also into the next file."""
    with ExitStack() as held:
        while True:
            if file is not None:
                yield from _entries(file)
            with contextlib.suppress(FileNotFoundError):
                if file is None or os.stat(path).st_ino != os.fstat(file.fileno()).st_ino:
                    if file is not None:
                        yield from _entries(file)  # what came before it was put aside
                    file = _open(path, held)
                    continue
            time.sleep(_LOOK_EVERY_S)


# Lines -------------------------------------------------------------------------------------------


def _row(entry: AuditEntry) -> tuple[object, ...]:
    return (
        show_time(entry.at),
        entry.decision,
        entry.who,
        entry.role,
        entry.from_,
        entry.status or "-",
        _what(entry),
    )


def _what(entry: AuditEntry) -> str:
    if entry.decision == "lost":
        return f"{entry.more} lines could not be written"
    asked = f"{entry.method} {entry.path}" + (f" ({entry.about})" if entry.about else "")
    return f"{entry.more} more, the last was {asked}" if entry.more else asked


def _show(entry: AuditEntry, output: Report) -> None:
    if output is Report.TABLE:
        print(_LINE.format(*(shown(value) for value in _row(entry))), flush=True)
    else:
        print(json.dumps(to_wire(entry)), flush=True)  # a line each, in ASCII; YAML reads it too
