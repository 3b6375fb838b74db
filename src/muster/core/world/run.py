"""What does the coordinator know of one run, and what can be done about it?

The record `Run`, the actions between which `decisions` decides, and what every stage needs: who has not confirmed its
stop, when the next lease runs out, the run without a member. What members report is entered by `transitions`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from muster.core.world import seating
from muster.core.world.pace import Stall
from muster.types.bench import Bench
from muster.types.many import changed
from muster.types.records import record, replace
from muster.types.state import Holding
from muster.types.world import (
    EndedRun,
    Gate,
    Healing,
    Loss,
    Member,
    MemberId,
    Pace,
    Reach,
    Recall,
    Round,
    RunOutcome,
    Seat,
    Settings,
    Spot,
    TakenBack,
)

HeldKey = tuple[int, int, int, int]  # step, round, ranks, rank


@record()
class Run:
    """The coordinator's record of one run: who is present, in which round and role."""

    settings: Settings
    target: int
    members: Mapping[MemberId, Member] = field(default_factory=dict)
    round: Round | None = None
    outcome: RunOutcome | None = None
    restarts_used: int = 0
    next_round: int = 0
    target_set_at: float = -math.inf
    removals: tuple[str, ...] = ()  # names that the next shrink should take first
    lent: Mapping[str, str] = field(default_factory=dict)  # workers without their GPUs, by name, and who has them
    ordered: RunOutcome | None = None  # an end that was asked for from outside
    min_reached_at: float | None = None
    below_min_since: float | None = None
    recovery_until: float | None = None
    not_before: float = -math.inf  # until then a later round than the one that we know may be presented
    departed: tuple[str, ...] = ()
    silent: Mapping[MemberId, float] = field(default_factory=dict)  # lost by silence: when each was last heard
    false_alarms: int = 0  # how often one of them was heard from again
    checking: frozenset[MemberId] = frozenset()
    surplus: frozenset[MemberId] = frozenset()  # sent out of the world by a smaller target
    best_step: int | None = None
    stale_rounds: int = 0
    blamed: str | None = None  # the worker that failed first in the last round, if a failure ended it
    blamed_times: int = 0
    holds_farewell: bool = False  # somebody else records the end first, and then lets the members go
    farewell_said: bool = False
    reach: Mapping[MemberId, Reach] = field(default_factory=dict)  # whom each member reaches; only with a gate
    gate: Gate | None = None  # of the round that is out
    coming: Gate | None = None  # of the next one, while ranks wait for it
    # Newcomers that would make a ready mesh degraded, until a way opens; with the sentence that says so.
    kept_out: Mapping[MemberId, str] = field(default_factory=dict)
    holdings: Mapping[MemberId, Holding] = field(default_factory=dict)  # state that members have in memory
    held_since: Mapping[MemberId, Mapping[HeldKey, float]] = field(default_factory=dict)  # when each of it was told
    barred: int | None = None  # nothing in memory from this step on is gone back to: rounds that did failed at once
    spots: Mapping[str, Spot] = field(default_factory=dict)  # by name, of those that do not know it themselves
    bearers: Mapping[str | int, MemberId] | None = None  # who came last with a name, or an infra rank
    proven: int | None = None  # the size to come back to if the one that was asked for does not work
    taken_back: TakenBack | None = None
    stuck_at: str = ""  # what the first rank to fail named, if its round made no progress
    stuck_times: int = 0  # in how many rounds in a row
    bench: Bench | None = None  # how fast its workers reach each other, as the first round found it
    hopeless: str = ""  # the line with which the round before ended, if no restart can change what it says
    pace: Pace = Pace()
    stall: Stall | None = None  # steps have stopped coming, and users were told
    told_unwatched: bool = False  # that its hang timeout is of no use
    healing: Healing | None = None  # a loss or a crash that was not made good yet
    incarnations: tuple[str, ...] = ()  # ids of this run, among all runs that had its run id
    launches: tuple[str, ...] = ()  # identities of the launches that had members in it
    earlier: tuple[EndedRun, ...] = ()  # runs that had its run id before
    durable_step: int | None = None  # the newest step that a worker ever reported to be on disk

    @property
    def aim(self) -> int:
        """How many workers should train together: as many as were asked for, unless that was seen not to work."""
        back = self.taken_back
        return back.size if back is not None and back.target == self.target else self.target

    @property
    def running(self) -> Round | None:
        """The round that trains now."""
        return self.round if self.round is not None and self.round.recall is None and not self.outcome else None

    @property
    def stands_still(self) -> bool:
        """Ranks wait for the next round, or for the word that it has begun everywhere."""
        last = self.round
        return last is not None and (last.recall is not None or len(last.started) < last.world_size)


REMEMBERED = 1_000  # members lost by silence: of more, the oldest are forgotten
NAMED = 8  # at most, of any number of workers, in a sentence
UNSEEN = -math.inf  # when a member was lost that nobody watched: failures of its round are put down to that

# What can be done about a run -------------------------------------------------------------------


@record()
class Stay:
    pass


@record()
class Lose:
    members: tuple[MemberId, ...]


@record()
class CallBack:
    recall: Recall


@record()
class GiveNotice:
    """Ranks are told that the round will be called back: first to be counted, then from which call on to save."""

    call: int | None = None
    for_s: float = 0.0


@record()
class WithdrawNotice:
    """It is not planned any more."""


@record()
class TakeBack:
    """The size that was asked for does not work."""

    taken: TakenBack


@record()
class CheckHealth:
    members: tuple[MemberId, ...]


@record()
class TurnGate:
    """What is known of the next round's mesh; None: nobody waits for it any more."""

    gate: Gate | None


@record()
class KeepOut:
    """These have had time enough to reach the others: the world that reaches each other does without them."""

    members: frozenset[MemberId]
    why: str


@record()
class Heal:
    """The round that is out began degraded, and its members reach each other now."""

    gate: Gate


@record()
class Release:
    round: Round
    charged: bool = False  # it costs one of the run's restarts
    blamed: str | None = None
    parked: tuple[tuple[MemberId, str], ...] = ()
    barred: int | None = None
    stuck_at: str = ""
    stuck_times: int = 0
    hopeless: str = ""


@record()
class TellStall:
    """No step has come for unusually long, or steps come again: then there is no stall any more."""

    stall: Stall | None = None


@record()
class TellUnwatched:
    """Its hang timeout is of no use: no rank tells steps."""


@record()
class ReportHeal:
    """A loss or a crash was made good."""

    data: Mapping[str, Any]  # the sentence's facts, for programs


@record()
class Dismiss:
    members: tuple[MemberId, ...]


@record()
class GiveUpOn:
    """Recovery is over: these members of the round did not come back."""

    members: tuple[Seat, ...]


@record()
class Finish:
    outcome: RunOutcome


@record()
class Farewell:
    pass


Action = (
    Stay
    | Lose
    | GiveNotice
    | WithdrawNotice
    | CallBack
    | TakeBack
    | CheckHealth
    | TurnGate
    | KeepOut
    | Heal
    | Release
    | TellStall
    | TellUnwatched
    | ReportHeal
    | Dismiss
    | GiveUpOn
    | Finish
    | Farewell
)


@record()
class Decision:
    action: Action
    reason: str
    wake_at: float = math.inf


# Reading a run ----------------------------------------------------------------------------------


def unacknowledged(run: Run) -> list[str]:
    """Members whose ranks may still be stopping, once there is an outcome."""
    return sorted(member.name for member in run.members.values() if not member.acknowledged)


def kept_lease(run: Run | None, settings: Settings) -> Settings:
    """Those settings, but no shorter lease than the run has: members end their ranks by the one that they were told."""
    if run is None or run.settings.lease_s <= settings.lease_s:
        return settings
    return replace(settings, lease_s=run.settings.lease_s)


def next_expiry(run: Run) -> float:
    """When the first lease runs out if nobody is heard before."""
    return min((member.lease_until for member in run.members.values()), default=math.inf)


def advanced(run: Run, closed: Round) -> bool:
    """Whether a rank of that round got further than any had been."""
    top = max((mark.step for mark in closed.progress.values()), default=None)
    return top is not None and (run.best_step is None or top > run.best_step)


def listed(names: Iterable[str]) -> str:
    """Names as a sentence can carry them: each once, in natural order, the end of a long list as a number."""
    once = set(names)
    first = ", ".join(heapq.nsmallest(NAMED, once, key=seating.natural))
    return first if len(once) <= NAMED else f"{first} and {len(once) - NAMED} more"


def told(sentences: Sequence[str], between: str) -> str:
    """The first of them, and how many more there are."""
    first = between.join(sentences[:NAMED])
    return first if len(sentences) <= NAMED else f"{first}{between}and {len(sentences) - NAMED} more"


# Losing a member (by silence in `core.world.decisions`, by a closed connection in `core.world.transitions`) ---------


def lose(run: Run, member_id: MemberId, now: float, why: str, since: float | None = None) -> Run:
    """The run without that member. `since` is when it was last known to be well: now, if its connection closed."""
    member = run.members.get(member_id)
    if member is None:
        return run
    members = {key: value for key, value in run.members.items() if key != member_id}
    departed = (*(name for name in run.departed if name != member.name), member.name)[-8:]
    reach = {key: value for key, value in run.reach.items() if key != member_id}
    run = replace(run, members=members, departed=departed, surplus=run.surplus - {member_id}, reach=reach)
    if member_id in run.holdings:
        run = replace(
            run,
            holdings={key: value for key, value in run.holdings.items() if key != member_id},
            held_since={key: value for key, value in run.held_since.items() if key != member_id},
        )
    run = replace(run, kept_out={key: why for key, why in run.kept_out.items() if key != member_id})
    current = run.round
    if current is None or current.seat_of(member_id) is None:
        return run
    well_at = now if since is None else since
    if member_id not in current.gone:
        # An agent whose connection closes may take us for dead; from then it keeps its ranks for one more lease.
        fence = well_at + run.settings.lease_s + run.settings.kill_margin_s
        current = replace(current, fences=changed(current.fences, member_id, fence))
    return replace(run, round=with_loss(current, Loss(member_id, member.name, well_at, why)))


def silenced(run: Run, member_id: MemberId, heard: float) -> Run:
    """Nobody saw that member die: should it say hello again, it was a false alarm."""
    known = {key: at for key, at in run.silent.items() if key != member_id} | {member_id: heard}
    return replace(run, silent=dict(list(known.items())[-REMEMBERED:]))


def with_loss(current: Round, loss: Loss) -> Round:
    """None is lost twice; one that was about to go, and is gone, is lost since it said so."""
    before = next((known for known in current.losses if known.member_id == loss.member_id), None)
    if before is not None and before.planned <= loss.planned:
        return current
    if before is not None:
        loss = replace(loss, at=min(loss.at, before.at))
    others = (known for known in current.losses if known.member_id != loss.member_id)
    return replace(current, losses=(*others, loss))
