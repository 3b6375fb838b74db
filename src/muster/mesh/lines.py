"""Signed lines between the publisher of a mesh and its probing agents. Standard library only.

    publisher → agent   {"muster": "observe", "nonce": P}
    agent → publisher   {"nonce": A}
    publisher → agent   MAC {"name": …, "peers": {NAME: [HOST, PORT], …}}
    agent → publisher   MAC {"rows": [[NAME, seconds or null, reason], …]}, again whenever the agent has news

Each MAC covers both nonces, the sender, the number of the line and its text, so a recorded line is worth nothing later.
Lines are signed, not encrypted: they hold names, addresses and round-trip times.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import secrets
from dataclasses import dataclass
from typing import Any

TOKEN = "MUSTER_MESH_TOKEN"
SHORTEST_TOKEN = 16
PORT = 8473
LINE_S = 5.0  # for a line of the handshake
BEAT_S = 5.0  # between two lines of an agent that has no news
SILENCE_S = 20.0  # after which an agent counts as gone
MOST_NODES = 256
MOST_LINE = 128 * 1024
MOST_NAME = 128


class BrokenTalk(Exception):
    """The other side broke the protocol, or does not have the token."""


def token() -> str:
    """Return the shared token, or an empty text if there is none. Raises ValueError if it is too short."""
    secret = os.environ.get(TOKEN, "")
    if 0 < len(secret) < SHORTEST_TOKEN:
        raise ValueError(f"{TOKEN} has {len(secret)} characters; a token of fewer than {SHORTEST_TOKEN} can be guessed")
    return secret


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_name(name: object) -> bool:
    """Return True for a text that can be the name of a node, which is a part of a key's path."""
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME or name in (".", ".."):
        return False
    return not any(char in "/=" or char.isspace() or not char.isprintable() for char in name)


@dataclass
class SignedLines:
    """A connection between publisher and agent after the exchange of nonces."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    secret: bytes
    nonces: str
    me: str
    peer: str
    sent: int = 0
    read: int = 0

    async def send(self, body: dict[str, Any]) -> None:
        text = json.dumps(body, separators=(",", ":"))
        self.writer.write(f"{self._mac(self.me, self.sent, text)} {text}\n".encode())
        self.sent += 1
        async with asyncio.timeout(SILENCE_S):
            await self.writer.drain()

    async def receive(self, within_s: float) -> dict[str, Any]:
        line = (await read_line(self.reader, within_s)).decode(errors="replace").rstrip("\n")
        mac, _, text = line.partition(" ")
        if not hmac.compare_digest(mac.encode(), self._mac(self.peer, self.read, text).encode()):
            raise BrokenTalk(f"the {self.peer} has another {TOKEN}")
        self.read += 1
        return as_object(text)

    def _mac(self, sender: str, number: int, text: str) -> str:
        covered = "\0".join(("muster-mesh", self.nonces, sender, str(number), text)).encode()
        return hmac.digest(self.secret, covered, "sha256").hex()


async def read_line(reader: asyncio.StreamReader, within_s: float) -> bytes:
    try:
        async with asyncio.timeout(within_s):
            line = await reader.readuntil(b"\n")
    except TimeoutError as why:
        raise BrokenTalk(f"no answer in {within_s:g} s") from why
    except asyncio.LimitOverrunError as why:
        raise BrokenTalk("the line does not end") from why
    except asyncio.IncompleteReadError as why:
        raise BrokenTalk("the connection ended") from why
    return line


def as_object(text: str | bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise BrokenTalk("what answers there is not muster")
    return body


async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> SignedLines:
    """Exchange nonces as the publisher, which sends the first line."""
    own_nonce = secrets.token_hex(16)
    writer.write(json.dumps({"muster": "observe", "nonce": own_nonce}).encode() + b"\n")
    peer_nonce = as_object(await read_line(reader, LINE_S)).get("nonce")
    if not isinstance(peer_nonce, str):
        raise BrokenTalk("what answers there is not muster")
    return SignedLines(reader, writer, secret, f"{own_nonce} {peer_nonce}", "publisher", "agent")


async def answer(
    hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> SignedLines:
    """Answer a publisher's first line as the agent."""
    peer_nonce = hello.get("nonce")
    if not isinstance(peer_nonce, str):
        raise BrokenTalk("it sent no nonce")
    own_nonce = secrets.token_hex(16)
    writer.write(json.dumps({"nonce": own_nonce}).encode() + b"\n")
    return SignedLines(reader, writer, secret, f"{peer_nonce} {own_nonce}", "agent", "publisher")
