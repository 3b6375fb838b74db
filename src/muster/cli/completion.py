"""`muster completion`: what does a shell need to complete muster's commands?"""

from __future__ import annotations

from enum import StrEnum

import typer

app = typer.Typer(rich_markup_mode=None)


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command(epilog='Example: eval "$(muster completion bash)"')
def completion(shell: Shell = typer.Argument(..., metavar="bash|zsh|fish", help="For which shell.")) -> None:
    """Print a script that completes muster's commands and options in a shell."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # public, but not marked so

    print(get_completion_script(prog_name="muster", complete_var="_MUSTER_COMPLETE", shell=shell.value))
