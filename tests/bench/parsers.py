"""The options of a benchmark, read from the parser that its program makes."""

from __future__ import annotations

import argparse
import contextlib
import io
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]


class _Parsed(Exception):
    """Ends a program after it has read its options."""


def parse(module: str, words: Sequence[str]) -> argparse.ArgumentParser:
    """Run a program until it has read these options, and return its parser. An unknown option raises ValueError."""
    parsers: list[argparse.ArgumentParser] = []
    read = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *args: object) -> None:
        parsers.append(self)
        read(self)
        raise _Parsed

    errors = io.StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(signal, "signal"),
        mock.patch.object(sys, "argv", [module, *words]),
        mock.patch.dict("os.environ"),
        contextlib.redirect_stderr(errors),
    ):
        try:
            runpy.run_path(str(ROOT / f"{module.replace('.', '/')}.py"), run_name="__main__")
        except _Parsed:
            return parsers[0]
        except SystemExit:
            raise ValueError(f"{module} {' '.join(words)}: {errors.getvalue().splitlines()[-1]}") from None
    raise ValueError(f"{module} reads no options")


def parts(module: str) -> set[str]:
    """Return the parts of a benchmark, which are the values of --only."""
    parser = parse(module, [])
    return {str(part) for action in parser._actions if action.dest == "only" for part in action.choices or ()}
