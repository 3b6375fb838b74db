"""The round's store: one TCPStore server per round, on a socket that the agent of rank 0 already listens on."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

from muster.node import system, torch_version


def serve(listen_fd: int, host: str, port: int) -> None:
    """Serve until killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
        timeout=timedelta(seconds=30),
    )
    while True:
        signal.pause()
        assert store is not None


if __name__ == "__main__":
    system.die_with_parent(int(sys.argv[4]))
    if refusal := torch_version.refusal():
        os.write(2, f"muster-node: a rank asked for the round's store: {refusal}\n".encode())
        sys.exit(1)
    try:
        serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    except ImportError as error:
        message = f"muster-node: a rank asked for the round's store, and torch cannot be imported: {error}\n"
        os.write(2, message.encode())
        sys.exit(1)
