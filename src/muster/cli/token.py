"""`muster token`: who may talk to this machine's control plane. Works on its files, so it needs no server."""

from __future__ import annotations

import difflib
from enum import StrEnum

import typer

from muster import files
from muster.cli.output import Output, write_data, write_table
from muster.errors import NotFound
from muster.server.auth import Tokens

app = typer.Typer(
    help="Make, list and revoke tokens of this machine's control plane.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: muster token create ci --role editor --namespace research",
)


class RoleName(StrEnum):
    VIEWER = "viewer"
    EDITOR = "editor"
    ADMIN = "admin"


def _tokens() -> Tokens:
    return Tokens(files.home())


@app.command(epilog="Example: muster token create ci --role editor --namespace research")
def create(
    name: str = typer.Argument(..., help="Whom it is for; shown as the actor of what it does."),
    role: RoleName = typer.Option(..., help="viewer reads, editor changes trainings, admin everything."),
    namespace: list[str] = typer.Option([], "-n", "--namespace", help="Only for this one; may be repeated."),
) -> None:
    """Make a token and print it. It is shown this once and kept only as a hash."""
    token = _tokens().create(name, role.value, tuple(namespace) or ("*",))
    print(token)
    typer.echo(f"token {name!r} was made; it cannot be shown again", err=True)


@app.command("list", epilog="Example: muster token list -o json")
def list_tokens(output: Output = typer.Option(Output.TABLE, "-o", "--output", help="How to print them.")) -> None:
    """List the tokens by name, never their values."""
    found = _tokens().list()
    if output is Output.NAME:
        print("\n".join(one.name for one in found))
    elif output is Output.TABLE:
        write_table(("NAME", "ROLE", "NAMESPACES"), [(one.name, one.role, ", ".join(one.namespaces)) for one in found])
    else:
        items = [{"name": one.name, "role": one.role, "namespaces": list(one.namespaces)} for one in found]
        write_data({"items": items}, output)


@app.command(epilog="Example: muster token revoke ci")
def revoke(name: str = typer.Argument(..., help="The name that it was made with.")) -> None:
    """Make a token worthless, at once."""
    tokens = _tokens()
    names = [one.name for one in tokens.list()]
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]}?" if close else "muster token list shows all"
        raise NotFound(f"there is no token {name!r}", hint=hint)
    tokens.revoke(name)
    typer.echo(f"token {name!r} is revoked", err=True)
