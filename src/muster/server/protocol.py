"""How are bytes on a socket taken? As uvicorn does it, where it leaves something open: pass as `http=Protocol`.

Three things: what is not HTTP gets the one form of error too, a head has a limit, and answers leave at once.
"""

from __future__ import annotations

import asyncio
import json
import socket
import uuid

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from muster.errors import InvalidRequest, to_wire

MOST_HEAD_BYTES = 64 * 1024


class Protocol(HttpToolsProtocol):
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does this only for sockets whose protocol is spelled out, which one bound by hand may lack; an answer
        # in two parts would then wait 40 ms for an acknowledgement.
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.send_400_response(f"the head of the request is larger than {MOST_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        request_id = uuid.uuid4().hex
        body = json.dumps(to_wire(InvalidRequest(msg), request_id)).encode()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"x-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
