"""A run, and who is connected to it: what joining, hearing and deciding share.

What has to be sent gathers in `outbox`; when `unsaved` is set, the record must be kept before it is sent.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from muster.core.succession.leadership import Known
from muster.core.world import transitions
from muster.core.world.run import Run
from muster.types.frames import ElectorsFrame, Frame, MetricsFrame, ModulesFrame, ProbeFrame
from muster.types.modules import joined
from muster.types.run_event import Kind, RunEvent
from muster.types.world import Electorate, EndedRun, MemberId, Role, RunId, Settings
from muster.world import frames_out
from muster.world.frames_out import Addressed, Moment, Peer

STORY = 500  # events that are remembered for whoever asks


@dataclass
class Visitor:
    """A connection that has said hello."""

    kind: str
    member_id: MemberId | None = None
    epoch: int = 0
    told_reason: str = ""
    told_copies: object = None


class Conversation:
    def __init__(self, run_id: RunId, *, epoch: int, settings: Settings | None, directed: bool, clock: str) -> None:
        self.run_id = run_id
        self.clock = clock  # the name of the clock: a record's times are of use on the same clock only
        self.epoch = epoch
        self.directed = directed
        self.incarnation = secrets.token_hex(8)  # the id of a run that is opened here
        self.earlier: tuple[EndedRun, ...] = ()  # runs that had this run id before
        self.run: Run | None = replace(self.opened(settings), holds_farewell=directed) if settings else None
        self.reason = "nobody has joined yet"
        self.confirmed = False  # a directed run's outcome is recorded, so members may be told
        self.ended_at: float | None = None
        self.led = False  # it has released a round of its own
        self.knows_lent = False  # from whoever directs the run, who is asked before any record
        self.electorate = Electorate()  # as its members know it
        self.announced = 0  # how often that has changed
        self.unaware: set[MemberId] = set()  # who has not said that it knows the last change
        self.is_settled: Callable[[Electorate], bool] = lambda announced: not announced.groups
        self.unsaved = False
        self.outbox: list[Addressed] = []
        self.agents: dict[MemberId, Peer] = {}
        self.guards: dict[MemberId, Peer] = {}
        self.visitors: dict[int, Visitor] = {}
        self.heard: dict[MemberId, float] = {}  # renewals that the run has not been told of
        self.modules: tuple[str, ...] = ()  # that ranks import by themselves
        self.unreached: set[MemberId] = set()  # those that have not been told whom to reach
        self.story: deque[RunEvent] = deque(maxlen=STORY)
        self.on_event: Callable[[RunEvent], None] | None = None
        self.on_metrics: Callable[[str, MetricsFrame], None] | None = None

    def opened(self, settings: Settings, incarnation: str = "") -> Run:
        """Return a run without members, with the incarnation that a member sent or else this one's own."""
        run = transitions.open_run(settings)
        return replace(run, incarnations=(incarnation or self.incarnation,), earlier=self.earlier)

    @property
    def lifelines(self) -> set[MemberId]:
        """Members whose end would be proved, if all of their processes ended."""
        mine = (visitor.member_id for visitor in self.visitors.values() if visitor.kind == "lifeline")
        return {member_id for member_id in mine if member_id is not None}

    @property
    def known(self) -> Known:
        """Who knows the last announcement. A member of 0.1 understands none, and what it is welcomed with neither."""
        old = any(not member.takes_outline for member in self.run.members.values()) if self.run is not None else False
        if old or not self.unaware.isdisjoint(self.agents):
            return Known.NOT_BY_ALL
        return Known.NOT_BY_LOST if self.unaware else Known.BY_ALL

    # Saying

    @property
    def moment(self) -> Moment:
        return Moment(self.run_id, self.epoch, self.run, self.clock)

    def send(self, peer: Peer, frame: Frame) -> None:
        self.outbox.append((peer, self.moment.encode(frame)))

    def send_to(self, member_id: MemberId, frame: Frame) -> None:
        if peer := self.agents.get(member_id):
            self.send(peer, frame)

    def send_all(self, frame: Frame) -> None:
        """To every agent."""
        data = self.moment.encode(frame)
        self.outbox += [(peer, data) for peer in self.agents.values()]

    def send_record(self) -> None:
        self.outbox += frames_out.known_to(self.moment, self.agents)

    def announce(self, electorate: Electorate) -> None:
        self.electorate = electorate
        self.announced += 1
        self.unaware = set(self.agents)
        self.send_all(ElectorsFrame(electorate=electorate, number=self.announced))

    def learn(self, modules: tuple[str, ...]) -> None:
        """Those that have ranks learn it from them."""
        assert self.run is not None
        before, self.modules = self.modules, joined(self.modules, modules)
        if self.modules != before:
            data, members = self.moment.encode(ModulesFrame(modules=self.modules)), self.run.members
            waiting = [i for i in self.agents if i in members and members[i].role is not Role.ACTIVE]
            self.outbox += [(self.agents[i], data) for i in waiting]

    def push_outcome(self, peers: list[Peer]) -> None:
        if self.directed and not self.confirmed:
            return  # all of them will hear it when it is recorded
        data = self.moment.outcome()
        self.outbox += [(peer, data) for peer in peers]

    def probe(self, member_id: MemberId) -> None:
        """Ask the guard of a lost member whether it is there; its word comes before the clock's."""
        if guard := self.guards.get(member_id):
            self.send(guard, ProbeFrame())

    # What happens

    def tell(self, kind: Kind, text: str, now: float, data: Mapping[str, Any] | None = None) -> None:
        number = self.run.round.number if self.run is not None and self.run.round else None
        event = RunEvent(now, kind, text, number, data or {})
        self.story.append(event)
        if self.on_event is not None:
            self.on_event(event)

    def ended(self, now: float) -> None:
        """The run has come to an outcome: whoever is here hears it as soon as it may be told."""
        assert self.run is not None and self.run.outcome is not None
        self.ended_at = now
        self.unsaved = True
        self.tell(Kind(self.run.outcome.state), self.run.outcome.message, now)
        self.push_outcome(list(self.agents.values()))

    def renewed_run(self) -> Run:
        """The run with all leases that were renewed since it was last looked at."""
        assert self.run is not None
        if self.heard:
            self.run = transitions.renew(self.run, self.heard)
            self.heard = {}
        return self.run

    def drop(self, member_id: MemberId) -> None:
        if peer := self.agents.pop(member_id, None):
            self.visitors.pop(id(peer), None)
            peer.refuse("lost", "nothing was heard for a lease; say hello again")

    def name(self, member_id: MemberId) -> str:
        member = self.run.members.get(member_id) if self.run is not None else None
        if member is not None:
            return member.name
        seat = self.run.round.seat_of(member_id) if self.run is not None and self.run.round else None
        return seat.name if seat else str(member_id)
