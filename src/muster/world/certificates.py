"""With what do members and coordinator encrypt? A certificate that follows from the run token, so none has to travel.

Its key is derived from token and run; both sides make the same certificate, show it, and accept exactly it. The
standard library can use certificates but not make them, so Ed25519 (RFC 8032) and the little DER that is needed are
here. The key signs nothing here but its own certificate, always the same bytes and only for those who know the token:
that the time it takes depends on the key tells nobody anything. Handshakes are OpenSSL's.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import os
import ssl

KEPT = 256  # contexts; one costs a few milliseconds to make

# Ed25519 ------------------------------------------------------------------------------------------

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_Y = 4 * pow(5, -1, _P) % _P
_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202

Point = tuple[int, int, int, int]  # X, Y, Z, T of extended coordinates
_BASE: Point = (_X, _Y, 1, _X * _Y % _P)


def _add(one: Point, other: Point) -> Point:
    (x1, y1, z1, t1), (x2, y2, z2, t2) = one, other
    a, b = (y1 - x1) * (y2 - x2), (y1 + x1) * (y2 + x2)
    c, d = 2 * t1 * t2 * _D, 2 * z1 * z2
    e, f, g, h = (b - a) % _P, (d - c) % _P, (d + c) % _P, (b + a) % _P
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


@functools.cache
def _powers() -> list[Point]:
    """The base point, twice that, four times that, …"""
    found = [_BASE]
    while len(found) < 255:
        found.append(_add(found[-1], found[-1]))
    return found


def _times_base(number: int) -> bytes:
    """That multiple of the base point, encoded."""
    total: Point = (0, 1, 1, 0)
    for bit, power in enumerate(_powers()):
        if number >> bit & 1:
            total = _add(total, power)
    x, y, z, _ = total
    inverse = pow(z, -1, _P)
    return (y * inverse % _P | (x * inverse % _P & 1) << 255).to_bytes(32, "little")


def _scalar(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    clamped = int.from_bytes(digest[:32], "little") & (2**254 - 8) | 2**254
    return clamped, digest[32:]


def public_key(seed: bytes) -> bytes:
    return _times_base(_scalar(seed)[0])


def sign(seed: bytes, message: bytes) -> bytes:
    scalar, prefix = _scalar(seed)

    def number(*parts: bytes) -> int:
        return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER

    once = number(prefix, message)
    point = _times_base(once)
    return point + ((once + number(point, public_key(seed), message) * scalar) % _ORDER).to_bytes(32, "little")


# X.509 --------------------------------------------------------------------------------------------

_ED25519 = bytes.fromhex("300506032b6570")  # AlgorithmIdentifier 1.3.101.112
_COMMON_NAME = bytes.fromhex("0603550403")
_NEVER_BEFORE, _NEVER_AFTER = b"700101000000Z", b"99991231235959Z"  # no clock that is wrong matters
_BIT_STRING, _OCTET_STRING, _UTF8, _UTC, _TIME = 0x03, 0x04, 0x0C, 0x17, 0x18
_SEQUENCE, _SET, _VERSION = 0x30, 0x31, 0xA0
_V3, _SERIAL, _PKCS8 = bytes.fromhex("020102"), bytes.fromhex("020101"), bytes.fromhex("020100")


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    length = [len(body)] if len(body) < 128 else [0x81, len(body)]  # nothing here is longer than a byte can tell
    return bytes([tag, *length]) + body


def _bits(data: bytes) -> bytes:
    return _der(_BIT_STRING, b"\0", data)


def certificate(seed: bytes) -> bytes:
    """In DER: signed by itself, for a name that nobody looks at."""
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _COMMON_NAME, _der(_UTF8, b"muster run"))))
    validity = _der(_SEQUENCE, _der(_UTC, _NEVER_BEFORE), _der(_TIME, _NEVER_AFTER))
    key = _der(_SEQUENCE, _ED25519, _bits(public_key(seed)))
    told = _der(_SEQUENCE, _der(_VERSION, _V3), _SERIAL, _ED25519, name, validity, name, key)
    return _der(_SEQUENCE, told, _ED25519, _bits(sign(seed, told)))


def private_key(seed: bytes) -> bytes:
    """In DER, as PKCS #8 wants it."""
    return _der(_SEQUENCE, _PKCS8, _ED25519, _der(_OCTET_STRING, _der(_OCTET_STRING, seed)))


def _pem(label: str, der: bytes) -> str:
    text = base64.encodebytes(der).decode()
    return f"-----BEGIN {label}-----\n{text}-----END {label}-----\n"


# TLS ----------------------------------------------------------------------------------------------


def seed_of(token: str, run_id: str) -> bytes:
    """HKDF-SHA256 of the token, with the run as its salt."""
    drawn = hmac.digest(run_id.encode(), token.encode(), "sha256")
    return hmac.digest(drawn, b"muster tls\x01", "sha256")


@functools.lru_cache(KEPT)
def context(token: str, run_id: str, *, server: bool) -> ssl.SSLContext:
    """TLS 1.3 with whoever knows the run token, and with nobody else."""
    seed = seed_of(token, run_id)
    shown = _pem("CERTIFICATE", certificate(seed))
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=shown)
    if server:
        made.num_tickets = 0  # nothing is resumed
    held = os.memfd_create("muster")
    try:  # a chain is loaded from a file only; this one is on no disk, and nobody else's
        os.write(held, (_pem("PRIVATE KEY", private_key(seed)) + shown).encode())
        made.load_cert_chain(f"/proc/self/fd/{held}")
    finally:
        os.close(held)
    return made
