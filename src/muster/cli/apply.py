"""`muster apply -f`: bring the control plane in line with a file."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from muster.cli import exits, session
from muster.cli.output import Output, tell
from muster.cli.trainings import OutputOption, show_all

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: muster apply -f training.yaml")
def apply(
    file: list[str] = typer.Option(..., "-f", "--file", metavar="FILE", help="YAML or JSON; - reads stdin."),
    force: bool = typer.Option(False, "--force", help="Create it even if it can never start here."),
    output: OutputOption = Output.TABLE,
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Create the trainings that files describe, or change those that exist to match."""
    manifests = [manifest for path in file for manifest in manifests_of(read_file(path), path)]
    client = session.open_client(url, token, namespace)
    applied = [client.apply(manifest, force=force).training for manifest in manifests]
    for training in applied:
        tell(f"{training.metadata.name} is applied, generation {training.generation}")
    if output is not Output.TABLE:
        show_all(applied, output)


def manifests_of(text: str, where: str) -> Iterator[Mapping[str, Any]]:
    """The objects in a file: one, a list of them, or several YAML documents."""
    for document in documents(text, where):
        many = document.get("items") if isinstance(document, Mapping) and "items" in document else document
        for one in many if isinstance(many, list) else [many]:
            if not isinstance(one, Mapping):
                raise exits.Misused(f"{where} holds no training but {type(one).__name__}", hint=_HINT)
            if one.get("kind", "Training") != "Training":
                raise exits.Misused(f"{where} holds a {one['kind']}, not a Training", hint=_HINT)
            yield one


_HINT = "muster get NAME -o yaml shows what one looks like"


def read_file(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise exits.Misused(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def documents(text: str, where: str, *, hint: str = _HINT) -> list[Any]:
    if text.lstrip().startswith(("{", "[")):
        try:
            return [json.loads(text)]
        except ValueError:
            pass  # YAML may look like that, too
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        needed = "pip install pyyaml, or write the file as JSON"
        raise exits.Misused(f"{where} is not JSON, and reading YAML needs PyYAML", hint=needed) from None
    try:
        found = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise exits.Misused(f"{where} is neither JSON nor YAML: {error}", hint=hint) from error
    if not found:
        raise exits.Misused(f"{where} is empty", hint=hint)
    return [json.loads(json.dumps(document, default=_show)) for document in found]


def _show(value: Any) -> str:
    """YAML reads times as times; a manifest has them as text."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
