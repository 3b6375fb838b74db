"""What is worth a line of the audit, and when is it enough? Every write, every refusal, and never so many that they
push out what happened before.

Each has a line of its own, up to a number in each minute for each token at each address: many for what succeeds, few
for what is refused or fails. The rest of the minute is one line with their number: whoever has done something that
others should not see could else do a hundred thousand harmless things after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from muster.types.audit import AuditEntry, Decision

READING = ("GET", "HEAD", "OPTIONS")
REFUSED = (401, 403, 429)
A_MINUTE_S = 60.0
MOST_LINES = 30  # of one token at one address that were refused or failed, in a minute
MOST_ALLOWED = 1000  # that were not
MOST_SOURCES = 1000  # in a minute; the others are one

_Source = tuple[str, str, str]  # from where, who, of which kind


def is_worth(method: str, status: int) -> bool:
    return method not in READING or status in REFUSED


def decision_of(status: int) -> Decision:
    if status in REFUSED:
        return "refused"
    return "allowed" if 100 <= status < 400 else "failed"


@dataclass
class _Count:
    written: int = 0
    last: AuditEntry | None = None
    more: int = 0


@dataclass
class Sums:
    """What has been written in this minute, by whom it was caused."""

    _since: float | None = None
    _lines: dict[_Source, _Count] = field(default_factory=dict)

    def take(self, entry: AuditEntry, *, routine: bool = False) -> AuditEntry | None:
        """The entry if it has a line of its own. `routine`: what succeeds is told once a minute for each path."""
        allowed = entry.decision == "allowed"
        most = (1 if routine else MOST_ALLOWED) if allowed else MOST_LINES
        kind = entry.path if routine and allowed else "allowed" if allowed else "not"
        source: _Source = (entry.from_, entry.who, kind)
        if source not in self._lines and len(self._lines) >= MOST_SOURCES:
            source, most = ("others", "-", "allowed" if allowed else "not"), MOST_LINES
            entry = replace(entry, from_="others", who="-", role="-", forwarded_for="")
        lines = self._lines.setdefault(source, _Count())
        if lines.written < most:
            lines.written += 1
            return entry
        lines.last, lines.more = entry, lines.more + 1
        return None

    def over(self, now: float, at: datetime, *, at_once: bool = False) -> Iterable[AuditEntry]:
        """At the end of a minute, a line for each who had more."""
        self._since = now if self._since is None else self._since
        if now - self._since < A_MINUTE_S and not at_once:
            return
        lines, self._lines, self._since = self._lines, {}, now
        for one in lines.values():
            if one.last is not None:
                yield replace(one.last, at=at, request_id="", more=one.more)
