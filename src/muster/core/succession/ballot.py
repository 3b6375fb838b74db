"""To whom does an elector give its voice, and what does it keep?

Once per term, and only when the leader that it has promised a lease to is dead, or has been silent for that lease; and
only to one whose record is no older than its own. So a leader that has the promises of enough electors knows that
nobody else leads, and whoever is elected has every record that enough electors have kept.
"""

from __future__ import annotations

import math
from dataclasses import replace

from muster.types.frames import KeepFrame, KeptFrame, RunRecord, VoiceFrame, VoteFrame
from muster.types.world import Elector, MemberId


class Ballot:
    """What one elector has promised and kept. Both have to outlive its process, if that can return."""

    def __init__(self, record: RunRecord | None = None) -> None:
        self.record = record
        self.promised = max(record.promised, record.electorate.term) if record is not None else 0
        self.given_to: MemberId | None = None  # in that term, unless its leader has spoken
        self.leader: Elector | None = None
        self.dead_term = 0  # the last one whose leader is known to be dead
        self.until = -math.inf  # nobody else gets the voice before, unless the leader of that term dies
        self.until_term = 0

    @property
    def last(self) -> tuple[int, int]:
        return (0, 0) if self.record is None else (self.record.electorate.term, self.record.revision)

    def kept(self) -> RunRecord | None:
        """As it is written down."""
        return None if self.record is None else replace(self.record, promised=self.promised)

    def is_free(self, now: float) -> bool:
        return self.dead_term >= self.until_term or now >= self.until

    def keep(self, frame: KeepFrame, lease_s: float, now: float) -> KeptFrame:
        if frame.term < self.promised:
            return KeptFrame(term=self.promised)
        if frame.term > self.promised or self.given_to is not None:
            self.promised, self.given_to = frame.term, None
        self.leader = frame.leader
        self.until, self.until_term = now + lease_s, frame.term
        found = frame.record
        if found is not None and (found.electorate.term, found.revision) > self.last:
            self.record = found
        term, revision = self.last
        return KeptFrame(term=frame.term, stamp=frame.stamp, revision=revision if term == frame.term else 0)

    def vote(self, frame: VoteFrame, now: float) -> VoiceFrame:
        who = frame.candidate.member_id
        if frame.term < self.promised or (frame.term == self.promised and self.given_to != who):
            why = f"promised term {self.promised}"
            return VoiceFrame(term=self.promised, why=why, leader=None if self.is_free(now) else self.leader)
        if not self.is_free(now):
            return VoiceFrame(term=self.promised, why="its leader may be alive", leader=self.leader)
        if frame.last < self.last:
            return VoiceFrame(term=self.promised, why="a later record is kept here", behind=True)
        if not frame.sounding:
            self.give(frame.term, who)
        return VoiceFrame(term=frame.term, given=True, sounding=frame.sounding)

    def give(self, term: int, who: MemberId) -> None:
        self.promised, self.given_to, self.leader = term, who, None
