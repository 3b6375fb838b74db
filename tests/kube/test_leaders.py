"""Of several control planes one acts; when it dies, stands still or is cut off, another goes on where it was."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muster import DistributedTraining, errors
from muster.daemon.plane import REPLACED
from muster.kube import lease
from muster.kube.lease import Leadership
from muster.ports import Record, Write
from muster.store.kube import KubeStore
from tests.fleet import Process, eventually
from tests.kube.api_proxy import ApiProxy
from tests.kube.cluster import Cluster
from tests.kube.house import api_of, define_trainings
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane
from tests.plane import reasons

WRITES = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True)
class Before:
    """What two that train look like before the leader goes."""

    plane: KubePlane
    pods: dict[str, str]
    ranks: list[dict[str, Any]]

    def goes_on(self, undisturbed: bool = True) -> None:
        """To a good end, with the same Pods; undisturbed ranks are the same ones too."""
        self.plane.go()
        status = self.plane.phase("succeeded")["status"]
        assert [one["exitCode"] for one in status["rankExits"]] == [0, 0]
        assert status["restarts"] == 0
        assert uids(self.plane) == self.pods
        ran = Counter((note["MUSTER_ROUND"], note["RANK"]) for note in self.plane.told("start"))
        assert set(ran.values()) == {1}, f"a rank ran twice in one round: {ran}"
        if undisturbed:
            assert self.plane.told("start") == self.ranks


def train(plane: KubePlane) -> Before:
    plane.train(world=(2, 2, 2)).wait_until_target_world(timeout=30)
    return Before(plane, uids(plane), plane.started(0, 2))


def uids(plane: KubePlane) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in plane.pods().items()}


def standby(plane: KubePlane, name: str) -> Process:
    replica = plane.serve(name, wait=False)
    replica.expect("standing by: .* leads")
    return replica


def takes_over(plane: KubePlane, replica: Process, since: float, how: str) -> float:
    """Seconds until clients are served again."""
    replica.expect("muster serves on")
    eventually(lambda: answers(plane), f"{how}: clients are served", 20)
    took = time.monotonic() - since
    print(f"{how}: another one serves after {took:.2f} s")
    return took


def answers(plane: KubePlane) -> bool:
    try:
        return plane.client.get("demo").phase == "ready"
    except errors.Unavailable:
        return False


def status_of(replica: Process, path: str) -> int:
    words = replica.command
    address = words[words.index("--listen") + 1]
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def knows_them_again(plane: KubePlane, times: int) -> None:
    """Each takeover is told once, when all ranks have been found."""
    eventually(lambda: reasons(plane.client.get("demo")).count("RoundRecovered") == times, "the round goes on", 30)


class Waiting:
    """A client that waits for the end from now on."""

    def __init__(self, training: DistributedTraining) -> None:
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._wait, args=(training,), daemon=True)
        self._thread.start()

    def _wait(self, training: DistributedTraining) -> None:
        try:
            training.result(timeout=90)
        except errors.MusterError as failure:
            self._failures.append(failure)

    def ends_well(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive() and not self._failures, self._failures


def test_a_standby_goes_on_when_the_leader_is_killed_or_told_to_stop(kube_plane: KubePlane) -> None:
    plane, before = kube_plane, train(kube_plane)
    one, two = plane.replicas["one"], standby(plane, "two")
    assert (status_of(two, "/healthz"), status_of(two, "/v1/trainings")) == (200, 503)
    waiting = Waiting(plane.client.get("demo"))
    began = time.monotonic()
    one.kill()
    assert takes_over(plane, two, began, "SIGKILL") < 15
    knows_them_again(plane, 1)
    again = standby(plane, "one")
    began = time.monotonic()
    two.kill(signal.SIGTERM)
    assert takes_over(plane, again, began, "SIGTERM") < 6
    assert two.wait() == 0
    knows_them_again(plane, 2)
    before.goes_on()
    waiting.ends_well()


@pytest.fixture
def through(cluster: Cluster) -> Iterator[ApiProxy]:
    made = ApiProxy(cluster)
    yield made
    made.close()


@pytest.fixture
def bare_plane(tmp_path: Path, cluster: Cluster, namespace: str, kubelet: TestKubelet) -> Iterator[KubePlane]:
    """Nobody serves yet."""
    made = KubePlane(tmp_path, cluster, namespace)
    yield made
    made.close()
    kubelet.no_process_left()


def test_a_leader_that_is_cut_off_from_the_api_ends_and_ranks_do_not_notice(
    bare_plane: KubePlane, through: ApiProxy
) -> None:
    plane = bare_plane
    old = plane.serve("old", url=through.url)
    before, two = train(plane), standby(plane, "two")
    began = time.monotonic()
    through.refuse()
    assert old.wait(10) == REPLACED
    took = time.monotonic() - began
    print(f"cut off: it ended after {took:.2f} s")
    assert took < lease.DURATION_S, "before anyone else may act"
    assert takes_over(plane, two, began, "cut off") < 15
    knows_them_again(plane, 1)
    before.goes_on()


def test_a_leader_that_stood_still_writes_nothing_more(bare_plane: KubePlane, through: ApiProxy) -> None:
    """Workers find it silent, so their ranks may begin a new round; it costs no restart."""
    plane = bare_plane
    old = plane.serve("old", url=through.url)
    before, two = train(plane), standby(plane, "two")
    began = time.monotonic()
    old.kill(signal.SIGSTOP)
    assert takes_over(plane, two, began, "SIGSTOP") < 15
    through.calls.clear()
    old.kill(signal.SIGCONT)
    assert old.wait(10) == REPLACED
    done = [call for call in through.calls if call.method in WRITES and call.status < 300]
    assert not done, f"it wrote {done}"
    plane.client.get("demo").wait_until_target_world(timeout=30)
    before.goes_on(undisturbed=False)


def test_leadership_ends_by_the_clock_even_while_the_process_stands_still(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "GIVE_UP_S", 0.3)

    async def story() -> None:
        api = api_of(cluster)
        held = Leadership(api, namespace, "one")
        with pytest.raises(errors.Unavailable):
            held.check()
        await held.acquire()
        held.check()
        time.sleep(0.35)  # noqa: ASYNC251 - nothing runs meanwhile: no renewal, and nobody to say so
        api.guard = held.check
        with pytest.raises(errors.Unavailable) as refused:
            await api.request("POST", f"/api/v1/namespaces/{namespace}/secrets", body={"metadata": {"name": "late"}})
        assert not refused.value.retryable
        assert await held.hold() == "the lease could not be renewed in time"
        await api.close()

    asyncio.run(asyncio.wait_for(story(), 20))
    assert cluster.get(f"/api/v1/namespaces/{namespace}/secrets/late") is None


def test_the_store_of_a_leader_that_was_replaced_refuses_to_write(cluster: Cluster, namespace: str) -> None:
    define_trainings(cluster)

    def kept(number: int) -> Write:
        return Write(records=(Record("test", "one", {"number": number}),))

    async def story() -> None:
        apis = [api_of(cluster) for _ in range(3)]
        old = await KubeStore.open(apis[0], namespace, "old")
        await old.write(kept(1))
        new = await KubeStore.open(apis[1], namespace, "new")
        assert new.record("test", "one") == {"number": 1}
        with pytest.raises(errors.Unavailable) as refused:
            await old.write(kept(2))
        assert not refused.value.retryable
        assert "another control plane" in await old.until_fenced()
        with pytest.raises(errors.Unavailable):
            await old.write(kept(3))
        await new.write(kept(4))
        await old.close()
        await new.close()
        third = await KubeStore.open(apis[2], namespace, "third")
        assert third.record("test", "one") == {"number": 4}
        await third.close()
        for api in apis:
            await api.close()

    asyncio.run(asyncio.wait_for(story(), 30))
