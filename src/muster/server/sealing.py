"""How does a text travel through a client that may neither read nor change it? Encrypted, with a tag that proves it.

The key stream and the tag are HMAC-SHA256, each under a key of its own; what it is good for goes into the tag. Standard
library only.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

_NONCE, _TAG = 16, 32


class NotSealedHere(ValueError):
    """Made by nobody who has the key, or for something else."""


class PageSeal:
    def __init__(self, secret: bytes) -> None:
        self._stream_key = hmac.digest(secret, b"muster: sealed texts, stream", hashlib.sha256)
        self._tag_key = hmac.digest(secret, b"muster: sealed texts, tag", hashlib.sha256)

    @classmethod
    def anew(cls) -> PageSeal:
        return cls(secrets.token_bytes(32))

    def close(self, text: str, good_for: str) -> str:
        nonce, clear = secrets.token_bytes(_NONCE), text.encode()
        hidden = self._crossed(clear, nonce)
        sealed = nonce + hidden + self._tag(nonce + hidden, good_for)
        return base64.urlsafe_b64encode(sealed).decode().rstrip("=")

    def open(self, sealed: str, good_for: str) -> str:
        try:
            raw = base64.b64decode(sealed + "=" * (-len(sealed) % 4), altchars=b"-_", validate=True)
        except ValueError:
            raise NotSealedHere from None
        body, tag = raw[:-_TAG], raw[-_TAG:]
        if len(body) < _NONCE or not hmac.compare_digest(tag, self._tag(body, good_for)):
            raise NotSealedHere
        return self._crossed(body[_NONCE:], body[:_NONCE]).decode()

    def _crossed(self, data: bytes, nonce: bytes) -> bytes:
        blocks = (
            hmac.digest(self._stream_key, nonce + number.to_bytes(4, "big"), hashlib.sha256)
            for number in range(-(-len(data) // 32))
        )
        return bytes(one ^ other for one, other in zip(data, b"".join(blocks), strict=False))

    def _tag(self, body: bytes, good_for: str) -> bytes:
        about = good_for.encode()
        return hmac.digest(self._tag_key, len(about).to_bytes(8, "big") + about + body, hashlib.sha256)
