"""`muster scale`, `wait`, `cancel` and `delete`: orders to trainings that exist."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli import durations, exits, session
from muster.cli.follow import ending, leaving
from muster.cli.output import tell
from muster.core.training.explain import show_round_times
from muster.errors import NotFound
from muster.types import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muster.sdk.client import Client
    from muster.sdk.training import DistributedTraining
    from muster.types.training import WorldStatus

app = typer.Typer(rich_markup_mode=None)

Timeout = Annotated[
    float | None,
    typer.Option("--timeout", parser=durations.option, metavar="DURATION", help="Give up after 90, 90s, 5m, 1h30m."),
]


class Goal(StrEnum):
    COMPLETE = "complete"
    TARGET = "target"
    MIN = "min"


@app.command(epilog="Example: muster scale demo 3 --wait --timeout 5m")
def scale(
    name: session.Name,
    target: int = typer.Argument(..., metavar="N", min=1, help="How many workers."),
    wait: bool = typer.Option(False, "--wait", help="Come back when that many train."),
    timeout: Timeout = None,
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Ask for N workers. The order is recorded at once; --wait stays until it is carried out."""
    if timeout is not None and not wait:
        raise exits.Misused("--timeout needs --wait", hint=f"muster scale {name} {target} --wait --timeout 5m")
    handle = session.find(session.open_client(url, token, namespace), name)
    world = handle.scale(target=target)
    tell(f"{name}: {plural.workers(world.target)} asked for, {world.ready} ready")
    if wait:
        with leaving(handle, namespace, f"the order stands: {name} goes to {plural.workers(target)}\n"):
            reached = handle.wait_until_target_world(timeout=timeout)
        _say_end(handle) if handle.training.is_terminal else _say_size(handle, reached)
    else:
        tell(f"muster wait {name} --for=target waits for it")


@app.command(epilog="Example: muster wait demo --for=complete --timeout 5m")
def wait(
    name: session.Name,
    goal: Goal = typer.Option(Goal.COMPLETE, "--for", help="Its end, its target size, or its minimum size."),
    timeout: Timeout = None,
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Wait for a training. Exits 0 when it came, 100 if it failed, 103 if it was cancelled, 124 on timeout."""
    handle = session.find(session.open_client(url, token, namespace), name)
    with leaving(handle, namespace):
        if goal is Goal.COMPLETE:
            handle.wait(timeout=timeout)
            raise typer.Exit(_say_end(handle))
        if goal is Goal.TARGET:
            world = handle.wait_until_target_world(timeout=timeout)
        else:
            world = handle.wait_until_min_world(timeout=timeout)
    if handle.training.is_terminal:
        raise typer.Exit(_say_end(handle))
    _say_size(handle, world)


def _say_size(handle: DistributedTraining, world: WorldStatus) -> None:
    took = show_round_times(handle.training.status)
    tell(f"{handle.name}: {plural.workers(world.target, f'{world.ready} of ')} ready" + (f"; {took}" if took else ""))


@app.command(epilog="Example: muster cancel demo --grace 10s")
def cancel(
    names: session.Names,
    grace: float | None = typer.Option(
        None, parser=durations.option, metavar="DURATION", help="How long ranks may take to stop."
    ),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """End trainings as cancelled; they stay to be looked at. One that has ended is left as it is."""
    client = session.open_client(url, token, namespace)
    for handle in _each(client, names):
        if handle.training.is_terminal:
            tell(f"{handle.name} has already ended: {handle.training.status.phase}")
            continue
        handle.cancel(grace_seconds=grace)
        tell(f"{handle.name}: cancel was requested")


@app.command(epilog="Example: muster suspend demo")
def suspend(
    names: session.Names,
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Have the workers of trainings leave, after ranks were told to save. They wait until they are resumed."""
    client = session.open_client(url, token, namespace)
    for handle in _each(client, names):
        handle.suspend()
        tell(f"{handle.name}: suspended; muster resume {handle.name} lets it go on")


@app.command(epilog="Example: muster resume demo")
def resume(
    names: session.Names,
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Let trainings go on that are suspended."""
    client = session.open_client(url, token, namespace)
    for handle in _each(client, names):
        handle.resume()
        tell(f"{handle.name}: resumed")


@app.command(epilog="Example: muster delete demo other")
def delete(
    names: session.Names,
    timeout: Timeout = None,
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Stop trainings if they run, and remove them with their logs. Their events and usage stay.

    A name that does not exist is reported, the others are deleted, and the exit code is 3.
    """
    client = session.open_client(url, token, namespace)
    for handle in _each(client, names):
        handle.delete(timeout=timeout)
        tell(f"{handle.name} is deleted")


def _each(client: Client, names: list[str]) -> Iterator[DistributedTraining]:
    """Yield the trainings of those names. Each name that does not exist is reported, and exits with 3 at the end."""
    missing = False
    for name in dict.fromkeys(names):
        try:
            handle = session.find(client, name)
        except NotFound as error:
            exits.report(error)
            missing = True
            continue
        yield handle
    if missing:
        raise typer.Exit(exits.NOT_FOUND)


def _say_end(handle: DistributedTraining) -> int:
    """Tell how a training ended; the exit code for that."""
    typer.echo(ending(handle.training), err=True)
    return exits.OF_PHASE[handle.training.status.phase]
