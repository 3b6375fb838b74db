"""Signing a browser in without a token in its address: a code for who has a token, the token for who has the code."""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass

from starlette.responses import Response

from muster import sockets
from muster.errors import Unauthenticated, Unavailable
from muster.sdk import peers
from muster.server.answers import as_json
from muster.server.calls import Call
from muster.server.describe import Answer, Body, Operation
from muster.server.sign_in import GOOD_FOR_S
from muster.types.codec import limited, to_wire

CODES = "/v1/sign-in-codes"
SIGN_IN = "/sign-in"  # open: whoever has a code has no token yet
_HINT = "`muster dashboard` makes a new one"


@dataclass(frozen=True)
class SignInForm:
    code: str = limited(max_length=128)


async def create_sign_in_code(call: Call) -> Response:
    services = call.services
    _, _, token = (call.header("authorization") or "").partition(" ")
    user = await _user(call)
    now, here = services.clock.steady().timestamp(), _is_here(call)
    code = services.codes.issue(call.identity.name, token.strip(), user, now, here=here)
    return as_json({"code": code, "seconds": GOOD_FOR_S}, 201)


async def sign_in(call: Call) -> Response:
    services = call.services
    form = await call.record(SignInForm)
    token = services.codes.redeem(form.code, await _user(call), services.clock.steady().timestamp())
    try:
        if token is None:
            raise Unauthenticated("the code was used already, is somebody else's, or its minute is over", hint=_HINT)
        identity = services.tokens.identify(token)  # which may have been revoked since
    except Unauthenticated:
        await services.attempts.pause(call.request.scope["muster.guest"].address)
        raise
    call.request.scope["muster.about"] = f"token {identity.name}"
    return as_json({"token": token, **to_wire(identity)})


async def _user(call: Call) -> int | None:
    """Return the user whose process is at the other end; None if that is on another machine.

    Raise Unavailable if the kernel does not answer: then nobody is known to be elsewhere.
    """
    connection = call.request.scope["muster.guest"].connection
    try:
        if connection is None:
            raise OSError("the connection is closed")
        return await asyncio.to_thread(peers.owner_of, connection)
    except OSError as error:
        raise Unavailable(f"whose connection this is cannot be seen: {error}", hint=_HINT) from error


def _is_here(call: Call) -> bool:
    """Whether it came over loopback, and goes to a browser that will."""
    try:
        host, _ = sockets.end(call.request.scope["muster.guest"].connection.getsockname())
        return ipaddress.ip_address(host).is_loopback
    except (OSError, ValueError):
        return False


OPERATIONS = (
    Operation(
        "POST",
        CODES,
        create_sign_in_code,
        "A code that signs a browser in, once and within a minute",
        {201: Answer("The code, and for how long it is good.", "SignInCode")},
        (403,),
    ),
    Operation(
        "POST",
        SIGN_IN,
        sign_in,
        "The token that a code stands for",
        {200: Answer("The token, and whose it is.", "SignedIn")},
        (401, 413, 422),
        body=Body("SignIn"),
        open=True,
    ),
)
