"""May ranks start, as far as their network is concerned? Tables for the words, properties for the states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from muster.core.world import gates, transitions
from muster.core.world.decisions import carry_out, decide
from muster.core.world.gates import healed, judge
from muster.core.world.run import CallBack, Heal, Release, Run, Stay, TurnGate
from muster.types import codec
from muster.types.world import Gate, GateState, Member, MemberId, Pair, Reach
from tests.core.builders import NOW, a_member, a_run, all_gone, an_id, members, recalled, with_members, without

TIMEOUT_S = 60.0


def reach(text: str, rtt: float = 0.001) -> dict[MemberId, Reach]:
    """`a>b b>a a!c`: a reaches b, b reaches a, a was refused by c."""
    found: dict[MemberId, tuple[dict[MemberId, float], dict[MemberId, str]]] = {}
    for way in text.split():
        source, target = way.replace("!", ">").split(">")
        is_open, shut = found.setdefault(an_id(source), ({}, {}))
        if "!" in way:
            shut[an_id(target)] = "refused"
        else:
            is_open[an_id(target)] = rtt
    return {member_id: Reach(*both) for member_id, both in found.items()}


def all_ways(names: str) -> str:
    return " ".join(f"{a}>{b}" for a in names.split() for b in names.split() if a != b)


def gated(active: str = "", waiting: str = "", ways: str = "", **settings: Any) -> Run:
    return replace(a_run(active, waiting, gate_timeout_s=TIMEOUT_S, **settings), reach=reach(ways))


def settled(run: Run, now: float = NOW) -> tuple[Run, object, str, float]:
    """The run when there is only waiting left, or a round was released or called back; the last decision."""
    while True:
        decision = decide(run, now)
        run = carry_out(run, decision.action, now)
        if isinstance(decision.action, Stay | Release | CallBack):
            return run, decision.action, decision.reason, decision.wake_at


# The words


def test_the_reason_names_each_pair_once_with_its_direction_and_cause() -> None:
    ways = "a>b b>a a>c a!d d!a b>c c>b c!a d>b d>c b>d c>d"
    verdict = judge(members("a b c d"), reach(ways), None, TIMEOUT_S, NOW)
    assert verdict.gate.pairs == (Pair("a", "d", "refused", both=True), Pair("c", "a", "refused"))
    expected = "the mesh converges: a ↔ d (refused), c → a (refused); ranks start anyway after 60 s"
    assert verdict.reason == expected
    assert verdict.look_at == NOW + TIMEOUT_S


def test_who_has_not_said_anything_yet_is_not_called_unreachable() -> None:
    verdict = judge(members("a b"), reach("a>b"), None, TIMEOUT_S, NOW)
    assert verdict.gate.named == "b → a (no answer yet)"


def test_a_long_list_of_pairs_says_that_there_are_others() -> None:
    gate = judge(members(" ".join(f"w{i}" for i in range(30))), {}, None, TIMEOUT_S, NOW).gate
    assert len(gate.pairs) == gates.MOST_NAMED
    assert gate.named.endswith("w0 ↔ w16 (no answer yet) and others")


def test_a_gate_travels_in_the_record() -> None:
    gate = judge(members("a b c"), reach("a>b a!c"), None, 0.0, NOW).gate
    assert gate.state is GateState.DEGRADED
    assert codec.from_wire(Gate, codec.to_wire(gate, names=codec.plain), names=codec.plain) == gate


# The states

names = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=7, unique=True)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Member], dict[MemberId, Reach]]:
    people = [a_member(name) for name in draw(names)]
    everyone = [an_id(name) for name in "abcdefgh"]
    ways = draw(st.dictionaries(st.sampled_from(everyone), st.frozensets(st.sampled_from(everyone)), max_size=8))
    if draw(st.booleans()):  # random ways alone would hardly ever join everyone
        for one in people:
            ways[one.member_id] = ways.get(one.member_id, frozenset()) | {other.member_id for other in people}
    return people, {source: Reach(open=dict.fromkeys(to, 0.001)) for source, to in ways.items()}


@given(situations(), st.floats(0, 100), st.floats(0.1, 100))
def test_a_gate_is_ready_exactly_when_every_pair_is_open_both_ways(
    situation: tuple[list[Member], dict[MemberId, Reach]], waited: float, timeout: float
) -> None:
    people, ways = situation
    first = judge(people, ways, None, timeout, NOW).gate
    gate = judge(people, ways, first, timeout, NOW + waited).gate
    shut = [
        (one.name, other.name)
        for one in people
        for other in people
        if one is not other and other.member_id not in ways.get(one.member_id, Reach()).open
    ]
    assert (gate.state is GateState.READY) == (not shut)
    if shut:
        assert gate.state is (GateState.DEGRADED if NOW + waited >= NOW + timeout else GateState.CONVERGING)
        told = {(pair.source, pair.target) for pair in gate.pairs}
        told |= {(pair.target, pair.source) for pair in gate.pairs if pair.both}
        assert told == set(shut) if not gate.more else told < set(shut) and len(gate.pairs) == gates.MOST_NAMED


@given(situations(), st.lists(st.floats(0.001, 30), max_size=8))
def test_a_gate_opens_at_its_timeout_whatever_is_reported_meanwhile(
    situation: tuple[list[Member], dict[MemberId, Reach]], steps: list[float]
) -> None:
    people, ways = situation
    now, gate = NOW, judge(people, {}, None, TIMEOUT_S, NOW).gate
    for step in steps:
        now += step
        ways = {source: found for source, found in ways.items() if source != people[0].member_id}
        gate = judge(people, ways, gate, TIMEOUT_S, now).gate
        assert gate.is_open == (now >= NOW + TIMEOUT_S or not gate.pairs)
        assert judge(people, ways, gate, TIMEOUT_S, now).gate == gate, "asked twice, it answers twice the same"


@given(situations())
def test_only_a_degraded_gate_heals_and_only_when_all_is_open(
    situation: tuple[list[Member], dict[MemberId, Reach]],
) -> None:
    people, ways = situation
    for before in (None, judge(people, {}, None, 0.0, NOW).gate):
        gate = judge(people, ways, before, 0.0, NOW).gate
        better = healed(gate, people, ways)
        assert better is None, "what is as good as it can be is no news"
    degraded = Gate(GateState.DEGRADED, len(people), NOW)
    better = healed(degraded, people, ways)
    assert (better is not None) == (judge(people, ways, None, 0.0, NOW).gate.state is GateState.READY)
    assert better is None or better.state is GateState.READY


def test_patience_does_not_begin_anew_when_members_change() -> None:
    gate = judge(members("a b"), {}, None, TIMEOUT_S, NOW).gate
    later = judge(members("a b c"), {}, gate, TIMEOUT_S, NOW + 59.0)
    assert later.look_at == NOW + TIMEOUT_S
    assert judge(members("a b c"), {}, later.gate, TIMEOUT_S, NOW + 60.0).gate.state is GateState.DEGRADED


# In a run


def test_a_run_without_a_gate_never_waits_for_one() -> None:
    run, action, _, _ = settled(a_run(waiting="a b", target=2))
    assert isinstance(action, Release) and run.gate is None


def test_ranks_are_held_until_everyone_of_the_coming_round_is_reached() -> None:
    run, action, reason, wake_at = settled(gated(waiting="a b", ways="a>b", target=2))
    assert isinstance(action, Stay) and "b → a (no answer yet)" in reason
    assert wake_at == NOW + 2.0, "a lease runs out before the gate's patience does"
    run, action, _, _ = settled(replace(run, reach=reach("a>b b>a")), NOW + 1.0)
    assert isinstance(action, Release)
    assert run.gate is not None and run.gate.state is GateState.READY and run.coming is None


def test_after_the_timeout_ranks_start_and_the_pairs_are_named() -> None:
    start = gated(waiting="a b", ways="a>b b!a", target=2, lease_s=1000.0)
    start = with_members(start, *(replace(one, lease_until=NOW + 500.0) for one in start.members.values()))
    run, action, _, wake_at = settled(start)
    assert isinstance(action, Stay) and wake_at == NOW + TIMEOUT_S
    run, action, _, _ = settled(run, NOW + TIMEOUT_S)
    assert isinstance(action, Release)
    assert run.gate is not None and run.gate.state is GateState.DEGRADED and run.gate.named == "b → a (refused)"


def test_spares_do_not_have_to_be_reached_before_the_round_forms() -> None:
    _, action, _, _ = settled(gated(waiting="a b c", ways="a>b b>a", target=2, spares=1))
    assert isinstance(action, Release)


def test_after_a_loss_known_pairs_form_the_next_round_at_once() -> None:
    run = gated("a b", "c", all_ways("a b c"), target=2, spares=1)
    run = all_gone(recalled(without(run, "b")))
    run, action, _, _ = settled(run)
    assert isinstance(action, Release) and [seat.name for seat in action.round.seats] == ["a", "c"]


def test_a_replacement_that_is_not_reached_yet_holds_only_the_coming_round() -> None:
    run = all_gone(recalled(without(gated("a b", "c", "a>b b>a", target=2, spares=1), "b")))
    _, action, reason, _ = settled(run)
    assert isinstance(action, Stay) and "a ↔ c (no answer yet)" in reason


def test_a_newcomer_that_is_not_reached_does_not_disturb_the_world() -> None:
    run = gated("a b", "c", "a>b b>a a>c c>a b>c", target=3)
    run, action, reason, _ = settled(run)
    assert isinstance(action, Stay) and "c → b (no answer yet)" in reason
    assert run.running is not None and run.coming is not None
    _, action, _, _ = settled(replace(run, reach=reach(all_ways("a b c"))), NOW + 1.0)
    assert isinstance(action, CallBack)


def test_a_newcomer_that_leaves_takes_its_gate_with_it() -> None:
    run, _, _, _ = settled(gated("a b", "c", "a>b b>a", target=3))
    assert run.coming is not None
    run, action, _, _ = settled(without(run, "c"))
    assert isinstance(action, Stay) and run.coming is None and run.running is not None


def test_too_few_to_train_wait_for_nobody() -> None:
    run, _, _, _ = settled(gated(waiting="a b", min=2, target=2))
    assert run.coming is not None
    run, action, _, _ = settled(without(run, "b"))
    assert isinstance(action, Stay) and run.coming is None


def test_a_round_that_began_degraded_heals_while_it_trains() -> None:
    degraded = Gate(GateState.DEGRADED, 2, NOW, (Pair("a", "b", "refused"),))
    run = replace(gated("a b", ways="b>a a!b", target=2), gate=degraded)
    assert isinstance(decide(run, NOW).action, Stay)
    run = replace(run, reach=reach("a>b b>a"))
    assert isinstance(decide(run, NOW).action, Heal)
    run, action, _, _ = settled(run)
    assert isinstance(action, Stay) and run.gate is not None and run.gate.state is GateState.READY
    assert not isinstance(decide(run, NOW).action, TurnGate)


# Newcomers that stay unreached


def trains(active: str, waiting: str, ways: str, state: GateState = GateState.READY, **settings: Any) -> Run:
    """A world that trains, began with such a gate, and has leases that outlast the gate's time."""
    run = gated(active, waiting, ways, lease_s=1000.0, **settings)
    run = with_members(run, *(replace(one, lease_until=NOW + 500.0) for one in run.members.values()))
    return replace(run, gate=Gate(state, len(active.split()), NOW))


LATE = NOW + TIMEOUT_S


def test_a_world_that_is_ready_trains_on_without_a_newcomer_that_stays_unreached() -> None:
    run, action, _, wake_at = settled(trains("a b", "c", "a>b b>a a>c c>a b>c c!b", target=3))
    assert isinstance(action, Stay) and wake_at == LATE
    run, action, reason, _ = settled(run, LATE)
    assert isinstance(action, Stay) and run.running is not None and run.coming is None
    assert reason == "round 0: 2 of 3 wanted workers train; c stays out: c → b (refused)"
    run, action, _, _ = settled(transitions.reached(run, an_id("c"), reach("c!b")[an_id("c")]), LATE + 1.0)
    assert isinstance(action, Stay), "that is no news"
    run, action, _, _ = settled(transitions.reached(run, an_id("c"), reach("c>b")[an_id("c")]), LATE + 2.0)
    assert isinstance(action, CallBack) and not run.kept_out
    run, action, _, _ = settled(all_gone(run), LATE + 3.0)
    assert isinstance(action, Release) and len(action.round.seats) == 3


def test_a_world_grows_by_those_newcomers_that_reach_it_and_each_other() -> None:
    run, _, _, _ = settled(trains("a b", "c d", all_ways("a b c") + " " + all_ways("a b d") + " c!d d!c", target=4))
    run, action, _, _ = settled(run, LATE)
    assert isinstance(action, CallBack) and run.kept_out.keys() == {an_id("d")}
    run, action, _, _ = settled(all_gone(run), LATE + 1.0)
    assert isinstance(action, Release) and [seat.name for seat in action.round.seats] == ["a", "b", "c"]
    assert run.gate is not None and run.gate.state is GateState.READY


def test_a_world_that_is_degraded_anyway_takes_a_newcomer_in_after_the_timeout() -> None:
    run, _, _, _ = settled(trains("a b", "c", "a>b b!a", GateState.DEGRADED, target=3))
    run, action, _, _ = settled(run, LATE)
    assert isinstance(action, CallBack) and run.coming is not None and run.coming.state is GateState.DEGRADED


def test_a_world_whose_own_ways_have_shut_is_not_called_back_to_grow() -> None:
    run, _, _, _ = settled(trains("a b", "c", all_ways("a c") + " " + all_ways("b c") + " a!b b>a", target=3))
    run, action, reason, _ = settled(run, LATE)
    assert isinstance(action, Stay) and "c stays out: a → b (refused)" in reason
    _, action, _, _ = settled(transitions.reached(run, an_id("a"), reach("a>b")[an_id("a")]), LATE + 1.0)
    assert isinstance(action, CallBack)


def test_who_is_kept_out_is_not_seated_after_a_failure_either_unless_there_are_too_few() -> None:
    run, _, _, _ = settled(trains("a b", "c", "a>b b>a", min=2, target=3))
    run, _, _, _ = settled(run, LATE)
    _, action, _, _ = settled(all_gone(recalled(run, at=LATE)), LATE + 60.0)
    assert isinstance(action, Release) and [seat.name for seat in action.round.seats] == ["a", "b"]
    lost = all_gone(recalled(without(run, "b"), at=LATE))
    lost, action, reason, _ = settled(lost, LATE + 1.0)
    assert isinstance(action, Stay) and "a ↔ c (no answer yet)" in reason
    lost, action, _, _ = settled(lost, LATE + 1.0 + TIMEOUT_S)
    assert isinstance(action, Release) and [seat.name for seat in action.round.seats] == ["a", "c"]
    assert lost.gate is not None and lost.gate.state is GateState.DEGRADED and not lost.kept_out


def test_of_two_spares_the_one_that_is_reached_takes_over_at_once() -> None:
    run = trains("a b", "c d", all_ways("a b d") + " a!c c!a", target=2, spares=2)
    run, action, _, _ = settled(all_gone(recalled(without(run, "b"))))
    assert isinstance(action, Release) and [seat.name for seat in action.round.seats] == ["a", "d"]


ways_among = st.frozensets(st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde")), max_size=20)


@given(ways_among, st.integers(2, 5), st.integers(1, 2), st.sampled_from([GateState.READY, GateState.DEGRADED]))
def test_no_ready_world_is_called_back_for_a_degraded_one(
    ways: frozenset[tuple[str, str]], target: int, least: int, state: GateState
) -> None:
    known = all_ways("a b") + " " + " ".join(f"{source}>{to}" for source, to in ways if source != to)
    run = trains("a b", "c d e", known, state, min=least, target=target)
    run, action, _, _ = settled(run)
    if isinstance(action, Stay):
        run, action, _, _ = settled(run, LATE)
    began_ready = run.gate is not None and run.gate.state is GateState.READY  # a degraded one heals first
    assert began_ready, "a and b reach each other"
    if isinstance(action, CallBack):
        assert run.coming is not None and run.coming.state is GateState.READY
        run, action, _, _ = settled(all_gone(run), LATE + 60.0)
        assert isinstance(action, Release) and run.gate is not None and run.gate.state is GateState.READY
