"""How does a rank run a decorated function?

`python -m muster.sdk.call TARGET ARGUMENTS [ROOT]`: import the function that TARGET names (`module:name`, or
`file.py:name` for one that stood in the program itself), and call it with the arguments, which are JSON. The file is
loaded under another name than `__main__`, so that it does not submit itself again.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from muster.sdk import functions

LOADED_AS = "__muster_main__"


def main(arguments: Sequence[str]) -> None:
    if len(arguments) not in (2, 3):
        sys.exit("usage: python -m muster.sdk.call TARGET ARGUMENTS [ROOT]")
    target, given, *root = arguments
    for place in [os.getcwd(), *map(os.path.abspath, root)]:
        if place not in sys.path:
            sys.path.append(place)
    functions.in_rank = True
    where, _, name = target.rpartition(":")
    sent = json.loads(given)
    functions.loading = True
    module = _module(where)
    functions.loading = False
    _function(module, name)(*sent["args"], **sent["kwargs"])


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    spec = importlib.util.spec_from_file_location(LOADED_AS, where)
    if spec is None or spec.loader is None:
        sys.exit(f"muster: {where} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[LOADED_AS] = module  # pickle and dataclasses look a class's module up by name
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        sys.exit(f"muster: {module.__name__} has no function {name!r}")
    function: Callable[..., Any] = found
    return function


if __name__ == "__main__":
    main(sys.argv[1:])
