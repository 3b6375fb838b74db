"""What does `docs/cli.md` say? It is made from the help of the commands themselves, so it cannot drift from them.

python -m tests.docs.cli_page > docs/cli.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from muster.cli.main import app

WIDTH = 100

_HEAD = """# The command line

Every command, in its own words. This page is made from the code (`python -m tests.docs.cli_page > docs/cli.md`), and a
test fails when it is out of date.

What holds for all of them:
- Data goes to stdout; progress, notes and errors to stderr. `-o table|json|yaml|name` chooses the form of data.
- An error is one line that says what is wrong, and where there is one a `hint:` with the next command. With
  `MUSTER_DEBUG=1` the traceback comes as well.
- A name that nearly fits gets a suggestion: `muster describe frist` asks whether you meant `first`.
- Without `--url` or `MUSTER_URL` the control plane of `MUSTER_HOME` (`~/.muster`) is meant; if none runs it is started.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | an error that has no code of its own |
| 2 | wrong usage, or a training that is not valid |
| 3 | not found |
| 4 | conflict: the name is taken, the training has ended, or (`shell`) its rank does not run now |
| 5 | no token, an unknown one, or one that may not do this |
| 6 | the namespace's quota |
| 7 | the control plane cannot be reached |
| 100 | `run`, `wait`, `scale --wait`: the training failed |
| 103 | `run`, `wait`, `scale --wait`: the training was cancelled |
| 124 | the timeout came first |
| 130 | Ctrl-C |
"""


def commands() -> Iterator[tuple[str, str, str]]:
    """Each command's path, its first sentence, and its help at a fixed width; groups come before their members."""
    group: Any = get_command(app)
    with group.make_context("muster", ["--help"], resilient_parsing=True, terminal_width=WIDTH) as context:
        yield from _walk(group, context, "muster")


def _walk(group: Any, context: Any, path: str) -> Iterator[tuple[str, str, str]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = type(context)(command, info_name=name, parent=context, terminal_width=WIDTH)
        text = command.get_help(inner)
        yield f"{path} {name}", _first_sentence(command.help or ""), "\n".join(map(str.rstrip, text.splitlines()))
        if hasattr(command, "list_commands"):
            yield from _walk(command, inner, f"{path} {name}")


def _first_sentence(text: str) -> str:
    sentence, dot, _ = " ".join(text.split()).partition(". ")
    return sentence + dot.strip()


def page() -> str:
    found = list(commands())
    lines = [_HEAD, "| command | what it does |", "|---|---|"]
    lines += [f"| [`{path}`](#{path.replace(' ', '-')}) | {about} |" for path, about, _ in found]
    for path, _, text in found:
        lines += ["", f"## {path}", "", "```", text, "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
