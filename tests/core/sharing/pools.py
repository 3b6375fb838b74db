"""Pools, pipelines and states for tests of the planner."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from muster.core.sharing.hands import places
from muster.core.sharing.leases import used_mask
from muster.types.sharing import (
    GENERATION_CLUSTER,
    Bundle,
    ClusterSpec,
    Crew,
    Elasticity,
    Lease,
    LeaseState,
    Pipeline,
    PipelineId,
    Pool,
    Priority,
    Request,
    Rollout,
    Shares,
    WorkerLease,
    gpus_of,
    mask_of,
)

NOW = 100.0


def a_pipeline(name: str, infer: ClusterSpec, **clusters: ClusterSpec) -> Pipeline:
    return Pipeline(PipelineId(name), {GENERATION_CLUSTER: infer, **clusters}, admitted=True)


def a_lease(pipeline: Pipeline, rank: int, state: LeaseState = LeaseState.HELD, held_since: float = 0.0) -> Lease:
    bundle = Bundle(pipeline.pipeline_id, GENERATION_CLUSTER, rank)
    return Lease(bundle, pipeline.infer.masks[rank], state, 1, Priority.GENERATION, held_since, held_since)


def fixed_leases(pipeline: Pipeline, cluster: str, priority: Priority = Priority.ACTOR_TRAINING) -> list[Lease]:
    spec = pipeline.clusters[cluster]
    return [
        Lease(Bundle(pipeline.pipeline_id, cluster, rank), mask, LeaseState.HELD, 1, priority, 0.0)
        for rank, mask in enumerate(spec.masks)
    ]


def a_state(
    gpus: int,
    pipelines: list[Pipeline],
    *,
    leases: list[Lease] | None = None,
    remaining: dict[str, int] | None = None,
    requests: tuple[Request, ...] = (),
    waiting: dict[str, float] | None = None,
) -> Shares:
    opened = {
        PipelineId(name): Rollout(count, waiting_since=(waiting or {}).get(name))
        for name, count in (remaining or {}).items()
    }
    return Shares(
        pool=Pool(gpus, gpus_per_node=max(1, gpus)),
        pipelines={one.pipeline_id: one for one in pipelines},
        leases={lease.bundle: lease for lease in leases or []},
        requests=requests,
        rollouts=opened,
        epoch=1,
    )


def a_request(
    seq: int, pipeline: str, cluster: str, priority: Priority = Priority.ACTOR_TRAINING, since: float = NOW
) -> Request:
    return Request(seq, PipelineId(pipeline), cluster, priority, since)


@st.composite
def states(
    draw: st.DrawFn, *, equal_maps: bool = False, most_gpus: int = 8, tps: tuple[int, ...] = (1, 1, 1, 2)
) -> Shares:
    """Any state that the scheduler could be in, small enough to be understood."""
    nodes, per_node = draw(st.sampled_from([(1, 2), (1, 4), (2, 2), (2, 4), (1, 8)]))
    total = min(most_gpus, nodes * per_node)
    pipelines: list[Pipeline] = []
    tp = draw(st.sampled_from([1, 1, 2])) if equal_maps else 1
    for index in range(draw(st.integers(1, 5))):
        if not equal_maps:
            tp = draw(st.sampled_from(tps))
        blocks = [tuple(range(at, at + tp)) for at in range(0, total - tp + 1, tp)]
        chosen = blocks if equal_maps else draw(st.lists(st.sampled_from(blocks), min_size=1, unique=True))
        slots = draw(st.sampled_from([None, None, 4]))
        infer = ClusterSpec([gpu for block in chosen for gpu in block], tp, slots)
        train = ClusterSpec(draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=2, unique=True)))
        pipelines.append(a_pipeline(f"p{index}", infer, actor_train=train))
    return _occupied(draw, total, pipelines)


def _occupied(draw: st.DrawFn, total: int, pipelines: list[Pipeline]) -> Shares:
    used, leases, requests = 0, [], []
    for index, pipeline in enumerate(pipelines):
        stage = draw(st.sampled_from(["idle", "idle", "trains", "wants to train"]))
        if stage == "trains" and not pipeline.clusters["actor_train"].mask & used:
            leases += fixed_leases(pipeline, "actor_train")
            used |= pipeline.clusters["actor_train"].mask
        elif stage == "wants to train":
            since = NOW - draw(st.sampled_from([0.0, 5.0, 40.0]))
            priority = draw(st.sampled_from([Priority.ACTOR_TRAINING, Priority.OLD_LOG_PROBS]))
            requests.append(a_request(index + 1, pipeline.pipeline_id, "actor_train", priority, since))
    for pipeline in pipelines:
        for rank, mask in enumerate(pipeline.infer.masks):
            if not mask & used and draw(st.booleans()):
                state = draw(st.sampled_from([LeaseState.HELD] * 4 + [LeaseState.GRANTING, LeaseState.DRAINING]))
                leases.append(a_lease(pipeline, rank, state, NOW - draw(st.sampled_from([0.0, 1.0, 20.0]))))
                used |= mask
    remaining: dict[str, int] = {
        pipeline.pipeline_id: draw(st.integers(0, 40))
        for pipeline in pipelines
        if draw(st.booleans()) or draw(st.booleans())
    }
    waiting: dict[str, float] = {name: NOW - draw(st.sampled_from([0.0, 3.0, 50.0])) for name in remaining}
    return a_state(total, pipelines, leases=leases, remaining=remaining, requests=tuple(requests), waiting=waiting)


# Trainings ---------------------------------------------------------------------------------------


def a_crew(
    name: str, least: int, wanted: int, most: int | None = None, elasticity: Elasticity = "fixed", **known: object
) -> Crew:
    values: dict[str, object] = {"gpus_each": 1, "min": least, "wanted": wanted} | known
    most = wanted if most is None else most
    return Crew(name, f"default/{name}", most=most, elasticity=elasticity, **values)  # type: ignore[arg-type]


def crewed(shares: Shares, crew: Crew, *gpus: int | tuple[int, ...], since: float = 0.0) -> Shares:
    """With a training that has workers on these GPUs."""
    masks = [mask_of([one] if isinstance(one, int) else one) for one in gpus]
    leases = [WorkerLease(crew.training, mask, LeaseState.HELD, since, since) for mask in masks]
    crew = replace(crew, using=sum(masks), admitted=crew.admitted or bool(masks))
    return replace(
        shares,
        crews={**shares.crews, crew.training: crew},
        workers={**shares.workers, **{one.key: one for one in leases}},
    )


@st.composite
def shared_states(draw: st.DrawFn) -> Shares:
    """Pipelines and trainings on one pool."""
    shares = draw(states())
    for index in range(draw(st.integers(1, 3))):
        elasticity: Elasticity = draw(st.sampled_from(["fixed", "lend", "fill"]))
        each = draw(st.sampled_from([1, 1, 1, 2]))
        least = draw(st.integers(0, 3))
        wanted = least + draw(st.integers(0, 3))
        most = wanted + (draw(st.integers(0, 4)) if elasticity == "fill" else 0)
        admitted = draw(st.booleans())
        priority, asked_at = draw(st.integers(-1, 1)), NOW - draw(st.sampled_from([0.0, 5.0, 40.0]))
        known = {"gpus_each": each, "priority": priority, "created": float(index), "asked_at": asked_at}
        crew = a_crew(f"t{index}", least, wanted, most, elasticity, admitted=admitted, **known)
        free = shares.pool.mask & ~used_mask(shares)
        room = [mask for mask in places(shares.pool, each).masks if mask & ~free == 0]
        count = draw(st.integers(min(least, len(room)), min(len(room), most + 1))) if admitted and room else 0
        chosen = [tuple(gpus_of(mask)) for mask in room[:count]]
        shares = crewed(shares, crew, *chosen, since=NOW - draw(st.sampled_from([1.0, 20.0])))
        here = shares.crews[crew.training]
        masks = [mask_of(one) for one in chosen]
        using = sum(mask for mask in masks if draw(st.integers(0, 4)))
        parked = draw(st.integers(0, shares.pool.mask)) & ~used_mask(shares)
        ready = draw(st.sampled_from([None, using & draw(st.integers(0, shares.pool.mask))]))
        here = replace(
            here,
            ready=ready,
            using=using,
            admitted=admitted,
            parked=parked,
            vacate_s=draw(st.sampled_from([None, 0.2])),
        )
        shares = replace(shares, crews={**shares.crews, crew.training: here})
        for mask in masks:
            if draw(st.integers(0, 4)) == 0:
                key = WorkerLease(crew.training, mask, LeaseState.HELD, 0.0).key
                lease = replace(shares.workers[key], state=LeaseState.DRAINING)
                shares = replace(shares, workers={**shares.workers, key: lease})
    since = {gpu: NOW - draw(st.sampled_from([0.0, 1.0, 60.0])) for gpu in range(shares.pool.gpus)}
    return replace(shares, vacant_since=since)
