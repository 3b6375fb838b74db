"""What may a flow ask of the world, and what does it get back?

A flow is a generator: it yields one of these values and is sent the answer. It never touches a socket, a clock or
the event loop, so the same flow serves the synchronous and the asynchronous caller.
"""

from __future__ import annotations

import json as json_codec
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

CALL_TIMEOUT_S = 30.0  # how long a plain call may stay unanswered


@dataclass(frozen=True)
class HttpRequest:
    """Answered by a Response, or by Lost when the connection did not survive it."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    json: object = None
    content: bytes | None = None  # in place of JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = CALL_TIMEOUT_S
    stream: bool = False  # the body is then read with NextLine

    @property
    def repeatable(self) -> bool:
        """Sending it twice is the same as sending it once.

        Orders to a training (scale, cancel, delete) set a state, so a repeat changes nothing; a creation does not,
        unless a key tells the server that it is the same one.
        """
        return self.method != "POST" or "Idempotency-Key" in self.headers or self.path.endswith(("/scale", "/cancel"))


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        """The body as JSON values, or None if it is not JSON."""
        try:
            return json_codec.loads(self.body)
        except ValueError:
            return None


@dataclass(frozen=True)
class Lost:
    """The connection broke, or was never made. Unless `sent`, the server cannot have seen the request."""

    reason: str
    sent: bool = True
    known: bool = False  # the server has answered before, so it is likely to come back
    hint: str = ""  # what to do about it, where the reason says all
    stopped: bool = False  # somebody has stopped the server on purpose


@dataclass(frozen=True)
class NextLine:
    """The next line of the open stream: a text, None at its end, or Lost."""


@dataclass(frozen=True)
class Emit:
    """Hand a value to whoever iterates over the flow."""

    value: object


@dataclass(frozen=True)
class Now:
    """Seconds on a clock that never goes back."""


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Locate:
    """Find the control plane again, and start the embedded one if it is gone and nobody has stopped it on purpose.

    Answered by None, or by Lost if it could not be started.
    """

    within_s: float


Effect = HttpRequest | NextLine | Emit | Now | Pause | Locate
Flow = Generator[Effect, Any, T]
