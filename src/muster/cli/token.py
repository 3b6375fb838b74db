"""`muster token`: who may talk to this machine's control plane. Works on its files, so it needs no server."""

from __future__ import annotations

import difflib
from datetime import UTC, datetime, timedelta
from enum import StrEnum

import typer

from muster import files
from muster.cli import durations, exits
from muster.cli.output import Output, write_data, write_table
from muster.core.training.explain import show_age
from muster.errors import NotFound
from muster.sdk import home
from muster.server.audit import note_local
from muster.server.auth import EMBEDDED_FILE, GRACE, ListedToken, Tokens
from muster.types.codec import show_time, to_wire
from muster.types.event import EMBEDDED

app = typer.Typer(
    help="Make, list, rotate and revoke tokens of this machine's control plane.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: muster token create ci --role editor --namespace research",
)


_ABSENT = dict.fromkeys(("name", "role", "namespaces", "created", "expires", "lastUse"))


class RoleName(StrEnum):
    VIEWER = "viewer"
    EDITOR = "editor"
    ADMIN = "admin"


def _tokens() -> Tokens:
    home.must_be_here(files.home())
    return Tokens(files.home())


@app.command(epilog="Example: muster token create ci --role editor --namespace research --expires 7d")
def create(
    name: str = typer.Argument(..., metavar="NAME", help="Whom it is for; shown as the actor of what it does."),
    role: RoleName = typer.Option(..., help="viewer reads, editor changes trainings, admin everything."),
    namespace: list[str] = typer.Option([], "-n", "--namespace", help="Only for this one; may be repeated."),
    expires: float | None = typer.Option(
        None, parser=durations.option, metavar="D", help="How long it is good: 7d, 12h; for ever without."
    ),
) -> None:
    """Make a token and print it. It is shown this once and kept only as a hash."""
    token = _tokens().create(name, role.value, tuple(namespace) or ("*",), expires_in=_span(expires))
    print(token)
    note_local(files.home(), "token create", name)
    typer.echo(f"token {name!r} was made; it cannot be shown again", err=True)


@app.command(epilog="Example: muster token rotate ci --grace 1h")
def rotate(
    name: str = typer.Argument(..., metavar="NAME", help="The name that it was made with."),
    grace: float = typer.Option(
        GRACE.total_seconds(), parser=durations.option, metavar="D", help="How long the old one is still good (1h)."
    ),
    expires: float | None = typer.Option(
        None, parser=durations.option, metavar="D", help="How long the new one is good; as long as the old one was."
    ),
) -> None:
    """Make a new secret for a token and print it. The old one is good for a while; --grace 0 ends it at once."""
    if name == EMBEDDED and expires is not None:
        raise exits.Misused("the embedded token does not expire", hint="muster token rotate embedded")
    tokens = _tokens()
    _must_know(tokens, name)
    token = tokens.rotate(name, grace=timedelta(seconds=grace), expires_in=_span(expires))
    note_local(files.home(), "token rotate", name)
    old = f"the old one is good until {show_time(datetime.now(UTC) + timedelta(seconds=grace))}" if grace else ""
    if name == EMBEDDED:
        typer.echo(f"the new one is in {files.home() / EMBEDDED_FILE}, where commands find it", err=True)
    else:
        print(token)
        typer.echo(f"token {name!r} has a new secret, which cannot be shown again", err=True)
    typer.echo(old or "the old one is worthless now", err=True)


@app.command("list", epilog="Example: muster token list -o json")
def list_tokens(output: Output = typer.Option(Output.TABLE, "-o", "--output", help="How to print them.")) -> None:
    """List the tokens by name, never their values."""
    found = _tokens().listed()
    if output is Output.NAME:
        print("\n".join(one.name for one in found))
    elif output is Output.TABLE:
        now = datetime.now(UTC)
        write_table(("NAME", "ROLE", "NAMESPACES", "CREATED", "EXPIRES", "LAST USE"), [_row(one, now) for one in found])
    else:
        write_data({"items": [_ABSENT | to_wire(one) for one in found]}, output)


def _row(one: ListedToken, now: datetime) -> tuple[object, ...]:
    expires = "never" if one.expires is None else f"in {show_age(one.expires - now)}"
    return (
        one.name,
        one.role,
        ", ".join(one.namespaces),
        "-" if one.created is None else f"{show_age(now - one.created)} ago",
        "expired" if one.expires is not None and one.expires <= now else expires,
        "-" if one.last_use is None else f"{show_age(now - one.last_use)} ago",
    )


@app.command(epilog="Example: muster token revoke ci")
def revoke(name: str = typer.Argument(..., metavar="NAME", help="The name that it was made with.")) -> None:
    """Make a token worthless, at once."""
    tokens = _tokens()
    _must_know(tokens, name)
    tokens.revoke(name)
    note_local(files.home(), "token revoke", name)
    typer.echo(f"token {name!r} is revoked", err=True)
    if name == EMBEDDED:
        next_step = "muster server stop, then muster server start, makes another"
        typer.echo(f"commands on this machine have no token any more: {next_step}", err=True)


def _must_know(tokens: Tokens, name: str) -> None:
    names = [one.name for one in tokens.list()]
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]}?" if close else "muster token list shows all"
        raise NotFound(f"there is no token {name!r}", hint=hint)


def _span(seconds: float | None) -> timedelta | None:
    if seconds == 0:
        raise exits.Misused("--expires 0 would be over before it is used", hint="muster token create ci --expires 7d")
    return None if seconds is None else timedelta(seconds=seconds)
