"""Programs for Basilica's SDK: its names and defaults, over a real control plane."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

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


@pytest.mark.parametrize("command", [["python", "t.py", "$BASILICA_RANK"], ["/bin/mpirun", "x"]])
def test_a_launcher_below_muster_is_refused(command: list[str]) -> None:
    with pytest.raises(basilica.ValidationError, match="muster starts its ranks itself"):
        basilica.distributed(command=command, world_size=basilica.WorldSize(1, 1, 1))


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 1, 3), (1, 4, 3)])
def test_a_world_size_that_cannot_be_is_refused_at_once(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(basilica.WorldSizeOutOfBounds) as caught:
        basilica.WorldSize(*sizes)
    assert (caught.value.min, caught.value.requested, caught.value.max) == sizes


@pytest.mark.parametrize("name", ["ScaleSuperseded", "ResizeTakenBack"])
def test_a_program_that_catches_below_minimum_world_catches_what_a_wait_raises_here(name: str) -> None:
    kind = getattr(basilica, name)
    assert kind is getattr(muster, name) and issubclass(kind, basilica.BelowMinimumWorld)


def test_the_mesh_gate_is_there() -> None:
    assert basilica.mesh_wait is muster.mesh_wait and basilica.mesh_status is muster.mesh_status


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
@pytest.mark.scenario
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


@pytest.mark.shared
@pytest.mark.usefixtures("told_where")
def test_torchrun_s_command_trains_with_the_ranks_it_names(plane: Plane, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:], flush=True)\n"
    )
    words = ["torchrun", "--rdzv-endpoint=$BASILICA_RDZV_ENDPOINT", "--nproc_per_node", "2", "--tee", "3"]
    with pytest.warns(UserWarning, match="torchrun --tee: no effect") as warned:
        training = basilica.distributed(
            command=[*words, str(script), "--lr", "1"], world_size=basilica.WorldSize(2, 2, 2), gpu_count=0
        )
    assert warned[0].filename == __file__
    with training:
        assert training.muster.result(timeout=60).ready == 0
        assert sorted(training.logs().splitlines()) == [f"[{rank}] {rank} 4 --lr 1" for rank in range(4)]


@pytest.mark.shared
@pytest.mark.usefixtures("told_where")
def test_a_target_that_another_writer_moved_is_raised_once_and_by_itself(plane: Plane) -> None:
    command = ["sleep", "600"]
    with basilica.distributed(
        command=command, name="moved", world_size=basilica.WorldSize(1, 1, 3), gpu_count=0
    ) as training:
        training.scale(3)
        plane.client.get("moved").scale(target=2)
        with pytest.raises(basilica.BelowMinimumWorld) as caught:
            training.wait_until_target_world()
        error = caught.value
        assert isinstance(error, basilica.ScaleSuperseded) and (error.requested, error.target) == (3, 2)
        assert error.required_min == 2 and error.timeout == 600
        assert error.__cause__ is None and error.__context__ is None
        training.wait_until_target_world(timeout=60)
        assert training.world.ready == 2


def test_in_a_rank_the_function_is_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(functions, "in_rank", True)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert train("called") is None
    assert capsys.readouterr().out == "called 5 INFO\n"
