"""What does every rank run? Fixed when the agent starts; the warm parent gets it as JSON.

The warm parent imports this before what ranks need, so it must cost next to nothing.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from typing import NamedTuple


class Program(NamedTuple):
    mode: str  # script | module | command
    target: str
    args: tuple[str, ...]
    warm: bool  # fork and run, instead of fork and exec
    preload: tuple[str, ...]  # modules that the user named
    auto: bool  # what the program imports, too
    heir: bool = False  # for a parent that has time, and takes over from another
    learned: tuple[str, ...] = ()  # what ranks imported by themselves
    without: tuple[str, ...] = ()  # what was found to be unfit for a parent
    attempts: int = 0  # how often this one has begun anew
    patience_s: float = 60.0  # with an import that gets nowhere

    @property
    def command(self) -> list[str]:
        """The command line of a fresh process."""
        if self.mode == "command":
            return [self.target, *self.args]
        flag = ["-m"] if self.mode == "module" else []
        return [sys.executable, *interpreter_flags(), *flag, self.target, *self.args]

    @property
    def path(self) -> str:
        """The script as the interpreter names it: absolute, but neither normalised nor resolved."""
        return os.getcwd() if self.target == "." else os.path.join(os.getcwd(), self.target)

    @property
    def is_folder(self) -> bool:
        """A script that is itself a place to import from, a directory or an archive with a `__main__` in it."""
        return self.mode == "script" and pkgutil.get_importer(self.path) is not None


def interpreter_flags() -> list[str]:
    """The interpreter's own options, so that a child runs under the same ones."""
    import subprocess

    return list(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]
