"""A line of the audit: who asked for what, from where, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

NOBODY = "-"

Decision = Literal["allowed", "refused", "failed", "ended", "lost"]


@dataclass(frozen=True)
class AuditEntry:
    """`more` stands for that many like it that have no line of their own."""

    at: datetime
    decision: Decision
    who: str = NOBODY  # the token's name
    role: str = NOBODY
    from_: str = NOBODY  # the address at the other end of the connection
    forwarded_for: str = ""  # what a proxy says, or whoever wants to be taken for one
    method: str = ""
    path: str = ""
    about: str = ""  # what a request has made whose path does not name it
    status: int = 0
    code: str = ""  # of the error
    request_id: str = ""
    more: int = 0
