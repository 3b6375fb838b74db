"""How are bytes on a socket taken? As uvicorn does it, where it leaves something open: pass as `http=Protocol`.

What is not HTTP gets the one form of error too, a head has a limit, trailers are not kept, answers leave at once, and
there is one request at a time: whoever sends another before its answer is complete is cut off, or it could queue any
number.
"""

from __future__ import annotations

import asyncio
import json
import socket
import uuid

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from muster.errors import InvalidRequest, to_wire
from muster.server.guests import Guest, Guests

MOST_HEAD_BYTES = 64 * 1024


class Protocol(HttpToolsProtocol):
    _in_head = True
    _head_bytes = 0
    _guest: Guest
    _guests: Guests

    def receive_guest(self, guest: Guest, guests: Guests) -> None:
        """Whose connection it will be, before it is made."""
        self._guest, self._guests = guest, guests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._guest.leave, self._guest.unsent = transport.abort, transport.get_write_buffer_size
        # asyncio does this only for sockets whose protocol is spelled out, which one bound by hand may lack; an answer
        # in two parts would then wait 40 ms for an acknowledgement.
        self._guest.connection = sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guests.gone(self._guest)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.send_400_response(f"the head of the request is larger than {MOST_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self.scope["muster.guest"] = self._guest  # type: ignore[typeddict-unknown-key]
        # What a header says about where it comes from may stand in the scope's own field.
        self.scope["muster.peer"] = self.client[0] if self.client else ""  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # behind a body there is no end to them, and nobody reads them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        if self._guest.asking:
            self.transport.abort()
            raise ValueError("one request at a time")
        self._guests.asks(self._guest)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._guests.answered(self._guest)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if self.transport.is_closing():
            return
        request_id = uuid.uuid4().hex
        body = json.dumps(to_wire(InvalidRequest(msg), request_id)).encode()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"x-content-type-options: nosniff\r\ncache-control: no-store\r\n"
            f"x-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
