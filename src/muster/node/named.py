"""Which of its files do a rank's last words name?

A checkpoint that cannot be read makes every restart fail alike, and its name stands in the error. It is looked for in
the words of the last lines: what is there, below a folder where the program may keep checkpoints, and no code. Whoever
wrote the lines may have written anything, so only a few words are looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"""'([^'\n]{1,1024})'|"([^"\n]{1,1024})"|([^\s'"<>|()\[\]{},;=]{2,1024})""")
_CODE = (".py", ".pyc", ".so", ".pyx", ".cpp", ".cu", ".h")
_MOST = 32  # words, from the end
_LONGEST = 200


def path_in(lines: Sequence[str], cwd: str, roots: Iterable[str]) -> str:
    """The last of them that is there, as a path; "" if there is none."""
    below = tuple(roots)
    for word in _words(lines):
        path = os.path.normpath(os.path.join(cwd, word))
        if len(path) <= _LONGEST and path != cwd and os.path.realpath(path).startswith(below) and os.path.exists(path):
            return path
    return ""


def _words(lines: Sequence[str]) -> list[str]:
    found: list[str] = []
    for line in reversed(lines):
        if not line.startswith('  File "'):
            words = ["".join(groups).rstrip(".:") for groups in _WORD.findall(line[:4096])]
            found += [word for word in reversed(words) if _may_be(word)]
        if len(found) >= _MOST:
            break
    return found[:_MOST]


def _may_be(word: str) -> bool:
    return ("/" in word or "." in word[1:]) and "\0" not in word and not word.endswith(_CODE) and word.isprintable()
