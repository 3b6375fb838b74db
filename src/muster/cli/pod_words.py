"""What do the words of `muster run` about Pods mean: `--storage`, `--template`?"""

from __future__ import annotations

from typing import Any

from muster.cli import exits
from muster.cli.apply import documents, read_file

_STORAGE = "--storage NAME=MOUNT:size=500Gi or --storage NAME=MOUNT:claim=CLAIM"
_KEYS = ("claim", "size", "class", "access", "keep")


def storage_of(text: str) -> dict[str, Any]:
    """NAME=MOUNT:size=500Gi[,class=C][,access=A][,keep=false], or NAME=MOUNT:claim=C."""
    name, equals, rest = text.partition("=")
    mount, colon, options = rest.partition(":")
    if not (name and equals and mount and colon and options):
        raise exits.Misused(f"--storage: {text!r} does not say what it is", hint=_STORAGE)
    found: dict[str, Any] = {"name": name, "mount": mount}
    for word in options.split(","):
        key, equals, value = word.partition("=")
        if key not in _KEYS or not equals:
            raise exits.Misused(f"--storage: {word!r} is not one of {', '.join(f'{one}=…' for one in _KEYS)}")
        found[key] = _truth(value) if key == "keep" else value
    return found


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise exits.Misused(f"--storage: keep={text} is neither true nor false")
    return text == "true"


def template_of(path: str) -> dict[str, Any]:
    """The partial Pod in a file. What makes it a whole one is not needed, and not minded."""
    found = documents(read_file(path), path, hint="docs/kubernetes.md shows what one looks like")
    if len(found) != 1 or not isinstance(found[0], dict):
        raise exits.Misused(f"--template: {path} does not hold one partial Pod")
    if (kind := found[0].get("kind", "Pod")) not in ("Pod", "PodTemplate"):
        raise exits.Misused(f"--template: {path} holds a {kind}, not a Pod")
    return {name: value for name, value in found[0].items() if name not in ("apiVersion", "kind")}
