"""`muster ps` and `muster get`: which trainings are there, and how are they?"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli import session
from muster.cli.output import Output, tell, write_data, write_table
from muster.cli.safe_text import shown
from muster.core.training.explain import first_line, show_age

if TYPE_CHECKING:
    from muster.types.training import Training

app = typer.Typer(rich_markup_mode=None)

COLUMNS = ("NAME", "PHASE", "READY", "SPARES", "ROUND", "RESTARTS", "AGE", "REASON")

# Conditions that explain why a training is not well, the most telling first, and the status that says so.
_WORRIES = (
    ("Admitted", "False"),
    ("BelowMinimum", "True"),
    ("Resizing", "True"),
    ("TargetReached", "False"),
    ("Stalled", "True"),
)


_PHASES = ("ready", "pending", "failed", "cancelled", "succeeded")


class PhaseName(StrEnum):
    PENDING = "pending"
    READY = "ready"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Sort(StrEnum):
    AGE = "age"
    NAME = "name"
    PHASE = "phase"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="How to print it.")]


@app.command(epilog="Example: muster ps --phase ready -l team=vision -o name")
def ps(
    selector: str | None = typer.Option(None, "-l", "--selector", metavar="K=V[,K=V]", help="Only with these labels."),
    phase: PhaseName | None = typer.Option(None, help="Only in this phase."),
    every: bool = typer.Option(False, "-A", "--all-namespaces", help="From every namespace."),
    sort: Sort = typer.Option(Sort.AGE, help="Newest first, by name, or what runs and waits first."),
    output: OutputOption = Output.TABLE,
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """List trainings with their phase, workers and reason."""
    client = session.open_client(url, token, namespace)
    found = ordered(session.listed(client, selector, phase.value if phase else None, every=every), sort)
    if output is Output.TABLE and not found:
        where = "in any namespace" if every else f"in namespace {namespace!r}"
        tell(f"no trainings {where}")
        return
    show_all(found, output, with_namespace=every)


@app.command(epilog="Example: muster get demo -o yaml")
def get(
    names: session.Names,
    output: OutputOption = Output.TABLE,
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Print trainings as they are now, as a line or as the whole object."""
    client = session.open_client(url, token, namespace)
    found = [session.find(client, name).training for name in names]
    if len(found) == 1 and output in (Output.JSON, Output.YAML):
        write_data(found[0].to_wire(), output)
    else:
        show_all(found, output)


def ordered(trainings: Sequence[Training], by: Sort) -> list[Training]:
    """Newest first, unless something else counts more."""
    newest = sorted(trainings, key=_created, reverse=True)
    if by is Sort.NAME:
        return sorted(newest, key=lambda one: (one.metadata.name, one.metadata.namespace))
    if by is Sort.PHASE:
        return sorted(newest, key=lambda one: _PHASES.index(one.status.phase))
    return newest


def _created(training: Training) -> datetime:
    return training.metadata.creation_timestamp or datetime.min.replace(tzinfo=UTC)


def show_all(trainings: Sequence[Training], output: Output, *, with_namespace: bool = False) -> None:
    if output is Output.NAME:
        for one in trainings:
            print(shown(one.metadata.name))
    elif output is Output.TABLE:
        now = datetime.now(UTC)
        space = ("NAMESPACE",) if with_namespace else ()
        rows = [((one.metadata.namespace,) if with_namespace else ()) + row_of(one, now) for one in trainings]
        write_table(space + COLUMNS, rows, wrap=True)
    else:
        write_data({"items": [one.to_wire() for one in trainings]}, output)


def row_of(training: Training, now: datetime) -> tuple[object, ...]:
    """A training on one line, in the order of COLUMNS."""
    status, created = training.status, training.metadata.creation_timestamp
    return (
        training.metadata.name,
        status.phase,
        "-" if training.is_terminal else f"{status.world_size.ready}/{target_of(training)}",
        "-" if training.is_terminal else f"{status.spares.ready}/{training.spec.spares}",
        "-" if status.round is None else status.round,
        status.restarts,
        show_age(now - created) if created else "-",
        reason_of(training),
    )


def target_of(training: Training) -> int:
    """How many workers it should have; what was asked for, also where the control plane has not seen it yet."""
    return training.spec.world_size.target


def reason_of(training: Training) -> str:
    """Why it is not simply well, in the words of the control plane; empty if it is."""
    status, outcome = training.status, training.status.outcome
    if outcome is not None:
        return "" if outcome.state == "succeeded" else first_line(outcome.message) or outcome.reason
    if training.spec.cancel is not None:
        return "cancel was requested"
    for kind, bad in _WORRIES:
        condition = status.condition(kind)
        if condition is not None and condition.status == bad:
            return condition.message or condition.reason
    return ""
