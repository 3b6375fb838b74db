"""Would the random histories notice? A fault is planted in the code that ships, and they have to find it.

Each row replaces a piece of one function, so that it does what a plausible mistake would make it do.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from muster.core.member import state as member_state
from muster.core.member.guard import GuardState
from muster.core.member.held_round import HeldRound
from muster.core.member.standing import MemberLease, Standing
from muster.core.member.state import MemberState
from muster.core.world import decisions, forming, lending, live, records
from muster.world.joining import Joining
from muster.world.protocol import RunProtocol
from tests.simulator import histories

HISTORIES = 1_000
RARE = (36, 54, 63, 102, 109, 131, 166, 462, 756)  # have found what few others do; all are tried if these do not

FAULTS = {
    "ranks are kept when the lease is over": (
        *(MemberState, "_silence", "current.running and self.at.outcome is None", "False"),
        "the guard of .* had to end ranks that its agent kept",
    ),
    "a lease counts from the answer": (
        *(MemberState, "heard", "at.lease.renewed()", "at.lease.since = now"),
        "counts its lease from",
    ),
    "a lease is never over": (
        *(MemberLease, "over_at", "max(self.since, self.dead_at) + lease_s", "math.inf"),
        "are behind their fence and still run|starts while round",
    ),
    "a dead coordinator is taken for a silent one": (
        *(MemberLease, "over_at", "max(self.since, self.dead_at)", "self.since"),
        "ends ranks though the coordinator is dead",
    ),
    "a release that is read too late starts ranks": (
        *(HeldRound, "_start_next", "at.now >= at.lease.since + at.settings.lease_s", "False"),
        "starts when it is over|starts while round",
    ),
    "a release of a connection that has ended starts ranks": (
        *(HeldRound, "_start_next", "session != at.session or", ""),
        "starts when it is over|starts while round",
    ),
    "a stop is confirmed before ranks are gone": (
        HeldRound,
        "recalled",
        "self.stop_after_saves(current, grace, lambda: self._confirm_stop(current), at_most_s=left)",
        "self._confirm_stop(current); self.stop_after_saves(current, grace, lambda: None, at_most_s=left)",
        "starts while round|runs on a GPU that .* lent",
    ),
    "a guard does not know of the lease": (
        *(
            GuardState,
            "due_at",
            "min(self._beat_at + self._lease_s, self._until + SLACK_S)",
            "self._beat_at + self._lease_s",
        ),
        "are behind their fence and still run",
    ),
    "a guard is not told that the lease was renewed": (
        *(MemberState, "heard", "self.held.beat()", "pass"),
        "the guard of .* had to end ranks that its agent kept",
    ),
    "a lifeline that is reset proves something": (
        *(Joining, "part", '"lifeline" and clean:', '"lifeline":'),
        "starts when it is over|starts while round",
    ),
    "the end of a relay is taken for a worker's": (
        *(Joining, "_greet_lifeline", "if is_direct(hello, peer) else None", ""),
        "starts when it is over|starts while round",
    ),
    "a guard reports before everything has ended": (
        *(GuardState, "report", "self.cleared and", ""),
        "are behind their fence and still run|starts while round|not in .* s: training or an outcome",
    ),
    "the outcome is not acknowledged": (
        *(MemberState, "_acknowledge", "current = self.held.current", "return"),
        "nobody bade it farewell",
    ),
    "ends of ranks are not presented again": (
        *(member_state, "_presented", "exits=current.reported(now),", ""),
        "not in .* s: an outcome|ended with",
    ),
    "what happens between hello and welcome is not told": (
        *(Standing, "send", "self.unsaid is not None", "False"),
        "not in .* s: an outcome",
    ),
    "a round is released before everyone is out of the last": (
        *(forming, "decide", "(held := still_there(last, now))", "(held := [])"),
        "starts while round",
    ),
    "a round is told before it is kept": (
        *(RunProtocol, "_release", "at.unsaved = at.led", "at.led"),
        "is told before it is kept",
    ),
    "a lent worker is a spare": (
        *(forming, "candidates", " and member.name not in run.lent", ""),
        "are lent and get a rank|runs on a GPU that .* lent",
    ),
    "a lent worker keeps its place": (
        *(forming, "_stays", " and member.name not in run.lent", ""),
        "are lent and get a rank|runs on a GPU that .* lent",
    ),
    "a lent worker is not called back": (
        *(live, "_resize", "lent = lending.seats(run, current)", "lent = []"),
        "not in .* s: training or an outcome",
    ),
    "a lent worker is sent home": (
        *(forming, "_not_needed", "[member for member in out if member.name not in run.lent]", "out"),
        "are lent and sent home",
    ),
    "a lent worker counts as gone before its ranks are": (
        *(lending, "vacated", "still_there(last, now)", "()"),
        "runs on a GPU that .* lent",
    ),
    "who is lent is not kept": (
        *(records, "record", "lent=run.lent,", ""),
        "runs on a GPU that .* lent",
    ),
    "members may leave while ranks run": (
        *(decisions, "_ended", "slow := unacknowledged(run)", "slow := []"),
        "farewell while ranks of members run",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finds(FAULTS[fault], monkeypatch, histories.play, [*RARE, *range(HISTORIES)])


def finds(
    fault: tuple[Any, str, str, str, str],
    monkeypatch: pytest.MonkeyPatch,
    play: Callable[[int], object],
    seeds: Iterable[int],
) -> None:
    owner, name, text, instead, found = fault
    monkeypatch.setattr(owner, name, planted(owner, name, text, instead))
    with pytest.raises(AssertionError, match=found):
        for seed in seeds:
            play(seed)


def planted(owner: Any, name: str, text: str, instead: str) -> Any:
    original: Any = inspect.getattr_static(owner, name)
    original = getattr(original, "fget", original)  # of a property
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(text) == 1, f"{name} does not say {text!r}"
    module = sys.modules[owner.__name__ if inspect.ismodule(owner) else owner.__module__]
    made: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{source.replace(text, instead)}", vars(module), made)
    return made[name]
