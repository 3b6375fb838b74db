"""Hypothesis strategies for trainings: anything that the codec must carry."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import strategies as st

from muster.types.storage import Storage
from muster.types.training import (
    Cancel,
    Condition,
    Mesh,
    Metadata,
    Outcome,
    RankExit,
    RankStatus,
    Resize,
    Resources,
    SparesStatus,
    Spec,
    Status,
    Training,
    WorldSize,
    WorldStatus,
)

# Milliseconds are what the wire keeps.
times = st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1), timezones=st.just(UTC)).map(
    lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000)
)
maybe_time = st.none() | times
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
counts = st.integers(0, 1000)
seconds = st.floats(0.001, 86_400)
text_maps = st.dictionaries(texts, texts, max_size=3)


def some(values: st.SearchStrategy[RankExit]) -> st.SearchStrategy[tuple[RankExit, ...]]:
    return st.lists(values, max_size=3).map(tuple)


text_lists = st.lists(texts, max_size=3).map(tuple)
sizes = st.tuples(*[st.integers(1, 50)] * 3).map(lambda three: WorldSize(*sorted(three)))
storages = st.builds(
    Storage,
    name=names,
    mount=st.just("/data"),
    claim=st.none() | names,
    size=st.none() | st.sampled_from(["1Gi", "2Ti"]),
    class_=st.none() | names,
    access=st.sampled_from(["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]),
    keep=st.booleans(),
)
specs = st.builds(
    Spec,
    command=st.none() | text_lists,
    script=st.none() | texts,
    module=st.none() | st.just("a.b"),
    args=text_lists,
    working_dir=st.none() | texts,
    env=text_maps,
    world_size=sizes,
    spares=counts,
    procs_per_worker=st.integers(1, 1024),
    resources=st.builds(
        Resources, cpu=st.none() | seconds, memory=st.none() | st.sampled_from(["512Mi", "1.5Gi", "1"]), gpus=counts
    ),
    max_restarts=counts,
    lease_seconds=st.floats(0.3, 3600),
    warm=st.sampled_from(["auto", "always", "never"]),
    preload=st.sampled_from([(), ("none",), ("numpy", "a.b")]),
    hang_timeout_seconds=st.none() | seconds,
    no_progress_rounds=st.none() | st.integers(1, 9),
    active_deadline_seconds=st.none() | seconds,
    below_minimum_timeout_seconds=seconds,
    stop_grace_seconds=seconds,
    ttl_seconds_after_finished=st.none() | seconds,
    secret_env=text_lists,
    cancel=st.none() | st.builds(Cancel, times, st.none() | seconds),
    priority=st.integers(-1_000_000, 1_000_000),
    backend=names,
    image=st.none() | texts,
    mesh=st.builds(Mesh, st.booleans(), seconds, st.none() | texts),
    segment=st.none() | st.integers(1, 9),
    topology_key=st.none() | st.just("topology.kubernetes.io/rack"),
    template=st.none() | st.just({"spec": {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]}}),
    storage=st.lists(storages, max_size=2).map(tuple),
    suspend=st.booleans(),
)
exits = st.builds(
    RankExit,
    rank=counts,
    exit_code=st.none() | st.integers(0, 255),
    termination_reason=texts,
    signal=st.none() | st.just("SIGKILL"),
    worker=texts,
    node=texts,
    round=counts,
    restart_count=counts,
    finished_at=maybe_time,
    stderr_tail=text_lists,
)
ranks = st.builds(
    RankStatus,
    rank=counts,
    worker=texts,
    phase=st.sampled_from(["starting", "running", "lost"]),
    started_at=maybe_time,
    step=st.none() | counts,
)
conditions = st.builds(
    Condition,
    type=texts,
    status=st.sampled_from(["True", "False", "Unknown"]),
    reason=texts,
    message=texts,
    last_transition_time=maybe_time,
    observed_generation=counts,
)
outcomes = st.builds(
    Outcome,
    state=st.sampled_from(["succeeded", "failed", "cancelled"]),
    reason=texts,
    message=texts,
    first_failure=st.none() | exits,
    finished_at=maybe_time,
)
statuses = st.builds(
    Status,
    observed_generation=counts,
    phase=st.sampled_from(["pending", "ready", "succeeded", "failed", "cancelled"]),
    conditions=st.lists(conditions, max_size=2).map(tuple),
    world_size=st.builds(WorldStatus, counts, counts, counts, counts, st.booleans()),
    spares=st.builds(SparesStatus, counts, counts),
    round=st.none() | counts,
    restarts=counts,
    ranks=st.lists(ranks, max_size=2).map(tuple),
    rank_exits=st.none() | some(exits),
    outcome=st.none() | outcomes,
    last_resize=st.none() | st.builds(Resize, counts, counts, texts, maybe_time),
    started_at=maybe_time,
    finished_at=maybe_time,
)
metadatas = st.builds(
    Metadata,
    name=names,
    namespace=names,
    uid=texts,
    generation=counts,
    resource_version=st.integers(0, 1 << 52).map(str),
    creation_timestamp=maybe_time,
    deletion_timestamp=maybe_time,
    labels=text_maps,
    annotations=text_maps,
)
trainings = st.builds(Training, metadatas, specs, statuses)
