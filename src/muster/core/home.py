"""Is what a home keeps still what was left there? Whether its control plane may start, and what to type if not.

A home has an identity, which its database and marks beside it carry, and a count of the transactions that were made.
A database that is missing, damaged, another home's or older than that count next to anything that shows that the home
was used is no new home: whoever served it would say "no trainings" and end the workers of all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_MOST_SHOWN = 8


class FileState(StrEnum):
    ABSENT = "absent"  # missing, or empty
    DAMAGED = "damaged"
    READABLE = "readable"


@dataclass(frozen=True)
class Kept:
    """What the database file says, as it lies there."""

    state: FileState
    fault: str = ""  # what is wrong with one that is damaged
    home: str = ""  # the identity of the home that it is of; of one that 0.1 wrote it is not known
    commits: int = 0  # transactions that are in it
    trainings: frozenset[str] = frozenset()
    workers: frozenset[str] = frozenset()  # that were written down as UID/NAME
    told: frozenset[str] = frozenset()  # of the uids asked for, those that the journal speaks of
    deleted: frozenset[str] = frozenset()  # and those whose removal it tells


@dataclass(frozen=True)
class Found:
    """A home as somebody finds it who is about to serve it."""

    database: str
    kept: Kept
    marks: Mapping[str, str] = field(default_factory=dict)  # file → the identity that it has
    reached: int = 0  # transactions that are known to have been made
    living: Sequence[tuple[str, str]] = ()  # uid and name of workers that run
    folders: Collection[str] = ()  # uids of trainings whose logs are there
    forgotten: Collection[str] = ()  # those of them that were given up
    twins: Sequence[str] = ()  # other folders that are this home, too, and have workers

    @property
    def strangers(self) -> list[tuple[str, str]]:
        """Workers that run and that this database cannot have started: each is written down before it is started.

        One whose training is gone was left behind by somebody who removed that; unless there is no training at all.
        """
        kept = self.kept
        known = {uid for uid, name in self.living if f"{uid}/{name}" in kept.workers} if kept.trainings else set()
        return [(uid, name) for uid, name in self.living if uid not in kept.trainings | known]

    @property
    def unexplained(self) -> list[str]:
        """Trainings whose logs are there and of which this database knows nothing: they came with an event each."""
        kept = self.kept
        known = kept.trainings | kept.deleted | (kept.told if kept.trainings else frozenset())
        return sorted(uid for uid in self.folders if uid not in known and uid not in self.forgotten)

    @property
    def used(self) -> bool:
        return bool(self.marks or self.living or self.unexplained)


def loss(found: Found) -> str:
    """What is lost of a home, in words; empty if nothing is."""
    kept, path = found.kept, found.database
    if kept.state is FileState.ABSENT:
        return f"{path} is missing or empty" if found.used else ""
    if kept.state is FileState.DAMAGED:
        return f"{path} is damaged ({kept.fault})" if found.used else ""
    others = sorted(name for name, home in found.marks.items() if home != kept.home)
    if others and kept.home:
        return f"{path} is the database of another home: {', '.join(others)} says so"
    if others:
        return f"{path} does not know this home: it was made anew, or is a copy of before this home had an identity"
    if found.reached > kept.commits:
        missing = found.reached - kept.commits
        return (
            f"{path} has lost the last {missing} write{'s' * (missing > 1)} that it had: it is an older copy, or its "
            "-wal file is gone or damaged"
        )
    if found.twins:
        return f"{path} is a copy: the workers of its trainings are directed from {_some(found.twins)}"
    if found.strangers:
        return f"{path} does not know them"
    if found.unexplained:
        return f"{path} knows nothing of trainings whose logs are here ({_some(found.unexplained)})"
    return ""


def advice(found: Found, what: str) -> str:
    """The whole refusal: what is lost, what goes on, and what to type."""
    if found.twins:
        return (
            f"{what}. Nothing was touched. Go on there: export MUSTER_HOME='{found.twins[0]}'; or end them there "
            "first; or have both direct the same workers: muster server forget (as muster server start --forget)"
        )
    names = [name for _, name in found.living]
    given = ", and give these workers up with what they have done since their last checkpoint" if names else ""
    return (
        (f"workers run here ({_some(names)}), but " if names else "")
        + f"{what}. Nothing was touched. "
        + ("They go on without a control plane. " if names else "")
        + "Put the right files back and type muster server start; or put a backup back: muster server restore FILE; "
        + f"or accept what is there{given}: muster server forget (as muster server start --forget)"
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
