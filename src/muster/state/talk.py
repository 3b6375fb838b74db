"""What do a rank and its agent agree upon to speak about state? Standard library only."""

from __future__ import annotations

SOCKET_VARIABLE = "MUSTER_STATE_SOCKET"
MOST_MESSAGE = 1 << 16
MOST_PARTS = 64  # descriptors in one message
