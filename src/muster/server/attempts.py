"""How fast may somebody guess? Whoever has failed often within a minute waits for each further answer.

It is counted per address, and only those who fail wait: whoever shares the address and has a good token does not
notice. How many can wait at once is bounded by the connections of one address (`guests`).
"""

from __future__ import annotations

import asyncio
from collections import Counter

FREE = 300  # in a minute
PAUSE_S = 0.1
A_MINUTE_S = 60.0
_MOST_ADDRESSES = 10_000
_OTHERS = "others"


class FailedAttempts:
    def __init__(self) -> None:
        self._failed: Counter[str] = Counter()
        self._since = 0.0

    async def pause(self, address: str) -> None:
        """After one more failure of that address."""
        now = asyncio.get_running_loop().time()
        if now - self._since > A_MINUTE_S:
            self._failed.clear()
            self._since = now
        if address not in self._failed and len(self._failed) >= _MOST_ADDRESSES:
            address = _OTHERS
        self._failed[address] += 1
        if self._failed[address] > FREE:
            await asyncio.sleep(PAUSE_S)
