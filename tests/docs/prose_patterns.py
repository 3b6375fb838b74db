"""The patterns of the prose check: signs of a sentence or a name that is hard to read, each with a hint.

A pattern looks at one sentence, in which code and quotations are blanked out. CONTRIBUTING.md has the rules.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Pattern(NamedTuple):
    """An expression, the kinds of text it applies to, and whether it looks only at the start of a text."""

    expression: re.Pattern[str]
    kinds: frozenset[str]
    opening: bool
    hint: str


def _pattern(expression: str, kinds: str, hint: str, opening: bool = False) -> Pattern:
    return Pattern(re.compile(expression, re.IGNORECASE), frozenset(kinds.split()), opening, hint)


_DOCSTRINGS = "module class function property"
_CODE = f"{_DOCSTRINGS} comment"
_ALL = f"{_CODE} paragraph cell heading"
_NO_VERB = (
    "a an the of for from to by with without until till as at on in into after before during while since under over "
    "what whatever whether who whoever whose whom which where when why how if unless because although "
    "it its they their these those that this he his she her we our you your one ones both each every either neither "
    "all any some no none nobody nothing not never somebody something anybody everybody everything others such so same "
    "is are was were has have had does do did can could may must should will would there here then else "
    "only also too and or but nor than once again still already always often two three several many much more most"
)
_VAGUE_NAMES = (
    "one ones found told at known kept made mine ours theirs said heard taken given gone least most own those these "
    "what who whom begun away past twin seen asked wanted held meant named"
)
_RELATIVE_SUBJECT = (
    "is are was were has have had can could may must should will would does did it they we others nobody somebody "
    "the a an its their each every"
)
_PROCESSES = "process worker rank agent guard spare member coordinator server client node machine pipeline training"

PATTERNS = {
    "question-docstring": _pattern(
        r".*\?$",
        _DOCSTRINGS,
        "Open with a statement: 'Pending connections: handshake, limits and eviction.'",
        opening=True,
    ),
    "no-verb-first": _pattern(
        rf"(?:{_NO_VERB.replace(' ', '|')})\b|[^a-z]|[a-z]+(?<![su])s\b",
        "function",
        "Start a function's docstring with a verb: 'Return', 'Send', 'Wait until'; or leave it out.",
        opening=True,
    ),
    "half-sentence-first": _pattern(
        r"(?:of|for(?! (?:example|instance))|from|by|with|until|as|and|or|nor|but|than|too|also|so|else"
        r"|that|which|whose)\b",
        _CODE,
        "Write a whole sentence: a subject, a verb, and the object.",
        opening=True,
    ),
    "pronoun-first": _pattern(
        r"(?:it|its|they|their|theirs|them|he|his|others|ours|none"
        r"|(?:these|those|ones?) (?:that|who|which|are|were|is))\b",
        _CODE,
        "Name the thing first. A pronoun needs a noun before it.",
        opening=True,
    ),
    "terse-docstring": _pattern(
        r"\S+(?: \S+){0,2}$",
        "class function",
        "Say what the name does not say, or leave the docstring out.",
        opening=True,
    ),
    "headless-clause": _pattern(
        rf"\bwhat (?:{_RELATIVE_SUBJECT.replace(' ', '|')})\b|\b(?:who|whom|what)ever\b|\bthose (?:that|who|which|of)\b"
        r"|\b(?:the )?ones? (?:that|who|which)\b|\ball (?:that|who)\b"
        r"|(?:^|\b(?:of|to|by|from|with|than|is|and|or) )who(?:se|m)?\b",
        _ALL,
        "Write the noun: 'the rank's record', 'the caller', 'the remaining workers'.",
    ),
    "processes-that-talk": _pattern(
        r"\b(?:tells?|told|hears?|heard|speaks?|spoke|spoken|believes?|believed|thanked)\b(?! you\b| apart\b)"
        r"|\b(?:knows?|knew) (?:of|it|that|them|what|who|whether|nothing|nobody)\b",
        _ALL,
        "Processes send, report, log, reply, detect and record.",
    ),
    "processes-as-people": _pattern(
        r"\b(?:no|some|any|every)body\b|\bsomeone else\b"
        rf"|\b(?:{_PROCESSES.replace(' ', '|')})s? who\b",
        _ALL,
        "Name the process or the person: 'no worker', 'another user'. A process is 'it', never 'who'.",
    ),
    "old-fashioned": _pattern(
        r"\b(?:anew|besides?|for ever|mean(?:while|time)|there(?:of|by|upon|with)|where(?:by|upon)|whence|hitherto"
        r"|lest|amiss|of late|as it were|at leisure|by turns|for want of|so long as|eldest|shall|on its own account)\b",
        _ALL,
        "Use the modern word: 'again', 'in the background', 'until then', 'oldest'.",
    ),
    "invented-metaphor": _pattern(
        r"\b(?:crews?|heirs?|shelf|shelves|visitors?|strangers?|lessons?|guests?|teller|bury|buried|sent home)\b",
        _ALL,
        "Use the field's word: claim, successor, cache, peer, pending connection, import.",
    ),
    "clause-as-heading": _pattern(
        r"(?:what|who|whose|whom|which|that|of|nobody|somebody|everything|nothing)\b|.*\?$",
        "heading",
        "Make the heading a noun or a task: 'Resize a training'.",
        opening=True,
    ),
    "vague-name": _pattern(
        rf"(?:{_VAGUE_NAMES.replace(' ', '|')})_*$",
        "name",
        "Name the noun: 'worker', 'leases', 'manifest'; a function starts with a verb.",
        opening=True,
    ),
}
_BY_KIND = {
    kind: [(name, pattern) for name, pattern in PATTERNS.items() if kind in pattern.kinds]
    for kind in f"{_ALL} name".split()
}
_QUOTED = re.compile(r"`[^`]*`|(?<!\w)\"[^\"]{1,60}\"(?!\w)")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def patterns_in(kind: str, sentence: str, opens: bool) -> list[str]:
    """Return the names of the patterns that a sentence matches. `opens` says that it is the first of its text."""
    plain = _LINK.sub(r"\1", _QUOTED.sub("``", sentence)).lstrip("*_\"'( ")
    return [
        name
        for name, pattern in _BY_KIND[kind]
        if (pattern.expression.match(plain) and opens if pattern.opening else pattern.expression.search(plain))
    ]
