"""The guard: a small process beside each agent that outlives it by just long enough.

It is the parent of the warm parent and inherits every orphan below it, so it can say for certain when no rank and
no grandchild is left. When the agent dies, or is silent for a lease, the guard kills them all and tells the
coordinator `gone(round)` over a connection of its own.

`muster.node.bootstrap` starts the warm parent and then calls `main`; the agent's first line says the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from muster.node import system
from muster.node.warm import LOOK_S, LOOK_SOON_S
from muster.types.world import RunId
from muster.world.connection import Address, Link, Refused
from muster.world.wire import Frame

REPORT_TIMEOUT_S = 10.0


class Guard:
    """Stands by an agent and, when that ends, clears what was below it. `clear()` returns when it is gone."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        clear: Callable[[], Awaitable[None]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._clear = clear
        self._beat_at = asyncio.get_running_loop().time()
        self._lease_s = 2.0
        self._round: int | None = None
        self._cleared = False
        self._reported = asyncio.Event()
        self._link: Link | None = None
        self._addresses: list[Address] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        config = json.loads(await self._reader.readline())
        self._lease_s = config["lease_s"]
        self._watch(config)
        linked = loop.create_task(self._stay_connected())
        why = await self._stand_by()
        await self._clear()
        self._cleared = True
        if why == "released" or self._round is None:
            return
        self._report()
        done = loop.create_task(self._reported.wait())
        await asyncio.wait({done, linked}, timeout=REPORT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)

    def _watch(self, config: dict[str, Any]) -> None:
        self._addresses = [(host, port) for host, port in config["addresses"]]
        member = {"member_id": config["member_id"], "name": config["name"]}
        self._link = Link(
            lambda: self._addresses,
            RunId(config["run_id"]),
            "guard",
            token=os.environ.get("MUSTER_RUN_TOKEN") or None,
            hello=lambda local: {"member": member},
            on_frame=self._hear,
        )

    async def _stay_connected(self) -> None:
        assert self._link is not None
        try:
            await self._link.run()
        except Refused:
            return  # the coordinator will go by the clock instead

    async def _stand_by(self) -> str:
        """Follow the agent's orders until it lets go, dies, or falls silent for a lease."""
        loop = asyncio.get_running_loop()
        while True:
            left = self._beat_at + self._lease_s - loop.time()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    line = await self._reader.readline()
            except TimeoutError:
                return "silent"
            except ConnectionError:
                return "dead"
            if not line:
                return "dead"
            self._beat_at = loop.time()
            order = json.loads(line)
            if "round" in order:
                self._round = order["round"]
            if "lease_s" in order:
                self._lease_s = order["lease_s"]
            if "addresses" in order:
                self._addresses = [(host, port) for host, port in order["addresses"]]
            if "release" in order:
                return "released"

    def _hear(self, frame: Frame) -> None:
        if frame["type"] == "welcome" and self._cleared:
            self._report()
        elif frame["type"] == "probe" and self._link is not None:
            if self._cleared:
                self._report()
            else:
                self._link.send("alive")

    def _report(self) -> None:
        if self._link is not None and self._link.send("gone", round=self._round):
            # Let the frame leave before the process does.
            asyncio.get_running_loop().call_later(0.02, self._reported.set)


class Below:
    """What lives below a guard: the warm parent and, generation after generation, everything that it started."""

    def __init__(self, warm_pid: int) -> None:
        self._warm_pid = warm_pid
        self._child_ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._child_ended.set)

    async def clear(self) -> None:
        """Kill all of it. The kernel says when nothing is left: we inherit every orphan."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._warm_pid, signal.SIGKILL)
        patience_s = LOOK_SOON_S
        while system.reap()[1]:
            self._child_ended.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._child_ended.wait()
            except TimeoutError:
                system.kill_children()
                patience_s = LOOK_S


async def _stand_guard(control_fd: int, warm_pid: int) -> None:
    system.adopt_orphans()
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=control_fd))
    await Guard(reader, writer, Below(warm_pid).clear).run()
    os._exit(0)  # nothing to clean up, and the agent waits for us


def main(control_fd: int, warm_pid: int) -> None:
    asyncio.run(_stand_guard(control_fd, warm_pid))
