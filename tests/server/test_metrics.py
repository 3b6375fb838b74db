"""How a training learns and what its workers use, as a client of the API and as Prometheus sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.core.curves import Curve, Point, TrainingCurves, WorkerReading
from muster.types.measured import WorkerUse
from muster.types.training import SparesStatus, Uid, WorldStatus
from tests.server.house import TRAININGS, House, error_of, in_house

METRICS = f"{TRAININGS}/demo/metrics"
AT = 1_769_860_800.0


@dataclass
class Known:
    """What a keeper of curves would say of every training."""

    learned: TrainingCurves = field(default_factory=TrainingCurves)
    use: dict[str, WorkerReading] = field(default_factory=dict)

    def curves(self, uid: Uid) -> Mapping[str, Curve]:
        return self.learned.curves

    def workers(self, uid: Uid) -> Mapping[str, WorkerReading]:
        return self.use


def known() -> Known:
    found = Known()
    for step in range(3):
        found.learned.log(0, step + 1, "loss", Point(step, AT + step, 1.0 / (step + 1)))
    found.learned.log(0, 4, 'odd "name"\\', Point(None, AT, 7.0))
    found.learned.log(0, 5, "gone", None)
    found.learned.reached(0, 0, 2, 5.0, AT + 2)
    found.use["demo-0"] = WorkerReading()
    found.use["demo-0"].take(WorkerUse(cpu_percent=93.1, memory_bytes=123), AT + 2)
    return found


def test_curves_and_use_are_told_as_promised(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        answer = await house.as_role("viewer").get(METRICS)
        assert answer.status_code == 200
        told = answer.json()
        assert [one["name"] for one in told["series"]] == ["gone", "loss", 'odd "name"\\', "step"]
        assert told["series"][1]["points"] == [[0, AT, 1.0], [1, AT + 1, 0.5], [2, AT + 2, 1.0 / 3]]
        assert told["series"][0] == {"name": "gone", "points": [], "notFinite": 1}
        [worker] = told["workers"]
        assert worker["recent"] == [[AT + 2, 93.1, 123, None, None]]
        assert {**worker, "recent": []} == {
            "name": "demo-0",
            "cpuPercent": 93.1,
            "memoryBytes": 123,
            "gpuPercent": None,
            "gpuMemoryBytes": None,
            "at": AT + 2,
            "recent": [],
        }
        few = (await house.client.get(METRICS, params={"names": "loss,lr", "after": AT + 1})).json()["series"]
        assert few == [{"name": "loss", "points": [[2, AT + 2, 1.0 / 3]]}]

    in_house(tmp_path, test, measured=known())


def test_only_who_may_read_a_training_learns_of_it(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        assert (await house.client.get(METRICS)).status_code == 404
        await house.submit()
        assert (await house.as_role("viewer", "elsewhere").get(METRICS)).status_code == 403
        assert (await house.with_token(None).get(METRICS)).status_code == 401
        for bad in ("after=x", "after=-1", "after=nan", "more=1", f"names={'x' * 5000}"):
            answer = await house.client.get(f"{METRICS}?{bad}")
            assert answer.status_code == 422 and error_of(answer)["code"] == "invalid"
        assert "demo" not in (await house.as_role("viewer", "elsewhere").get("/metrics")).text

    in_house(tmp_path, test, measured=known())


def test_without_a_keeper_there_is_nothing_to_tell(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        assert (await house.client.get(METRICS)).json() == {"series": [], "workers": []}
        assert "muster_training_logged" not in (await house.client.get("/metrics")).text

    in_house(tmp_path, test)


def test_prometheus_gets_a_series_for_each_training_number_and_worker(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        await house.submit()
        await house.submit("over")
        await house.settle("over", "succeeded", rank_exits=())
        size = WorldStatus(2, 3, 1, 4)
        await house.settle("demo", "ready", world_size=size, spares=SparesStatus(1, 2), round=5, restarts=2)
        text = (await house.client.get("/metrics")).text
        of = 'namespace="default",training="demo"'
        for line in (
            f"muster_training_workers_ready{{{of}}} 2",
            f"muster_training_workers_target{{{of}}} 3",
            f"muster_training_workers_min{{{of}}} 1",
            f"muster_training_workers_max{{{of}}} 4",
            f"muster_training_spares_ready{{{of}}} 1",
            f"muster_training_round{{{of}}} 5",
            f"muster_training_restarts{{{of}}} 2",
            f"muster_training_step{{{of}}} 2",
            f'muster_training_logged{{{of},name="loss"}} 0.333333333333333',
            f'muster_training_logged{{{of},name="odd \\"name\\"\\\\"}} 7',
            f'muster_training_not_finite_total{{{of},name="gone"}} 1',
            f'muster_worker_cpu_percent{{{of},worker="demo-0"}} 93.1',
            f'muster_worker_memory_bytes{{{of},worker="demo-0"}} 123',
        ):
            assert f"{line}\n" in text, line
        assert 'training="over"' not in text, "it has ended"
        assert "muster_worker_gpu_percent{" not in text, "what is not known is not there"
        assert text.count("# TYPE muster_training_step ") == 1

    in_house(tmp_path, test, measured=known())
