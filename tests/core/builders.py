"""Builders for the pure code: members, rounds and runs that read as a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from muster.core.world import decisions, run, transitions
from muster.core.world.run import Decision, Run
from muster.types.world import (
    Cause,
    Member,
    MemberId,
    RankEnd,
    RanksState,
    Recall,
    Role,
    Round,
    Seat,
    Settings,
)

NOW = 100.0


def an_id(name: str) -> MemberId:
    return MemberId(f"id-{name}")


def a_member(name: str, **known: Any) -> Member:
    known.setdefault("lease_until", NOW + 2.0)
    known.setdefault("joined_at", NOW - 10.0)
    known.setdefault("store_port", 1000)
    return Member(member_id=an_id(name), name=name, **known)


def members(names: str, **known: Any) -> list[Member]:
    return [a_member(name, **known) for name in names.split()]


def a_seat(rank: int, name: str, **known: Any) -> Seat:
    return Seat(rank, an_id(name), name, addr="127.0.0.1", procs=known.pop("procs", 1), **known)


def a_round(names: str, number: int = 0, **known: Any) -> Round:
    seats = tuple(a_seat(rank, name) for rank, name in enumerate(names.split()))
    known.setdefault("ran_at", known.setdefault("up_at", NOW - 5.0))
    return Round(number, seats, **known)


def a_recall(cause: Cause = Cause.LOSS, at: float = NOW, **known: Any) -> Recall:
    return Recall(cause, known.pop("reason", f"{cause}"), at, known.pop("grace_s", 0.2), **known)


def an_exit(rank: int, code: int = 1, worker: str = "", **known: Any) -> RankEnd:
    return RankEnd(rank=rank, exit_code=code, worker=worker, **known)


def a_run(active: str = "", waiting: str = "", *, last: Round | None = None, **settings: Any) -> Run:
    """A run whose round has the active members in order of rank, unless `last` says otherwise; the rest are spares."""
    known = Settings(**{"min": 1, "max": 8, "lease_s": 2.0, **settings})
    seated = [
        replace(member, role=Role.ACTIVE, rank=rank, ranks_state=RanksState.RUNNING)
        for rank, member in enumerate(members(active))
    ]
    people = {member.member_id: member for member in [*seated, *members(waiting)]}
    current = last if last is not None else (a_round(active) if active else None)
    return Run(
        settings=known,
        target=known.first_target,
        members=people,
        round=current,
        next_round=current.number + 1 if current else 0,
    )


def with_members(given: Run, *people: Member) -> Run:
    return replace(given, members={**given.members, **{member.member_id: member for member in people}})


def without(given: Run, *names: str) -> Run:
    gone = {an_id(name) for name in names}
    return replace(given, members={key: member for key, member in given.members.items() if key not in gone})


def recalled(given: Run, cause: Cause = Cause.LOSS, at: float = NOW, *, gone: str = "", **known: Any) -> Run:
    """The round called back, with those named confirmed gone."""
    assert given.round is not None
    ids = frozenset(an_id(name) for name in gone.split())
    return replace(given, round=replace(given.round, recall=a_recall(cause, at, **known), gone=ids))


def all_gone(given: Run) -> Run:
    assert given.round is not None
    return replace(given, round=replace(given.round, gone=frozenset(seat.member_id for seat in given.round.seats)))


def settle(given: Run, now: float, most: int = 30) -> tuple[Run, list[Decision]]:
    """Decide and carry out until there is only waiting left, as the protocol does; with all decisions."""
    made: list[Decision] = []
    while True:
        given = transitions.tell_time(given, now)
        decision = decisions.decide(given, now)
        made.append(decision)
        if isinstance(decision.action, run.Stay):
            return given, made
        given = decisions.carry_out(given, decision.action, now)
        assert len(made) < most, f"decisions do not end: {[one.reason for one in made[-4:]]}"


def names(people: Iterable[Member]) -> list[str]:
    return [member.name for member in people]


def seated(given: Run) -> list[str]:
    return [seat.name for seat in given.round.seats] if given.round else []
