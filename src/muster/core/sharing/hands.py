"""What do trainings hold of the pool, and which of it may be taken? Kept while a plan is made.

A training's workers are alike: which of its GPUs it gives is for others to choose, how many is for its minimum to say.
One that does not lend gives nothing but GPUs on which it has no worker and for which it has no use.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from muster.core.sharing.plans import Seat
from muster.types.sharing import ClusterSpec, Crew, Gpu, LeaseState, Pool, Shares, WorkerLease


@functools.lru_cache(maxsize=64)
def places(pool: Pool, gpus_each: int) -> ClusterSpec:
    """Where workers of that size fit: side by side and inside one node, or on whole nodes."""
    per_node = pool.gpus_per_node
    if gpus_each > per_node:
        whole = pool.gpus // gpus_each * gpus_each if gpus_each % per_node == 0 else 0
        return ClusterSpec(range(whole), gpus_each)
    fitting = per_node // gpus_each * gpus_each
    gpus = [gpu for gpu in range(pool.gpus) if gpu % per_node < fitting]
    last = pool.gpus % per_node  # of a last node that is not whole
    if last:
        gpus = [gpu for gpu in gpus if gpu < pool.gpus - last % gpus_each]
    return ClusterSpec(gpus, gpus_each)


@dataclass
class Hand:
    """One training's part."""

    crew: Crew
    held: dict[int, WorkerLease]  # mask → lease that stays, as far as is known
    given: list[Seat] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.held) + len(self.given)

    def may_give(self, masks: Collection[int]) -> bool:
        """Whether its minimum is there without these. What is to come does not count: it may take a while."""
        if not self.crew.lends or len(self.held) - len(masks) < self.crew.min:
            return False
        going = sum(self.is_ready(mask) for mask in masks)
        return not going or sum(map(self.is_ready, self.held)) - going >= self.crew.min

    def is_ready(self, mask: int) -> bool:
        """A worker is there, and has joined its world."""
        return self.crew.ready is None or mask & ~self.crew.ready == 0

    @property
    def lacks(self) -> int:
        """Workers to its minimum."""
        return max(0, self.crew.min - self.count)


class Hands:
    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.leaves: dict[str, str] = {}  # key of a worker's lease → why it has to go
        self.asked_for = 0  # GPUs of bundles that would do for those that have nothing
        self.by_training = {uid: Hand(crew, {}) for uid, crew in sorted(shares.crews.items())}  # the same every time
        for lease in sorted(shares.workers.values(), key=lambda one: one.mask):
            if lease.state is LeaseState.HELD and lease.training in self.by_training:
                self.by_training[lease.training].held[lease.mask] = lease
        self._at: dict[Gpu, WorkerLease] | None = None
        for hand in self.by_training.values():
            self._drop_surplus(hand)

    def __iter__(self) -> Iterator[Hand]:
        return iter(self.by_training.values())

    def _drop_surplus(self, hand: Hand) -> None:
        """What it asked for once and does not want any more. Workers that do not lend leave in their own way first."""
        over = len(hand.held) - hand.crew.most
        if over <= 0:
            return
        going = [lease for lease in hand.held.values() if not lease.mask & hand.crew.using]
        if hand.crew.lends:
            going += [lease for lease in reversed(self.protected_first(hand)) if lease not in going]
        for lease in going[:over]:
            self.take(lease, f"{hand.crew.name} has more than it wants")

    def at(self, gpu: Gpu) -> WorkerLease | None:
        """Whose worker has that GPU, and stays as far as is known."""
        if self._at is None:
            self._at = {one: lease for hand in self for lease in hand.held.values() for one in _bits(lease.mask)}
        lease = self._at.get(gpu)
        return lease if lease is not None and lease.key not in self.leaves else None

    def mask(self) -> int:
        """All that trainings hold and keep."""
        whole = 0
        for hand in self:
            for mask in hand.held:
                whole |= mask
        return whole

    def in_the_way(self, need: int) -> list[WorkerLease] | None:
        """The workers on these GPUs, if all of them may be taken."""
        found = {lease.key: lease for gpu in _bits(need) if (lease := self.at(gpu)) is not None}
        for uid, masks in by_training(found.values()).items():
            if not self.by_training[uid].may_give(masks):
                return None
        return list(found.values())

    def keepers(self, need: int) -> str:
        """Those that keep these GPUs, in words."""
        found = {lease.training for gpu in _bits(need) if (lease := self.at(gpu)) is not None}
        told = sorted(
            f"{self._shares.crews[uid].shown}" + (" (its minimum)" if self._shares.crews[uid].lends else "")
            for uid in found
        )
        return ", ".join(told)

    def take(self, lease: WorkerLease, why: str) -> None:
        self.by_training[lease.training].held.pop(lease.mask, None)
        self.leaves[lease.key] = why

    def protected_first(self, hand: Hand) -> list[WorkerLease]:
        """Those that it would rather give come last: who is not there yet, what somebody with nothing could use only
        whole, spares, GPUs on which pipelines train."""
        resting, trained = hand.crew.resting, self._trained_on
        return sorted(
            hand.held.values(),
            key=lambda one: (
                not hand.is_ready(one.mask),
                bool(one.mask & self.asked_for),
                bool(one.mask & resting),
                bool(one.mask & trained),
                one.mask,
            ),
        )

    @functools.cached_property
    def _trained_on(self) -> int:
        return trained_on(self._shares)


def by_training(leases: Iterable[WorkerLease]) -> dict[str, list[int]]:
    """The masks of each training's."""
    found: dict[str, list[int]] = {}
    for lease in leases:
        found.setdefault(lease.training, []).append(lease.mask)
    return found


def trained_on(shares: Shares) -> int:
    """GPUs that belong to a stage of some pipeline that is granted whole."""
    whole = 0
    for pipeline in shares.pipelines.values():
        for spec in pipeline.fixed:
            whole |= spec.mask
    return whole


def seat_of(crews: Mapping[str, Crew], training: str, mask: int, free: int, why: str = "") -> Seat:
    return Seat(training, crews[training].name, mask, mask & ~free == 0, why)


def fitting(spec: ClusterSpec, among: int, taken: Iterable[int] = ()) -> Iterator[int]:
    """Places whose GPUs are all among these, the lowest first."""
    left = among & spec.mask
    for mask in taken:
        left &= ~mask
    if spec.tp_size == 1:
        while left:
            low = left & -left
            yield low
            left ^= low
        return
    while left:
        low = left & -left
        mask = spec.masks[spec.rank_at[low.bit_length() - 1]]
        if mask & ~left == 0:
            yield mask
        left &= ~mask & ~low


def _bits(mask: int) -> Iterator[Gpu]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
