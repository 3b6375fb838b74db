"""What does a page print, and does an answer agree with it? Blocks are read from the Markdown, so they cannot drift."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GAP = "…"  # alone: lines that are left out; inside a line: words that are
INTERRUPT = "^C"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
_FILE = re.compile(r"`([^`\s]+\.(?:json|yaml))`")
_PROGRAM = re.compile(r"# (\w+\.py)\b")

# What is another one in each run. All other numbers count: ranks, rounds, sizes, exit codes.
_VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z"), "TIME"),
    (re.compile(r"(?<=127\.0\.0\.1:)\d+"), "PORT"),
    (re.compile(r"^\d+(?= +http)|(?<=\(pid )\d+"), "PID"),
    (re.compile(r"\b((\d+(\.\d+)?(ms|[smhd]))+\b ?)+"), "TIME "),
    (re.compile(r"^ *\d+\.\d{3}(?=  )"), "TIME"),
    (re.compile(r"(?<=\bafter )\d+(\.\d+)? m?s\b"), "TIME"),  # as a heal has it
    (re.compile(r"loss \d+\.\d+"), "loss X"),
    (re.compile(r"starts at step [1-9]\d*"), "starts at step N"),
    (re.compile(r"(?<=-[01] )from \S+$"), "from HOST"),
)


@dataclass(frozen=True)
class Command:
    """What is typed, and the lines that are said to answer it; None where the page shows no answer."""

    text: str
    said: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Block:
    page: str
    kind: str
    body: str
    file: str = ""  # data: where the page says that it is kept; Python: what its first line says that it is called

    @property
    def name(self) -> tuple[str, str]:
        """The page and the first line: enough to speak of it."""
        return self.page, self.body.partition("\n")[0]


def pages() -> list[str]:
    """All that users read, by name; the front page first."""
    return ["README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md"))]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page if page == "README.md" else ROOT / "docs" / page).read_text()
    return [Block(page, found[1], found[2], _file(found, text)) for found in _FENCE.finditer(text)]


def _file(found: re.Match[str], text: str) -> str:
    if found[1] == "python":
        named = _PROGRAM.match(found[2])
        return named[1] if named else ""
    told = _FILE.findall(text[: found.start()].rstrip().rpartition("\n\n")[2])
    return told[-1] if told and found[1] else ""


def commands(block: Block) -> list[Command]:
    """Of a block for the shell. With prompts it is a transcript, without them only commands."""
    whole = re.sub(r"\\\n *", "", block.body)
    if not whole.startswith("$ "):
        return [Command(line) for line in whole.splitlines()]
    return list(_transcript(whole))


def _transcript(text: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *said = [line for line in part.splitlines() if line]
        while _is_open(command):
            command = "\n".join([command, said.pop(0)])
        yield Command(command, tuple(said) or None)


def _is_open(command: str) -> bool:
    """Whether a quotation goes on in the next line."""
    try:
        shlex.split(command)
    except ValueError:
        return True
    return False


def printed(body: str) -> tuple[str, ...]:
    """What a Python example says that its lines print."""
    return (*_PRINTED.findall(body), GAP)


def likeness(line: str) -> str:
    """What stays the same from one run to the next, whatever the widths of columns."""
    for pattern, name in _VARYING:
        line = pattern.sub(name, line)
    return " ".join(line.split())


def differences(said: tuple[str, ...], came: list[str]) -> list[str]:
    """Lines that were promised and did not come; and, where nothing is left out, lines that came unpromised.

    In any order: ranks, workers and the control plane speak at the same time.
    """
    left = [likeness(line) for line in came if line.strip()]
    missing = []
    for line in said:
        if line.strip() in (GAP, INTERRUPT):
            continue
        pattern = ".*".join(re.escape(part) for part in likeness(line).split(GAP))
        found = next((one for one in left if re.fullmatch(pattern, one)), None)
        if found is None:
            missing.append(f"- {line}")
        else:
            left.remove(found)
    whole = all(line.strip() != GAP for line in said)
    return missing + [f"+ {line}" for line in left if whole]


def may_fail(command: Command) -> bool:
    """Whether the page itself shows an error as the answer."""
    return any(line.startswith(("muster: ", "muster world: ", "The Training ")) for line in command.said or ())
