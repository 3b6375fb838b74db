"""Where do the tensors of one rank lie in its memory, and what is each of them?

A manifest is what makes memory into state: it names step, round and rank, and of every piece the place, the kind and
the content hash; and it has a hash of its own. It is written last. Agents read it too, without torch, to see what two
workers have in common.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

FORMAT = 3
HASH_DIGITS = 32  # of a content hash, in hexadecimal
ALIGN = 256
MOST_PIECES = 1_000_000
_TEXT = 4096
_ATTEMPT = re.compile(r"[0-9A-Za-z]{0,64}")
_HASH = re.compile(rf"([0-9a-f]{{{HASH_DIGITS}}})?")


@dataclass(frozen=True)
class Piece:
    """A tensor, or this rank's part of one."""

    name: str
    dtype: str  # as torch says it, without its name
    shape: tuple[int, ...]
    offset: int
    length: int
    hash: str = ""  # the content hash; empty until it is computed
    whole: tuple[int, ...] | None = None  # the shape of all parts together, if this is one
    begin: tuple[int, ...] = ()  # where in the whole this part begins
    device: str = "cpu"  # the kind that it was on

    @property
    def itemsize(self) -> int:
        count = math.prod(self.shape)
        return self.length // count if count else 1


@dataclass(frozen=True)
class Manifest:
    rank: int
    ranks: int
    round: int
    step: int
    pieces: tuple[Piece, ...]
    rest: Piece  # all that is no tensor, pickled; the last one
    attempt: str = ""  # tells those who wrote a step together from others who wrote the same step

    @property
    def length(self) -> int:
        return self.rest.offset + self.rest.length

    @property
    def room(self) -> int:
        """What memory for it needs, with the manifest behind it; a little more, so that the next one fits as well."""
        told = sum(len(piece.name) * 12 for piece in self.pieces)  # as JSON writes the worst of characters
        return aligned(self.length + (64 << 10) + 512 * len(self.every) + told + self.rest.length)

    @property
    def every(self) -> tuple[Piece, ...]:
        return (*self.pieces, self.rest)

    def with_hashes(self, hashes: Sequence[str]) -> Manifest:
        """Return a copy with the hashes of its pieces, the rest's last."""
        pieces = tuple(replace(piece, hash=digest) for piece, digest in zip(self.pieces, hashes[:-1], strict=True))
        return replace(self, pieces=pieces, rest=replace(self.rest, hash=hashes[-1]))

    def write(self) -> bytes:
        told: dict[str, Any] = {
            "format": FORMAT,
            "rank": self.rank,
            "ranks": self.ranks,
            "round": self.round,
            "step": self.step,
            "attempt": self.attempt,
            "pieces": [_told(piece) for piece in self.pieces],
            "rest": _told(self.rest),
        }
        return _text(told | {"sum": _sum(told)})


def _told(piece: Piece) -> list[Any]:
    whole = None if piece.whole is None else list(piece.whole)
    place = [piece.offset, piece.length, piece.hash]
    return [piece.name, piece.dtype, list(piece.shape), *place, whole, list(piece.begin), piece.device]


def _text(told: Mapping[str, Any]) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode()


def _sum(told: Mapping[str, Any]) -> str:
    return hashlib.blake2b(_text(told), digest_size=8).hexdigest()


def placed(pieces: Sequence[Piece], rest_length: int) -> tuple[tuple[Piece, ...], Piece]:
    """Place the pieces one after the other, each at an offset that is aligned for a GPU, and the rest behind them."""
    laid: list[Piece] = []
    for piece in pieces:
        laid.append(replace(piece, offset=_end(laid)))
    return tuple(laid), rest_behind(laid, rest_length)


def rest_behind(pieces: Sequence[Piece], length: int) -> Piece:
    return Piece("", "uint8", (length,), _end(pieces), length)


def _end(pieces: Sequence[Piece]) -> int:
    return aligned(pieces[-1].offset + pieces[-1].length) if pieces else 0


def aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def read(data: bytes | memoryview, room: int) -> Manifest:
    """A manifest of memory of that size; ValueError says what is wrong with it."""
    try:
        told = json.loads(bytes(data))
        if told["format"] != FORMAT:
            raise ValueError("a format that this version does not know")
        made = told.pop("sum")
        pieces, attempt = told["pieces"], told["attempt"]
        if not isinstance(pieces, list) or len(pieces) > MOST_PIECES:
            raise ValueError("too many pieces")
        if not isinstance(attempt, str) or not _ATTEMPT.fullmatch(attempt):
            raise ValueError("not an attempt")
        numbers = {name: _number(told[name]) for name in ("rank", "ranks", "round", "step")}
        found = Manifest(
            pieces=tuple(_piece(one, room) for one in pieces),
            rest=_piece(told["rest"], room),
            attempt=attempt,
            **numbers,
        )
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a manifest: {type(error).__name__} {error}") from None
    if found.rank >= found.ranks:
        raise ValueError(f"rank {found.rank} of {found.ranks} cannot be")
    if (found.rest.dtype, found.rest.shape) != ("uint8", (found.rest.length,)):
        raise ValueError("its rest is no bytes")
    if _sum(told) != made:
        raise ValueError("its manifest is damaged")
    return found


def _number(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 62:
        raise ValueError(f"not a number: {value!r}"[:_TEXT])
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 64:
        raise ValueError("not a shape")
    return tuple(_number(one) for one in value)


def _piece(told: Any, room: int) -> Piece:
    if not isinstance(told, list) or len(told) != 9:
        raise ValueError("not a piece")
    name, dtype, shape, offset, length, digest, whole, begin, device = told
    if not all(isinstance(text, str) and len(text) <= _TEXT for text in (name, dtype, digest, device)):
        raise ValueError("a piece without a name")
    if not _HASH.fullmatch(digest):
        raise ValueError(f"{name} has no content hash")
    if _number(offset) + _number(length) > room:
        raise ValueError(f"{name} ends behind its memory")
    made_whole = None if whole is None else _numbers(whole)
    piece = Piece(name, dtype, _numbers(shape), offset, length, digest, made_whole, _numbers(begin), device)
    if made_whole is not None and not _within(piece.begin, piece.shape, made_whole):
        raise ValueError(f"{name} is no part of its whole")
    count = math.prod(piece.shape)
    if (length % count or not length) if count else length:
        raise ValueError(f"{name} is not as long as its shape says")
    return piece


def _within(begin: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> bool:
    return len(begin) == len(shape) == len(whole) and all(
        at + size <= most for at, size, most in zip(begin, shape, whole, strict=True)
    )
