"""Pools, pipelines and states for tests of the planner."""

from __future__ import annotations

from hypothesis import strategies as st

from muster.types.sharing import (
    GENERATION_CLUSTER,
    Bundle,
    ClusterSpec,
    Lease,
    LeaseState,
    Pipeline,
    PipelineId,
    Pool,
    Priority,
    Request,
    Rollout,
    Shares,
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
