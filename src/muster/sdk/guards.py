"""Would a rank that imports the program come by this call again?

A rank finds a decorated function by importing its module. A call that stands at the top of that module, outside of
`if __name__ == "__main__":`, would then happen once more in each rank.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Mapping
from types import FrameType
from typing import Any


def unguarded_line(names: Mapping[str, Any], frame: FrameType | None) -> int | None:
    """The line at the top of the module with those names from which the call comes, if no `if` stands before it.

    Which `if` it is does not matter here: one that also holds in a rank is found out there.
    """
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is names:
            source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
            return None if is_conditional(source, frame.f_lineno) else frame.f_lineno
        frame = frame.f_back
    return None


def is_conditional(source: str, line: int) -> bool:
    """Whether what stands in that line of a program is within an `if`; of what cannot be read, nobody knows: yes."""
    try:
        body: list[ast.stmt] = ast.parse(source).body
    except (SyntaxError, ValueError):
        return True
    around = [node for part in body for node in ast.walk(part) if isinstance(node, ast.stmt) and _has(node, line)]
    return not around or any(isinstance(node, ast.If | ast.Match) for node in around)


def _has(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
