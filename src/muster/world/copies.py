"""What is each agent told about copies of its state, and when? With its renewals, and when it says what it holds."""

from __future__ import annotations

from collections.abc import Mapping

from muster.core.world import buddies
from muster.types.frames import CopiesFrame
from muster.types.world import MemberId
from muster.world.conversation import Conversation, Visitor
from muster.world.frames_out import Peer

REST_S = 0.0005  # for each member, between two looks at what all of them hold


class CopiesTold:
    def __init__(self) -> None:
        self._orders: Mapping[MemberId, buddies.Copies] = {}
        self._seen: tuple[object, ...] = ()
        self._again_at = 0.0

    def say(self, at: Conversation, peer: Peer, visitor: Visitor, member_id: MemberId, now: float) -> None:
        assert at.run is not None
        if not at.run.holdings:
            return
        seen = at.run.holdings, at.run.round, at.run.members
        if now >= self._again_at and any(
            old is not new for old, new in zip(self._seen or (None,) * 3, seen, strict=True)
        ):
            self._seen, self._orders = seen, buddies.orders(at.run)
            self._again_at = now + REST_S * len(at.run.members)
        order = self._orders.get(member_id)
        if order is not None and visitor.told_copies != order:
            visitor.told_copies = order
            frame = CopiesFrame(
                targets=order.targets,
                buddy=order.buddy,
                safe=order.safe,
                every=order.every,
                stride=order.stride,
                write_at=order.write_at,
            )
            at.send(peer, frame)
