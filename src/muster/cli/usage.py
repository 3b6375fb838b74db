"""`muster usage`: what was used, and what does that cost?"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from muster.cli import durations, exits, session
from muster.cli.output import Sheet, write_csv, write_data, write_table
from muster.core.training.metering import read_rates
from muster.types.codec import Invalid, to_wire

if TYPE_CHECKING:
    from muster.core.training.metering import Rates
    from muster.types.usage import Usage

app = typer.Typer(rich_markup_mode=None)

_CSV = (
    "namespace",
    "training",
    "uid",
    "workers",
    "running",
    "worker_seconds",
    "gpu_seconds",
    "cost",
    "currency",
    "pipeline",
)


class By(StrEnum):
    TRAINING = "training"
    NAMESPACE = "namespace"


@app.command(epilog="Example: muster usage --since 24h --by namespace --rates rates.json -o csv")
def usage(
    since: str | None = typer.Option(None, metavar="24h|TIME", help="Only from then on; ISO 8601 or how long ago."),
    by: By = typer.Option(By.TRAINING, help="What to sum up."),
    rates: Path | None = typer.Option(
        None, metavar="FILE", help='What an hour costs: {"currency": "EUR", "workerHour": 0.1, "gpuHour": 2.5}.'
    ),
    output: Sheet = typer.Option(Sheet.TABLE, "-o", "--output", help="How to print it."),
    namespace: str | None = typer.Option(
        None, "-n", "--namespace", envvar="MUSTER_NAMESPACE", metavar="NS", help="Only this namespace."
    ),
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Sum up worker and GPU time, of running trainings and of pipelines of pools up to now."""
    prices = None if rates is None else _read_rates(rates)
    client = session.open_client(url, token, namespace or session.DEFAULT)
    found = [one for one in client.usage(since=_since(since), by=by.value) if namespace in (None, one.namespace)]
    if prices is not None:
        found = [dataclasses.replace(one, cost=prices.cost(one.worker_seconds, one.gpu_seconds)) for one in found]
    show(found, output, prices.currency if prices else "")


def show(found: list[Usage], output: Sheet, currency: str) -> None:
    if output is Sheet.CSV:
        fields = _CSV[: _CSV.index("currency")]
        write_csv(_CSV, [[*(getattr(one, name) for name in fields), currency, one.pipeline] for one in found])
    elif output is Sheet.TABLE:
        _show_table(found, currency)
    else:
        extra = {"currency": currency} if currency else {}
        write_data({"items": [to_wire(one) | extra for one in found]}, output)


def _show_table(found: list[Usage], currency: str) -> None:
    priced = any(one.cost is not None for one in found)
    pooled = any(one.pipeline for one in found)
    titles = ["NAMESPACE", "TRAINING", *(["PIPELINE"] if pooled else []), "WORKERS", "RUNNING"]
    titles += ["WORKER-HOURS", "GPU-HOURS"]
    rows: list[list[object]] = []
    for one in found:
        hours = (f"{one.worker_seconds / 3600:.3f}", f"{one.gpu_seconds / 3600:.3f}")
        whose = [one.namespace, one.training, *([one.pipeline] if pooled else [])]
        rows.append([*whose, one.workers, one.running, *hours])
        if priced:
            rows[-1].append("-" if one.cost is None else f"{one.cost:.2f}")
    if not found:
        typer.echo("nothing was used", err=True)
        return
    write_table([*titles, f"COST {currency}".strip()] if priced else titles, rows)


def _since(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return durations.moment(text, datetime.now(UTC))
    except ValueError as error:
        raise exits.Misused(f"--since: {error}") from None


def _read_rates(path: Path) -> Rates:
    try:
        return read_rates(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise exits.Misused(f"--rates: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except Invalid as error:
        hint = 'a rates file is {"currency": "EUR", "workerHour": 0.1, "gpuHour": 2.5}'
        raise exits.Misused(f"--rates: {path}: {error}", hint=hint) from error
