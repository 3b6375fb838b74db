"""What of a training's state is safe now, against what, and what would the loss of a worker cost?

For people to read: where a round goes on is decided by `core.world.resuming`, and this module has to say the same. A
rank that fails costs no memory; a worker that is lost takes its memory with it; a failure domain, that of all its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Literal

from muster.core.world import resuming
from muster.core.world.run import Run, listed, told
from muster.types.codec import MOST
from muster.types.records import record, replace
from muster.types.state import KeptState
from muster.types.world import MemberId, Round


@record()
class Kept:
    state: KeptState
    age_s: float | None = None  # for how long its step has been safe


@record()
class _Step:
    """A step that is whole in memory."""

    key: resuming.Key
    holders: Mapping[int, Set[MemberId]]  # of each rank

    @property
    def number(self) -> int:
        return self.key[0]

    @property
    def copies(self) -> int:
        return min(map(len, self.holders.values()))

    @property
    def needs(self) -> Set[MemberId]:
        """Without any of these it would not be whole."""
        return {next(iter(ids)) for ids in self.holders.values() if len(ids) == 1}


@record()
class _Loss:
    """What happens if that worker is lost now."""

    member_id: MemberId
    step: int  # from which the next round would go on
    tier: str  # "in memory", "on disk", or empty: from the beginning
    torn: bool  # of no step all ranks would be left in memory


def kept(run: Run, now: float) -> Kept | None:
    """None for a training that keeps no state."""
    if not run.holdings:
        return None
    whole = [
        _Step(key, {rank: frozenset(ids) for rank, ids in ranks.items()})
        for key, ranks in resuming.complete(resuming.living(run)).items()
    ]
    safe = next((one for one in whole if one.copies > 1), whole[0] if whole else None)
    holdings = run.holdings.values()
    durable = max((one.durable for one in holdings if one.durable is not None), default=None)
    takes = [one.taken or sum(held.bytes for held in one.held) for one in holdings]
    every = max(one.every for one in holdings)
    slowest = max(holdings, key=lambda one: one.commit_s)
    commit_s, step_s = slowest.commit_s or None, slowest.step_s or max(one.step_s for one in holdings) or None
    state = KeptState(
        durable_step=durable,
        newest_step=whole[0].number if whole else None,
        memory_bytes=min(sum(takes), MOST - 1),
        worker_memory_bytes=max(takes),
        every=every,
        commit_seconds=commit_s,
        step_seconds=step_s,
        overhead=commit_s / (every * step_s) if commit_s and step_s else None,
        resumed=run.round.resume.why if run.round is not None and run.round.resume is not None else "",
        refused=_refused(run),
    )
    state = _with_cost(run, state, whole)
    return Kept(state) if safe is None else _with_step(run, state, safe, now)


def _with_step(run: Run, state: KeptState, safe: _Step, now: float) -> Kept:
    since = _since(run, safe)
    state = replace(
        state,
        step=safe.number,
        round=safe.key[1],
        survives=_survives(run, safe),
        where=_where(run, safe),
        copies=safe.copies,
        bytes=min(_bytes(run, safe), MOST - 1),
    )
    return Kept(state, None if since is None else max(0.0, now - since))


def went_on(before: Run, formed: Round) -> str:
    """From where the ranks of a new round go on, and what they do again."""
    assert formed.resume is not None
    told_of = f"round {formed.number} goes on {formed.resume.why}"
    marks = before.round.progress.values() if before.round is not None else ()
    again = max((mark.step for mark in marks), default=0) - formed.resume.step
    if again > 0:
        told_of += f"; {again} {_plural('step', again)} {'is' if again == 1 else 'are'} done again"
    return told_of


# Against what it is safe -------------------------------------------------------------------------


def _survives(run: Run, safe: _Step) -> Literal["ranks", "worker", "domain"]:
    if safe.copies < 2:
        return "ranks"
    named = {member_id for ids in safe.holders.values() for member_id in ids if _named_domain(run, member_id)}
    apart = all(len({_domain(run, member_id) for member_id in ids}) > 1 for ids in safe.holders.values())
    return "domain" if named and apart else "worker"


def _named_domain(run: Run, member_id: MemberId) -> str | None:
    member = run.members.get(member_id)
    return member.domain if member is not None else None


def _domain(run: Run, member_id: MemberId) -> tuple[str, bool]:
    """A worker that names none is one of its own."""
    named = _named_domain(run, member_id)
    return (member_id, False) if named is None else (named, True)


def _since(run: Run, safe: _Step) -> float | None:
    """When the last of its ranks had as many copies as make it safe."""
    nth = 1 if safe.copies > 1 else 0
    times = []
    for rank, ids in safe.holders.items():
        told_at = sorted(run.held_since.get(i, {}).get((*safe.key, rank), float("inf")) for i in ids)
        times.append(told_at[nth])
    last = max(times)
    return None if last == float("inf") else last


# Where it is -------------------------------------------------------------------------------------


def _where(run: Run, safe: _Step) -> str:
    current = run.round
    seated = {seat.member_id for seat in current.seats} if current is not None else set()
    owner: dict[int, MemberId] = {}
    if current is not None and current.rank_count == safe.key[2]:
        for seat in current.seats:
            owner |= dict.fromkeys(range(len(owner), len(owner) + seat.procs), seat.member_id)
    own = sum(owner.get(rank) in ids for rank, ids in safe.holders.items())
    spares = sum(member_id not in seated for ids in safe.holders.values() for member_id in ids)
    buddies = sum(map(len, safe.holders.values())) - own - spares
    ranks = len(safe.holders)
    whose = "its" if ranks == 1 else "their"
    parts = [f"{own} of {ranks} {_plural('rank', ranks)} in the memory of {whose} own worker"]
    parts += [f"{buddies} {_plural('copy', buddies)} with other workers"] if buddies else []
    parts += [f"{spares} {_plural('copy', spares)} with spares"] if spares else []
    return ", ".join(parts if own or len(parts) == 1 else parts[1:])


def _bytes(run: Run, safe: _Step) -> int:
    found: dict[int, int] = defaultdict(int)
    for holding in run.holdings.values():
        for one in holding.held:
            if (one.step, one.round, one.ranks) == safe.key:
                found[one.rank] = max(found[one.rank], one.bytes)
    return sum(found.values())


def _refused(run: Run) -> str:
    return told([f"{_name(run, i)}: {one.refused}" for i, one in run.holdings.items() if one.refused], "; ")


def _name(run: Run, member_id: MemberId) -> str:
    member = run.members.get(member_id)
    return member.name if member is not None else member_id


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"


# What a loss would cost --------------------------------------------------------------------------


def _with_cost(run: Run, state: KeptState, whole: Sequence[_Step]) -> KeptState:
    """Of the worker whose loss would cost most; a spare has no rank to lose."""
    seats = run.round.seats if run.round is not None else ()
    here = [seat.member_id for seat in seats if seat.member_id in run.members]
    if not here:
        return state
    losses = _losses(run, whole, state.durable_step, here)
    worst = min(losses, key=lambda one: one.step)
    same = [one for one in losses if one.step == worst.step]
    steps = max(0, _done(run, whole) - worst.step)
    seconds = steps * state.step_seconds if state.step_seconds is not None else None
    who = "any one worker" if len(same) == len(here) > 1 else listed(_name(run, one.member_id) for one in same)
    cost = f"{steps} {_plural('step', steps)}" if steps else "no finished step"
    cost += f" ({seconds:.3g} s)" if steps and seconds is not None else ""
    missing = "what is left in memory would not be whole, " if worst.torn else ""
    goes_on = f"it goes on from step {worst.step} {worst.tier}" if worst.tier else "it begins again"
    sentence = f"the loss of {who} now costs {cost}: {missing}{goes_on}"
    return replace(state, loss=sentence, loss_steps=steps, loss_seconds=seconds)


def _losses(run: Run, whole: Sequence[_Step], durable: int | None, here: Sequence[MemberId]) -> list[_Loss]:
    needed = [(one.number, one.needs) for one in whole]
    bar = resuming.barred(run, charged=False)
    found = []
    for member_id in here:
        left = [number for number, needs in needed if member_id not in needs]
        usable = [number for number in left if durable is None or number >= durable]
        allowed = [number for number in usable if bar is None or number < bar] or (usable if durable is None else [])
        if allowed:
            found.append(_Loss(member_id, allowed[0], "in memory", torn=False))
        else:
            found.append(_Loss(member_id, durable or 0, "on disk" if durable else "", torn=not left))
    return found


def _done(run: Run, whole: Sequence[_Step]) -> int:
    """How far the training is."""
    last = run.round
    marks = [mark.step for mark in last.progress.values()] if last is not None else []
    begun = [last.resume.step] if last is not None and last.resume is not None else []
    return max([*marks, *begun, *(one.number for one in whole[:1])], default=0)
