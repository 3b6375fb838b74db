"""How do coordinator and members talk? Length-prefixed JSON frames, a version range, TLS between machines.

A frame is four bytes of length (big-endian) and one JSON object with `v`, `type`, `epoch`, `round` and what the
type needs: `types.frames`. One that is too long is sent in parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import hmac
import ipaddress
import json
import socket
import ssl
import struct
import termios
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from muster.sockets import End
from muster.types import frames
from muster.types.codec import Invalid
from muster.types.frames import ChallengeFrame, ErrorFrame, Frame, HelloFrame, PartFrame, ProofFrame, TlsFrame
from muster.world import neighbours

Version = tuple[int, int]

VERSION: Version = (1, 0)
MAX_FRAME = 1 << 20
MAX_WHOLE = 16 << 20  # of a frame in parts, which only those send and get that have proved themselves
MAX_UNSENT = 32 << 20  # a peer that lets this much pile up is not reading
HANDSHAKE_S = 5.0
GOODBYE_S = 1.0  # for the other end to agree that a connection in TLS is over
NO_ROOM = ("closing", "too many are connected; say hello again")  # a code that 0.1 comes back after, too
LONG = 64 << 10  # what few frames are, and no stranger's first but an agent's that brings a large run back
SHORT = 160  # what most frames are, and many members say the very same
_PART = MAX_FRAME // 2 - 256  # as text within a frame it may become twice as long
_OPENINGS = frozenset(one.type for one in (HelloFrame, ChallengeFrame, ProofFrame, TlsFrame, ErrorFrame))
_LENGTH = struct.Struct(">I")
_JSON = json.JSONEncoder(separators=(",", ":"))


class WireError(Exception):
    """The peer broke the protocol; `code` is what it is told."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


ADDRESS_TAKEN = "address taken"  # a coordinator's report to its parent process, in place of an address


def no_run(run_id: str) -> WireError:
    return WireError("not_found", f"no run {run_id!r} here")


def show(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def agree(low: object, high: object, mine: Version = VERSION) -> Version:
    """The highest version that both sides speak; any minor of the same major will do."""
    try:
        theirs_low, theirs_high = _version(low), _version(high)
    except (TypeError, ValueError):
        raise WireError("version_mismatch", f"unreadable protocol versions {low!r} to {high!r}") from None
    if not theirs_low[0] <= mine[0] <= theirs_high[0]:
        span = f"{show(theirs_low)} to {show(theirs_high)}"
        raise WireError("version_mismatch", f"the peer speaks protocol {span}, this side speaks {show(mine)}")
    return min(mine, theirs_high) if theirs_high[0] == mine[0] else mine


def _version(text: object) -> Version:
    major, minor = str(text).split(".")
    return int(major), int(minor)


def encode(frame: Frame, *, epoch: int | None = None, round: int | None = None) -> bytes:
    """With the epoch and the round in which it is said, where it names none itself."""
    return pack(spoken(frame, epoch=epoch, round=round))


def spoken(frame: Frame, *, epoch: int | None = None, round: int | None = None) -> dict[str, Any]:
    """The JSON object that a frame is."""
    said_in = {"v": show(VERSION)} | ({} if epoch is None else {"epoch": epoch})
    return said_in | ({} if round is None else {"round": round}) | frames.write(frame)


def pack(told: Mapping[str, Any]) -> bytes:
    """As one frame, or as several that make one together."""
    text = _JSON.encode(told)  # without a character that takes more than one byte
    if len(text) <= MAX_FRAME:
        return _LENGTH.pack(len(text)) + text.encode()
    if len(text) > MAX_WHOLE:
        raise WireError("frame_too_large", f"a frame of {len(text)} bytes is over the limit of {MAX_WHOLE}")
    starts = range(0, len(text), _PART)
    return b"".join(encode(PartFrame(text=text[at : at + _PART], more=at != starts[-1])) for at in starts)


def understood(told: Mapping[str, Any]) -> Frame:
    """What a JSON object with a type says."""
    try:
        return frames.read(told)
    except Invalid as error:
        code = "invalid" if told["type"] == HelloFrame.type else "garbage"
        raise WireError(code, f"a frame could not be understood: {told['type']}: {str(error)[:500]}") from None


class Decoder:
    """Bytes in, JSON objects with a type out. Anything else raises WireError."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._parts: list[str] = []

    def __len__(self) -> int:
        """What has come and is no whole frame yet."""
        return len(self._buffer)

    def rest(self) -> bytes:
        """What has come and belongs to no frame, for somebody else."""
        rest, self._buffer = bytes(self._buffer), bytearray()
        return rest

    def feed(self, data: bytes) -> Iterable[dict[str, Any]]:
        return map(_parse, self.bodies(data))

    def joined(self, part: PartFrame) -> Frame | None:
        """The frame that this part completes, if it does."""
        self._parts.append(part.text)
        if not part.text:
            raise WireError("garbage", "a part with nothing in it")
        if sum(map(len, self._parts)) > MAX_WHOLE:
            raise WireError("frame_too_large", f"a frame in parts is over the limit of {MAX_WHOLE}")
        if part.more:
            return None
        text, self._parts = "".join(self._parts), []
        return understood(_parse(text.encode()))

    def bodies(self, data: bytes) -> Iterable[bytes]:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise WireError("frame_too_large", f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


def _frame(body: bytes) -> Frame:
    return _short_frame(body) if len(body) <= SHORT else understood(_parse(body))


@functools.lru_cache(maxsize=1024)
def _short_frame(body: bytes) -> Frame:
    """Renewals and confirmations of a round are the same from everybody; nobody changes a frame."""
    return understood(_parse(body))


def _parse(body: bytes) -> dict[str, Any]:
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError):
        raise WireError("garbage", "a frame is not JSON") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise WireError("garbage", "a frame is not an object with a type")
    return frame


def proof(token: str, nonce: str, *parts: str) -> str:
    """How members of 0.1 prove that they know the run token, to whoever asks; see `world.proofs`."""
    text = "\0".join((nonce, *parts))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def parse_address(text: str, default_host: str = "127.0.0.1") -> tuple[str, int]:
    """`HOST:PORT`, `[v6]:PORT` or `:PORT`; ValueError says what is wrong."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    host = host.removeprefix("[").removesuffix("]")
    return host or default_host, int(port)


def show_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(info[4][0].split("%")[0]).is_loopback for info in infos)  # type: ignore[union-attr]


def only_openings(channel: Channel, told: Mapping[str, Any]) -> None:
    """Of whoever has proved nothing: what belongs to an opening is small, and anything else is not looked into."""
    if told["type"] in frames.TYPES and told["type"] not in _OPENINGS:
        raise WireError("garbage", f"{str(told['type'])[:100]!r} before a proof")


OnFrame = Callable[["Channel", Frame], None]
OnEnd = Callable[["Channel", str], None]


class Channel(asyncio.Protocol):
    """One connection as frames. `on_frame` gets each; `on_end` gets the reason once, also for our own close."""

    def __init__(
        self,
        on_frame: OnFrame,
        on_end: OnEnd,
        on_open: Callable[[Channel], None] = lambda channel: None,
        on_long: Callable[[Channel], None] = lambda channel: None,
        screen: Callable[[Channel, Mapping[str, Any]], None] = only_openings,
    ) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_open = on_open
        self._on_long = on_long  # a frame that has not come whole is long already
        self._screen = screen  # before a frame is looked into of somebody who has not proved itself
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self.local_host = "127.0.0.1"
        self.here: End | None = None
        self.there: End | None = None
        self._why = "the connection closed"
        self._ended = False
        self._ours = False
        self._closed = False  # by us, in whatever way
        self._nothing_follows = False
        self._changing = False  # to TLS: nothing can be said meanwhile
        self._early = b""  # what came in TLS before we knew that it had begun
        self.encrypted = False
        self.proved = False  # who is there: only then it may send a frame in parts
        self.fault: WireError | None = None  # what the peer did wrong, if anything
        self.peer_died = False  # it ended because somebody over there ended it
        self.ended_cleanly = False  # that, and not with a reset: nothing that was sent is missing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # Asked now: a transport in TLS that is closed twice cannot be asked any more.
        name = transport.get_extra_info("sockname")
        self.local_host = str(name[0]) if name else self.local_host
        self.here = neighbours.end(name)
        self.there = neighbours.end(transport.get_extra_info("peername"))
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = raw
        self._on_open(self)

    @property
    def unread(self) -> int:
        """Bytes of a frame that has not come whole."""
        return len(self._decoder)

    @property
    def peer_host(self) -> str:
        return self.there[0] if self.there else "?"

    @property
    def peer(self) -> str:
        return show_address(*self.there) if self.there else "?"

    def encrypt(self, context: ssl.SSLContext, *, server: bool) -> Coroutine[Any, Any, None]:
        """Go on in TLS, and say nothing until that is done; OSError if it cannot be, which ends the connection."""
        assert self._transport is not None
        self._changing = True
        self._transport.pause_reading()
        return self._encrypt(self._transport, context, server)

    async def _encrypt(self, plain: asyncio.Transport, context: ssl.SSLContext, server: bool) -> None:
        try:
            if plain.is_closing():
                raise ConnectionResetError("the connection closed")
            self._transport = await asyncio.get_running_loop().start_tls(
                *(plain, self, context),
                server_side=server,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=GOODBYE_S,
            )
            if self._transport is None:  # it was lost meanwhile
                raise ConnectionResetError("the connection closed")
        except OSError as error:
            self.connection_lost(error)  # asyncio may tell it to nobody
            raise
        self._changing, self.encrypted = False, True
        early, self._early = self._early, b""
        self.data_received(early)

    def data_received(self, data: bytes) -> None:
        if self._changing:
            self._early += data
            return
        try:
            for body in self._decoder.bodies(data):
                frame: Frame | None = self._understood(body)
                if self.proved and isinstance(frame, PartFrame):
                    frame = self._decoder.joined(frame)
                if frame is not None:
                    self._on_frame(self, frame)
                if self._transport is None or self._transport.is_closing():
                    return
                if self._changing and len(self._decoder):
                    raise WireError("garbage", "something was said in clear after the wish for TLS")
            if len(self._decoder) > LONG:
                self._on_long(self)
        except WireError as error:
            self.fault = error
            self.refuse(error.code, str(error))

    def _understood(self, body: bytes) -> Frame:
        if self.proved or len(body) <= SHORT:
            return _frame(body)
        told = _parse(body)
        self._screen(self, told)
        return understood(told)

    def eof_received(self) -> None:
        self._nothing_follows = True

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended:
            self._ended = True
            self.ended_cleanly = self._nothing_follows and exc is None and not self._closed
            self.peer_died = not self._ours and (exc is None or isinstance(exc, ConnectionError))
            self._on_end(self, str(exc) if exc else self._why)

    def send(self, frame: Frame, *, epoch: int | None = None) -> None:
        self.send_raw(encode(frame, epoch=epoch))

    def send_raw(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing() or self._changing:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNSENT:
            self.abort("it does not read what it is sent")

    def has_delivered(self) -> bool:
        """Return True if the connection is open and the other end's kernel has all that was written to it."""
        if self._transport is None or self._socket is None or self._ended or self._nothing_follows:
            return False
        if self._transport.is_closing() or self._transport.get_write_buffer_size():
            return False
        unacknowledged = bytearray(4)
        try:
            fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, unacknowledged)
        except OSError:
            return False
        return unacknowledged == b"\0\0\0\0"

    def refuse(self, code: str, message: str) -> None:
        """Tell the peer what is wrong, then end this connection and nothing else."""
        if self._changing:
            self.abort(message)
            return
        self.send(ErrorFrame(code=code, message=message))
        self._why = message
        self.close()

    def hand_over(self) -> tuple[asyncio.Transport, bytes]:
        """The connection itself, for one who goes on in another language, and what has come already."""
        assert self._transport is not None
        self._ended = True
        return self._transport, self._decoder.rest()

    def close(self) -> None:
        """Once: a transport in TLS that is closed for a second time cannot be aborted any more."""
        self._closed = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def abort(self, why: str) -> None:
        if self._ended or self._transport is None:
            return
        self._why = why
        self._ours = self._closed = True
        if self._socket is not None:
            # With a reset: a clean end would say to the other side that this process has ended.
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
