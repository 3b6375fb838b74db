"""Which of a coordinator's runs does it lead, and who else could? One post for each run that has no director."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace

from muster.core.succession import electorate
from muster.core.succession.state import Succession
from muster.core.world.run import Run
from muster.types.frames import Frame, HelloFrame, MovedFrame, RunRecord, WelcomeFrame
from muster.types.world import Elector, Electorate, Member, MemberId, Path, RunId
from muster.world import wire
from muster.world.joining import is_direct
from muster.world.post import Duties, Post
from muster.world.protocol import RunProtocol
from muster.world.wire import Channel

log = logging.getLogger("muster.coordinator")

PUT_OFF_S, FORMING_S = 0.5, 30.0


class Posts:
    def __init__(
        self,
        token: str | None,
        lead: Callable[[RunId, RunRecord], None],
        step_down: Callable[[RunId, str, MovedFrame], None],
        beside: MemberId | None,
    ) -> None:
        self._token = token
        self._lead = lead
        self._step_down = step_down
        self.announce: Callable[[RunId, Electorate], None] = lambda run_id, electorate: None
        self.remember: Callable[[RunId, RunRecord], None] = lambda run_id, record: None
        self.speak: Callable[[RunId], None] = lambda run_id: None
        self.say: Callable[[str], None] = log.warning
        self._beside = beside  # a member that is lost with this coordinator
        self._posts: dict[RunId, Post] = {}
        self.visited: dict[Channel, Post] = {}  # by those who lead, or want to, and by lifelines
        self._put_off: dict[RunId, asyncio.TimerHandle] = {}  # other electorates, while ranks stand still
        self.address: Path = ("127.0.0.1", 0)

    def get(self, run_id: RunId) -> Post | None:
        return self._posts.get(run_id)

    @property
    def follows(self) -> bool:
        """Whether somebody else may lead a run of ours."""
        return any(not post.leads for post in self._posts.values())

    def close(self) -> None:
        for timer in self._put_off.values():
            timer.cancel()
        for post in self._posts.values():
            post.close()

    def forget(self, run_id: RunId) -> None:
        self._let_come(run_id)
        if (post := self._posts.pop(run_id, None)) is not None:
            post.close()

    # Who comes to a post

    def come(self, channel: Channel, hello: HelloFrame) -> None:
        """One who leads, or wants to; or the lifeline of a member that is lost with whoever leads."""
        if (post := self._posts.get(RunId(hello.run_id))) is None:
            raise wire.no_run(hello.run_id)
        if hello.kind == "keep" and hello.elector != post.state.me.member_id:
            raise wire.WireError("not_found", f"elector {hello.elector} of run {hello.run_id!r} is not here")
        self.visited[channel] = post
        if hello.kind == "lifeline" and hello.member is not None and is_direct(hello, channel):
            post.hold(channel, hello.member.member_id)
        channel.send(WelcomeFrame())

    def hear(self, channel: Channel, frame: Frame) -> bool:
        """Whether it was meant for a post."""
        if (post := self.visited.get(channel)) is not None:
            post.hear(channel, frame)
        return post is not None

    def ended(self, channel: Channel) -> None:
        if (post := self.visited.pop(channel, None)) is not None:
            post.let_go(channel)

    def hand_over(self, protocol: RunProtocol) -> list[Channel]:
        """What a post knows of members is the run's from now on, for it is led here. Returns their lifelines."""
        post = self._posts[protocol.run_id]
        protocol.take_over(post.lifelines.items(), post.proved, post.now)
        channels = list(post.lifelines)
        post.lifelines.clear()
        for channel in channels:
            del self.visited[channel]
        return channels

    # Taking part

    def first(self, term: int) -> Electorate:
        """For a run that nobody leads yet."""
        me = self._me()
        return Electorate(term, me, ((me,),))

    def following(self, run_id: RunId, term: int) -> Electorate:
        """Return the first electorate of the next run under a run id, after a run that was led in that term."""
        if (post := self._posts.get(run_id)) is not None:
            term = max(term, post.state.ballot.promised)
        return self.first(term + 1)

    def take_back(self, run_id: RunId) -> RunRecord | None:
        """Take over an ended run without a leader, and return its record; return None if there is no such run.

        Electors leave with their run, so a restarted coordinator would wait for their votes forever.
        """
        post = self._posts.get(run_id)
        if post is None or post.state.ballot.record is None or not post.state.is_left_over(post.now):
            return None
        record, term = post.state.ballot.record, post.state.ballot.promised + 1
        self.forget(run_id)
        post = self._take(run_id, Succession(self._me(), record.settings.lease_s, post.now))
        record = post.state.lead_anew(record, post.now, term)
        self.remember(run_id, record)
        post.tick()
        return record

    def _me(self) -> Elector:
        shown = wire.show_address(*self.address)
        me = MemberId(f"c{secrets.token_hex(6)}")
        return Elector(me, f"the coordinator on {shown}", self.address, returns=True)

    def found(self, protocol: RunProtocol, record: RunRecord) -> RunRecord:
        """Lead a run that is led by nobody."""
        at = protocol.at
        assert at.electorate.leader is not None
        state = Succession(at.electorate.leader, record.settings.lease_s, asyncio.get_running_loop().time())
        post = self._take(at.run_id, state)
        post.founded = True
        record = state.lead_anew(record, post.now, at.electorate.term)
        post.tick()
        return record

    def return_to(self, run_id: RunId, record: RunRecord) -> None:
        """To a run that an earlier process here led, or followed."""
        known = electorate.everyone(record.electorate.groups)
        mine = [one for one in known if one.returns] or [one for one in known if one.post == self.address]
        me = replace(mine[0], post=self.address) if mine else self._me()
        if not known:
            record = replace(record, electorate=Electorate(0, me, ((me,),)))  # kept by 0.1
        state = Succession(me, record.settings.lease_s, asyncio.get_running_loop().time(), record)
        self._take(run_id, state).tick()

    def follow(
        self,
        run_id: RunId,
        me: Elector,
        lease_s: float,
        followed: Callable[[Elector], None],
        known: Callable[[], Electorate] = Electorate,
    ) -> Post:
        """`known` tells what its member was told of who leads."""
        state = Succession(me, lease_s, asyncio.get_running_loop().time())
        return self._take(run_id, state, followed, known)

    def _take(
        self,
        run_id: RunId,
        state: Succession,
        followed: Callable[[Elector], None] = lambda leader: None,
        known: Callable[[], Electorate] = Electorate,
    ) -> Post:
        post = Post(
            run_id,
            self._token,
            state,
            Duties(
                lead=lambda record: self._lead(run_id, record),
                step_down=lambda why: self._step_down(run_id, why, post.moved()),
                announce=lambda electorate: self.announce(run_id, electorate),
                remember=lambda record: self.remember(run_id, record),
                speak=lambda: self.speak(run_id),
                say=lambda text: self.say(text),
                follow=followed,
                electorate=known,
            ),
        )
        self._posts[run_id] = post
        return post

    # While it goes on

    def widen(self, protocol: RunProtocol) -> None:
        post, run = self._posts.get(protocol.run_id), protocol.run
        if post is None or not post.leads or run is None or run.outcome is not None or run.recovery_until is not None:
            return  # who is not back yet is not lost yet
        if self._is_put_off(protocol.run_id, run, post.now):
            return
        mine = {self._beside, post.state.me.member_id}
        able = [
            (Elector(one.member_id, one.name, one.post), _machine(one.host, one.addr))
            for one in sorted(run.members.values(), key=_joined)
            if one.post is not None and one.member_id not in mine
        ]
        here = _machine(socket.gethostname(), self.address[0])
        post.do(post.state.widen(here, able, post.now, protocol.at.known))

    def _is_put_off(self, run_id: RunId, run: Run, now: float) -> bool:
        """It costs every member a frame and an answer, and each record a majority: the next round goes first."""
        for_s = put_off_s(run)
        if not for_s:
            self._let_come(run_id)
            return False
        timer = self._put_off.get(run_id)
        if timer is None or timer.when() > now + for_s:
            self._let_come(run_id)
            timer = asyncio.get_running_loop().call_later(for_s, lambda: self.speak(run_id))
            self._put_off[run_id] = timer
        return now < timer.when()

    def _let_come(self, run_id: RunId) -> None:
        if (timer := self._put_off.pop(run_id, None)) is not None:
            timer.cancel()

    def moved(self, run_id: RunId, hello: HelloFrame) -> MovedFrame | None:
        """What somebody is told who asks here for a run that is not led here; None if it may be from now on."""
        if (post := self._posts.get(run_id)) is not None:
            return post.moved()
        shown = hello.present.electorate
        if hello.present.outcome is None and electorate.can_succeed(shown):  # an end that was told stays true
            return MovedFrame(posts=tuple(one.post for one in electorate.everyone(shown.groups)))
        return None

    def is_settled(self, run_id: RunId, announced: Electorate) -> bool:
        """Return True if enough of the announced electors have kept the record that names them.

        A run under a control plane has no electors to wait for.
        """
        post = self._posts.get(run_id)
        if post is None:
            return not announced.groups
        return post.state.leadership is not None and post.state.leadership.is_settled(announced.groups)

    def led_elsewhere(self, run_id: RunId, hello: HelloFrame) -> MovedFrame | None:
        """For a member of a run that others lead: it was opened here anew, by somebody who knew nothing of that."""
        post, shown = self._posts.get(run_id), hello.present.electorate
        if post is None or not post.founded or hello.present.outcome is not None or not electorate.can_succeed(shown):
            return None
        known = electorate.everyone(shown.groups)
        if post.state.me.member_id in {one.member_id for one in known}:
            return None
        return MovedFrame(posts=tuple(one.post for one in known))

    def outranked(self, run_id: RunId, hello: HelloFrame) -> None:
        """A member that was led in a later term than ours."""
        if (post := self._posts.get(run_id)) is not None:
            post.do(post.state.outranked(hello.present.electorate.term, post.now))


def put_off_s(run: Run) -> float:
    """How long another electorate waits for the round, at most. All who start at once are too busy to answer."""
    if run.round is None:
        return FORMING_S
    return PUT_OFF_S if run.stands_still else 0.0


def _machine(host: str, addr: str) -> str:
    return f"{host} {addr}"


def _joined(member: Member) -> tuple[float, str]:
    return member.joined_at, member.member_id
