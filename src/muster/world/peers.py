"""Whom are members told to reach? In a run with a gate all that listen, whenever that has changed."""

from __future__ import annotations

from muster.types.world import MemberId, Path
from muster.world import frames_out
from muster.world.conversation import Conversation


class PeersTold:
    def __init__(self) -> None:
        self._told: dict[MemberId, tuple[Path, ...]] = {}

    def say(self, at: Conversation) -> None:
        if at.run is None or at.run.settings.gate_timeout_s is None or at.run.outcome is not None:
            return
        listening = {member_id: member.paths for member_id, member in at.run.members.items() if member.paths}
        told, self._told = self._told, listening
        due = at.unreached & listening.keys()
        new = {member_id: peer for member_id, peer in at.agents.items() if member_id in due}
        at.unreached = (at.unreached - new.keys()) & at.agents.keys()
        at.outbox += frames_out.peers(at.moment, at.agents, new, told, listening)
