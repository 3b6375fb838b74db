"""Who would have us lead? Electors are asked first whether they would give their voice, and then for it.

One who cannot win must not begin a term, for that would end the term of another.
"""

from __future__ import annotations

from muster.types.frames import VoiceFrame, VoteFrame
from muster.types.world import Elector, MemberId

ASK_S = 0.05  # between two questions for a voice that was not given yet


class Candidacy:
    def __init__(self, me: Elector, promised: int, last: tuple[int, int], now: float, lease_s: float) -> None:
        self._me = me
        self._last = last
        self.term = promised + 1
        self.sounds = True
        self.voices: set[MemberId] = {me.member_id}
        self.ask_at = now
        self.give_up_at = now + lease_s

    @property
    def wake_at(self) -> float:
        return min(self.ask_at, self.give_up_at)

    def question(self, now: float) -> VoteFrame:
        self.ask_at = now + ASK_S
        return VoteFrame(term=self.term, candidate=self._me, last=self._last, sounding=self.sounds)

    def ask_in_earnest(self) -> None:
        self.sounds, self.voices = False, {self._me.member_id}

    def hear(self, elector_id: MemberId, voice: VoiceFrame) -> bool:
        """Whether that is a voice for what was asked."""
        given = voice.given and voice.sounding == self.sounds and voice.term == self.term
        if given:
            self.voices.add(elector_id)
        return given
