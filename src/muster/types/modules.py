"""Which names of modules are kept and told? They come from users' processes, so they are checked and bounded."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

MAX_BYTES = 1 << 16
MAX_NAMES = 2000
LONGEST = 200
_SLOW = ("torch", "tensorflow", "jax", "transformers", "datasets", "accelerate", "lightning", "deepspeed", "trl")
_OTHERS = "importing its modules"
DOING = frozenset({_OTHERS, *(f"importing {name}" for name in _SLOW)})  # what ranks wait for, as it is told
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


def joined(*lists: Iterable[str]) -> tuple[str, ...]:
    """Names of other people's modules, each once and in order, as many as may be kept."""
    found: dict[str, None] = {}
    room = MAX_BYTES
    for name in (name for names in lists for name in names):
        if name in found or is_ours(name) or len(name) > LONGEST or _MODULE.fullmatch(name) is None:
            continue
        room -= len(name) + 4  # with its quotes and comma
        if room < 0 or len(found) == MAX_NAMES:
            break
        found[name] = None
    return tuple(found)


def doing(name: str) -> str:
    """What is said while that module is being imported: people know the names of those that take long."""
    word = f"importing {name.partition('.')[0]}"
    return word if word in DOING else _OTHERS


def is_ours(name: str) -> bool:
    """Of Python or muster, or the program itself."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("muster", "__main__", "__mp_main__")
