"""How does data leave a command? As a table for people, or as JSON, YAML or names for programs; always on stdout.

Tables are written without rich, which costs more time to import than most commands take.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from muster.cli import safe_text
from muster.cli.safe_text import shown

_PLAIN_TEXT = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@+-]*")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WRAPPED_LINES = 3
_WORDS_OF_YAML = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


class Report(StrEnum):
    """For answers that are not about objects with names."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class Story(StrEnum):
    """For what happened over time."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    PNG = "png"


class Sheet(StrEnum):
    """For answers that go into a spreadsheet."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


def write_data(data: object, form: str) -> None:
    """Values as JSON or YAML."""
    print(yaml_of(data) if form == "yaml" else safe_text.json_of(data))


def tell(text: str) -> None:
    """One line about what was done, on stderr."""
    print(safe_text.line(text), file=sys.stderr, flush=True)


def write_table(titles: Sequence[str], rows: Sequence[Sequence[object]], *, wrap: bool = False) -> None:
    """Print columns that line up; on a terminal the last one is cut at its edge.

    With `wrap`, a last cell that would be cut is printed on lines of its own below its row.
    """
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(titles, *texts, strict=True)]
    limit = _terminal_width()
    for row in [list(titles), *texts]:
        line = _line(row, widths)
        if limit is None or len(line) <= limit:
            print(line)
        elif wrap and row[-1] != titles[-1]:
            print(_line(row[:-1], widths[:-1])[:limit])
            print("\n".join(_wrapped(row[-1], limit)))
        else:
            print(f"{line[: limit - 1]}…")


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    indent = "  "
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, max_lines=_WRAPPED_LINES, placeholder=" …"
    )


def write_csv(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows([[shown(value) if isinstance(value, str) else value for value in row] for row in rows])


def yaml_of(data: object) -> str:
    """A document that any YAML reader takes; strings that could be read as something else are quoted."""
    return "\n".join(_yaml_lines(data))


def _yaml_lines(data: object) -> Iterator[str]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            name = key if _is_plain(key, _PLAIN_KEY) else _quoted(key)
            yield from _yaml_entry(f"{name}:", value, "  ")
    elif isinstance(data, list | tuple) and data:
        for value in data:
            if isinstance(value, Mapping | list | tuple) and value:
                first, *rest = _yaml_lines(value)
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
            else:
                yield f"- {_yaml_scalar(value)}"
    else:
        yield _yaml_scalar(data)


def _yaml_entry(head: str, value: object, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        yield head
        yield from (f"{indent}{line}" for line in _yaml_lines(value))
    else:
        yield f"{head} {_yaml_scalar(value)}"


def _yaml_scalar(value: Any) -> str:
    if isinstance(value, str):
        return value if _is_plain(value, _PLAIN_TEXT) else _quoted(value)
    text = json.dumps(list(value) if isinstance(value, tuple) else value)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")  # without a point YAML 1.1 reads a text
    return text


def _quoted(text: str) -> str:
    """As JSON writes it, but for what cannot be seen: YAML reads no pairs of surrogates."""
    shown = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in shown)


def _is_plain(text: str, form: re.Pattern[str]) -> bool:
    return form.fullmatch(text) is not None and text.lower() not in _WORDS_OF_YAML


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else shown(value)


def is_live() -> bool:
    """A person looks at a terminal whose lines can be written again."""
    return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _terminal_width() -> int | None:
    if not sys.stdout.isatty():
        return None
    import shutil

    return max(20, shutil.get_terminal_size().columns)
