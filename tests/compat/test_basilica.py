"""Programs for Basilica's SDK: its names and defaults, over a real control plane."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from datetime import UTC, datetime

import pytest

import muster
from muster.compat import basilica, handle
from muster.sdk import functions
from muster.types.bench import BenchSize, summed_up
from muster.types.training import Metadata, RankStatus, Resize, Spec, Status, Training
from tests.compat.functions_to_run import train
from tests.plane import Plane

ASKED = {"world_size": basilica.WorldSize(1, 2, 3)}


@pytest.fixture
def told_where(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_URL", plane.url)
    monkeypatch.setenv("MUSTER_TOKEN", plane.api_token)


# Defaults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "seconds"),
    [("wait_until_min_world", 300), ("wait_until_target_world", 600), ("wait_until_complete", 1800)],
)
def test_waits_have_time_outs(method: str, seconds: int) -> None:
    for name in (method, f"{method}_async"):
        assert inspect.signature(getattr(handle.DistributedTraining, name)).parameters["timeout"].default == seconds


def test_what_is_not_said_is_as_it_is_there() -> None:
    made = basilica.options_of(ASKED, ranks_each=None)
    assert made["resources"] == {"gpus": 1, "cpu": None, "memory": None} and made["procs_per_worker"] == 1
    assert made["active_deadline_seconds"] == made["ttl_seconds_after_finished"] == 86_400
    assert inspect.signature(basilica.distributed).parameters["timeout"].default == 600


def test_arguments_become_ours() -> None:
    given = {**ASKED, "gpu_count": 4, "cpu": "500m", "memory": "32Gi", "env": {"A": "1"}, "nccl_env": {"B": "2"}}
    made = basilica.options_of({**given, "pip_packages": ["numpy"], "bench": True}, ranks_each=None)
    assert made["resources"] == {"gpus": 4, "cpu": 0.5, "memory": "32Gi"} and made["procs_per_worker"] == 4
    assert made["env"] == {"A": "1", "B": "2"} and made["requirements"] == ["numpy"] and made["bench"] is True
    assert basilica.options_of(given, ranks_each=1)["procs_per_worker"] == 1


def test_what_has_no_effect_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="gpu_models, provider_filter: no effect"):
        basilica.options_of(
            {**ASKED, "provider_filter": basilica.ProviderFilter(include=["x"]), "gpu_models": ["A100"]}, ranks_each=1
        )


def test_what_nobody_knows_is_refused() -> None:
    with pytest.raises(TypeError, match="'gpucount'"):
        basilica.options_of({**ASKED, "gpucount": 1}, ranks_each=1)
    with pytest.raises(basilica.ValidationError, match="world_size is required"):
        basilica.options_of({}, ranks_each=1)
    with pytest.raises(basilica.ValidationError, match="not a number of CPUs"):
        basilica.options_of({**ASKED, "cpu": "many"}, ranks_each=1)


@pytest.mark.parametrize("command", [["torchrun", "t.py"], ["python", "t.py", "$BASILICA_RANK"], ["/bin/mpirun", "x"]])
def test_a_launcher_below_muster_is_refused(command: list[str]) -> None:
    with pytest.raises(basilica.ValidationError, match="muster starts its ranks itself"):
        basilica.distributed(command=command, world_size=basilica.WorldSize(1, 1, 1))


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 1, 3), (1, 4, 3)])
def test_a_world_size_that_cannot_be_is_refused_at_once(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(basilica.WorldSizeOutOfBounds) as caught:
        basilica.WorldSize(*sizes)
    assert (caught.value.min, caught.value.requested, caught.value.max) == sizes


# Records -----------------------------------------------------------------------------------------


def test_records_have_their_fields() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    sizes = (BenchSize(1024, 9, 1e-4, 2e-4, 3e-4), BenchSize(1 << 20, 9, 1e-3, 2e-3, 4e-3))
    bench = replace(summed_up(0, "nccl", 2, 2, sizes), measured_at=at)
    ranks = (RankStatus(0, "w-0", restarts=1), RankStatus(1, "w-1", restarts=2))
    status = Status(bench=bench, ranks=ranks, round=3, started_at=at, last_resize=Resize(1, 2, at=at))
    training = Training(Metadata("demo", creation_timestamp=at), Spec(script="/t.py"), status)
    found = handle.bench_of(training)
    assert found is not None and (found.measured_at, found.probe_node_a, found.probe_node_b) == (at, "w-0", "w-1")
    assert found.busbw_gbps_p50 == pytest.approx((1 << 20) / 2e-3 / 1e9)
    assert found.busbw_gbps_p10 == pytest.approx((1 << 20) / 4e-3 / 1e9)
    assert found.latency_us_at_1mib == pytest.approx(2000) and found.size_bytes_swept == [1024, 1 << 20]
    metrics = handle.metrics_of(training)
    assert (metrics.rendezvous_restarts_total, metrics.rank_restarts_total, metrics.last_resize_at) == (3, 3, at)
    assert metrics.time_to_first_rendezvous_seconds == 0.0
    assert handle.bench_of(replace(training, status=Status())) is None


# With a control plane ----------------------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.usefixtures("told_where")
def test_a_decorated_function_comes_back_when_it_trains_and_is_deleted_with_its_block(plane: Plane) -> None:
    with train("hello") as training:
        assert isinstance(training, basilica.DistributedTraining) and training.name == "compat"
        assert sorted(training.stream_logs()) == [(0, "hello 0 WARN"), (1, "hello 1 WARN")]
        assert training.logs(rank=1) == "hello 1 WARN"
        events = training.events()
        assert events[-1]["reason"] == "Created" and events[0]["last_timestamp"] >= events[-1]["last_timestamp"]
        assert training.muster.result(timeout=30).ready == 0
    assert plane.client.list() == []


@pytest.mark.shared
@pytest.mark.usefixtures("told_where")
def test_a_command_s_handle_has_its_endpoint_and_an_exception_deletes_it_too(plane: Plane) -> None:
    async def held() -> None:
        made = await basilica.distributed_async(
            command=["sleep", "600"], name="block", world_size=basilica.WorldSize(2, 2, 2), gpu_count=0
        )
        async with made:
            host, _, port = made.rendezvous_endpoint.rpartition(":")
            assert host and int(port) > 0
            assert [one.pod_name for one in made.ranks] and made.world.ready == 2
            raise KeyError("its own")

    with pytest.raises(KeyError):
        asyncio.run(held())
    assert plane.client.list() == []


@pytest.mark.shared
@pytest.mark.usefixtures("told_where")
def test_a_world_that_does_not_come_in_time_is_deleted(plane: Plane) -> None:
    with pytest.raises(basilica.BelowMinimumWorld) as caught:
        basilica.distributed(  # no worker can be started and have joined by then
            command=["sleep", "600"], world_size=basilica.WorldSize(1, 1, 1), gpu_count=0, timeout=0.01
        )
    assert isinstance(caught.value, muster.WaitTimeout) and caught.value.required_min == 1
    assert plane.client.list() == []


def test_in_a_rank_the_function_is_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(functions, "in_rank", True)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert train("called") is None
    assert capsys.readouterr().out == "called 5 INFO\n"
