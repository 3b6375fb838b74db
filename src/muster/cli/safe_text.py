"""How do words of others reach a terminal without its obeying them?

Names, reasons and tails of logs may hold escape sequences, marks that turn the direction of writing, or line ends that
forge a line. What a command tells goes through `line` or `shown`; what forgets to is still caught where text leaves the
process (`guarded`). Only our own colours, and what ranks wrote where that is asked for, go through `raw`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

MOST = 4096  # characters of one line; nobody reads more


def line(value: object, most: int = MOST) -> str:
    """On one line, character for character: what is not seen is a space, or a mark."""
    text = str(value)
    if len(text) > most:
        text = f"{text[: most - 1]}…"
    return text if text.isprintable() else "".join(map(_seen, text))


def shown(value: object) -> str:
    """On one line, with single spaces."""
    return line(" ".join(str(value).split()))


def json_of(data: object) -> str:
    """The same values whoever reads it, and nothing in it that a terminal would obey."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    return text if _is_plain(text) else "".join(char if _is_plain(char) else _escaped(char) for char in text)


def _seen(char: str) -> str:
    return char if char.isprintable() else " " if char.isspace() else "�"


def _is_plain(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x80 else json.dumps(char)[1:-1]


# Where text leaves the process -------------------------------------------------------------------


class Guarded:
    """A stream that passes on what can be seen, and line ends. What its encoding does not have is written out."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        safe = text if _is_plain(text) else "".join(char if char == "\n" else _seen(char) for char in text)
        try:
            self.stream.write(safe)
        except UnicodeEncodeError:
            encoding = self.stream.encoding
            self.stream.write(safe.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # bytes would go past
            raise AttributeError(name)
        return getattr(self.stream, name)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """For as long as a command runs, both streams."""
    out, err = (cast(TextIO, Guarded(raw(stream))) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def raw(stream: TextIO) -> TextIO:
    """The stream itself, for bytes that a terminal may obey."""
    return cast(Any, stream).stream if isinstance(stream, Guarded) else stream
