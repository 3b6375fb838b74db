"""What must hold of every state, and of every plan? Each function returns what is broken, in words."""

from __future__ import annotations

import math

from muster.core.sharing.plans import SharePlan
from muster.types.sharing import GENERATION_CLUSTER, Bundle, Lease, LeaseState, Priority, Shares, gpus_of


def broken(shares: Shares) -> list[str]:
    """Of a state: a GPU is in one lease, a lease is what its name says, fixed clusters are held whole or not at all."""
    found, seen = [], 0
    for bundle, lease in shares.leases.items():
        if lease.mask & seen:
            found.append(f"GPU {gpus_of(lease.mask & seen)} is in two leases, one of them {bundle}")
        seen |= lease.mask
        pipeline = shares.pipelines.get(bundle.pipeline)
        if pipeline is None or bundle.cluster not in pipeline.clusters:
            found.append(f"{bundle} is leased to nobody")
            continue
        spec = pipeline.clusters[bundle.cluster]
        if not 0 <= bundle.rank < len(spec.masks) or spec.masks[bundle.rank] != lease.mask:
            found.append(f"{bundle} has other GPUs than its own")
        if lease.epoch > shares.epoch:
            found.append(f"{bundle} is ahead of the epoch")
        if lease.priority is Priority.GENERATION and bundle.cluster != GENERATION_CLUSTER:
            found.append(f"{bundle} generates, and is not the generation cluster")
    for key, worker in shares.workers.items():
        if worker.mask & seen:
            found.append(
                f"GPU {gpus_of(worker.mask & seen)} has two holders, one of them a worker of {worker.training}"
            )
        seen |= worker.mask
        if key != worker.key or not worker.mask or worker.training not in shares.crews:
            found.append(f"{key} is leased to nobody")
        elif worker.mask.bit_count() != shares.crews[worker.training].gpus_each:
            found.append(f"{key} has another number of GPUs than its training asks for")
    if seen & ~shares.pool.mask:
        found.append(f"GPU {gpus_of(seen & ~shares.pool.mask)} is not in the pool")
    found += _half_held(shares)
    found += [
        f"{one.pipeline} asks and is not registered" for one in shares.requests if one.pipeline not in shares.pipelines
    ]
    found += [f"{name} has demand and is not registered" for name in shares.rollouts if name not in shares.pipelines]
    return found


def _half_held(shares: Shares) -> list[str]:
    if shares.lost_gpus:
        return []  # what was on a lost node is gone
    fixed: dict[tuple[str, str], set[int]] = {}
    for bundle, lease in shares.leases.items():
        if lease.priority is not Priority.GENERATION:
            fixed.setdefault((bundle.pipeline, bundle.cluster), set()).add(bundle.rank)
    found = []
    for (name, cluster), ranks in fixed.items():
        pipeline = next((one for key, one in shares.pipelines.items() if key == name), None)
        if pipeline is not None and len(ranks) != len(pipeline.clusters[cluster].masks):
            found.append(f"{name}/{cluster} is held in part at a fixed priority")
    return found


def broken_by(shares: Shares, plan: SharePlan) -> list[str]:
    """Of a plan: the rules that need no due shares to be checked."""
    found = []
    vacated = _free(shares)
    for bundle, lease in shares.leases.items():
        if lease.state is LeaseState.DRAINING and shares.pipelines[bundle.pipeline].movable:
            vacated |= lease.mask
    for worker in shares.workers.values():
        if worker.state is LeaseState.DRAINING or worker.key in plan.leaves:
            vacated |= worker.mask
    ready = _free(shares)
    for bundle in plan.shrinks:
        found += _bad_shrink(shares, bundle)
        vacated |= shares.leases[bundle].mask if bundle in shares.leases else 0
    granting = sum_of(shares, LeaseState.GRANTING)
    used = 0
    for mask, is_ready, name in _takes(plan):
        if mask & used:
            found.append(f"{name} is given GPU {gpus_of(mask & used)}, which something else in the plan gets too")
        used |= mask
        if mask & ~(vacated | granting):
            found.append(f"{name} is given GPU {gpus_of(mask & ~vacated)}, which nobody vacates")
        if is_ready != (mask & ~ready == 0):
            found.append(f"{name} is ready and its GPUs are not, or the other way round")
    for bundle in plan.shrinks:
        if bundle in shares.leases and not shares.leases[bundle].mask & used:
            found.append(f"{bundle} is shrunk for nothing")
    return found + _bad_leaves(shares, plan, used) + _idle_and_wanted(shares, plan, used)


def _bad_leaves(shares: Shares, plan: SharePlan, used: int) -> list[str]:
    found = []
    for key in plan.leaves:
        worker = shares.workers.get(key)
        if worker is None or worker.state is not LeaseState.HELD:
            found.append(f"{key} cannot leave")
        elif not plan.leaves[key]:
            found.append(f"{key} leaves and nobody says why")
        elif not worker.mask & used and not _gives_up(shares, plan, worker.training):
            found.append(f"{key} leaves for nothing")
    for uid, crew in shares.crews.items():
        held = _held(shares, uid)
        gone = [key for key in held if key in plan.leaves]
        if gone and len(held) - len(gone) < min(crew.min, len(held)) and crew.most >= len(held):
            found.append(f"the minimum of {uid} is taken")
        if not crew.lends and any(shares.workers[key].mask & crew.using for key in gone):
            found.append(f"{uid} does not lend, and a worker of it is taken")
        given = sum(seat.training == uid for seat in plan.seats)
        if given and len(held) - len(gone) + given > crew.most:
            found.append(f"{uid} gets more than it can use")
        if any(seat.training == uid and seat.mask.bit_count() != crew.gpus_each for seat in plan.seats):
            found.append(f"{uid} gets places of another size")
    return found


def _gives_up(shares: Shares, plan: SharePlan, training: str) -> bool:
    """Whether it has more than it wants, or moves to another place."""
    more = len(_held(shares, training)) > shares.crews[training].most
    return more or any(seat.training == training for seat in plan.seats)


def _held(shares: Shares, training: str) -> list[str]:
    return [key for key, one in shares.workers.items() if one.training == training and one.state is LeaseState.HELD]


def _bad_shrink(shares: Shares, bundle: Bundle) -> list[str]:
    lease = shares.leases.get(bundle)
    if lease is None or lease.state is not LeaseState.HELD or lease.priority is not Priority.GENERATION:
        return [f"{bundle} cannot be shrunk"]
    return [] if shares.pipelines[bundle.pipeline].movable else [f"{bundle} is shrunk and its pipeline has no hooks"]


def _takes(plan: SharePlan) -> list[tuple[int, bool, str]]:
    grants = [(grant.mask, grant.ready, f"request #{grant.seq}") for grant in plan.grants]
    seats = [(seat.mask, seat.ready, f"training {seat.training}") for seat in plan.seats]
    return [*grants, *seats, *((expand.mask, expand.ready, str(expand.bundle)) for expand in plan.expands)]


def _free(shares: Shares) -> int:
    taken = 0
    for lease in shares.leases.values():
        taken |= lease.mask
    for worker in shares.workers.values():
        taken |= worker.mask
    for gpu in shares.lost_gpus:
        taken |= 1 << gpu
    return shares.pool.mask & ~taken


def sum_of(shares: Shares, state: LeaseState) -> int:
    mask = 0
    for lease in shares.leases.values():
        if lease.state is state:
            mask |= lease.mask
    return mask


def after(shares: Shares, plan: SharePlan) -> dict[Bundle, Lease | None]:
    """Generation bundles as they will be when everything in the plan has been done."""
    kept: dict[Bundle, Lease | None] = {
        bundle: lease
        for bundle, lease in shares.leases.items()
        if lease.priority is Priority.GENERATION
        and lease.state is not LeaseState.DRAINING
        and bundle not in plan.shrinks
        and not any(grant.mask & lease.mask for grant in plan.grants)
    }
    return kept | {expand.bundle: None for expand in plan.expands}


def _idle_and_wanted(shares: Shares, plan: SharePlan, used: int) -> list[str]:
    """Work conserving: no idle GPU that an open pipeline which holds less than it can use could reach."""
    idle = _free(shares) & ~used
    holdings = after(shares, plan)
    found = []
    for name, rollout in shares.rollouts.items():
        pipeline = shares.pipelines[name]
        if not pipeline.admitted or not pipeline.movable or rollout.remaining <= 0:
            continue
        spec = pipeline.infer
        useful = math.ceil(rollout.remaining / spec.slots_per_bundle) if spec.slots_per_bundle else rollout.remaining
        held = sum(bundle.pipeline == name for bundle in holdings)
        busy = {
            bundle.rank for bundle in shares.leases if bundle.pipeline == name and bundle.cluster == GENERATION_CLUSTER
        }
        if held < useful:
            found += [
                f"GPU {gpus_of(mask)} is idle, and {name} could use it"
                for rank, mask in enumerate(spec.masks)
                if mask & ~idle == 0 and rank not in busy
            ]
    return found
