"""`muster top`: how is everything, now and as it changes?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from muster.cli import session
from muster.cli.output import write_table
from muster.cli.trainings import reason_of, target_of

if TYPE_CHECKING:
    from muster.sdk.client import Client
    from muster.types.training import Training

app = typer.Typer(rich_markup_mode=None)

_COLUMNS = ("NAME", "PHASE", "READY", "SPARES", "GPUS", "ROUND", "STEP", "RESTARTS", "AGE", "REASON")
_ORDER = {"ready": 0, "pending": 1}  # what ended comes last
_REDRAWS_PER_S = 2  # ages move without anyone telling


@app.command(epilog="Example: muster top")
def top(
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Show trainings in a table that follows every change; where it is piped, once."""
    client = session.open_client(url, token, namespace)
    if not sys.stdout.isatty():
        rows = _rows(session.listed(client, None, None, every=False), datetime.now(UTC))
        write_table(_COLUMNS, rows)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _live(client)


def _live(client: Client) -> None:
    from rich.live import Live

    there: dict[str, Training] = {}

    def draw() -> Any:
        return _table(list(there.values()))

    with Live(get_renderable=draw, refresh_per_second=_REDRAWS_PER_S, screen=True) as live:
        for deleted, training in session.watched(client):
            if deleted:
                there.pop(training.uid, None)
            else:
                there[training.uid] = training
            live.refresh()


def _table(trainings: Iterable[Training]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=True)
    for title in _COLUMNS:
        table.add_column(title, no_wrap=True, overflow="ellipsis", ratio=1 if title == "REASON" else None)
    for row in _rows(trainings, datetime.now(UTC)):
        table.add_row(*(Text(str(value)) for value in row))
    return table


def _rows(trainings: Iterable[Training], now: datetime) -> list[tuple[object, ...]]:
    ordered = sorted(trainings, key=lambda one: (_ORDER.get(one.status.phase, 2), one.metadata.name))
    return [_row(one, now) for one in ordered]


def _row(training: Training, now: datetime) -> tuple[object, ...]:
    from muster.core.explain import show_age

    status, created = training.status, training.metadata.creation_timestamp
    steps = [rank.step for rank in status.ranks if rank.step is not None]
    return (
        training.metadata.name,
        status.phase,
        f"{status.world_size.ready}/{target_of(training)}",
        f"{status.spares.ready}/{training.spec.spares}",
        (status.world_size.ready + status.spares.ready) * training.spec.resources.gpus,
        "-" if status.round is None else status.round,
        min(steps, default="-"),
        status.restarts,
        show_age(now - created) if created else "-",
        reason_of(training),
    )
