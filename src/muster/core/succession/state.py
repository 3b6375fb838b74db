"""What does one participant do so that exactly one coordinator leads a run?

It follows, stands for election, or leads. The driver carries frames between posts and does what the orders say; it must
write down what `Remember` holds before anything that comes after it is sent.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum

from muster.core.succession import electorate
from muster.core.succession.ballot import Ballot
from muster.core.succession.candidacy import ASK_S, Candidacy
from muster.core.succession.electorate import Groups
from muster.core.succession.leadership import KEEP_EVERY, Known, Leadership
from muster.core.succession.orders import Lead, NotElected, Remember, StepDown, SuccessionOrder, Tell
from muster.types.frames import Frame, KeepFrame, KeptFrame, RunRecord, VoiceFrame, VoteFrame
from muster.types.world import Elector, Electorate, MemberId

STAGGER_S = 0.1  # after each other electors stand, in their order


class Part(StrEnum):
    FOLLOWS = "follows"
    STANDS = "stands"
    LEADS = "leads"


class Succession:
    def __init__(self, me: Elector, lease_s: float, now: float, record: RunRecord | None = None) -> None:
        """With the `record` that an earlier process of this participant kept."""
        self.me = me
        self.ballot = Ballot(record)
        self.leadership: Leadership | None = None
        self._candidacy: Candidacy | None = None
        self._lease_s = lease_s
        self._told_missing = False
        self._stand_at = math.inf
        self._began = now
        self._orders: list[SuccessionOrder] = []
        if record is not None:
            self._return(record, now)

    def _return(self, record: RunRecord, now: float) -> None:
        leader = record.electorate.leader
        if leader is not None and leader.member_id == self.me.member_id:
            self.ballot.dead_term = record.electorate.term  # that was us
            self._stand_at = now
        else:
            self.ballot.leader = leader
            self.ballot.until, self.ballot.until_term = now + self._lease_s, max(1, record.electorate.term)
            self._stand_after(self.ballot.until)

    # Looking

    @property
    def part(self) -> Part:
        if self.leadership is not None:
            return Part.LEADS
        return Part.FOLLOWS if self._candidacy is None else Part.STANDS

    @property
    def leader(self) -> Elector | None:
        """As far as is known here."""
        return self.me if self.leadership is not None else self.ballot.leader

    @property
    def posts(self) -> list[Elector]:
        """Whom to ask for the leader, the likeliest first."""
        known = electorate.everyone(self._groups)
        first = [self.leader] if self.leader is not None else []
        return [*first, *(one for one in known if one not in first and one.member_id != self.me.member_id)]

    @property
    def correspondents(self) -> list[Elector]:
        """With whom a connection has to be kept."""
        if self.leadership is not None:
            return self.leadership.others
        return self._rivals if self._candidacy is not None else []

    @property
    def _rivals(self) -> list[Elector]:
        return [one for one in electorate.everyone(self._groups) if one.member_id != self.me.member_id]

    @property
    def _is_elector(self) -> bool:
        return self.me.member_id in {one.member_id for one in electorate.everyone(self._groups)}

    @property
    def _groups(self) -> Groups:
        return self.ballot.record.electorate.groups if self.ballot.record is not None else ()

    def may_speak(self, now: float) -> bool:
        return self.leadership is not None and self.leadership.may_speak(now)

    def is_left_over(self, now: float) -> bool:
        """Return True if the run has ended and no leader has sent anything for two leases: its electors have left."""
        record = self.ballot.record
        silent_since = max(self._began + self._lease_s, self.ballot.until)
        is_silent = not self.leadership and now >= silent_since + self._lease_s
        return record is not None and record.outcome is not None and is_silent

    def missing(self, now: float) -> str:
        """Why it may not."""
        if self.leadership is not None:
            return electorate.missing(self.leadership.groups, self.leadership.promising(now))
        voices = self._candidacy.voices if self._candidacy is not None else {self.me.member_id}
        return electorate.missing(self._groups, voices)

    # Time

    @property
    def wake_at(self) -> float:
        if self.leadership is not None:
            return min(self.leadership.keep_at, self.leadership.sure_at + self._lease_s)
        return self._stand_at if self._candidacy is None else self._candidacy.wake_at

    def tick(self, now: float) -> list[SuccessionOrder]:
        if self.leadership is not None:
            self._look_after(self.leadership, now)
        elif self._candidacy is None:
            self._stand(now)
        elif now >= self._candidacy.give_up_at:
            self._give_up(now)
        elif now >= self._candidacy.ask_at:
            self._ask(self._candidacy, now)
        return self._taken()

    def _taken(self) -> list[SuccessionOrder]:
        orders, self._orders = self._orders, []
        return orders

    # Leading

    def lead_anew(self, record: RunRecord, now: float, term: int) -> RunRecord:
        """A run that nobody leads, and of which members know no later term than one below this."""
        self.ballot.promised = term
        first = Electorate(term, self.me, ((self.me,),))
        return self._begin(replace(record, electorate=first, revision=1, promised=term), now)

    def _begin(self, record: RunRecord, now: float) -> RunRecord:
        self.ballot.record, self.ballot.leader = record, self.me
        self._candidacy = None
        self.leadership = Leadership(self.me, record, self._lease_s, now)
        self._stand_at = math.inf
        return record

    def write(self, record: RunRecord, now: float) -> RunRecord:
        """What follows from it must not be said before `may_speak`. Returns it as it is to be written down."""
        assert self.leadership is not None
        self.ballot.record = self.leadership.write(record, now, needed=True)
        return self.ballot.record

    def widen(self, host: str, able: list[tuple[Elector, str]], now: float, known: Known) -> list[SuccessionOrder]:
        """These members could be electors, each on its machine. `known`: who knows what was announced last."""
        if self.leadership is not None:
            self._orders += self.leadership.widen(host, able, now, known)
            self.ballot.record = self.leadership.record
        return self._taken()

    def _look_after(self, leading: Leadership, now: float) -> None:
        if leading.is_sure(now) or leading.is_over:
            leading.sure_at = now
        elif now >= leading.sure_at + self._lease_s:
            self._step_down(f"without a majority: {self.missing(now)}", now)
            return
        if now >= leading.keep_at:
            leading.keep_at = now + KEEP_EVERY * self._lease_s
            self._orders += [Tell(elector, leading.keep(elector, now)) for elector in leading.others]

    def give_way(self, why: str, now: float) -> list[SuccessionOrder]:
        """Lead no longer, for a reason of its own."""
        if self.leadership is not None:
            self._step_down(why, now)
            self._stand_after(now + self._lease_s)
        return self._taken()

    def _step_down(self, why: str, now: float) -> None:
        self.leadership = self.ballot.leader = None
        self._stand_after(now)
        self._orders.append(StepDown(why))

    # Standing

    def _stand_after(self, since: float) -> None:
        """In the order of electors, so that they do not all stand at once."""
        if not self._is_elector:
            self._stand_at = math.inf
            return
        lost = self.ballot.leader.member_id if self.ballot.leader is not None else None
        order = sorted(one.member_id for one in self._rivals if one.member_id != lost)
        self._stand_at = since + STAGGER_S * sum(one < self.me.member_id for one in order)

    def _stand(self, now: float) -> None:
        ballot = self.ballot
        if now < self._stand_at:
            return
        if not self._is_elector or not ballot.is_free(now):
            self._stand_after(ballot.until)
            return
        ballot.leader = None
        self._candidacy = Candidacy(self.me, ballot.promised, ballot.last, now, self._lease_s)
        self._ask(self._candidacy, now)

    def _remember(self) -> None:
        if (kept := self.ballot.kept()) is not None:
            self._orders.append(Remember(kept))

    def _ask(self, standing: Candidacy, now: float) -> None:
        self._count(standing, now)
        if standing is self._candidacy:
            question = standing.question(now)
            self._orders += [Tell(one, question) for one in self._rivals if one.member_id not in standing.voices]

    def _count(self, standing: Candidacy, now: float) -> None:
        """With voices enough it begins in earnest, and then leads."""
        record = self.ballot.record
        assert record is not None
        if standing.sounds and electorate.is_enough(self._groups, standing.voices):
            standing.ask_in_earnest()
            self.ballot.give(standing.term, self.me.member_id)
            self._remember()
            standing.ask_at = now
        if not standing.sounds and electorate.is_enough(self._groups, standing.voices):
            chosen = Electorate(standing.term, self.me, self._groups)
            made = replace(record, electorate=chosen, revision=record.revision + 1, promised=standing.term)
            self._begin(made, now)
            self._orders += [Remember(made), Lead(made)]
            assert self.leadership is not None
            self._look_after(self.leadership, now)

    def _give_up(self, now: float) -> None:
        if not self._told_missing and self.ballot.leader is None:
            self._told_missing = True
            self._orders.append(NotElected(self.missing(now)))
        self._stand_down(now, ASK_S)

    def _stand_down(self, now: float, pause_s: float) -> None:
        self._candidacy = None
        self._stand_after(now + pause_s)

    # Hearing

    def asked(self, frame: Frame, now: float) -> tuple[Frame | None, list[SuccessionOrder]]:
        """What is answered to one who leads or wants to, after the orders are carried out."""
        answer: Frame | None = None
        match frame:
            case KeepFrame():
                answer = self._keep(frame, now)
            case VoteFrame():
                answer = self._vote(frame, now)
        return answer, self._taken()

    def _keep(self, frame: KeepFrame, now: float) -> KeptFrame:
        before = (self.ballot.last, self.ballot.promised)
        answer = self.ballot.keep(frame, self._lease_s, now)
        if answer.term > frame.term:
            return answer
        if self.leadership is not None:
            self._step_down(f"{frame.leader.name} leads in term {frame.term}", now)
        self._candidacy, self.ballot.leader, self._told_missing = None, frame.leader, False
        if before != (self.ballot.last, self.ballot.promised):
            self._remember()
        if not self.ballot.is_free(now):  # else it was said before it died
            self._stand_after(self.ballot.until)
        return answer

    def _vote(self, frame: VoteFrame, now: float) -> VoiceFrame:
        if self.leadership is not None and self.leadership.is_sure(now):
            return VoiceFrame(term=self.ballot.promised, why="it leads", leader=self.me)
        voice = self.ballot.vote(frame, now)
        if voice.given and not voice.sounding:
            if self.leadership is not None:
                self._step_down(f"{frame.candidate.name} was given the voice for term {frame.term}", now)
            self._candidacy = None
            self._remember()
            self._stand_after(now + self._lease_s)
        return voice

    def answered(self, elector_id: MemberId, frame: Frame, now: float) -> list[SuccessionOrder]:
        """By an elector whom we asked."""
        match frame:
            case KeptFrame(term=term) if self.leadership is not None:
                if term > self.leadership.term:
                    return self.outranked(term, now)
                self.leadership.kept(elector_id, frame)
            case VoiceFrame() if self._candidacy is not None:
                self._hear_voice(self._candidacy, elector_id, frame, now)
        return self._taken()

    def outranked(self, term: int, now: float) -> list[SuccessionOrder]:
        """Somebody was led in that term."""
        if self.leadership is not None and term > self.leadership.term:
            self.ballot.promised = max(self.ballot.promised, term)
            self._remember()
            self._step_down(f"term {term} has begun elsewhere", now)
        return self._taken()

    def _hear_voice(self, standing: Candidacy, elector_id: MemberId, frame: VoiceFrame, now: float) -> None:
        if standing.hear(elector_id, frame):
            self._count(standing, now)
            if standing is self._candidacy and now >= standing.ask_at:
                self._ask(standing, now)
        elif frame.behind:
            self._stand_down(now, self._lease_s)  # who has the later record should stand
        elif frame.term > self.ballot.promised:
            self.ballot.promised, self.ballot.given_to = frame.term, None
            self._remember()
            self._stand_down(now, ASK_S)
        if frame.leader is not None and self.leadership is None:
            self.ballot.leader = frame.leader

    # Connections

    def connected(self, elector_id: MemberId) -> None:
        if self.leadership is not None:
            self.leadership.unheard(elector_id)
            self.leadership.keep_at = -math.inf
        elif self._candidacy is not None:
            self._candidacy.ask_at = -math.inf

    def disconnected(self, elector_id: MemberId, now: float, *, died: bool) -> list[SuccessionOrder]:
        """Or it could not be told. `died`: it is certain that the process which was connected is gone."""
        if self.leadership is not None:
            self.leadership.unheard(elector_id)
            if died:
                self.leadership.died(elector_id, now)
        return self._taken()

    def leader_died(self, term: int, now: float) -> None:
        """It is certain that the process which led in that term is gone. It may have returned, and lead in a later."""
        ballot = self.ballot
        if self.part is Part.FOLLOWS and ballot.dead_term < term:
            ballot.dead_term = term
            if term >= ballot.until_term:
                self._stand_after(now)
