"""`muster metrics`: how does a training learn, and what do its workers use?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from muster import trimming
from muster.cli import exits, session, tensorboard
from muster.cli.output import Report, tell, write_data, write_table
from muster.cli.safe_text import line
from muster.types.codec import to_wire

if TYPE_CHECKING:
    from muster.types.metrics import Metrics, Series, WorkerMetrics

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: muster metrics demo --tensorboard runs")
def metrics(
    name: session.Name,
    board: Path | None = typer.Option(
        None, "--tensorboard", metavar="DIR", help="Write all curves to DIR/NAME for `tensorboard --logdir DIR`."
    ),
    output: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print it."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Show what a training logs with `muster.log`, its steps and size, and what its workers use."""
    handle = session.find(session.open_client(url, token, namespace), name)
    found = handle.metrics()
    if board is not None:
        _export(found, board / handle.name)
    elif output is not Report.TABLE:
        write_data(to_wire(found), output)
    elif not found.series and not found.workers:
        tell(f"nothing is known of {name} yet: it has no steps, and its workers have said nothing")
    else:
        _show(found)


def _export(found: Metrics, folder: Path) -> None:
    path = folder / tensorboard.FILE
    coming = folder / ".coming.muster"  # who reads meanwhile has what was there before
    try:
        folder.mkdir(parents=True, exist_ok=True)
        coming.write_bytes(tensorboard.file_of(found))
        coming.replace(path)
    except OSError as error:
        raise exits.Misused(f"--tensorboard: {path} cannot be written: {error.strerror or error}") from error
    tell(f"{len(found.series)} curves are in {path}; tensorboard --logdir {folder.parent} shows them")


def _show(found: Metrics) -> None:
    if found.series:
        write_table(
            ("CURVE", "LAST", "STEP", "LOWEST", "HIGHEST", "POINTS", "NOTE"), [_row(one) for one in found.series]
        )
    if found.workers:
        print()
        write_table(("WORKER", "CPU", "MEMORY", "GPU", "GPU-MEMORY"), [_use(one) for one in found.workers])


def _row(series: Series) -> list[object]:
    values = [value for _, _, value in series.points]
    step = series.points[-1][0] if series.points else None
    numbers = [_number(one) for one in (values[-1], min(values), max(values))] if values else ["-"] * 3
    note = f"{series.not_finite} × not finite" if series.not_finite else ""
    last, low, high = numbers
    return [line(series.name), last, "-" if step is None else step, low, high, len(values), note]


def _use(worker: WorkerMetrics) -> list[object]:
    percent = [None if one is None else f"{one:.0f}%" for one in (worker.cpu_percent, worker.gpu_percent)]
    size = [None if one is None else trimming.show(one) for one in (worker.memory_bytes, worker.gpu_memory_bytes)]
    return [worker.name, *(one or "-" for one in (percent[0], size[0], percent[1], size[1]))]


def _number(value: float) -> str:
    return f"{value:.6g}"
