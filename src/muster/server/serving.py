"""How does the API listen? As uvicorn does, but behind a door that counts who comes."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn

from muster import descriptors
from muster.background import Tasks
from muster.listening import Door, arrive
from muster.server.app import App
from muster.server.guests import HEAD_TIMEOUT_S, MOST, Guest, Guests
from muster.server.protocol import Protocol

log = logging.getLogger("muster.server")

BACKLOG = 256  # who waits behind more than that waits too long for an answer; the kernel lets it try again


class ApiServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the business of the process

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.guests = Guests(descriptors.share(4, MOST))
        self._app = cast(App, self.config.app)
        self._app.services.visits.most = self.guests.most
        self._tending = Tasks(lambda error: log.critical("the API no longer looks after itself: %r", error))
        self._tending.start(self.guests.tend())
        self._tending.start(self._app.tend())
        doors = [Door(one, self._admit, name="the API", backlog=BACKLOG) for one in sockets or []]
        self.servers = cast(Any, doors)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._tending.cancel()
        await super().shutdown(sockets)
        await self._app.close()

    def _admit(self, taken: socket.socket, address: str) -> None:
        guest = self.guests.come(address)

        def protocol() -> Protocol:
            made = Protocol(self.config, self.server_state, self.lifespan.state)
            made.receive_guest(guest, self.guests)
            return made

        arrival = arrive(taken, protocol, tls=self.config.ssl, within_s=HEAD_TIMEOUT_S)
        guest.leave = arrival.cancel
        arrival.add_done_callback(lambda task: self._arrived(guest, failed=task.cancelled() or bool(task.exception())))

    def _arrived(self, guest: Guest, *, failed: bool) -> None:
        if failed:
            self.guests.gone(guest)
