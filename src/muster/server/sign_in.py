"""How does a browser get a token that nobody types? By a code that whoever has the token asks for and passes on.

A code is good once, for a minute, and stands for the very token that asked for it. It is kept as a hash and in memory:
codes do not outlive the control plane. The token is kept beside it for that minute, since tokens are stored as hashes.

A browser gets its address as an argument, which other users of that machine can see. So a code that one user of this
machine asked for is nothing to the others; whose a connection is, the kernel says. One that was asked for over loopback
is meant for a browser here: from another machine, to which somebody may have passed it on, it is nothing either.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

GOOD_FOR_S = 60.0
_ROOT = 0  # could read the token anyway
MOST_OF_ONE = 8  # codes of one token at once; the oldest gives way


@dataclass(frozen=True)
class _Kept:
    token: str = field(repr=False)
    name: str
    user: int | None  # who asked, if that was on this machine
    here: bool  # over loopback
    until: float


class SignInCodes:
    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}  # by the code's hash, oldest first

    def issue(self, name: str, token: str, user: int | None, now: float, *, here: bool = False) -> str:
        """A new code for the token of that name; `here`: it was asked for over loopback."""
        self._drop(lambda one: one.until <= now)
        mine = [digest for digest, one in self._kept.items() if one.name == name]
        for digest in mine[: max(0, len(mine) - MOST_OF_ONE + 1)]:
            del self._kept[digest]
        code = secrets.token_urlsafe(32)
        self._kept[_digest(code)] = _Kept(token, name, user, here, now + GOOD_FOR_S)
        return code

    def redeem(self, code: str, user: int | None, now: float) -> str | None:
        """Return the token behind a code and use the code up; None if it is not good, or not for that user.

        A code that another user shows stays good: who sees it must not keep its owner from signing in.
        """
        digest = _digest(code)
        kept = self._kept.get(digest)
        if kept is None or kept.until <= now:
            return None
        known = kept.user is None or user in (kept.user, _ROOT)
        elsewhere = user is None and not kept.here
        if not (known or elsewhere):
            return None
        del self._kept[digest]
        return kept.token

    def _drop(self, is_over: Callable[[_Kept], bool]) -> None:
        self._kept = {digest: one for digest, one in self._kept.items() if not is_over(one)}


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()
