"""Who is being answered right now, and may they still be? One entry per request that showed a good token.

A token can end while a request of it is under way: it is revoked, it expires, or its role or namespaces become fewer.
Every stream and every wait is a request that lasts, so all of them are ended from here, whatever they wait for. How
many one token may have open at once is decided in `core.crowding`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Protocol

from muster.core import crowding
from muster.errors import MusterError, TooManyRequests
from muster.server.auth import Pass, Tokens

LOOK_EVERY_S = 0.25
MOST = 4096


class OpenRequest(Protocol):
    def leave(self, error: MusterError) -> None:
        """End it now, for that reason."""


class Visits:
    def __init__(self) -> None:
        self.most = MOST  # how many can be answered at once
        self._here: dict[Pass, set[OpenRequest]] = {}
        self._open: Counter[str] = Counter()  # of those who are no admins, by the token's name

    def __len__(self) -> int:
        return sum(map(len, self._here.values()))

    def begin(self, shown: Pass, visit: OpenRequest) -> None:
        """Raises TooManyRequests."""
        whose = shown.identity
        if whose.role != "admin":
            if not crowding.has_room(self._open, whose.name, self.most):
                raise TooManyRequests(
                    f"token {whose.name!r} has {self._open[whose.name]} requests open at once",
                    hint="end streams and waits that nobody needs, or ask again in a second",
                )
            self._open[whose.name] += 1
        self._here.setdefault(shown, set()).add(visit)

    def end(self, shown: Pass, visit: OpenRequest) -> None:
        left = self._here[shown]
        left.remove(visit)
        if not left:
            del self._here[shown]
        if shown.identity.role != "admin":
            self._open[shown.identity.name] -= 1
            if not self._open[shown.identity.name]:
                del self._open[shown.identity.name]

    async def tend(self, tokens: Tokens) -> None:
        """End what may not go on, for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look(tokens)

    def look(self, tokens: Tokens) -> None:
        for shown, visits in list(self._here.items()):
            try:
                tokens.refresh()
                tokens.check(shown)
            except MusterError as error:  # in doubt nobody goes on: tokens that cannot be read let nobody in
                for visit in list(visits):
                    visit.leave(error)
