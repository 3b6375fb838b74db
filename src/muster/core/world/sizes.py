"""Does the size that was asked for work? If not, the one before is formed again.

A program may be unable to run with another number of workers. The first round at a new size that its own ranks end,
before any of them gets further than the run had been, is put down to the size: it costs no restart, and the size is
not tried again before somebody asks for one. Where the size before would need workers that are lent, there is nothing
to go back to, and the failure costs what any does.
"""

from __future__ import annotations

from muster.core.world import last_words
from muster.core.world.run import Run, advanced
from muster.types import plural
from muster.types.records import replace
from muster.types.world import RankEnd, Role, Round, Settings, TakenBack

TRIAL_S = 600.0  # ranks that tell no steps and have run for so long have shown that they can
BACK_S = 60.0  # how long workers are awaited at most that the size before needs


def asked(run: Run, target: int, *, lending: bool = False) -> Run:
    """Another target, or the same once more: the size that the world has now is the one to come back to.

    A target that follows what is lent is nobody's wish to try again a size that did not work.
    """
    size = run.round.world_size if run.round is not None else None
    back = run.taken_back
    keeps = lending and back is not None and back.target == run.target and back.size < target
    back = replace(back, target=target) if keeps and back is not None else None
    return replace(run, target=target, proven=size if run.proven is None else run.proven, taken_back=back)


def works(run: Run, closed: Round) -> bool:
    """Whether that round got on."""
    if closed.progress or run.best_step is not None:
        return advanced(run, closed)
    assert closed.recall is not None
    return closed.up_at is not None and closed.recall.at - closed.up_at >= TRIAL_S


def on_trial(run: Run) -> bool:
    """Whether the world has another size than before, and ranks that tell steps have not told any there."""
    current = run.round
    if current is None or run.proven is None or run.proven == current.world_size:
        return False
    return run.best_step is not None and not current.progress


def proven_after(run: Run, closed: Round) -> int | None:
    """The size to come back to once that round is over; None: the one that was asked for has been seen to work."""
    if run.proven is None or not works(run, closed):
        return run.proven
    return None if closed.world_size == run.aim else closed.world_size


def taken_back(run: Run, closed: Round, first: RankEnd | None) -> TakenBack | None:
    """What follows from a failure of that round that would cost a restart; None if it is not the size's."""
    proven = run.proven
    if proven is None or proven in (closed.world_size, run.aim) or works(run, closed):
        return None
    if not run.settings.min <= proven <= run.settings.max or not _can_be_formed(run, proven):
        return None
    assert closed.recall is not None
    cause = closed.recall.reason if first is None else last_words.report(first)
    why = f"{plural.workers(closed.world_size)} failed without progress: {cause}"
    return TakenBack(run.target, proven, why)


def _can_be_formed(run: Run, size: int) -> bool:
    """Whether there are so many without those that are lent."""
    able = (Role.ACTIVE, Role.SPARE)
    have = [member for member in run.members.values() if member.role in able and member.name not in run.lent]
    return not run.lent or len(have) >= size


def back_s(settings: Settings) -> float:
    """How long to wait for workers that the size before needs: fewer would be another size that nobody has tried."""
    return max(settings.last_call_s, min(BACK_S, settings.below_min_timeout_s))
