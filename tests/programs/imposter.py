"""Another user of the machine, who listens where a control plane was: imposter.py RECORD HOST PORT [deaf | RELAY_PORT]

All that it gets is kept in RECORD. It answers everything with 200 and an empty list; `deaf` never accepts; with a
port it hands everything on to there and back.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import BinaryIO

NOBODY = 65534
BODY = b'{"items": [], "metadata": {}}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


def pour(source: socket.socket, target: socket.socket, record: BinaryIO | None = None) -> None:
    while data := source.recv(65536):
        if record is not None:
            record.write(data)
        target.sendall(data)


def serve(guest: socket.socket, record: BinaryIO, relay: str) -> None:
    if relay:
        there = socket.create_connection(("127.0.0.1", int(relay)))
        threading.Thread(target=pour, args=(there, guest), daemon=True).start()
        return pour(guest, there, record)
    while data := guest.recv(65536):
        record.write(data)
        guest.sendall(ANSWER)


def main(record: str, host: str, port: str, how: str = "") -> None:
    with open(record, "ab", buffering=0) as kept:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen()
        print(listener.getsockname()[1], flush=True)
        while how == "deaf":
            threading.Event().wait()
        while True:
            guest, _ = listener.accept()
            threading.Thread(target=serve, args=(guest, kept, how), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
