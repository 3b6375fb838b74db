"""Who is connected, and for how long may they be? One entry per connection, from the moment it is taken.

Whoever says nothing, or says it too slowly, is let go after a while; when too many are there, somebody has to go at
once (`core.crowding`), and never an admin who is being answered, as long as there is anybody else. A connection that
carried a good token counts as somebody's; without one it is a stranger's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from muster.core import crowding

MOST = 4096
HEAD_TIMEOUT_S = 10.0  # for a whole head, from the connection or the last answer on
READ_TIMEOUT_S = 60.0  # for taking an answer that was given at once
TEND_EVERY_S = 1.0


class Guest:
    """One connection."""

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.since = now
        self.token = ""
        self.admin = False
        self.asking = False
        self.connection: Any = None  # its socket
        self.leave: Callable[[], object] = lambda: None
        self.unsent: Callable[[], int] = lambda: 0

    def is_late(self, now: float) -> bool:
        return not self.asking and now - self.since > (READ_TIMEOUT_S if self.unsent() else HEAD_TIMEOUT_S)


class Guests:
    """All of them, eldest first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._here: dict[Guest, None] = {}
        self._now = asyncio.get_running_loop().time

    def __len__(self) -> int:
        return len(self._here)

    def come(self, address: str) -> Guest:
        """One more; somebody goes if there are too many in all, or too many strangers with that address."""
        half = max(self.most // 2, 1)
        if len(self._here) >= half:
            strangers = [one for one in self._here if not one.token and one.address == address]
            if len(strangers) >= half:
                self._send_away(strangers[0])
            elif len(self._here) >= self.most:
                others = [one for one in self._here if not (one.admin and one.asking)]
                self._send_away(crowding.who_goes(others or list(self._here)))
        guest = Guest(address, self._now())
        self._here[guest] = None
        return guest

    def gone(self, guest: Guest) -> None:
        self._here.pop(guest, None)

    def asks(self, guest: Guest) -> None:
        guest.asking, guest.since = True, self._now()

    def answered(self, guest: Guest) -> None:
        guest.asking, guest.since = False, self._now()

    async def tend(self) -> None:
        """Let go whoever is late, for ever."""
        while True:
            await asyncio.sleep(TEND_EVERY_S)
            for guest in [one for one in self._here if one.is_late(self._now())]:
                self._send_away(guest)

    def _send_away(self, guest: Guest) -> None:
        self.gone(guest)
        guest.leave()
