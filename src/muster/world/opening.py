"""Whom does a member speak with? The opening of one connection: TLS if it leaves the machine, and proofs of both sides.

Until the coordinator has proved that it knows the run token, nothing that it says is acted upon. A member without a
token has nothing to ask a proof with, and believes whoever answers.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from muster.background import Tasks
from muster.types.frames import ChallengeFrame, ErrorFrame, Frame, HelloFrame, ProofFrame, TlsFrame, UnknownFrame
from muster.types.world import RunId
from muster.world import neighbours, proofs, wire
from muster.world.proofs import Talk
from muster.world.wire import Channel, Version

# Errors after which saying hello again can help.
PASSING = frozenset({"lost", "timeout", "closing"})

# What our coordinator may say before it has proved itself: to those whom it does not understand, or has no room for.
TURNED_AWAY = PASSING | {"garbage", "invalid", "frame_too_large", "version_mismatch"}


NOT_PROVED = "whoever answers there has not proved to know the run token"


class CoordinatorRefused(Exception):
    """The coordinator answered, and its answer is no; or it is not the one that it should be (`unproved`)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Opening:
    def __init__(
        self,
        run_id: RunId,
        kind: str,
        token: str | None,
        hello: Callable[[str], HelloFrame],
        version: Version,
    ) -> None:
        self._run_id = run_id
        self._kind = kind
        self._token = token
        self._hello = hello
        self._version = version
        self._talk: Talk | None = None  # since our hello
        self._asked_for_tls = False
        self._tasks = Tasks()
        self.proved = not token
        self.direct = False  # nobody is between us and the other end, as far as both can see
        self.near = False  # that, and both ends are on this machine
        self.another = False  # whoever is there is not our coordinator, unless it has proved itself
        self.turned_away = False
        self.refusal: CoordinatorRefused | None = None

    def screen(self, channel: Channel, told: Mapping[str, Any]) -> None:
        """Before a large frame is looked into."""
        try:
            wire.only_openings(channel, told)
        except wire.WireError:
            raise self._refused(_unproved(NOT_PROVED)) from None

    def takes(self, channel: Channel, frame: Frame) -> bool:
        """Hear what belongs to the opening; False if the frame does not, and may be acted upon."""
        try:
            match frame:
                case ErrorFrame(seq=None):
                    self.refusal = CoordinatorRefused(frame.code, frame.message)
                    self.turned_away = frame.code in TURNED_AWAY
                    self.another = not self.turned_away
                    channel.close()
                case ChallengeFrame() if self._talk is None:
                    self._challenged(channel, frame)
                case TlsFrame() if self._asked_for_tls and not channel.encrypted:
                    self._go_on_in_tls(channel)
                case ProofFrame() if self._token:
                    self._check(channel, frame)
                case UnknownFrame() if not self.proved:
                    pass
                case _ if not self.proved:
                    raise _unproved(NOT_PROVED)
                case _:
                    return False
        except wire.WireError as error:
            raise self._refused(error) from None
        return True

    def _refused(self, error: wire.WireError) -> wire.WireError:
        self.refusal = CoordinatorRefused(error.code, str(error))
        self.turned_away = error.code in TURNED_AWAY
        return error

    def _challenged(self, channel: Channel, challenge: ChallengeFrame) -> None:
        wire.agree(challenge.low, challenge.high, self._version)
        self.direct = _is_direct(channel, challenge)
        self.near = is_near(channel, challenge)
        if not self._token or channel.encrypted:
            self._say_hello(channel, challenge, proofs.IN_TLS)
        elif not challenge.tls:
            raise _unproved(
                "the coordinator does not prove that it knows the run token: it has none, or it is of muster 0.1 "
                "(update it before its workers), or somebody else listens there"
            )
        elif is_near(channel, challenge):
            self._say_hello(channel, challenge, proofs.ends(channel.here, channel.there))
        else:
            self._asked_for_tls = True
            proof = proofs.prove_wish_for_tls(self._token, challenge.nonce, self._run_id)
            channel.send(TlsFrame(run_id=self._run_id, proof=proof))

    def _say_hello(self, channel: Channel, challenge: ChallengeFrame, ends: str) -> None:
        low, high = wire.show((self._version[0], 0)), wire.show(self._version)
        hello = self._hello(channel.local_host)
        hello = replace(hello, v=high, low=low, high=high, kind=self._kind, run_id=self._run_id)
        if self._token:
            self._talk = Talk(self._run_id, self._kind, challenge.nonce, proofs.new_nonce(), ends)
            proof = proofs.prove(self._token, "member", self._talk)
            hello = replace(hello, nonce=self._talk.nonce, proof=proof)
        channel.proved = self.proved
        channel.send(hello)

    def _go_on_in_tls(self, channel: Channel) -> None:
        from muster.world import certificates  # most never need it

        assert self._token
        self._asked_for_tls = False
        context = certificates.context(self._token, self._run_id, server=False)
        self._tasks.start(self._encrypt(channel.encrypt(context, server=False)))

    async def _encrypt(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except ssl.SSLError as error:
            self.another = True
            why = f"whoever answers there does not have the key of this run ({error.reason or error})"
            self.refusal = CoordinatorRefused("unproved", why)
        except OSError:
            return  # lost meanwhile

    def _check(self, channel: Channel, frame: ProofFrame) -> None:
        if (
            self._talk is None
            or self.proved
            or not proofs.is_proof(frame.proof, self._token, "coordinator", *self._talk)
        ):
            raise _unproved("whoever answers there does not know the run token")
        self.proved = channel.proved = True


def is_near(channel: Channel, challenge: ChallengeFrame) -> bool:
    """Both ends are on this machine, with nobody between them: then the kernel keeps what is said to itself."""
    return neighbours.on_this_machine(channel.here, channel.there) and _is_direct(channel, challenge)


def _is_direct(channel: Channel, challenge: ChallengeFrame) -> bool:
    return channel.here is not None and challenge.peer == wire.show_address(*channel.here)


def _unproved(message: str) -> wire.WireError:
    return wire.WireError("unproved", message)
