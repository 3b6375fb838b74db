"""`muster share status|pipelines|events|unregister|kill`: look at a control plane's pool, and take a pipeline out."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer

from muster.cli import output, session
from muster.cli.output import Report
from muster.sdk import flows
from muster.sdk.effects import HttpRequest

WAIT_S = 10.0

app = typer.Typer(rich_markup_mode=None)

PoolName = Annotated[str, typer.Option("--pool", metavar="POOL", help="Which pool.")]
Form = Annotated[Report, typer.Option("-o", "--output", help="How to print it.")]


@app.command(epilog="Example: muster share status -o json")
def status(
    pool: PoolName = "default",
    form: Form = Report.TABLE,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Show who holds which GPU of a pool, who waits, and why."""
    found = asked(url, token, "GET", path_of(pool))
    if form is not Report.TABLE:
        output.write_data(found, form)
        return
    held: Mapping[str, Any] = found["leases"]
    rows = [_gpu_row(gpu, held.get(str(gpu)), idle=gpu in found["idle"]) for gpu in range(found["gpus"])]
    output.write_table(("GPU", "PIPELINE", "CLUSTER", "RANK", "STATE"), rows)
    if found["pending"]:
        print()
        waiting = [(one["pipeline"], one["cluster"], one["priority"], one["reason"]) for one in found["pending"]]
        output.write_table(("WAITING", "CLUSTER", "PRIORITY", "REASON"), waiting)
    if found["quarantined"]:
        print()
        output.write_table(("QUARANTINED", "REASON"), list(found["quarantined"].items()))


@app.command(epilog="Example: muster share pipelines -o json")
def pipelines(
    pool: PoolName = "default",
    form: Form = Report.TABLE,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """List the pipelines of a pool."""
    items = asked(url, token, "GET", path_of(pool))["pipelines"]
    if form is not Report.TABLE:
        output.write_data({"items": items}, form)
        return
    output.write_table(("PIPELINE", "STATE", "WEIGHT", "GPUS", "REMAINING", "REASON"), [_row(one) for one in items])


@app.command(epilog="Example: muster share events --after 1767225600000 -o json")
def events(
    after: int = typer.Option(0, min=0, metavar="ID", help="Only those with a larger id."),
    pool: PoolName = "default",
    form: Form = Report.TABLE,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Show what the scheduler of a pool decided and saw, oldest first."""
    items = asked(url, token, "GET", f"{path_of(pool)}/events", {"after": str(after)})["items"]
    if form is not Report.TABLE:
        output.write_data({"items": items}, form)
        return
    rows = [
        (one["at"], one["kind"], one["pipeline"], one["cluster"], _listed(one["gpus"]), one["text"]) for one in items
    ]
    output.write_table(("TIME", "EVENT", "PIPELINE", "CLUSTER", "GPUS", "ABOUT"), rows)


@app.command(epilog="Example: muster share unregister p1")
def unregister(
    pipeline: str = typer.Argument(..., metavar="PIPELINE", help="Which one."),
    pool: PoolName = "default",
    form: Form = Report.TABLE,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Take a pipeline out of a pool. Its GPUs are free at once, so be sure that it has ended."""
    found = asked(url, token, "DELETE", f"{path_of(pool)}/pipelines/{quote(pipeline, safe='')}")
    if form is not Report.TABLE:
        output.write_data({"pipeline": pipeline, **found}, form)
        return
    typer.echo(f"pipeline {pipeline!r} is unregistered", err=True)


@app.command(epilog="Example: muster share kill p1 --why 'its owner has left'")
def kill(
    pipeline: str = typer.Argument(..., metavar="PIPELINE", help="Which one."),
    why: str = typer.Option("", "--why", metavar="TEXT", help="Told to whoever is ended, and in the events."),
    force: bool = typer.Option(False, "--force", help="Free its GPUs at once: be sure that it uses none."),
    pool: PoolName = "default",
    form: Form = Report.TABLE,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """End somebody's pipeline. What it does not give back stays quarantined until its process is gone."""
    path = f"{path_of(pool)}/pipelines/{quote(pipeline, safe='')}/kill"
    body, headers = {"why": why, "force": force}, {"Idempotency-Key": uuid.uuid4().hex}
    client = session.open_client(url, token, session.DEFAULT)
    order = HttpRequest("POST", path, {"wait": f"{WAIT_S:g}"}, json=body, headers=headers, timeout_s=2 * WAIT_S)
    while (answer := client.run(flows.call(order))).status == 202:
        output.tell(answer.json["reason"])
    found: dict[str, Any] = answer.json
    if form is not Report.TABLE:
        output.write_data({"pipeline": pipeline, "gpus": found["gpus"], "text": found["text"]}, form)
        return
    output.tell(found["text"])


def asked(
    url: str | None, token: str | None, method: str, path: str, params: Mapping[str, str] | None = None
) -> dict[str, Any]:
    client = session.open_client(url, token, session.DEFAULT)
    found: dict[str, Any] = client.run(flows.call(HttpRequest(method, path, params or {}))).json
    return found


def path_of(pool: str) -> str:
    return f"/v1/pools/{quote(pool, safe='')}"


def _gpu_row(gpu: int, holder: Mapping[str, Any] | None, *, idle: bool) -> Sequence[object]:
    if holder is None:
        return (gpu, None, None, None, "idle" if idle else "out of use")
    return (gpu, holder["pipeline"], holder["cluster"], holder["rank"], holder["state"])


def _row(one: Mapping[str, Any]) -> Sequence[object]:
    left = f"{one['remaining']} of {one['target']}" if "remaining" in one else None
    state = one["state"] if one["admitted"] else f"{one['state']}, not admitted"
    return (one["id"], state, f"{one['weight']:g}", _listed(one["held"]), left, one["quarantine"])


def _listed(gpus: Sequence[int]) -> str:
    return ",".join(map(str, gpus))
