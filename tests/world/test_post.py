"""An elector has one voice: what it promised outlives its process if that returns, and nobody else speaks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

from muster.core.succession.state import Succession
from muster.core.world import transitions
from muster.types.frames import (
    HelloFrame,
    Introduction,
    KeepFrame,
    KeptFrame,
    Presented,
    RunRecord,
    VoiceFrame,
    VoteFrame,
)
from muster.types.world import Cause, Elector, Electorate, MemberId, Recall, Round, RunId, Settings
from muster.world.post import Post
from muster.world.posts import FORMING_S, PUT_OFF_S, put_off_s
from muster.world.protocol import RunProtocol
from muster.world.service import Coordinator
from muster.world.standby import place_beside
from muster.world.wire import Channel
from tests.world.test_impostor import TOKEN, until

RUN = RunId("run")
A, B, C = (Elector(MemberId(name), name, ("127.0.0.1", 1)) for name in "abc")


def record_of(term: int, leader: Elector, *group: Elector, revision: int = 1) -> RunRecord:
    return RunRecord(Settings(), 1, 0, electorate=Electorate(term, leader, (group,)), revision=revision, promised=term)


def voice_of(one: Succession, frame: VoteFrame, now: float) -> VoiceFrame:
    answer, _ = one.asked(frame, now)
    assert isinstance(answer, VoiceFrame)
    return answer


def test_a_follower_that_returns_keeps_its_promise() -> None:
    """The one that it follows counts on it for a lease, whatever became of the process meanwhile."""
    kept = record_of(2, B, A, B, C)
    back = Succession(A, 1.0, 100.0, kept)
    vote = VoteFrame(term=3, candidate=C, last=(2, 1))
    assert not voice_of(back, vote, 100.1).given
    assert voice_of(back, vote, 101.1).given


def test_a_member_leaves_the_port_of_its_own_machines_coordinator_alone() -> None:
    """It may listen there before that one is back; elsewhere the run is looked for at the same port."""
    assert place_beside(("10.0.0.1", 29400), "10.0.0.1") == ("10.0.0.1", 0)
    assert place_beside(("10.0.0.1", 29400), "10.0.0.2") == ("10.0.0.2", 29400)


def test_the_end_of_an_earlier_process_is_not_the_leaders() -> None:
    """It was started again and elected again; that its old connection has ended is heard late."""
    one = Succession(A, 1.0, 0.0)
    one.asked(KeepFrame(term=3, stamp=0.0, leader=B, record=record_of(3, B, A, B, C)), 10.0)
    vote = VoteFrame(term=4, candidate=C, last=(3, 1))
    one.leader_died(1, 10.1)
    assert not voice_of(one, vote, 10.2).given
    one.leader_died(3, 10.3)
    assert voice_of(one, vote, 10.4).given


def test_one_voice_is_not_given_by_another_process_that_has_the_place() -> None:
    """It promised nothing and kept nothing: with it, one elector of three would be two."""

    async def scenario(there: Coordinator, here: Coordinator) -> None:
        there.posts.follow(RUN, Elector(MemberId("new"), "b", there.posts.address), 1.0, lambda leader: None)
        post, said = returned(here, there.posts.address)
        await until(lambda: bool(said), "it has stood in vain")
        assert "nobody leads" in said[0] and not post.leads

    asyncio.run(with_two(scenario))


def test_electors_whose_connections_are_reset_are_not_taken_for_gone() -> None:
    """One that returns asks again, and hears who leads."""

    async def scenario(there: Coordinator, here: Coordinator) -> None:
        place = there.posts.address
        follower = there.posts.follow(RUN, replace(B, post=place), 60.0, lambda leader: None)
        follower.state.asked(KeepFrame(term=1, stamp=0.0, leader=C, record=record_of(1, C, A, B, C)), follower.now)
        post, said = returned(here, place, B)
        await until(lambda: len(there.posts.visited) == 1, "it asks")
        await asyncio.sleep(0.2)
        for channel in list(there.posts.visited):
            channel.abort("a reset")
        await until(lambda: post.state.leader == C, "it knows who leads")
        assert not post.leads and not said

    asyncio.run(with_two(scenario))


def test_one_that_returns_does_not_lead_because_nobody_listens_any_more() -> None:
    """Others may have been elected since, by electors that it does not know."""

    async def scenario(there: Coordinator, here: Coordinator) -> None:
        post, said = returned(here, ("127.0.0.1", 1))
        await until(lambda: bool(said), "it has stood in vain")
        assert "nobody leads" in said[0] and "1 of 3 electors" in said[0] and not post.leads

    asyncio.run(with_two(scenario))


def returned(here: Coordinator, place: tuple[str, int], *others: Elector) -> tuple[Post, list[str]]:
    """With a record of others who are to be there, and what it says to people."""
    said: list[str] = []
    here.posts.say = said.append
    me = Elector(MemberId("me"), "me", here.posts.address)
    here.posts.return_to(RUN, record_of(1, me, *(replace(one, post=place) for one in others or (B, C)), me))
    post = here.posts.get(RUN)
    assert post is not None
    return post, said


async def with_two(scenario: Callable[[Coordinator, Coordinator], Awaitable[None]]) -> None:
    there, here = Coordinator(token=TOKEN, opens_runs=False), Coordinator(token=TOKEN)
    for one in (there, here):
        await one.start("127.0.0.1", 0)
    try:
        await scenario(there, here)
    finally:
        await here.stop()
        await there.stop()


def test_one_who_leads_for_a_second_time_is_followed_again() -> None:
    """Its own agent above all: it looks for its coordinator everywhere else."""

    async def scenario(there: Coordinator, here: Coordinator) -> None:
        followed: list[Elector] = []
        post = there.posts.follow(RUN, replace(A, post=there.posts.address), 1.0, followed.append)
        vote = VoteFrame(term=2, candidate=B, last=(1, 1))
        for frame, after_s in ((keep_of(1), 0.0), (vote, 2.0), (keep_of(2), 2.0)):
            _, orders = post.state.asked(frame, post.now + after_s)
            post.do(orders)
        assert followed == [B, B]

    asyncio.run(with_two(scenario))


def keep_of(term: int) -> KeepFrame:
    return KeepFrame(term=term, stamp=0.0, leader=B, record=record_of(term, B, A, B, C))


def a_hello_of(term: int, leader: Elector, *group: Elector) -> HelloFrame:
    return HelloFrame(run_id=RUN, kind="agent", present=Presented(electorate=Electorate(term, leader, (group,))))


def founded(coordinator: Coordinator) -> Post:
    """It has opened the run, and leads it alone."""
    protocol = RunProtocol(RUN)
    protocol.at.electorate = coordinator.posts.first(1)
    coordinator.posts.found(protocol, replace(record_of(1, A, A), electorate=protocol.at.electorate))
    post = coordinator.posts.get(RUN)
    assert post is not None and post.leads
    return post


def test_one_that_lost_its_record_sends_members_to_whoever_leads_them() -> None:
    """It had opened the run anew; taking them in, it would have begun a term beside their own leader's."""

    async def scenario(there: Coordinator, here: Coordinator) -> None:
        post = founded(here)
        moved = here.posts.led_elsewhere(RUN, a_hello_of(7, B, A, B, C))
        assert moved is not None and moved.posts == (A.post, B.post, C.post)
        assert here.posts.led_elsewhere(RUN, a_hello_of(1, post.state.me, post.state.me, B, C)) is None
        assert here.posts.led_elsewhere(RUN, HelloFrame(run_id=RUN)) is None, "it is new"
        assert post.leads

    asyncio.run(with_two(scenario))


def test_one_that_returns_at_another_address_is_the_same() -> None:
    """It had a voice by the name of its old address: as somebody else it could never lead again."""

    async def scenario(there: Coordinator, here: Coordinator) -> None:
        me = replace(A, post=("127.0.0.1", 1), returns=True)
        here.posts.return_to(RUN, record_of(1, me, me))
        post = here.posts.get(RUN)
        assert post is not None and post.state.me == replace(me, post=here.posts.address)
        assert post.leads

    asyncio.run(with_two(scenario))


def test_electors_that_are_only_announced_are_not_shown_as_settled() -> None:
    # Operators and tests end the coordinator when they read that its electors are settled.

    async def scenario(there: Coordinator, here: Coordinator) -> None:
        assert here.posts.is_settled(RUN, Electorate()), "a control plane leads the run"
        post = founded(here)
        assert post.state.leadership is not None
        alone = post.state.leadership.record.electorate
        assert here.posts.is_settled(RUN, alone)
        announced = replace(alone, groups=((post.state.me, B, C),))
        assert not here.posts.is_settled(RUN, announced)
        protocol = RunProtocol(RUN, settings=Settings())
        protocol.at.is_settled = lambda electorate: here.posts.is_settled(RUN, electorate)
        for electorate, settled in ((announced, False), (alone, True)):
            protocol.at.electorate = electorate
            assert protocol.orders.view(0.0)["electors_settled"] is settled

    asyncio.run(with_two(scenario))


def test_a_member_without_a_voice_says_who_leads() -> None:
    async def scenario(there: Coordinator, here: Coordinator) -> None:
        known = Electorate(3, B, ((A, B, replace(C, post=("127.0.0.1", 2))),))
        me = Elector(MemberId("d"), "d", there.posts.address)
        post = there.posts.follow(RUN, me, 1.0, lambda leader: None, lambda: known)
        assert post.moved().posts == (B.post, ("127.0.0.1", 2))

    asyncio.run(with_two(scenario))


def test_what_cannot_be_written_down_is_not_promised() -> None:
    async def scenario(there: Coordinator, here: Coordinator) -> None:
        answers: list[object] = []
        post = there.posts.follow(RUN, replace(A, post=there.posts.address), 1.0, lambda leader: None)

        class Asking:
            def send(self, frame: object) -> None:
                answers.append(frame)

        def is_full(run_id: RunId, record: RunRecord) -> None:
            raise OSError("no space left on the device")

        remember, there.posts.remember = there.posts.remember, is_full
        said: list[str] = []
        there.posts.say = said.append
        post.hear(cast(Channel, Asking()), keep_of(1))
        assert not answers and "no space left" in said[0]
        there.posts.remember = remember
        post.hear(cast(Channel, Asking()), keep_of(2))
        assert [type(answer) for answer in answers] == [KeptFrame]

    asyncio.run(with_two(scenario))


def test_no_other_electorate_while_the_first_round_forms() -> None:
    """Agents that all start at once are too busy to answer, and the coordinator gave way to one of them."""
    run = transitions.open_run(Settings())
    assert run.round is None and put_off_s(run) == FORMING_S
    trains = replace(run, round=Round(0, (), "127.0.0.1", 1))
    assert put_off_s(trains) == 0.0
    recalled = replace(
        trains, round=replace(Round(0, (), "127.0.0.1", 1), recall=Recall(Cause.LOSS, "lost a", 0.0, 0.0))
    )
    assert put_off_s(recalled) == PUT_OFF_S


def test_a_worker_of_0_1_is_not_let_in_where_others_may_lead() -> None:
    """It would keep its ranks when it finds the coordinator dead, whoever has gone on by then."""

    class Refused:
        peer, told = "192.0.2.1:1", ""

        def send_raw(self, data: bytes) -> None: ...
        def refuse(self, code: str, message: str) -> None:
            self.told = f"{code}: {message}"

    old = HelloFrame(run_id=RUN, kind="agent", member=Introduction(MemberId("m"), "m"), settings={"min": 1, "max": 1})
    for group, refused in (((A,), False), ((A, B, C), True)):
        protocol, peer = RunProtocol(RUN), Refused()
        protocol.at.electorate = Electorate(1, A, (group,))
        protocol.greet(peer, old, 0.0)
        assert ("update it" in peer.told) is refused, peer.told
        assert (protocol.run is None) is refused
