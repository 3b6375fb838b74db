"""What do trainings get beyond their minima, and how do they fare?

Those that do not lend grow to what they want when there is room. Those that fill get what nobody else has a use for,
unless that was taken from them too soon the last times: all their workers stand still while one more joins. Bundles
that a pipeline holds and can no longer fill with work are of no use to it in that sense, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from muster.core.sharing.draft import Draft
from muster.core.sharing.hands import Hand, fitting, places, seat_of
from muster.core.sharing.plans import Seat, Standing
from muster.types.sharing import GENERATION_CLUSTER, Bundle, Crew, Gpu, Lease, Shares, gpus_of

SETTLE_S = 0.05  # a GPU that was released is often asked for again at once
WORTH_IT = 2.0  # what is filled is to be kept for so many times what the change costs
LONG_AGO = -1e9
UNMEASURED_S = 1.0  # what a change costs each worker, until that is known


class Crews:
    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._shares = draft.shares
        self.seats: list[Seat] = list(draft.fixed.seats)
        self.recheck = math.inf

    def _in_order(self) -> list[Hand]:
        return sorted(
            (hand for hand in self._draft.hands if not hand.lacks),
            key=lambda hand: (-hand.crew.priority, hand.crew.created, hand.crew.name),
        )

    # Those that do not lend

    def grow(self) -> None:
        """To what they want, from what is vacant or yielded, while nobody waits for it who comes first."""
        draft = self._draft
        if draft.fixed.first_waiting is not None:
            return
        for hand in self._in_order():
            crew = hand.crew
            if crew.lends or hand.count >= crew.wanted:
                continue
            spec = places(self._shares.pool, crew.gpus_each)
            among = (draft.vacant | draft.yielded) & ~draft.fixed.reserved
            for part in (among & draft.room.free, among):
                for mask in fitting(spec, part):
                    if hand.count >= crew.wanted:
                        break
                    if mask & ~(draft.vacant | draft.yielded) == 0:
                        self._give(hand, mask)
            self._anywhere(hand)

    def _anywhere(self, hand: Hand) -> None:
        """One that is placed once and stays may have GPUs that do not lie side by side."""
        each = hand.crew.gpus_each
        left = gpus_of(self._draft.vacant & ~self._draft.fixed.reserved)
        while hand.count < hand.crew.wanted and len(left) >= each:
            self._give(hand, sum(1 << gpu for gpu in left[:each]))
            left = left[each:]

    def _give(self, hand: Hand, mask: int, why: str = "") -> None:
        draft = self._draft
        draft.clear(mask, hand.crew.shown)
        draft.vacant &= ~mask
        seat = seat_of(self._shares.crews, hand.crew.training, mask, draft.room.free, why)
        hand.given.append(seat)
        self.seats.append(seat)

    # Those that fill

    def take_over(self) -> None:
        """What pipelines and lending trainings are given in the draft is theirs: note what is a training's."""
        for bundle, mask in self._draft.expands:
            one = self._draft.opens[bundle.pipeline]
            if one.crew is not None:
                hand = self._draft.hands.by_training[one.crew.training]
                seat = seat_of(self._shares.crews, one.crew.training, mask, self._draft.room.free)
                hand.given.append(seat)
                self.seats.append(seat)

    def fill(self) -> None:
        """What is idle, and has been for long enough to be worth it."""
        for hand in self._in_order():
            room = hand.crew.most - hand.count
            if hand.crew.elasticity != "fill" or room <= 0 or hand.count < hand.crew.wanted:
                continue
            self._fill(hand, room)

    def _fill(self, hand: Hand, room: int) -> None:
        draft, crew = self._draft, hand.crew
        spec = places(self._shares.pool, crew.gpus_each)
        idle = draft.vacant & draft.room.free
        found = list(fitting(spec, idle & crew.parked))
        found += fitting(spec, idle, found)
        found += fitting(spec, (idle | draft.left_over()) & draft.avail, found)
        found, loose = found[:room], self._loose(spec.tp_size) if len(found) < room else []
        slack = [lease for _, lease in loose][: room - len(found)]
        if not found and not slack:
            return
        since = [self._idle_since(crew, mask) for mask in found]
        since += [at for at, _ in loose][: len(slack)]
        if draft.now < (ready := self._worth_it(hand, since)):
            self.recheck = min(self.recheck, ready)
            return
        for mask in found:
            self._give(hand, mask, "nobody else has a use for it")
        for lease in slack:
            one = draft.opens[lease.bundle.pipeline]
            left = f"{one.remaining} left need {one.useful} of {one.count} bundles"
            draft.take_slack(one, lease, f"{one.name}: {left}; {crew.shown} fills the rest")
            self._give(hand, lease.mask, "its holder cannot fill it any more")

    def _worth_it(self, hand: Hand, since: Iterable[float]) -> float:
        """At once, if what it filled before was kept for long enough to be worth the change; if not, when what has been
        lost by waiting is as much as the change costs, which is never far from the best moment."""
        starts = sorted(since)
        crew = hand.crew
        switch_s = UNMEASURED_S if crew.vacate_s is None or crew.return_s is None else crew.vacate_s + crew.return_s
        cost = switch_s * max(1, hand.count)
        settled = starts[-1] + SETTLE_S
        if crew.kept_s is None or crew.kept_s * len(starts) > WORTH_IT * cost:
            return settled
        return max((sum(starts) + cost) / len(starts), settled)

    def _idle_since(self, crew: Crew, mask: int) -> float:
        """What was vacated for it need not lie idle first."""
        if (crew.training, mask) in self._shares.promised_seats:
            return LONG_AGO
        since = self._shares.vacant_since
        return max(self._draft.left_since(gpu) or since.get(gpu, LONG_AGO) for gpu in gpus_of(mask))

    def _loose(self, size: int) -> list[tuple[float, Lease]]:
        """Bundles of open pipelines that have more of them than work for them, with since when."""
        found = []
        for one in self._draft.opens.values():
            if not one.loose or one.spec.tp_size != size:
                continue
            since = self._shares.rollouts[one.name].reported_at
            if since is not None:
                found += [(since, lease) for _, lease in sorted(one.kept.items(), reverse=True)[: one.loose]]
        return sorted(found, key=lambda item: (item[0], str(item[1].bundle)))


# How they fare -----------------------------------------------------------------------------------


def standings(draft: Draft) -> dict[str, Standing]:
    waiting = draft.fixed.first_waiting
    return {hand.crew.training: _standing(draft, hand, waiting) for hand in draft.hands}


def _standing(draft: Draft, hand: Hand, waiting: Crew | None) -> Standing:
    crew, gpus = hand.crew, draft.shares.pool.gpus
    if hand.lacks:
        return _refusal(draft, hand, waiting)
    has = hand.count
    if has >= crew.wanted:
        more = has - crew.wanted
        fills = f", {_gpus(more * crew.gpus_each)} of them until somebody needs them" if more else ""
        return Standing(True, "Admitted", f"{has * crew.gpus_each} of {gpus} GPUs are its own{fills}")
    if crew.lends and (lent := lent_to(draft.shares, crew)):
        return Standing(True, "Lent", lent)
    behind = f"; {waiting.name} waits for them too" if waiting is not None else ""
    missing = (crew.wanted - has) * crew.gpus_each
    return Standing(True, "InsufficientGPUs", f"waits for {_gpus(missing)} to have {crew.wanted} workers{behind}")


def lent_to(shares: Shares, crew: Crew) -> str:
    """Who has the GPUs of its workers that wait for them."""
    return "; ".join(
        f"GPU {gpu} is {told}" for gpu in gpus_of(crew.parked) if (told := with_whom(shares, gpu)) is not None
    )


def with_whom(shares: Shares, gpu: Gpu) -> str | None:
    """Who has that GPU, in words; None if nobody has."""
    for bundle, lease in shares.leases.items():
        if lease.mask >> gpu & 1:
            return f"with {in_words(bundle)}"
    for worker in shares.workers.values():
        if worker.mask >> gpu & 1 and worker.training in shares.crews:
            return f"with training {shares.crews[worker.training].name}"
    return None


def in_words(bundle: Bundle) -> str:
    what = "generation" if bundle.cluster == GENERATION_CLUSTER else bundle.cluster
    return f"{bundle.pipeline}'s {what}"


def _refusal(draft: Draft, hand: Hand, waiting: Crew | None) -> Standing:
    shares, crew = draft.shares, hand.crew
    gpus, need = shares.pool.gpus, crew.min * crew.gpus_each
    workers = f"{crew.min} worker{'s' if crew.min > 1 else ''} × {crew.gpus_each}"
    if need > gpus:
        never = f"needs {_gpus(need)} ({workers}), there are only {gpus} here: it can never start"
        return Standing(crew.admitted, "InsufficientGPUs", never)
    free = draft.room.free.bit_count()
    message = f"needs {_gpus(need)} ({workers}), {free} of {gpus} free; held by {_held_by(shares, crew) or 'nobody'}"
    if waiting is not None and waiting.training != crew.training and not crew.admitted:
        return Standing(False, "Queued", f"{message}; {waiting.name} is before it")
    return Standing(crew.admitted, "InsufficientGPUs", message)


def _held_by(shares: Shares, crew: Crew) -> str:
    held: dict[str, int] = {}
    for worker in shares.workers.values():
        if worker.training != crew.training and worker.training in shares.crews:
            name = shares.crews[worker.training].name
            held[name] = held.get(name, 0) + worker.mask.bit_count()
    for bundle, lease in shares.leases.items():
        name = f"{bundle.pipeline}/{bundle.cluster}"
        held[name] = held.get(name, 0) + lease.mask.bit_count()
    return ", ".join(f"{name} ({count})" for name, count in held.items())


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
