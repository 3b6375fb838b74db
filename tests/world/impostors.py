"""Somebody who has taken the coordinator's place, in every guise that we could think of."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from muster.types.frames import (
    ChallengeFrame,
    DismissFrame,
    ErrorFrame,
    FarewellFrame,
    Frame,
    OutcomeFrame,
    ProofFrame,
    RecallFrame,
    TlsFrame,
    WelcomeFrame,
)
from muster.types.world import OutcomeState, RunOutcome, Settings
from muster.world import wire

NONCE = "00" * 16
CHALLENGE = ChallengeFrame(nonce=NONCE, low="1.0", high="1.0", tls=True)


def _challenge(visitor: socket.socket, **changes: Any) -> None:
    told = {**vars(CHALLENGE), "peer": wire.show_address(*visitor.getpeername()[:2]), **changes}
    _say(visitor, ChallengeFrame(**told))


def _say(visitor: socket.socket, *frames: Frame) -> None:
    visitor.sendall(b"".join(wire.encode(frame, epoch=99, round=0) for frame in frames))


def _dismisses(visitor: socket.socket) -> None:
    _challenge(visitor)
    visitor.recv(65536)
    _say(visitor, WelcomeFrame(settings=Settings()), DismissFrame(reason="go away"))


def _dismisses_at_once(visitor: socket.socket) -> None:
    _say(visitor, WelcomeFrame(settings=Settings()), DismissFrame(reason="go away"))


def _is_of_0_1(visitor: socket.socket) -> None:
    _challenge(visitor, tls=False, peer="")
    _say(visitor, WelcomeFrame(settings=Settings()), DismissFrame(reason="go away"))


def _proves_wrongly(visitor: socket.socket) -> None:
    _challenge(visitor)
    visitor.recv(65536)
    _say(visitor, ProofFrame(proof="00" * 32), WelcomeFrame(settings=Settings()), DismissFrame(reason="go away"))


def _gives_the_proof_back(visitor: socket.socket) -> None:
    _challenge(visitor)
    hello = next(iter(wire.Decoder().feed(visitor.recv(65536))))
    _say(visitor, ProofFrame(proof=str(hello.get("proof"))), WelcomeFrame(), DismissFrame(reason="go away"))


def _refuses(code: str) -> Callable[[socket.socket], None]:
    def refuse(visitor: socket.socket) -> None:
        _challenge(visitor)
        visitor.recv(65536)
        _say(visitor, ErrorFrame(code=code, message="somebody else's word"))

    return refuse


def _recalls(visitor: socket.socket) -> None:
    _challenge(visitor)
    visitor.recv(65536)
    _say(visitor, WelcomeFrame(settings=Settings()), RecallFrame(reason="stop"))


def _ends_the_run(visitor: socket.socket) -> None:
    _challenge(visitor)
    visitor.recv(65536)
    outcome = RunOutcome(OutcomeState.SUCCEEDED, "done", "all is over")
    _say(visitor, WelcomeFrame(settings=Settings()), OutcomeFrame(outcome=outcome, farewell_s=0.0), FarewellFrame())


def _speaks_another_version(visitor: socket.socket) -> None:
    _challenge(visitor, low="9.0", high="9.1")


def _lures_into_tls(visitor: socket.socket) -> None:
    _challenge(visitor, peer="192.0.2.1:1")
    visitor.recv(65536)
    _say(visitor, TlsFrame())
    visitor.recv(65536)
    visitor.sendall(os.urandom(100))


def _talks_nonsense(visitor: socket.socket) -> None:
    visitor.sendall(b"HTTP/1.1 200 OK\r\nServer: another\r\n\r\n")


def _sends_too_much(visitor: socket.socket) -> None:
    visitor.sendall(struct.pack(">I", wire.MAX_FRAME + 1))


def _closes(visitor: socket.socket) -> None:
    visitor.shutdown(socket.SHUT_RDWR)


def _closes_after_the_challenge(visitor: socket.socket) -> None:
    _challenge(visitor)
    visitor.shutdown(socket.SHUT_RDWR)


def _resets(visitor: socket.socket) -> None:
    visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    visitor.close()


def _says_nothing(visitor: socket.socket) -> None:
    while visitor.recv(65536):
        pass


GUISES: dict[str, Callable[[socket.socket], None]] = {
    "welcomes and dismisses": _dismisses,
    "dismisses at once": _dismisses_at_once,
    "claims to be of 0.1": _is_of_0_1,
    "proves wrongly": _proves_wrongly,
    "gives the proof back": _gives_the_proof_back,
    "does not know the token": _refuses("bad_token"),
    "says that the run is over": _refuses("terminal_state"),
    "says that there is no such run": _refuses("not_found"),
    "has no room": _refuses("closing"),
    "recalls": _recalls,
    "tells an outcome": _ends_the_run,
    "speaks another version": _speaks_another_version,
    "lures into TLS": _lures_into_tls,
    "talks nonsense": _talks_nonsense,
    "sends too much": _sends_too_much,
    "closes": _closes,
    "closes after the challenge": _closes_after_the_challenge,
    "resets": _resets,
    "says nothing": _says_nothing,
}


class Impostor:
    """Listens in the coordinator's place, and treats each who comes in the next of its guises."""

    def __init__(self, address: tuple[str, int], *guises: str) -> None:
        self.visits: Counter[str] = Counter()
        self.guises = guises
        self._server = _bound(address)
        self._visitors: list[socket.socket] = []
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for visitor in self._visitors:
            with contextlib.suppress(OSError):
                visitor.shutdown(socket.SHUT_RDWR)
            visitor.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for number in range(1 << 30):
                visitor, _ = self._server.accept()
                guise = self.guises[number % len(self.guises)]
                self._visitors.append(visitor)
                self.visits[guise] += 1
                threading.Thread(target=self._treat, args=(GUISES[guise], visitor), daemon=True).start()

    def _treat(self, guise: Callable[[socket.socket], None], visitor: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            visitor.settimeout(30)
            guise(visitor)
            while visitor.recv(65536):
                pass


def _bound(address: tuple[str, int]) -> socket.socket:
    """As soon as the port is free."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_server(address)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
