"""A participant's post in one run: carries what `core.succession` says to the other posts, and tells who leads.

Others come to it over connections that its coordinator's door has taken; it goes to others over connections of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from muster.background import Tasks
from muster.core.succession.electorate import everyone
from muster.core.succession.orders import Announce, Lead, NotElected, Remember, StepDown, SuccessionOrder, Tell
from muster.core.succession.state import Part, Succession
from muster.types.frames import Frame, HelloFrame, Introduction, MovedFrame, RunRecord, WelcomeFrame
from muster.types.world import Elector, Electorate, MemberId, RunId
from muster.world.connection import Connection, CoordinatorRefused
from muster.world.wire import Channel, WireError


@dataclass(frozen=True)
class Duties:
    """What the process of a post does about it."""

    lead: Callable[[RunRecord], None]  # go on with the run
    step_down: Callable[[str], None]
    announce: Callable[[Electorate], None]  # to all members
    remember: Callable[[RunRecord], None]
    speak: Callable[[], None]  # what was held back may be said now, perhaps
    say: Callable[[str], None]  # to a person
    follow: Callable[[Elector], None] = lambda leader: None
    electorate: Callable[[], Electorate] = Electorate


class Post:
    def __init__(self, run_id: RunId, token: str | None, state: Succession, duties: Duties) -> None:
        self._run_id = run_id
        self._token = token
        self._duties = duties
        self._loop = asyncio.get_running_loop()
        self._links: dict[MemberId, _Link] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._told: Elector | None = None
        self.founded = False  # the run was opened here
        self.state = state
        self.lifelines: dict[Channel, MemberId] = {}  # of members that are lost with whoever leads
        self.proved: set[MemberId] = set()  # nothing of these is left

    def tick(self) -> None:
        """Do what is due."""
        self.do(self.state.tick(self.now))

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def leads(self) -> bool:
        return self.state.part is Part.LEADS

    def may_speak(self) -> bool:
        return self.state.may_speak(self.now)

    def moved(self) -> MovedFrame:
        """For those who ask here and should ask elsewhere."""
        told = self._duties.electorate()  # what its member knows, if it is no elector
        known = self.state.posts or ([told.leader] if told.leader is not None else []) + list(everyone(told.groups))
        me = self.state.me.member_id
        return MovedFrame(posts=tuple(dict.fromkeys(one.post for one in known if one.member_id != me)))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for link in self._links.values():
            link.close()

    def leader_gone(self, term: int) -> None:
        self.state.leader_died(term, self.now)
        self.tick()

    # Orders

    def do(self, orders: list[SuccessionOrder]) -> bool:
        """False if something could not be written down: then nothing that follows from it is done or said."""
        self._keep_links()
        kept = True
        for order in orders:
            match order:
                case Remember(record=record):
                    kept = kept and self._remember(record)
                case Tell() | Lead() | Announce() if not kept:
                    continue
                case Tell(elector=elector, frame=frame):
                    self._tell(elector, frame)
                case Lead(record=record):
                    self._duties.say(f"leading run {self._run_id} from here, in term {record.electorate.term}")
                    self._duties.lead(record)
                case StepDown(why=why):
                    self._duties.say(f"no longer leading run {self._run_id}: {why}")
                    self._duties.step_down(why)
                case NotElected(why=why):
                    self._duties.say(f"nobody leads run {self._run_id}: {why}")
                case Announce(electorate=electorate):
                    self._duties.announce(electorate)
        if not kept and self.leads:
            self.do(self.state.give_way("it cannot be written down", self.now))
        self._set_timer()
        leader = self.state.leader
        if leader != self._told:
            self._told = leader  # None, too: who leads again has to be told again
            if leader is not None:
                self._duties.follow(leader)
        return kept

    def _remember(self, record: RunRecord) -> bool:
        try:
            self._duties.remember(record)
        except OSError as error:
            self._duties.say(f"cannot keep run {self._run_id}: {error}")
            return False
        return True

    def _tell(self, elector: Elector, frame: Frame) -> None:
        try:
            if (link := self._links.get(elector.member_id)) is not None and link.connection.send(frame):
                return
        except WireError as error:  # it is too long
            self._duties.say(f"run {self._run_id}: {elector.name} cannot be told: {error}")
        self.state.disconnected(elector.member_id, self.now, died=False)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.state.wake_at
        self._timer = None if due == float("inf") else self._loop.call_at(max(due, self.now), self.tick)

    # Others come

    def hold(self, channel: Channel, member_id: MemberId) -> None:
        self.lifelines[channel] = member_id

    def let_go(self, channel: Channel) -> None:
        if (member_id := self.lifelines.pop(channel, None)) is not None and channel.ended_cleanly:
            self.proved.add(member_id)

    def hear(self, channel: Channel, frame: Frame) -> None:
        answer, orders = self.state.asked(frame, self.now)
        if self.do(orders) and answer is not None:
            channel.send(answer)

    # We go to others

    def _keep_links(self) -> None:
        """One to each with whom there is something to say."""
        wanted = {elector.member_id: elector for elector in self.state.correspondents}
        for member_id in [one for one, link in self._links.items() if wanted.get(one) != link.elector]:
            self._links.pop(member_id).close()
        for member_id, elector in wanted.items():
            if member_id not in self._links:
                self._links[member_id] = _Link(self, elector, self._run_id, self._token)

    def answered(self, elector: Elector, frame: Frame) -> None:
        if isinstance(frame, WelcomeFrame):
            self.state.connected(elector.member_id)
            self.tick()
            return
        self.do(self.state.answered(elector.member_id, frame, self.now))
        if self.leads:
            self._duties.speak()

    def ended(self, elector: Elector, *, died: bool) -> None:
        self.do(self.state.disconnected(elector.member_id, self.now, died=died))
        if self.leads:
            self._duties.speak()


class _Link:
    """A connection to the post of another, for as long as there is something to say."""

    def __init__(self, post: Post, elector: Elector, run_id: RunId, token: str | None) -> None:
        self.elector = elector
        me = post.state.me
        self.connection = Connection(
            lambda: [elector.post],
            run_id,
            "keep",
            token=token,
            hello=lambda local: HelloFrame(elector=elector.member_id, member=Introduction(me.member_id, me.name)),
            on_frame=lambda frame: post.answered(elector, frame),
            on_down=lambda why: post.ended(elector, died=False),
            on_gone=lambda: post.ended(elector, died=True),
        )
        self._tasks = Tasks()
        self._tasks.start(self._run())

    async def _run(self) -> None:
        with contextlib.suppress(CoordinatorRefused):  # somebody else is there by now: it is not in touch
            await self.connection.run()

    def close(self) -> None:
        self._tasks.cancel()
