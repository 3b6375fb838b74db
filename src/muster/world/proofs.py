"""How do a member and its coordinator show each other that they know the run token? With hashes; it is never sent.

Each names a number that the other has to use, so nothing that was said once is good again. A proof says who gives it,
so it cannot be given back to its giver. And it is bound to the two ends of the connection: somebody in the middle, who
hands on what both say, has two connections. In TLS, where ends may be mapped on the way, the run's key stands for them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Literal, NamedTuple

from muster.sockets import End

Prover = Literal["member", "coordinator"]

IN_TLS = "tls"
_NOBODYS = secrets.token_hex(16)  # for what a stranger cannot tell from a wrong token: that there is none


class Talk(NamedTuple):
    """What a proof is bound to."""

    run_id: str
    kind: str
    challenge: str  # the coordinator's number
    nonce: str  # the member's
    ends: str  # of the connection, as whoever proves or checks sees them; or `IN_TLS`


def ends(member: End | None, coordinator: End | None) -> str:
    return json.dumps([member, coordinator])


def new_nonce() -> str:
    return secrets.token_hex(16)


def prove(token: str, who: Prover, talk: Talk) -> str:
    return _mac(token, who, *talk)


def prove_wish_for_tls(token: str, challenge: str, run_id: str) -> str:
    """With it the coordinator knows, before it does anything that costs, that a key can be agreed upon."""
    return _mac(token, IN_TLS, challenge, run_id)


def is_proof(given: str, token: str | None, *expected: str) -> bool:
    """Is it what `_mac` makes of these? As slowly without a token as with one."""
    right = _mac(token or _NOBODYS, *expected)
    return hmac.compare_digest(right.encode(), given.encode(errors="replace")) and token is not None


def _mac(token: str, *parts: str) -> str:
    # A key of its own: a member of 0.1 hashes under the token whatever it is given as a number.
    key = hmac.digest(token.encode(), b"muster mutual proof", "sha256")
    return hmac.new(key, json.dumps(parts).encode(), hashlib.sha256).hexdigest()
