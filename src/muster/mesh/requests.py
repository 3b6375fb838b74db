"""What does a client of the key API ask for? Bytes of one HTTP request in, a record out.

Only as much HTTP as clients of keys speak: a length for every body, no chunks, small heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from muster.mesh.keys import MOST_VALUE, Refused, invalid, normal

ROOT = "/v2/keys"
MOST_HEAD = 16 * 1024
MOST_BODY = 4 * MOST_VALUE  # a form takes up to three bytes for one
MOST_FIELDS = 32
_TRUE, _FALSE = {"1", "t", "T", "TRUE", "true", "True"}, {"0", "f", "F", "FALSE", "false", "False"}
_KNOWN = {
    "GET": {"wait", "waitIndex", "recursive", "sorted", "quorum", "consistent"},
    "PUT": {"value"},
    "DELETE": {"recursive", "dir"},
}
_KNOWN["HEAD"] = _KNOWN["GET"] - {"wait"}


@dataclass(frozen=True)
class KeyRequest:
    method: str
    path: str
    fields: Mapping[str, str]
    token: str
    keep: bool  # the connection stays open
    chunks: bool  # the client understands a body in chunks

    def flag(self, name: str) -> bool:
        value = self.fields.get(name, "false")
        if value not in _TRUE | _FALSE:
            raise invalid(f'invalid value for "{name}"')
        return value in _TRUE

    @property
    def wait_index(self) -> int:
        """0: from now on."""
        value = self.fields.get("waitIndex", "0")
        if not (value.isascii() and value.isdigit() and len(value) < 20):
            raise Refused(400, 203, "The given index in POST form is not a number", 'invalid value for "waitIndex"')
        return int(value)


def take(buffer: bytearray) -> KeyRequest | None:
    """Cut the first request off the buffer; None while it is not complete. After `Refused` nothing more can be read."""
    head, end, _ = bytes(buffer[: MOST_HEAD + 4]).partition(b"\r\n\r\n")
    if not end:
        if len(buffer) > MOST_HEAD:
            raise Refused(431, 209, "Invalid field", f"the head of a request has at most {MOST_HEAD} bytes")
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = _headers(lines)
    size = _size(headers)
    whole = len(head) + len(end) + size
    if len(buffer) < whole:
        return None
    body = bytes(buffer[whole - size : whole])
    del buffer[:whole]
    return _request(first, headers, body)


def _headers(lines: list[str]) -> dict[str, str]:
    made: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name == "content-length" and name in made):
            raise invalid("that is not HTTP")
        made[name] = value.strip()
    return made


def _size(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise Refused(411, 209, "Invalid field", "a body needs a Content-Length")
    given = headers.get("content-length", "0")
    if not (given.isascii() and given.isdigit()):
        raise invalid("invalid Content-Length")
    if len(given) > 9 or int(given) > MOST_BODY:
        raise Refused(413, 209, "Invalid field", f"a body has at most {MOST_BODY} bytes")
    return int(given)


def _request(first: str, headers: Mapping[str, str], body: bytes) -> KeyRequest:
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
        raise invalid("that is not HTTP")
    method, target, version = words
    raw, _, query = target.partition("?")
    if raw != ROOT and not raw.startswith(f"{ROOT}/"):
        raise Refused(404, 100, "Key not found", f"keys are under {ROOT}/")
    if method not in _KNOWN:
        raise Refused(405, 209, "Invalid field", f"{method[:16]!r} is not GET, HEAD, PUT or DELETE")
    fields = _fields(query) | (_fields(body.decode("utf-8", "surrogateescape")) if method == "PUT" else {})
    if unknown := fields.keys() - _KNOWN[method]:
        raise invalid(f"{min(unknown)[:64]!r} is not supported here")
    connection = headers.get("connection", "").lower()
    keep = "close" not in connection if version == "HTTP/1.1" else "keep-alive" in connection
    token = headers.get("authorization", "").removeprefix("Bearer ").strip()
    path = normal(unquote(raw.removeprefix(ROOT), errors="surrogateescape"))
    return KeyRequest(method, path, fields, token, keep, version == "HTTP/1.1")


def _fields(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="surrogateescape"))
    except ValueError as why:
        raise invalid("too many fields") from why
