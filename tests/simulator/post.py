"""A simulated post: carries out on virtual time what `core.succession` orders, as `world.post` does."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from muster.core.succession.orders import Announce, Lead, NotElected, Remember, StepDown, SuccessionOrder, Tell
from muster.core.succession.state import Part, Succession
from muster.types.frames import Frame, HelloFrame, Introduction, MovedFrame, WelcomeFrame
from muster.types.world import Elector, MemberId

if TYPE_CHECKING:
    from tests.simulator.connection import SimulatedConnection
    from tests.simulator.coordinator import SimulatedCoordinator


class SimulatedPost:
    def __init__(
        self, owner: SimulatedCoordinator, state: Succession, rng: Random, follow: Callable[[Elector], None] | None
    ) -> None:
        self.state = state
        self._owner = owner
        self._rng = rng
        self._follow = follow
        self._told: Elector | None = None
        self._links: dict[MemberId, tuple[Elector, SimulatedConnection]] = {}
        self._timer = math.inf

    @property
    def now(self) -> float:
        return self._owner.process.clock.now

    @property
    def leads(self) -> bool:
        return self.state.part is Part.LEADS

    def moved(self) -> MovedFrame:
        return MovedFrame(posts=tuple(one.post for one in self.state.posts if one.member_id != self.state.me.member_id))

    def start(self) -> None:
        self.do(self.state.tick(self.now))

    def do(self, orders: list[SuccessionOrder]) -> None:
        self._keep_links()
        for order in orders:
            match order:
                case Remember(record=record):
                    self._owner.remember(record)
                case Tell(elector=elector, frame=frame):
                    link = self._links.get(elector.member_id)
                    if link is None or not link[1].send(frame):
                        self.state.disconnected(elector.member_id, self.now, died=False)
                case Lead(record=record):
                    self._owner.lead(record)
                case StepDown(why=why):
                    self._owner.step_down(why)
                case NotElected(why=why):
                    self._owner.say(f"nobody leads: {why}")
                case Announce(electorate=electorate):
                    self._owner.announce(electorate)
        self._set_timer()
        leader = self.state.leader
        if leader != self._told:
            self._told = leader
            if leader is not None and self._follow is not None:
                self._follow(leader)

    def _set_timer(self) -> None:
        due = self.state.wake_at
        if due < self._timer:
            self._timer = due
            self._owner.process.after(due - self.now, self._due, due)

    def _due(self, when: float) -> None:
        if when == self._timer:
            self._timer = math.inf
            self.do(self.state.tick(self.now))

    def leader_gone(self, term: int) -> None:
        self.state.leader_died(term, self.now)
        self.start()

    def asked(self, frame: Frame) -> Frame | None:
        answer, orders = self.state.asked(frame, self.now)
        self.do(orders)
        return answer

    def _keep_links(self) -> None:
        wanted = {elector.member_id: elector for elector in self.state.correspondents}
        for member_id in [one for one, link in self._links.items() if wanted.get(one) != link[0]]:
            self._links.pop(member_id)[1].close()
        for member_id, elector in wanted.items():
            if member_id not in self._links:
                self._links[member_id] = (elector, self._link(elector))

    def _link(self, elector: Elector) -> SimulatedConnection:
        from tests.simulator.connection import SimulatedConnection

        owner, me = self._owner, self.state.me
        hello = HelloFrame(member=Introduction(me.member_id, me.name))
        link = SimulatedConnection(
            owner.process,
            owner.network,
            lambda: [owner.network.listeners[elector.post]],
            owner.machine,
            self._rng,
            kind="keep",
            hello=lambda: hello,
            on_frame=lambda frame: self._answered(elector, frame),
            on_refused=lambda code, message: None,
            on_down=lambda why: self._ended(elector, died=False),
            on_gone=lambda: self._ended(elector, died=True),
        )
        link.connect()
        return link

    def _answered(self, elector: Elector, frame: Frame) -> None:
        if isinstance(frame, WelcomeFrame):
            self.state.connected(elector.member_id)
            self.start()
            return
        self.do(self.state.answered(elector.member_id, frame, self.now))
        if self.leads:
            self._owner.speak()

    def _ended(self, elector: Elector, *, died: bool) -> None:
        self.do(self.state.disconnected(elector.member_id, self.now, died=died))
        if self.leads:
            self._owner.speak()

    def break_off(self) -> None:
        """All its connections to others end, and what was said last is lost."""
        for _, link in list(self._links.values()):
            link.break_off()

    def close(self) -> None:
        for _, link in self._links.values():
            link.close()

    def vanish(self) -> None:
        for _, link in self._links.values():
            link.vanish()
