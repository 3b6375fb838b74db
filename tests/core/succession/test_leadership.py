"""When may a leader speak? Not before enough have kept what follows, and not after they may elect somebody else."""

from __future__ import annotations

from dataclasses import replace

from muster.core.succession.leadership import Known, Leadership
from muster.types.frames import KeptFrame, RunRecord
from muster.types.world import Elector, Electorate, MemberId, OutcomeState, RunOutcome, Settings

LEASE_S = 1.0
ME, B, C = (Elector(MemberId(name), name, ("127.0.0.1", 1)) for name in "abc")
RECORD = RunRecord(Settings(), 1, 0, electorate=Electorate(1, ME, ((ME, B, C),)), revision=1, promised=1)
ENDED = replace(RECORD, outcome=RunOutcome(OutcomeState.SUCCEEDED, "all ranks exited 0", ""))


def a_leader(now: float = 0.0) -> Leadership:
    return Leadership(ME, RECORD, LEASE_S, now)


def hears(leader: Leadership, revision: int, at: float, *electors: Elector) -> None:
    for elector in electors:
        leader.kept(elector.member_id, KeptFrame(term=1, stamp=at, revision=revision))


def test_it_speaks_while_enough_have_kept_what_follows_and_promise() -> None:
    leader = a_leader()
    assert not leader.may_speak(0.0)
    hears(leader, 1, 0.0, B)
    assert leader.may_speak(0.5)
    assert not leader.may_speak(LEASE_S), "they may have elected somebody else"
    hears(leader, 1, 1.0, C)
    assert leader.may_speak(1.5)
    leader.write(RECORD, 1.5, needed=True)
    assert not leader.may_speak(1.5), "nobody has kept that"


def test_an_end_that_enough_have_kept_is_told_for_ever_whatever_is_written_afterwards() -> None:
    """Electors leave with the outcome. Who comes later had nobody that would tell it."""
    leader = a_leader()
    hears(leader, 1, 0.0, B, C)
    ended = leader.write(ENDED, 0.1, needed=True)
    assert not leader.is_over and not leader.may_speak(0.1)
    hears(leader, ended.revision, 0.1, B)
    assert leader.is_over and leader.may_speak(0.2)
    leader.write(ended, 0.3, needed=True)
    leader.write(ended, 0.4, needed=True)
    assert leader.is_over and leader.may_speak(100.0)


def test_an_elector_that_dies_while_it_promises_has_promised_for_good() -> None:
    leader = a_leader()
    hears(leader, 1, 0.0, B)
    leader.died(B.member_id, 0.5)
    assert leader.may_speak(100.0)
    late = a_leader()
    hears(late, 1, 0.0, B)
    late.died(B.member_id, LEASE_S)
    assert not late.may_speak(LEASE_S), "it may have elected somebody before it died"


def widened(leader: Leadership, now: float, known: Known) -> list[str]:
    """What is ordered when B and C could be electors, too."""
    return [type(order).__name__ for order in leader.widen("here", [(B, "there"), (C, "beyond")], now, known)]


def an_only_one() -> Leadership:
    """It leads alone, and the others have learned all that it knows."""
    alone = replace(RECORD, electorate=Electorate(1, ME, ((ME,),)))
    leader = Leadership(ME, alone, LEASE_S, 0.0)
    hears(leader, 1, 0.0, B, C)
    assert widened(leader, 0.0, Known.BY_ALL) == ["Announce"], "all have to know before others could lead"
    return leader


def test_nobody_can_follow_before_those_who_are_here_know_of_it() -> None:
    """One who does not know keeps its ranks when it finds us dead, and a worker of 0.1 never knows."""
    leader = an_only_one()
    hears(leader, 1, 50.0, B, C)
    assert widened(leader, 50.1, Known.NOT_BY_ALL) == []
    assert widened(leader, 50.1, Known.BY_ALL) == ["Remember", "Announce"] and leader.groups == ((ME, B, C),)


def test_those_who_are_gone_are_waited_for_until_their_leases_are_over() -> None:
    leader = an_only_one()
    assert widened(leader, 0.5, Known.NOT_BY_LOST) == []
    hears(leader, 1, 2.0, B, C)
    assert widened(leader, 2.0, Known.NOT_BY_LOST) == ["Remember", "Announce"] and leader.groups == ((ME, B, C),)


def test_electors_that_need_their_leader_are_replaced_in_one_revision() -> None:
    # Between two revisions, electors would wait for the vote of a lost leader.
    pair = replace(RECORD, electorate=Electorate(1, ME, ((ME, B),)))
    leader = Leadership(ME, pair, LEASE_S, 0.0)
    hears(leader, 1, 0.0, B, C)
    assert widened(leader, 0.0, Known.BY_ALL) == ["Announce"]
    assert widened(leader, 0.1, Known.BY_ALL) == ["Remember", "Announce"]
    assert leader.groups == ((ME, B, C),)


def test_electors_that_can_elect_a_successor_agree_to_the_next_ones() -> None:
    # With one revision, the old group and the new group could elect two leaders.
    fourth = Elector(MemberId("d"), "d", ("127.0.0.1", 1))
    leader = a_leader()
    hears(leader, 1, 0.0, B, C)
    able = [(B, "there"), (C, "beyond"), (fourth, "far")]
    leader.widen("here", able, 0.0, Known.BY_ALL)
    hears(leader, 1, 0.1, fourth)
    leader.widen("here", able, 0.1, Known.BY_ALL)
    assert [len(group) for group in leader.groups] == [3, 4]
    hears(leader, leader.record.revision, 0.2, B, C)
    leader.widen("here", able, 0.2, Known.BY_ALL)
    assert [len(group) for group in leader.groups] == [4]


def test_electors_are_settled_when_enough_of_them_have_kept_the_record_that_names_them() -> None:
    leader, electors = an_only_one(), ((ME, B, C),)
    assert leader.is_settled(((ME,),)) and not leader.is_settled(electors), "they are announced only"
    assert widened(leader, 0.0, Known.BY_ALL) == ["Remember", "Announce"]
    assert not leader.is_settled(electors), "no elector has that record"
    hears(leader, leader.record.revision, 0.1, B)
    assert leader.is_settled(electors)
    leader.write(leader.record, 0.2, needed=True)
    assert leader.is_settled(electors), "a later record names the same electors"


def test_a_coordinator_that_was_succeeded_hears_who_leads_while_it_answers() -> None:
    """Without news it would send whoever asks it to those who led long ago. It has no voice: it sees nobody die."""
    old = Elector(MemberId("c0"), "the coordinator", ("127.0.0.1", 1), returns=True)
    leader = Leadership(ME, replace(RECORD, electorate=Electorate(2, ME, ((old, ME, B),))), LEASE_S, 0.0)
    able = [(B, "there"), (C, "beyond")]
    for elector, at in ((B, 19.9), (C, 19.9), (old, 15.0)):
        leader.widen("here", able, at, Known.BY_ALL)
        assert old in leader.others
        leader.kept(elector.member_id, KeptFrame(term=2, stamp=at, revision=leader.record.revision))
    leader.widen("here", able, 20.0, Known.BY_ALL)
    assert old not in leader.groups[-1] and old in leader.learning
    leader.widen("here", able, 34.0, Known.BY_ALL)
    assert old in leader.learning
    leader.widen("here", able, 36.0, Known.BY_ALL)
    assert old not in leader.learning, "it has gone"
