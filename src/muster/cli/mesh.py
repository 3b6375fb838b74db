"""`muster mesh`: the gate for programs that muster does not start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

from muster.cli import durations, exits
from muster.cli.safe_text import line as shown_line
from muster.errors import Unavailable

if TYPE_CHECKING:
    from muster.mesh.probe import Path
    from muster.mesh.publishing import Finding, Observer
    from muster.ports import Keys

app = typer.Typer(
    help="Open the mesh gate for programs in images that muster does not start.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: muster mesh publish --listen 127.0.0.1:2379 --node a=127.0.0.1:8473 --node b=127.0.0.1:8474",
)

_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*")  # other first words are left to the shell
_EXAMPLE = "muster mesh publish --etcd http://HOST:2379 --node a=10.8.0.1 --node b=10.8.0.2"


class Lines(StrEnum):
    TABLE = "table"
    JSON = "json"


@app.callback()
def mesh() -> None:
    """Open the mesh gate for programs in images that muster does not start."""


@app.command(epilog=f"Example: {_EXAMPLE} --prefix basilica --timeout 60s")
def publish(
    node: list[str] = typer.Option(
        ...,
        metavar="NAME=ADDRESS",
        help="A node and the address of its agent; NAME alone with --verdict. Repeat it for each node.",
    ),
    etcd: str | None = typer.Option(None, metavar="URL", help="Write the keys to this etcd (its v2 API)."),
    listen: str | None = typer.Option(None, metavar="HOST:PORT", help="Serve the keys here, instead of an etcd."),
    prefix: str = typer.Option("muster", metavar="NAME", help="The keys' first part; basilica for BASILICA_ programs."),
    timeout: float = typer.Option(
        60.0, parser=durations.option, metavar="TIME", help="Open the gate as degraded after this time."
    ),
    verdict: str | None = typer.Option(
        None, metavar="COMMAND", help="Ask this command, which a shell runs, not agents: ready when it exits 0."
    ),
    every: float = typer.Option(2.0, parser=durations.option, metavar="TIME", help="Pause between runs of COMMAND."),
    output: Lines = typer.Option(Lines.TABLE, "-o", "--output", help="json: one object per change, on a line."),
) -> None:
    """Probe nodes and write whether their mesh is ready, so that mesh_wait returns in programs on them.

    Each node runs `python -m muster.mesh probe`, which needs Python's standard library only. With --etcd the publisher
    ends when the mesh is ready; with --listen it serves the keys until you end it. It first removes earlier keys.
    """
    if (etcd is None) == (listen is None):
        raise exits.Misused("muster mesh publish needs either --etcd or --listen", hint=_EXAMPLE)
    nodes = _nodes(node, probed=verdict is None)
    printer = Printer(output, list(nodes))
    asyncio.run(_publish(_prefix(prefix), nodes, etcd, listen, timeout, _observer(nodes, verdict, every), printer))


def _nodes(texts: Sequence[str], *, probed: bool) -> dict[str, Path]:
    from muster.mesh import lines
    from muster.types import address

    nodes: dict[str, Path] = {}
    for text in texts:
        name, equals, where = text.partition("=")
        if not lines.is_name(name):
            raise exits.Misused(f"--node {text!r}: the name cannot be part of a key", hint="give NAME=ADDRESS")
        if name in nodes:
            raise exits.Misused(f"--node {name} is given twice", hint="give each node once")
        if probed and not equals:
            raise exits.Misused(
                f"--node {name} has no address", hint=f"give --node {name}=ADDRESS, or --verdict COMMAND"
            )
        path: Path = ("", 0)
        if probed:
            try:
                meant = address.read(where)
            except ValueError as why:
                raise exits.Misused(f"--node {name}: {why}", hint="give NAME=HOST or NAME=HOST:PORT") from why
            if not isinstance(meant, tuple):
                raise exits.Misused(f"--node {name}: {where} is a network", hint="give the address of one machine")
            path = (meant[0], meant[1] or lines.PORT)
        nodes[name] = path
    if len(nodes) > lines.MOST_NODES:
        raise exits.Misused(f"{len(nodes)} nodes are given; a mesh has at most {lines.MOST_NODES}")
    return nodes


def _prefix(text: str) -> str:
    from muster.mesh import lines

    parts = [part for part in text.split("/") if part]
    if not parts or not all(lines.is_name(part) for part in parts):
        raise exits.Misused(f"--prefix {text!r} is no path of keys", hint="give a name such as basilica")
    return "/".join(parts)


def _observer(nodes: dict[str, Path], verdict: str | None, every: float) -> Observer:
    from muster.mesh import lines, publishing

    if verdict is not None:
        _check_command(verdict)
        return publishing.CommandVerdict(["/bin/sh", "-c", verdict], list(nodes), max(every, 0.1))
    try:
        secret = lines.token()
    except ValueError as why:
        raise exits.Misused(
            str(why), hint=f"export {lines.TOKEN}=$(openssl rand -hex 32), on each node the same"
        ) from why
    beyond = next((name for name, (host, _) in nodes.items() if not lines.is_loopback(host)), None)
    if beyond is not None and not secret:
        message = f"node {beyond} is not on this machine, and there is no {lines.TOKEN} that its agent could check"
        raise exits.Misused(message, hint=f"export {lines.TOKEN}=$(openssl rand -hex 32), on each node the same")
    return publishing.Agents(nodes, secret)


def _check_command(command: str) -> None:
    """Refuse a command that a shell cannot read, or that begins with a program which is not installed."""
    hint = "give a command of the shell, such as 'ping -c 1 10.8.0.2'"
    if not command.strip():
        raise exits.Misused("--verdict is empty", hint=hint)
    syntax = subprocess.run(["/bin/sh", "-n", "-c", command], capture_output=True, text=True)
    if syntax.returncode != 0:
        raise exits.Misused(f"--verdict {command!r} cannot be read: {shown_line(syntax.stderr.strip())}", hint=hint)
    first = command.split(maxsplit=1)[0]
    if not _PLAIN_WORD.fullmatch(first):
        return
    lookup = subprocess.run(["/bin/sh", "-c", 'command -v "$0"', first], capture_output=True, text=True)
    if lookup.returncode != 0:
        raise exits.Misused(f"--verdict {command!r} names no program that this machine has", hint=hint)


async def _publish(
    prefix: str,
    nodes: dict[str, Path],
    etcd: str | None,
    listen: str | None,
    timeout: float,
    observer: Observer,
    printer: Printer,
) -> None:
    from muster.mesh.publishing import MeshPublisher

    async with _keys(etcd, listen, printer) as keys:
        publisher = MeshPublisher(
            keys, prefix, list(nodes), observer, timeout_s=timeout, on_finding=printer, trouble=printer.say
        )
        await publisher.run(stay=listen is not None)


@contextlib.asynccontextmanager
async def _keys(etcd: str | None, listen: str | None, printer: Printer) -> AsyncIterator[Keys]:
    if etcd is not None:
        from muster.mesh.etcd import EtcdKeys

        real = EtcdKeys(etcd)
        try:
            yield real
        finally:
            await real.close()
        return
    import secrets

    from muster.mesh.serving import KeyServer
    from muster.types import address

    assert listen is not None
    try:
        meant = address.read(listen)
    except ValueError as why:
        raise exits.Misused(f"--listen: {why}", hint="give HOST:PORT, such as 0.0.0.0:2379") from why
    if not isinstance(meant, tuple):
        raise exits.Misused(f"--listen {listen} is a network", hint="give HOST:PORT, such as 0.0.0.0:2379")
    # Programs read the keys without a token. The token is secret, so only this process writes them.
    server = KeyServer(meant[0], meant[1] or 2379, token=secrets.token_hex(32))
    try:
        where = await server.start()
    except OSError as why:
        reason = why.strerror or str(why)
        raise Unavailable(
            f"--listen {listen}: {reason}", hint="choose another port, or end what listens there"
        ) from why
    printer.say(f"serving the keys on http://{where}")
    try:
        yield server.keys
    finally:
        await server.stop()


class Printer:
    """Printer of a publisher: each change goes to stdout, trouble to stderr."""

    def __init__(self, form: Lines, nodes: list[str]) -> None:
        self._form = form
        self._nodes = nodes

    def __call__(self, finding: Finding) -> None:
        state = str(finding.gate.state)
        reason = finding.reason.replace("ranks start", "programs start")
        if self._form is Lines.JSON:
            moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            print(json.dumps({"at": moment, "state": state, "nodes": self._nodes, "reason": reason}), flush=True)
        else:
            print(f"{datetime.now():%H:%M:%S}  {state:<10}  {shown_line(reason)}", flush=True)

    def say(self, text: str) -> None:
        print(f"muster: {shown_line(text)}", file=sys.stderr, flush=True)
