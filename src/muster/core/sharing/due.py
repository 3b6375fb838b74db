"""How much of the pool is each open pipeline's due?

Proportional to weight · remaining · tp over the GPUs that generation may use, capped by what a pipeline can use. With
unequal maps it is the weighted max-min share over reachable GPUs: the split that minimises Σ due² / claim, found class
by class (a class is the GPUs that the same pipelines reach), which for equal maps is one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.types.sharing import PipelineId

SWEEPS = 60
CLOSE_ENOUGH = 1e-9


@dataclass(frozen=True)
class ShareClaim:
    """What an open pipeline may be given. `most` is in GPUs."""

    pipeline: PipelineId
    claim: float
    reach: int  # mask of the GPUs that it can use now
    most: float


def shares(claims: Sequence[ShareClaim]) -> dict[PipelineId, float]:
    """Each pipeline's due, in GPUs."""
    classes = _classes(claims)
    given: dict[PipelineId, float] = {claim.pipeline: 0.0 for claim in claims}
    parts: list[dict[PipelineId, float]] = [{} for _ in classes]
    for _ in range(1 if len(classes) == 1 else SWEEPS):
        moved = 0.0
        for index, (size, members) in enumerate(classes):
            before = parts[index]
            elsewhere = {one.pipeline: given[one.pipeline] - before.get(one.pipeline, 0.0) for one in members}
            parts[index] = _split(size, members, elsewhere)
            for one in members:
                new = elsewhere[one.pipeline] + parts[index][one.pipeline]
                moved = max(moved, abs(new - given[one.pipeline]))
                given[one.pipeline] = new
        if moved < CLOSE_ENOUGH:
            break
    return given


def _classes(claims: Sequence[ShareClaim]) -> list[tuple[int, list[ShareClaim]]]:
    """Sets of GPUs that the same pipelines reach, with their sizes."""
    groups: list[tuple[int, list[ShareClaim]]] = []
    by_reach: dict[int, list[ShareClaim]] = {}
    for claim in claims:
        by_reach.setdefault(claim.reach, []).append(claim)
    for reach, members in by_reach.items():
        left, found = reach, []
        for mask, others in groups:
            both = mask & left
            if both:
                found.append((both, [*others, *members]))
                if mask & ~both:
                    found.append((mask & ~both, others))
                left &= ~both
            else:
                found.append((mask, others))
        if left:
            found.append((left, members))
        groups = found
    return [(mask.bit_count(), members) for mask, members in groups]


def _split(size: int, members: Sequence[ShareClaim], elsewhere: Mapping[PipelineId, float]) -> dict[PipelineId, float]:
    """Pour `size` GPUs so that the lowest levels (due ÷ claim) rise first and nobody gets more than it can use."""
    poured = {one.pipeline: 0.0 for one in members}
    open_ones = [one for one in members if one.most - elsewhere[one.pipeline] > CLOSE_ENOUGH and one.claim > 0]
    left = float(size)
    # Levels at which somebody joins or is full, in order; between two of them everyone who is in rises alike.
    marks = [(elsewhere[one.pipeline] / one.claim, 0, one) for one in open_ones]
    marks += [(one.most / one.claim, 1, one) for one in open_ones]
    marks.sort(key=lambda mark: (mark[0], mark[1], mark[2].pipeline))
    rising: dict[PipelineId, ShareClaim] = {}
    pull, level = 0.0, marks[0][0] if marks else 0.0
    for at, kind, one in marks:
        cost = pull * (at - level)
        if rising and cost >= left:
            break
        left -= cost
        level = at
        if kind == 0:
            rising[one.pipeline] = one
            pull += one.claim
        else:
            rising.pop(one.pipeline, None)
            pull -= one.claim
            poured[one.pipeline] = one.most - elsewhere[one.pipeline]
    if rising and left > 0 and pull > 0:
        level += left / pull
    for pipeline, one in rising.items():
        poured[pipeline] = min(one.most, level * one.claim) - elsewhere[pipeline]
    return poured
