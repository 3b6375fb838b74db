"""The texts of pages and modules that the prose check reads, each with its kind and its first line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

# A string is matched as a whole, so that no sign in it begins a comment.
_STRING_OR_COMMENT = re.compile(
    r""""{3}(?:\\.|.)*?"{3}|\'{3}(?:\\.|.)*?\'{3}|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(?P<comment>#[^\n]*)""",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"#(!| ?(noqa|type:|mypy:|ruff:|pragma|SPDX))")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
_SENTENCE = re.compile(r"\S.*?(?:[.!?](?=\s|$)|(?=\n\s*(?:\n|[-*] ))|\Z)", re.DOTALL)
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Text(NamedTuple):
    """A docstring, comment, paragraph, cell, heading or name."""

    line: int
    kind: str
    text: str

    def sentences(self) -> list[tuple[int, str]]:
        """Return each sentence with the line where it starts."""
        matches = _SENTENCE.finditer(self.text)
        return [(self.line + self.text.count("\n", 0, match.start()), " ".join(match[0].split())) for match in matches]


def texts_of_page(source: str) -> Iterator[Text]:
    """Yield the headings, table cells and paragraphs of a Markdown page, without its blocks of code."""
    paragraph: list[str] = []
    fenced = False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        begins = fence or fenced or not line.strip() or line.lstrip().startswith(("#", "|", "<", "!["))
        if paragraph and (begins or _ITEM.match(line)):
            yield Text(number - len(paragraph), "paragraph", "\n".join(paragraph))
            paragraph = []
        if not begins:
            paragraph.append(_ITEM.sub("", line, count=1))
        elif not fenced and line.startswith("#"):
            yield Text(number, "heading", line.lstrip("# "))
        elif not fenced and line.lstrip().startswith("|"):
            yield from (Text(number, "cell", cell.strip()) for cell in line.split("|") if cell.strip(" -:"))
        fenced ^= fence


def texts_of_code(source: str) -> Iterator[Text]:
    """Yield the docstrings, names and comments of a Python module, but no `one` of a comprehension on one line."""
    tree = ast.parse(source)
    clear: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, _COMPREHENSIONS) and node.lineno == node.end_lineno:
            targets = (target for part in node.generators for target in ast.walk(part.target))
            clear.update(name for name in targets if isinstance(name, ast.Name) and name.id == "one")
        if isinstance(node, ast.Module | ast.ClassDef | _FUNCTION) and (docstring := ast.get_docstring(node)):
            yield Text(node.body[0].lineno, _kind_of(node), docstring)
        if isinstance(node, _FUNCTION):
            yield Text(node.lineno, "name", node.name)
        elif isinstance(node, ast.arg):
            yield Text(node.lineno, "name", node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in clear:
            yield Text(node.lineno, "name", node.id)
    yield from _comments(source)


def _kind_of(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    return "property" if any("property" in ast.unparse(item) for item in node.decorator_list) else "function"


def _comments(source: str) -> Iterator[Text]:
    """Yield the comments. Comments on consecutive lines of their own are one text."""
    block: list[str] = []
    start = 0
    for match in _STRING_OR_COMMENT.finditer(source):
        comment = match["comment"]
        if not comment or _DIRECTIVE.match(comment):
            continue
        line = source.count("\n", 0, match.start()) + 1
        own_line = not source[source.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
        if block and not (own_line and line == start + len(block)):
            yield Text(start, "comment", "\n".join(block))
            block = []
        if not own_line:
            yield Text(line, "comment", comment.strip("#- "))
            continue
        if not block:
            start = line
        block.append(comment.strip("#- "))
    if block:
        yield Text(start, "comment", "\n".join(block))
