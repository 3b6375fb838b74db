"""Workers as Pods on a real API server: how they come, what is seen of them, how they end, and who finds them again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster import errors
from muster.backends.kube import pod_removal
from muster.backends.records import removals
from muster.core.training.reconcile import USAGE_ERROR
from muster.ports import LogQuery, Write
from muster.types.training import Resources
from muster.types.worker import SHORTAGE
from tests.kube.api import MERGE
from tests.kube.cluster import NOBODY, Cluster
from tests.kube.house import House, plain_node, play
from tests.kube.kubelet import TestKubelet

Json = dict[str, Any]

STUBBORN = 'trap "" TERM; while :; do sleep 0.05; done'


@pytest.fixture
def kubelet(cluster: Cluster, tmp_path: Path) -> Iterator[TestKubelet]:
    """Its agents do as a test says."""
    made = TestKubelet(cluster, env={"PATH": plain_node(tmp_path)})
    yield made
    made.close()


def released(pod: Json | None) -> bool:
    return pod is not None and not pod["metadata"].get("finalizers")


def test_a_worker_comes_runs_and_goes_with_few_calls(cluster: Cluster, kubelet: TestKubelet, namespace: str) -> None:
    async def scenario(house: House) -> None:
        training = await house.training(env={"KEY": "hidden", "A": "$(POD_IP) $$"}, secret_env=("KEY",))
        house.api.calls.clear()
        begun = await house.backend.start(training, "demo-0", (), "token")
        assert begun.alive and begun.waiting
        assert house.api.calls == ["POST secrets", "POST services", "POST pods"]
        house.api.calls.clear()
        await house.backend.start(training, "demo-1", (), "token")
        assert house.api.calls == ["POST pods"]
        worker = await house.running(training)
        assert worker.node == worker.mesh_name == "node-1" and not worker.waiting
        secret = await house.ask("GET", house.path("demo-run", "secrets"))
        assert secret is not None and set(secret["data"]) == {"run-token", "KEY"}
        await house.running(training, "demo-1")

        house.api.calls.clear()
        await house.backend.stop(training.uid, "demo-0", why="enough")
        await house.backend.stop(training.uid, "demo-0", why="enough")
        ended = await house.ended(training)
        assert (ended.exit_code, ended.reason, ended.why_ended) == (143, "", "enough")
        await house.until_pod("demo-0", lambda pod: pod is None, "its Pod goes")
        assert house.api.calls == ["DELETE pods", "PATCH pods"]
        told = [(event.reason, event.data["worker"]) for event in await house.store.events(uid=training.uid)]
        assert told == [("WorkerStarted", "demo-0"), ("WorkerStarted", "demo-1"), ("WorkerExited", "demo-0")]

    play(cluster, namespace, scenario)


def test_an_end_is_told_in_the_kubelets_words_and_the_pod_stays_for_its_log(
    cluster: Cluster, kubelet: TestKubelet, namespace: str
) -> None:
    async def scenario(house: House) -> None:
        training = await house.training(script='echo "[0] last"; [ $0 ] && exec sleep 600')
        failing = await house.training("other", "exit 3")
        for name in ("demo-0", "demo-1", "demo-2"):
            await house.backend.start(training, name, (), "token")
            await house.running(training, name)
        await asyncio.to_thread(kubelet.oom, "demo-0")
        await asyncio.to_thread(kubelet.evict, "demo-1")
        await asyncio.to_thread(kubelet.kill, "demo-2")
        await house.backend.start(failing, "other-0", (), "token")
        ends = [await house.ended(training, name) for name in ("demo-0", "demo-1", "demo-2")]
        ends.append(await house.ended(failing, "other-0"))
        assert [(one.exit_code, one.reason) for one in ends] == [
            (137, "OOMKilled"),
            (137, "Evicted"),
            (137, "Error"),
            (3, "Error"),
        ]
        for name in ("demo-0", "demo-1", "demo-2", "other-0"):
            await house.until_pod(name, released, f"{name} is let go, and stays")
        kept = await house.records(training.uid)
        assert {one["reason"] for one in kept.values()} == {"OOMKilled", "Evicted", "Error"}
        house.api.calls.clear()
        await house.backend.stop(training.uid, "demo-0", why="late")
        assert not house.api.calls, "what has ended is not asked to leave"
        await house.backend.forget(training.uid)
        assert house.backend.workers(training.uid) == () and not await house.records(training.uid)
        for name in ("demo-0", "demo-1", "demo-2"):
            await house.until_pod(name, lambda pod: pod is None, f"{name} is removed")

    play(cluster, namespace, scenario)


def test_a_pod_that_somebody_deletes_is_on_its_way_out(cluster: Cluster, kubelet: TestKubelet, namespace: str) -> None:
    async def scenario(house: House) -> None:
        training = await house.training(script='trap "exit 7" TERM; while :; do sleep 0.02; done')
        await house.backend.start(training, "demo-0", (), "token")
        await house.running(training)
        await house.ask("DELETE", house.path("demo-0"))
        await house.until(lambda: house.worker(training).stopping)
        await house.ended(training)
        await house.until_pod("demo-0", lambda pod: pod is None, "nothing keeps it")

    play(cluster, namespace, scenario)


def test_a_pod_that_waits_says_what_for(cluster: Cluster, kubelet: TestKubelet, namespace: str) -> None:
    async def scenario(house: House) -> None:
        big = await house.training(resources=Resources(gpus=9))
        missing = await house.training("other", image="missing:1")
        worker = await house.backend.start(big, "demo-0", tuple(range(9)), "token")
        assert len(worker.gpus) == 9
        await house.backend.start(missing, "other-0", (), "token")
        await house.until(lambda: "nodes are available" in house.worker(big).waiting)
        await house.until(lambda: "ImagePullBackOff: Back-off" in house.worker(missing, "other-0").waiting)
        await house.backend.stop(big.uid, "demo-0", why="enough")
        ended = await house.ended(big)
        assert (ended.exit_code, ended.reason, ended.why_ended) == (None, "", "enough")
        await house.until_pod("demo-0", lambda pod: pod is None, "nothing keeps it")

    play(cluster, namespace, scenario)


def test_another_control_plane_finds_what_the_first_one_left(
    cluster: Cluster, kubelet: TestKubelet, namespace: str
) -> None:
    async def scenario(house: House) -> None:
        training = await house.training()
        for name in ("demo-0", "demo-1", "demo-2", "demo-3"):
            await house.backend.start(training, name, (), "token")
            await house.running(training, name)
        await house.backend.close()
        await asyncio.to_thread(kubelet.kill, "demo-1")  # ends while nobody looks
        ended = await house.until_pod("demo-1", lambda pod: pod and pod["status"]["phase"] == "Failed")
        assert ended is not None and ended["metadata"]["finalizers"], "its end is not lost"
        await house.ask("PATCH", house.path("demo-2"), {"metadata": {"finalizers": None}}, kind=MERGE)
        await house.ask("DELETE", house.path("demo-2"), gracePeriodSeconds="0")
        await house.store.write(Write(records=removals(training.uid, {"demo-3": 0})))

        house.backend = house.another()
        house.api.calls.clear()
        await house.backend.start_watching()
        assert await house.backend.adopt(None) == 2
        assert house.worker(training).alive and house.worker(training).node == "node-1"
        assert (await house.ended(training, "demo-1")).exit_code == 137
        gone = await house.ended(training, "demo-2")
        assert gone.why_ended == "its Pod was gone when the control plane came back" and gone.reason == "NodeLost"
        assert house.worker(training, "demo-3").alive and len(await house.records(training.uid)) == 4
        await house.until_pod("demo-1", released, "it is let go")
        touched = [call for call in house.api.calls if not call.startswith("GET")]
        assert touched == ["PATCH pods"], "no Pod that runs is touched"

    play(cluster, namespace, scenario)


def test_a_pod_of_a_training_that_nobody_knows_is_let_go_once_it_has_ended(
    cluster: Cluster, kubelet: TestKubelet, namespace: str
) -> None:
    async def scenario(house: House) -> None:
        training = await house.training()
        await house.backend.start(training, "demo-0", (), "token")
        await house.running(training)
        await house.backend.close()
        house.store = type(house.store)()  # one that has never heard of it
        house.backend = house.another()
        await house.backend.start_watching()
        assert await house.backend.adopt(None) == 0
        pod = await house.ask("GET", house.path("demo-0"))
        assert pod is not None and "deletionTimestamp" not in pod["metadata"], "it is not ours to end"
        await asyncio.to_thread(kubelet.kill, "demo-0")
        await house.until_pod("demo-0", released, "nothing keeps it")

    play(cluster, namespace, scenario)


def test_what_the_cluster_refuses_ends_at_once_with_its_words(
    cluster: Cluster, kubelet: TestKubelet, namespace: str
) -> None:
    async def scenario(house: House) -> None:
        wrong = await house.training(args=("x" * 131_072,) * 13)  # more than etcd takes
        ended = await house.backend.start(wrong, "demo-0", (), "token")
        assert ended.exit_code == USAGE_ERROR and "request is too large" in ended.last_words
        house.backend.orders._image = ""
        ended = await house.backend.start(await house.training("bare"), "bare-0", (), "token")
        assert ended.last_words == "spec.image is needed: there is no default image"
        assert ended.exit_code == USAGE_ERROR and await house.ask("GET", house.path("bare-run", "secrets")) is None
        house.backend.orders._image = "base"

        full = await house.training("full")
        hard = {"hard": {"pods": "0"}}
        quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
        await house.ask("POST", quotas, {"metadata": {"name": "none"}, "spec": hard})
        used = {"status": {**hard, "used": {"pods": "0"}}}
        await house.ask("PATCH", f"{quotas}/none/status", used, kind=MERGE)
        for number in range(50):  # the server learns of a quota a moment later
            ended = await house.backend.start(full, f"full-{number}", (), "token")
            if not ended.alive:
                break
        assert ended.exit_code == SHORTAGE and "exceeded quota" in ended.why_ended
        await house.ask("DELETE", f"{quotas}/none")

        events = await house.store.events(uid=wrong.uid)
        assert [event.reason for event in events] == ["WorkerStarted", "WorkerExited"], "it counts no time"

    play(cluster, namespace, scenario)


def test_a_name_that_somebody_else_has_is_not_taken(cluster: Cluster, kubelet: TestKubelet, namespace: str) -> None:
    async def scenario(house: House) -> None:
        training = await house.training()
        main = {"name": "main", "image": "any", "command": ["sleep", "600"]}
        body = {"metadata": {"name": "demo-0"}, "spec": {"containers": [main]}}
        await house.ask("POST", f"/api/v1/namespaces/{namespace}/pods", body)
        ended = await house.backend.start(training, "demo-0", (), "token")
        assert ended.exit_code == SHORTAGE and "taken by a Pod of somebody else" in ended.why_ended
        pod = await house.ask("GET", house.path("demo-0"))
        assert pod is not None and "deletionTimestamp" not in pod["metadata"]

    play(cluster, namespace, scenario)


def test_without_the_right_to_start_pods_nothing_is_left_behind(cluster: Cluster, namespace: str) -> None:
    async def scenario(house: House) -> None:
        training = await house.training()
        with pytest.raises(errors.Forbidden, match="cannot create resource"):
            await house.backend.start(training, "demo-0", (), "token")
        assert house.backend.workers(training.uid) == () and not await house.records(training.uid)

    play(cluster, namespace, scenario, user=NOBODY)


@pytest.mark.parametrize("late", [False, True], ids=["seen at once", "seen later"])
def test_a_pod_whose_answer_got_lost_is_never_left_alone(
    cluster: Cluster, kubelet: TestKubelet, namespace: str, late: bool
) -> None:
    """It is either its worker's, or it goes; and nothing is written for a training while the cluster is like that."""

    async def scenario(house: House) -> None:
        training = await house.training()

        def lost(method: str, path: str) -> Exception | None:
            return errors.Unavailable("no answer") if method == "POST" and path.endswith("/pods") else None

        house.api.lose = lost
        if late:  # the watch has not told of it
            await house.backend.close()
            house.backend = house.another()
            await house.backend.adopt(None)
        with contextlib.suppress(errors.Unavailable):
            await house.backend.start(training, "demo-0", (), "token")
        house.api.lose = lambda method, path: None
        if late:
            assert not house.worker(training).alive
            await house.backend.start_watching()
        if house.worker(training).alive:
            await house.running(training)
        else:
            await house.until_pod("demo-0", lambda pod: pod is None, "it goes")
            house.api.calls.clear()
            await house.backend.start(training, "demo-1", (), "token")
            assert house.api.calls[:2] == ["POST pods dry", "POST pods"]
        exits = [event for event in await house.store.events(uid=training.uid) if event.reason == "WorkerExited"]
        assert len(exits) == (0 if house.worker(training).alive else 1)

    play(cluster, namespace, scenario)


def test_a_node_that_does_not_answer_loses_its_worker(
    cluster: Cluster, kubelet: TestKubelet, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_removal, "OVERDUE_S", 0.3)

    async def scenario(house: House) -> None:
        training = await house.training()
        await house.backend.start(training, "demo-0", (), "token")
        await house.running(training)
        await asyncio.to_thread(kubelet.vanish)
        await house.backend.stop(training.uid, "demo-0", why="enough", kill=True)
        ended = await house.ended(training)
        assert (ended.exit_code, ended.reason) == (None, "NodeLost") and ended.why_ended == "enough"
        await house.until_pod("demo-0", lambda pod: pod is None, "nothing keeps it")

    play(cluster, namespace, scenario)


def test_a_worker_that_will_not_leave_is_killed(
    cluster: Cluster, kubelet: TestKubelet, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_removal, "OVERDUE_S", 0.3)

    async def scenario(house: House) -> None:
        training = await house.training(script=STUBBORN, stop_grace_seconds=600.0)
        await house.backend.start(training, "demo-0", (), "token")
        await house.running(training)
        await house.backend.stop(training.uid, "demo-0", why="please")
        await house.until_pod("demo-0", lambda pod: pod and "deletionTimestamp" in pod["metadata"])
        await house.backend.stop(training.uid, "demo-0", why="now", kill=True)
        ended = await house.ended(training)
        assert ended.why_ended == "now"

    play(cluster, namespace, scenario)


def test_other_secrets_are_there_for_the_next_worker(cluster: Cluster, kubelet: TestKubelet, namespace: str) -> None:
    async def scenario(house: House) -> None:
        training = await house.training(env={"KEY": "old"}, secret_env=("KEY",))
        await house.backend.start(training, "demo-0", (), "token")
        spec = replace(training.spec, env={"KEY": "new"})
        house.api.calls.clear()
        await house.backend.start(replace(training, spec=spec), "demo-1", (), "token")
        assert house.api.calls == ["PUT secrets", "POST pods"]
        other = house.another()
        other._adopted = True
        house.api.calls.clear()
        await other.start(training, "demo-2", (), "token")
        taken_over = ["PUT secrets dry", "PUT secrets", "POST services", "PATCH services dry", "PATCH services"]
        assert house.api.calls == ["POST secrets", *taken_over, "POST pods"]
        await other.close()

    play(cluster, namespace, scenario)


def test_a_secret_of_somebody_else_is_not_touched(cluster: Cluster, kubelet: TestKubelet, namespace: str) -> None:
    async def scenario(house: House) -> None:
        body = {"metadata": {"name": "demo-run"}, "stringData": {"mine": "x"}}
        await house.ask("POST", f"/api/v1/namespaces/{namespace}/secrets", body)
        training = await house.training()
        with pytest.raises(errors.AlreadyExists, match="not muster's"):
            await house.backend.start(training, "demo-0", (), "token")
        kept = await house.ask("GET", house.path("demo-run", "secrets"))
        assert kept is not None and set(kept["data"]) == {"mine"} and not await house.records(training.uid)

    play(cluster, namespace, scenario)


# Logs

TALKER = """
echo 'muster-node[x] joined run'
echo 'muster-node[x] round 0: rank 0 of 1; why'; echo '[0] a'
echo 'muster-node[x] round 1: rank 0 of 1; why'; echo '[0] b'; echo '[0] c'
while [ ! -e "$GO" ]; do sleep 0.02; done
printf '[0] end'
"""


async def read(house: House, uid: Any, query: LogQuery, ended: Any = lambda: True) -> list[str]:
    return b"".join([chunk async for chunk in house.backend.logs(uid, query, ended)]).decode().splitlines()


def test_logs_are_what_ranks_wrote_by_rank_round_and_tail(
    cluster: Cluster, kubelet: TestKubelet, namespace: str, tmp_path: Path
) -> None:
    async def scenario(house: House) -> None:
        training = await house.training(script=TALKER, env={"GO": str(tmp_path)})
        await house.backend.start(training, "demo-0", (), "token")
        await house.ended(training)
        assert await read(house, training.uid, LogQuery()) == ["[0] a", "[0] b", "[0] c", "[0] end"]
        assert await read(house, training.uid, LogQuery(rank=0, round=1)) == ["b", "c", "end"]
        assert await read(house, training.uid, LogQuery(rank=0, round=0)) == ["a"]
        assert await read(house, training.uid, LogQuery(tail=2)) == ["[0] c", "[0] end"]
        assert await read(house, training.uid, LogQuery(rank=7)) == []
        assert await read(house, training.uid, LogQuery(follow=True, tail=1)) == ["[0] end"]

    play(cluster, namespace, scenario)


def test_following_begins_before_the_first_pod_and_gives_every_line_once(
    cluster: Cluster, kubelet: TestKubelet, namespace: str, tmp_path: Path
) -> None:
    async def scenario(house: House) -> None:
        go = tmp_path / "go"
        training = await house.training(script=TALKER, env={"GO": str(go)})
        over, lines = asyncio.Event(), asyncio.Queue[str]()

        async def follow() -> None:
            async for chunk in house.backend.logs(training.uid, LogQuery(follow=True), over.is_set):
                for line in chunk.decode().splitlines():
                    lines.put_nowait(line)

        following = asyncio.create_task(follow())
        await asyncio.sleep(0)
        await house.backend.start(training, "demo-0", (), "token")
        assert [await lines.get() for _ in range(3)] == ["[0] a", "[0] b", "[0] c"]
        await house.backend.start(training, "demo-1", (), "token")
        assert [await lines.get() for _ in range(3)] == ["[0] a", "[0] b", "[0] c"], "of the one that came later"
        go.touch()
        for name in ("demo-0", "demo-1"):
            await house.ended(training, name)
        over.set()
        await following
        assert [lines.get_nowait() for _ in range(lines.qsize())] == ["[0] end", "[0] end"]

    play(cluster, namespace, scenario)
