"""Who gets which GPUs next, and why?

`plan(shares, now)` looks at everything that is known and answers what to shrink, grant and expand. It is asked again
after every change, so a plan holds nothing back for later: grants and expands whose GPUs are still being vacated are
named, and made when they are. Draining GPUs count as vacant for planning, so nothing is shrunk twice for one purpose.

The stages, in order:

    fixed      whole-cluster requests and the minima of trainings (`fixed`)
    grown      trainings that do not lend, to what they want (`crews`)
    promised   what the last plan shrank for somebody who can still use it (`filling`)
    vacant     free GPUs to open pipelines, whoever is furthest below its due first
    yielded    bundles of holders that have nothing left to do
    moved      from one busy pipeline to another, calmly (`moving`)
    turns      one bundle each and somebody waits: the longest-held moves on
    filled     what nobody has a use for, to trainings that fill (`crews`)

Trainings that lend stand beside the pipelines in the middle stages, with what they want above their minima.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from muster.core.sharing.crews import Crews, standings
from muster.core.sharing.draft import Draft
from muster.core.sharing.filling import Filling
from muster.core.sharing.moving import Moving
from muster.core.sharing.plans import Expand, SharePlan
from muster.core.sharing.room import holders, listed
from muster.types.sharing import WORKERS, PipelineId, Priority, Shares


def plan(shares: Shares, now: float) -> SharePlan:
    draft = Draft(shares, now)
    filling, moving, crews = Filling(draft), Moving(draft), Crews(draft)
    crews.grow()
    filling.keep_promises()
    filling.fill()
    before = len(draft.shrinks)
    moving.move()
    moving.take_turns()
    if len(draft.shrinks) > before:
        filling.fill()  # whoever gave a bundle away may be able to use what nobody could before
    crews.take_over()
    crews.fill()
    recheck = min(draft.fixed.recheck, moving.recheck, crews.recheck)
    return SharePlan(
        shrinks=tuple(draft.shrinks),
        grants=tuple(draft.fixed.grants),
        expands=tuple(
            Expand(bundle, mask, mask & ~draft.room.free == 0)
            for bundle, mask in draft.expands
            if bundle.cluster != WORKERS
        ),
        reasons=draft.fixed.reasons | dict(_waiting(draft)) | {str(at): why for at, why in draft.shrinks.items()},
        recheck_at=None if recheck == math.inf else recheck,
        leaves=draft.hands.leaves,
        seats=tuple(crews.seats),
        standings=standings(draft),
    )


def dues(shares: Shares, now: float) -> dict[PipelineId, float]:
    """How many GPUs the generation of each open pipeline should have."""
    opens = Draft(shares, now).opens
    return {name: one.due * one.spec.tp_size for name, one in opens.items() if one.crew is None}


def _waiting(draft: Draft) -> Iterator[tuple[str, str]]:
    """What those wait for that have nothing."""
    for request in draft.shares.requests:
        one = draft.opens.get(request.pipeline)
        if one is None or one.count or request.priority is not Priority.GENERATION:
            continue
        told = "no bundle that it can use is free" if one.most else "all GPUs of its map are in other hands"
        if blocked := one.spec.mask & (draft.room.fixed | draft.room.frozen):
            told += f"; {holders(draft.shares, blocked)} holds GPU {listed(blocked)}"
        yield f"#{request.seq}", told
