"""Which exit code and which words does an error get?

The codes are public contract: 0 ok, 1 error, 2 usage, 3 not found, 4 conflict or terminal, 5 auth, 6 quota,
7 unavailable, 100 failed, 103 cancelled, 124 timeout, 130 interrupt.
"""

from __future__ import annotations

import sys

from muster import errors
from muster.cli.safe_text import shown
from muster.types.codec import Invalid

ERROR, USAGE, NOT_FOUND, CONFLICT, AUTH, QUOTA, UNAVAILABLE = 1, 2, 3, 4, 5, 6, 7
FAILED, CANCELLED, TIMEOUT, INTERRUPT = 100, 103, 124, 130

OF_PHASE = {"succeeded": 0, "failed": FAILED, "cancelled": CANCELLED}

_OF_ERROR: tuple[tuple[type[Exception], int], ...] = (
    (errors.TrainingFailed, FAILED),
    (errors.TrainingCancelled, CANCELLED),
    (errors.WaitTimeout, TIMEOUT),
    (errors.NotFound, NOT_FOUND),
    (errors.AlreadyExists, CONFLICT),
    (errors.Conflict, CONFLICT),
    (errors.UDTerminalState, CONFLICT),
    (errors.ScaleSuperseded, CONFLICT),
    (errors.ResizeTakenBack, CONFLICT),
    (errors.Unauthenticated, AUTH),
    (errors.Forbidden, AUTH),
    (errors.QuotaExceeded, QUOTA),
    (errors.Unavailable, UNAVAILABLE),
    (errors.RendezvousUnavailable, UNAVAILABLE),
    (errors.InvalidRequest, USAGE),
    (errors.WorldSizeOutOfBounds, USAGE),
    (errors.TooLarge, USAGE),
    (Invalid, USAGE),
)


class Misused(errors.MusterError):
    """The command line itself is wrong; nothing was sent."""

    code = "usage"


def code_of(error: Exception) -> int:
    if isinstance(error, Misused):
        return USAGE
    return next((code for kind, code in _OF_ERROR if isinstance(error, kind)), ERROR)


def say(message: str, hint: str = "") -> None:
    """One line on stderr, and one with the next command."""
    sys.stdout.flush()  # so that both streams keep their order where they go to the same place
    print(f"muster: {shown(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {shown(hint)}", file=sys.stderr)


def report(error: Exception) -> int:
    """Tell the user about an error that was foreseen; the exit code that it gets."""
    hint = error.hint if isinstance(error, errors.MusterError) else ""
    say(str(error), hint or _HINTS.get(type(error), ""))
    if isinstance(error, errors.InvalidRequest):
        for problem in error.problems:
            text = f"{problem.field}: {problem.message}"
            if text not in str(error) and problem.message != str(error):
                print(f"  {shown(text)}", file=sys.stderr)
    return code_of(error)


_HINTS: dict[type[Exception], str] = {
    errors.Unauthenticated: "give a token with --token or MUSTER_TOKEN",
    errors.Forbidden: "muster token create NAME --role editor makes a token that may do more",
    errors.Unavailable: "muster server status says whether the control plane runs",
}
