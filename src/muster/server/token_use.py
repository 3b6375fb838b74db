"""When was each token last used? Kept in memory, and now and then in a file that only the control plane writes.

It is for people who look for tokens that nobody needs: the last minute before a crash may be missing. Tokens are named
by the hash of their secret, so that one that was made again under the same name starts anew.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path

from muster.files import read_text, write_private
from muster.types.codec import show_time

USE_FILE = "token-use.json"
SAVE_EVERY_S = 60.0


class TokenUse:
    def __init__(self, home: Path) -> None:
        self._path = home / USE_FILE
        self._used: dict[str, datetime] | None = None
        self._dirty = False

    def note(self, digest: str, now: datetime) -> None:
        self._known()[digest] = now
        self._dirty = True

    def latest(self, digests: Iterable[str]) -> datetime | None:
        known = self._known()
        return max((known[one] for one in digests if one in known), default=None)

    def unsaved(self, wanted: Collection[str]) -> str | None:
        """All of it, for `write`, if there is anything new; what is not wanted any more is left out."""
        if not self._dirty:
            return None
        self._dirty = False
        self._used = {digest: at for digest, at in self._known().items() if digest in wanted}
        return json.dumps({digest: show_time(at) for digest, at in self._used.items()}, indent=1)

    def write(self, text: str) -> None:
        """From any thread. What cannot be written is missing until the next time."""
        with contextlib.suppress(OSError):
            write_private(self._path, text)

    def _known(self) -> dict[str, datetime]:
        if self._used is None:
            self._used = _read(self._path)
        return self._used


def _read(path: Path) -> dict[str, datetime]:
    """What the file says, as far as it can be read: nobody is let in by it."""
    try:
        found = json.loads(read_text(path))
        return {str(digest): datetime.fromisoformat(at).astimezone(UTC) for digest, at in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
