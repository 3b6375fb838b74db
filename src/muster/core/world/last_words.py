"""The cause of a failed rank's end, read from what the rank printed, and the sentence that reports it.

A Python exception is named with the place in the user's own code that it passed last. Any other end is named by its
exit code or signal; the last printed line stands behind it and is marked as output, because it may have nothing to do
with the end. A rank writes what it likes: every text is bounded and is used as text only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from muster.types.world import RankEnd

LONGEST = 300
MAX_PLACE = 100
MAX_CAUSE = 160  # of an exception in a sentence: its place and rank follow
UNCAUGHT = 1  # the exit code of Python after an exception that nothing caught
_RANK = re.compile(r"\[rank\d+\]: ?")  # torch's hook for exceptions writes it in front of every line
_GROUP = re.compile(r" {2,}[|+] ?")  # Python writes it in front of the lines of an exception group
_FRAME = re.compile(r'\s+File "(?P<path>[^"]*)", line (?P<line>\d+)(?:, in |$)')
_HEAD = re.compile(r"(?:Original |Exception Group )?Traceback \(most recent call last\):")
_NO_CAUSE = re.compile(r"Exception ignored |Exception in thread |Error in (?:atexit|sys)\b")
# The level of a line of a log stands in its first words, in capital letters.
_NO_PROBLEM = re.compile(r"^.{0,60}?(?<![\w.=])(?:INFO|DEBUG|TRACE|NOTICE)(?![\w.=])|^[DI]\d{4} \d\d:\d\d")
_PROBLEM = re.compile(r"^.{0,60}?(?<![\w.=])(?:ERROR|CRITICAL|FATAL)(?![\w.=])|^[EF]\d{4} \d\d:\d\d")
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib/python3(?:\.\d+)?/|/muster/(?:node|state)/")


def exception(lines: Sequence[str]) -> tuple[str, str]:
    """Return the line that ends the last traceback and the place in user code that it passed last.

    Either is empty if the lines do not have it. Tracebacks that do not end a process (of threads, of finalizers) do
    not count.
    """
    plain = [_plain(line) for line in lines]
    for frames, after in reversed(list(_tracebacks(plain))):
        last = next((line for line in plain[after:] if line.strip() and not line[0].isspace()), "")
        if last:
            own = [frame for frame in frames if not _LIBRARY.search(frame["path"])]
            place = f"{own[-1]['path'].replace(chr(92), '/').rpartition('/')[2]}:{own[-1]['line']}" if own else ""
            return _bounded(last), _bounded(place, MAX_PLACE)
    return "", ""


def _tracebacks(lines: Sequence[str]) -> Iterator[tuple[list[re.Match[str]], int]]:
    """Yield the frames of each traceback and the number of the line after its last frame."""
    frames: list[re.Match[str]] = []
    after, before, counts = 0, "", True
    for number, line in enumerate(lines):
        if frame := _FRAME.match(line):
            frames.append(frame)
            after = number + 1
        elif line and not line[0].isspace():
            if frames and counts:
                yield frames, after
            counts = not (_HEAD.match(line) and _NO_CAUSE.match(before))
            frames, before = [], line
    if frames and counts:
        yield frames, after


def last_output(lines: Sequence[str]) -> str:
    """Return the last line with a letter or a digit in it.

    A program that logs says most after an error. If the last line is one of INFO or less, the last line of an error
    counts instead; without one there is nothing to say.
    """
    words = [line for line in map(_plain, lines) if any(map(str.isalnum, line))]
    if words and _NO_PROBLEM.match(words[-1]):
        words = [line for line in words if _PROBLEM.match(line)]
    return _bounded(words[-1]) if words else ""


def of(end: RankEnd) -> str:
    """Return the exception that ended a rank, otherwise its last output."""
    return end.exception or last_output(end.stderr_tail)


def cause(end: RankEnd) -> str:
    """Say in a few words why a rank ended: an exception and its place, a signal, a hang or an exit code."""
    if end.hung or end.oom or end.signal:
        return f"{end.reason} at {end.stack}" if end.stack else end.reason
    if end.exit_code == UNCAUGHT and end.exception:
        return _raised(end)
    return f"exited with code {end.exit_code}"


def report(end: RankEnd, when: str = "") -> str:
    """Say why a rank ended, the cause first; `when` tells more about the round."""
    parts = [f"{cause(end)} (rank {end.rank})", end.memory, _printed(end)]
    parts.append(", ".join(part for part in (f"worker {end.worker}" if end.worker else "", when) if part))
    return "; ".join(part for part in parts if part)


def _printed(end: RankEnd) -> str:
    """The rank's last output, marked as such, unless the cause is known."""
    if end.hung or (end.exit_code == UNCAUGHT and end.exception):
        return ""
    if end.exception:
        return f"last traceback: {_raised(end)}"
    return f"last output: {line}" if (line := last_output(end.stderr_tail)) else ""


def _raised(end: RankEnd) -> str:
    short = end.exception if len(end.exception) <= MAX_CAUSE else f"{end.exception[: MAX_CAUSE - 2]} …"
    return f"{short} at {end.place}" if end.place else short


def _plain(line: str) -> str:
    line = _RANK.sub("", line, count=1) if line.startswith("[rank") else line
    return _GROUP.sub("", line, count=1) if line.startswith("  ") and _GROUP.match(line) else line


def _bounded(text: str, most: int = LONGEST) -> str:
    return " ".join(text.split())[:most]
