"""Who has connected and has not said who it is? Each gets a challenge, some time, and no more work than it has earned.

A stranger that knows a run token may have TLS, and a proof that the coordinator knows it, too. Whether a run exists is
told to nobody else: an unknown run and a wrong token are answered alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from muster import descriptors, listening
from muster.background import Tasks
from muster.core import crowding
from muster.types.frames import ChallengeFrame, ErrorFrame, Frame, HelloFrame, ProofFrame, TlsFrame, UnknownFrame
from muster.types.world import RunId
from muster.world import proofs, wire
from muster.world.proofs import Talk
from muster.world.wire import Channel, OnEnd, OnFrame

HELLO_TIMEOUT_S = 5.0
_CLAIMS = ("run_id", "kind", "nonce", "proof")
GRACE_S = 0.1
MOST_UNREAD = 32 << 20  # bytes of theirs, in all
MOST_STRANGERS = 1024  # and no more than an eighth of the files that the process may open


@dataclass
class Stranger:
    nonce: str
    timer: asyncio.TimerHandle
    whose: str
    since: float


class Strangers:
    """`token_of` a run is None where it has none or does not exist; `open_to_all`: there are no tokens at all."""

    def __init__(self, token_of: Callable[[RunId], str | None], *, open_to_all: bool) -> None:
        self._token_of = token_of
        self._open_to_all = open_to_all
        self._known: dict[Channel, Stranger] = {}  # eldest first
        self._arriving = Tasks()
        self.most = descriptors.share(8, MOST_STRANGERS)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, channel: Channel) -> bool:
        return channel in self._known

    def arrive(self, taken: socket.socket, on_frame: OnFrame, on_end: OnEnd) -> None:
        if len(self._known) + len(self._arriving) >= self.most and not self._make_room():
            with contextlib.suppress(OSError):  # so that a member can tell a crowd from somebody else in our place
                taken.send(wire.encode(_no_room()))
            taken.close()
            return
        self._arriving.hold(
            listening.arrive(taken, lambda: Channel(on_frame, on_end, self.challenge, self.bound, self.screen))
        )

    def _make_room(self) -> bool:
        """Let a stranger go for one who comes; False if all just came, for each has a moment to say who it is."""
        now = asyncio.get_running_loop().time()
        if not self._known or now - next(iter(self._known.values())).since < GRACE_S:
            return False
        eldest = crowding.eldest_of_greediest((one, known.whose) for one, known in self._known.items())
        self._known.pop(eldest).timer.cancel()
        eldest.send(_no_room())
        eldest.abort("too many have not said who they are")
        return True

    def bound(self, channel: Channel) -> None:
        """What strangers have sent and not finished takes memory: whoever has the most of it goes."""
        if channel in self._known and sum(one.unread for one in self._known) > MOST_UNREAD:
            longest = max(self._known, key=lambda one: one.unread)
            self.forget(longest)
            longest.refuse(*wire.NO_ROOM)

    def challenge(self, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(HELLO_TIMEOUT_S, channel.refuse, "timeout", "no hello in time")
        whose = listening.whose(channel.peer_host)
        self._known[channel] = Stranger("", timer, whose, loop.time())
        self._ask(channel)

    def _ask(self, channel: Channel) -> None:
        self._known[channel].nonce = nonce = proofs.new_nonce()
        low, high = wire.show((wire.VERSION[0], 0)), wire.show(wire.VERSION)
        channel.send(ChallengeFrame(nonce=nonce, low=low, high=high, tls=not self._open_to_all, peer=channel.peer))

    def forget(self, channel: Channel) -> None:
        if (stranger := self._known.pop(channel, None)) is not None:
            stranger.timer.cancel()

    def close(self) -> None:
        for channel in list(self._known):
            channel.close()

    def screen(self, channel: Channel, told: Mapping[str, Any]) -> None:
        """To read the record in a hello of a megabyte takes half a second: first the proof."""
        if told["type"] != HelloFrame.type:
            wire.only_openings(channel, told)
        elif channel in self._known:
            claimed = {name: told[name] for name in _CLAIMS if isinstance(told.get(name), str)}
            self._checked(channel, HelloFrame(**claimed))

    def hear(self, channel: Channel, frame: Frame) -> HelloFrame | None:
        """A hello in a version that we speak, with a proof of the token: then it is no stranger any more."""
        if isinstance(frame, TlsFrame) and not channel.encrypted:
            self._to_tls(channel, frame)
            return None
        if not isinstance(frame, HelloFrame):
            told = frame.name if isinstance(frame, UnknownFrame) else frame.type
            raise wire.WireError("garbage", f"expected a hello, not {told!r}")
        wire.agree(frame.low or frame.v, frame.high or frame.v)
        if not frame.run_id:
            raise wire.WireError("invalid", "a hello must name its run")
        proof = self._checked(channel, frame)
        channel.proved = True
        self.forget(channel)
        if proof is not None:
            channel.send(proof)
        return frame

    def _checked(self, channel: Channel, hello: HelloFrame) -> ProofFrame | None:
        """Our own proof, for those who want one."""
        if self._open_to_all:
            return None
        nonce, token = self._known[channel].nonce, self._token_of(RunId(hello.run_id))
        if not hello.nonce:  # a member of 0.1, which believes whoever answers
            known = wire.proof(token or "", nonce, hello.run_id, hello.kind)
            if not hmac.compare_digest(known.encode(), hello.proof.encode()) or not token:
                raise _wrong_token()
            return None
        ends = proofs.IN_TLS if channel.encrypted else proofs.ends(channel.there, channel.here)
        talk = Talk(hello.run_id, hello.kind, nonce, hello.nonce, ends)
        if not proofs.is_proof(hello.proof, token, "member", *talk):
            raise _wrong_token()
        assert token
        return ProofFrame(proof=proofs.prove(token, "coordinator", talk))

    def _to_tls(self, channel: Channel, wish: TlsFrame) -> None:
        """Only for those who know the token: nobody else can make us sign, or learn whether there is such a run."""
        from muster.world import certificates  # most never need it

        token = None if self._open_to_all else self._token_of(RunId(wish.run_id))
        if not proofs.is_proof(wish.proof, token, proofs.IN_TLS, self._known[channel].nonce, wish.run_id):
            raise _wrong_token()
        assert token
        channel.send(TlsFrame())
        context = certificates.context(token, wish.run_id, server=True)
        self._arriving.start(self._encrypt(channel, channel.encrypt(context, server=True)))

    async def _encrypt(self, channel: Channel, work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(OSError):
            await work
            if channel in self._known:
                self._ask(channel)


def _no_room() -> ErrorFrame:
    code, message = wire.NO_ROOM
    return ErrorFrame(code=code, message=message)


def _wrong_token() -> wire.WireError:
    return wire.WireError(
        "bad_token",
        "wrong or missing run token: export MUSTER_RUN_TOKEN=$(ssh HOST cat FILE); "
        "the coordinator keeps it in MUSTER_HOME/coordinators",
    )
