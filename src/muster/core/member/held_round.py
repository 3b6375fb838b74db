"""What does a member do about the round that it has a place in? It starts ranks, tells of them, and ends them.

Of a stop only the beginning is decided here and what follows it: `StopRanks` is answered with `cleared`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.core.member.orders import AwaitSaves, Hasten, Notify, Order, RestartProcesses, Say, StartRanks, StopRanks
from muster.core.member.standing import Standing
from muster.types.frames import (
    ExitsFrame,
    FinishedFrame,
    NoticedFrame,
    NoticeFrame,
    RecallFrame,
    ReportedEnd,
    RunRecord,
    SavingFrame,
    StartedFrame,
    StoppedFrame,
    UpFrame,
    report,
)
from muster.types.world import Place, RankEnd

_WAITS_FOR_THE_WORLD = 0.75  # of the stop grace, one that was asked to go
TAILS_TOLD = 8  # ends that travel with their last lines, for a frame has a limit

Then = Callable[[], None]


@dataclass(frozen=True)
class Going:
    """This worker was asked to go: its ranks run on until the world has been told."""

    until: float  # no longer than that
    why: str
    then: Then


@dataclass
class InRound:
    """The round that this worker has, or last had, a place in."""

    place: Place
    exits: dict[int, tuple[RankEnd, float]] = field(default_factory=dict)
    running: bool = True  # its ranks, or what they left behind, may still be there
    stopping: bool = False
    hung: bool = False
    up: bool = False
    finished: bool = False
    why_stopped: str = ""
    afterwards: list[Then] = field(default_factory=list)  # when nothing of it is left
    after_saves: list[Then] | None = None  # None: nobody waits for saves

    @property
    def number(self) -> int:
        return self.place.number

    def reported(self, now: float, only: int | None = None) -> tuple[ReportedEnd, ...]:
        """Ends as they travel, first ones first."""
        ends = sorted(self.exits.values(), key=lambda known: known[1])
        told = [(end, now - at) for end, at in ends if only is None or end.rank == only]
        return tuple(report(end, age, tail=index < TAILS_TOLD) for index, (end, age) in enumerate(told))


class HeldRound:
    def __init__(self, at: Standing) -> None:
        self._at = at
        self._seq = 0
        self._processes_lost = False
        self._next: tuple[Place, int] | None = None  # a release that waits, and the session that brought it
        self._late = False  # it waits because it was read when the lease was over
        self._going: Going | None = None
        self._gone_by = math.inf  # when nothing may be left here
        self.current: InRound | None = None

    @property
    def runs(self) -> bool:
        return self.current is not None and self.current.running

    def beat(self) -> None:
        self._at.beat(self.current.number if self.current is not None else None, runs=self.runs)

    # Starting

    def released(self, record: RunRecord) -> None:
        """A round is out, or is told again after a reconnect."""
        place = record.place_of(self._at.member_id)
        if place is None or self._at.outcome is not None or self._at.leaving:
            return
        current = self.current
        if current is not None and place.number <= current.number:
            if place.number == current.number and not current.running:
                self._confirm_stop(current)
            return
        self._next, self._late = (place, self._at.session), False
        if current is not None and current.running:
            self.stop(current, 0.0, self._start_next, why="a newer round was released")
        else:
            self._start_next()

    def _start_next(self) -> None:
        """Where what runs the ranks is gone, another is started first; the release may have become old meanwhile."""
        at = self._at
        if self._next is None:
            return
        place, session = self._next
        if self._processes_lost:
            at.do(RestartProcesses())
            return
        if at.now >= at.lease.since + at.settings.lease_s and at.connected and session == at.session:
            self._late = True  # the world may have gone on; what is answered next tells
            at.renew()
            return
        self._next = None
        if session != at.session or at.leaving or at.outcome is not None:
            return
        self.current = InRound(place)
        ranks = place.ranks
        span = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        # Before their output: where only the copy of it is kept, this line tells the round.
        at.do(Say(f"round {place.number}: {span} of {place.rank_count}; {place.round.why}"))
        self.beat()
        at.do(StartRanks(place))
        at.send(StartedFrame(round=place.number))

    def renewed(self) -> None:
        """A release that was read too late may start: if the round had been called back, that had come before."""
        if self._late and not self.runs:
            self._late = False
            self._start_next()

    def up(self, number: int, now: float) -> list[Order]:
        """All ranks of a round run."""
        self._at.reach(now)
        if (current := self.current) is not None and current.number == number and not current.stopping:
            current.up = True
            self._at.send(UpFrame(round=number))
        return self._at.taken()

    # Ends of ranks

    def exited(self, end: RankEnd, now: float) -> list[Order]:
        at, current = self._at, self.current
        at.reach(now)
        if current is None or current.number != end.round:
            return at.taken()
        current.exits[end.rank] = (end, now)
        if end.failed and not end.hung:
            at.do(Say(f"rank {end.rank}: {end.reason}"))
        if not current.stopping:  # else they travel with the confirmation
            self._seq += 1
            at.send(ExitsFrame(round=end.round, seq=self._seq, exits=current.reported(now, end.rank)))
            every = [one.exit_code for one, _ in current.exits.values()]
            if len(every) == current.place.seat.procs and not any(every):
                self._finished(current)
        return at.taken()

    def finished(self, number: int, now: float) -> list[Order]:
        """All ranks of a round have exited 0, says a launcher that does not tell of each."""
        self._at.reach(now)
        if (current := self.current) is not None and current.number == number and not current.stopping:
            self._finished(current)
        return self._at.taken()

    def _finished(self, current: InRound) -> None:
        current.finished = True
        self._at.send(FinishedFrame(round=current.number))

    # Ending ranks

    def notice(self, frame: NoticeFrame) -> None:
        """A recall is planned. Where no rank runs there is nobody to tell, which is an answer."""
        current, number = self.current, -1 if frame.round is None else frame.round
        if current is not None and current.number == number and current.running and not current.stopping:
            self._at.do(Notify(number, frame.call, frame.for_s, frame.withdrawn))
        else:
            self._at.send(NoticedFrame(round=number))

    def noticed(self, number: int, calls: int, now: float, *, seen: bool = False, done: bool = False) -> list[Order]:
        """What ranks know of it."""
        self._at.reach(now)
        self._at.send(NoticedFrame(round=number, calls=calls, seen=seen, done=done))
        return self._at.taken()

    def recalled(self, frame: RecallFrame) -> None:
        number = -1 if frame.round is None else frame.round
        if self._next is not None and self._next[0].number <= number:
            self._next = None  # it waits to begin, and must not any more
        current = self.current
        if current is None or current.number < number:
            self._at.send(StoppedFrame(round=number))
        elif current.number == number and current.running:
            if not current.stopping:
                self._at.do(Say(f"round {number} is called back: {frame.reason}"))
            if frame.dump:
                self.stop(current, frame.grace_s, lambda: self._confirm_stop(current), dump=True)
            else:
                left = self._gone_by - self._at.now
                grace = min(frame.grace_s, max(left, 0.0))
                self.stop_after_saves(current, grace, lambda: self._confirm_stop(current), at_most_s=left)
        elif current.number == number:
            self._confirm_stop(current)

    def _confirm_stop(self, current: InRound) -> None:
        ends = current.reported(self._at.now)
        self._at.send(StoppedFrame(round=current.number, why=current.why_stopped, exits=ends))

    def leave(self, grace_s: float, why: str, then: Then) -> None:
        """Go when what runs has ended. The coordinator calls it back, once all ranks know; without one, at once."""
        current, now = self.current, self._at.now
        if current is None or not current.running:
            then()
            return
        self._gone_by = now + grace_s
        self._going = Going(now + grace_s * _WAITS_FOR_THE_WORLD, why, then)
        if not self._at.connected or current.stopping:
            self.go()

    @property
    def going_at(self) -> float:
        """When this worker ends its ranks itself, if nobody has called them back."""
        return self._going.until if self._going is not None else math.inf

    def go(self) -> None:
        """End what runs, confirm it, and go."""
        if (current := self.current) is not None and (going := self._going) is not None:
            left = max(self._gone_by - self._at.now, 0.0)
            self.stop_after_saves(current, left, lambda: self._confirm_stop(current), why=going.why, at_most_s=left)

    def stop(self, current: InRound, grace_s: float, then: Then, *, why: str = "", dump: bool = False) -> None:
        """End the ranks of a round and all that they left; `then` when nothing is left."""
        if not current.running:
            then()
            return
        current.afterwards.append(then)
        if self._going is not None:
            current.afterwards.append(self._going.then)
            self._going = None
        if current.stopping:
            self._at.do(Hasten(grace_s))
            return
        current.stopping, current.hung, current.why_stopped = True, dump, why
        self._at.do(StopRanks(current.number, grace_s, dump))

    def stop_after_saves(
        self, current: InRound, grace_s: float, then: Then, *, why: str = "", at_most_s: float = math.inf
    ) -> None:
        """Those that are in the middle of a save end it before they are asked to go.

        Without a grace they must go at once, because the world may have gone on without them.
        """
        one, began = self._at.settings, self._at.now

        def stop() -> None:
            left = at_most_s - (self._at.now - began)
            self.stop(current, max(min(grace_s, left), min(grace_s, one.restart_grace_s)), then, why=why)

        if grace_s <= 0 or not current.running or current.stopping:
            self.stop(current, grace_s, then, why=why)
        elif current.after_saves is not None:
            current.after_saves.append(stop)
        else:
            current.after_saves = [stop]
            limits = min(one.save_grace_s, at_most_s), min(one.saving_timeout_s, at_most_s)
            self._at.do(AwaitSaves(current.number, *limits))

    def saving(self, number: int, what: str, now: float) -> list[Order]:
        """A rank that should end saves, and is given time for it."""
        self._at.reach(now)
        self._at.do(Say(f"round {number}: {what}"))
        self._at.send(SavingFrame(round=number, what=what))
        return self._at.taken()

    def saves_over(self, number: int, now: float) -> list[Order]:
        self._at.reach(now)
        current = self.current
        if current is not None and current.number == number and current.after_saves is not None:
            waiting, current.after_saves = current.after_saves, None
            for stop in waiting:
                stop()
        return self._at.taken()

    def cleared(self, number: int, now: float) -> list[Order]:
        """Nothing is left of the ranks of a round."""
        self._at.reach(now)
        current = self.current
        if current is None or current.number != number or not current.running:
            return self._at.taken()
        current.running, current.stopping = False, True
        afterwards, current.afterwards = current.afterwards, []
        for then in afterwards:
            then()
        self.beat()  # the guard is in no hurry, and the coordinator waits for what was said before
        if self._processes_lost and self._next is None:
            self._at.do(RestartProcesses())
        return self._at.taken()

    # What runs the ranks

    def processes_lost(self, why: str, now: float) -> list[Order]:
        """What runs ranks has died; the ends of its ranks have been told before."""
        self._at.reach(now)
        self._processes_lost = True
        self._at.do(Say(f"{why}: its ranks are gone, starting another"))
        if not self.runs:
            self._at.do(RestartProcesses())
        return self._at.taken()

    def restarted(self, now: float) -> list[Order]:
        """Ranks can be started again."""
        self._at.reach(now)
        self._processes_lost = False
        self.beat()
        self._start_next()
        return self._at.taken()
