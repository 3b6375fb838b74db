"""A limit on how long a rank waits for the round's store when it joins its process group.

torch itself retries for as long as the group's timeout, half an hour by default, and waits without a limit for a store
that accepts a connection and sends nothing. The check connects with torch's own client first, so it does not depend
on torch's protocol. It covers `init_process_group` with `env://`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from muster.node import system

TIMEOUT_VARIABLE = "MUSTER_STORE_TIMEOUT_S"
_STORE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_AGAIN_S = 0.2
_LOOK_S = 0.5


def install() -> None:
    """Check the store before torch's handler of `env://` uses it."""
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    handlers = getattr(rendezvous, "_rendezvous_handlers", None)
    limit = os.environ.get(TIMEOUT_VARIABLE)
    if isinstance(handlers, dict) and "env" in handlers and limit:
        handlers["env"] = _checked(handlers["env"], _place(), float(limit))


def _place() -> tuple[str, ...]:
    return tuple(os.environ.get(name, "") for name in _STORE_VARIABLES)


def _checked(handler: Callable[..., Iterator[Any]], place: tuple[str, ...], limit_s: float) -> Callable[..., Any]:
    def rendezvous(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if _place() == place:  # otherwise the program uses a store of its own
            await_store(place[0], int(place[1]), limit_s)
        yield from handler(url, *args, **kwargs)

    return rendezvous


def await_store(host: str, port: int, limit_s: float) -> None:
    """Return when the store has replied; otherwise end this rank after `limit_s` with one line that says why.

    torch's client cannot be interrupted and exceeds its timeout, so it runs in a thread. Python cannot end cleanly
    while that thread runs, so the process exits at once.
    """
    connected = threading.Event()
    until = time.monotonic() + limit_s
    threading.Thread(target=_connect, args=(host, port, until, connected), name="muster-store", daemon=True).start()
    if connected.wait(limit_s):
        return
    with contextlib.suppress(Exception):
        system.flush()
    text = (
        f"ConnectionError: rank {os.environ.get('RANK', '?')} cannot reach the round's store at {host}:{port} within "
        f"{limit_s:g} s ({_cause(host, port)}). Let workers reach each other at any port, or allow more time with "
        "--store-timeout-s\n"
    )
    os.write(2, text.encode(errors="replace"))
    os._exit(1)


def _connect(host: str, port: int, until: float, connected: threading.Event) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    while (left_s := until - time.monotonic()) > 0:
        try:
            TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=left_s))
        except RuntimeError:
            time.sleep(_AGAIN_S)
        else:
            connected.set()
            return


def _cause(host: str, port: int) -> str:
    """Return the result of a plain connection to the store. It sends nothing, so a store sends nothing either."""
    try:
        with socket.create_connection((host, port), _LOOK_S) as connection:
            connection.settimeout(_LOOK_S)
            try:
                replied = connection.recv(1)
            except TimeoutError:
                return "it accepts the connection and does not reply"
            return "it replies with something else" if replied else "it closes the connection"
    except OSError as error:
        return (error.strerror or str(error) or type(error).__name__).lower()
