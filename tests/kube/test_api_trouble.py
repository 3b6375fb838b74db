"""Trouble with the Kubernetes API itself, under a control plane with work to do: does everything come right?"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster import errors
from muster.kube import lease
from tests.fleet import PROBE, eventually
from tests.kube.api_proxy import ApiProxy, Call
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane

RESTARTED = (75, 1)  # exit codes after which the kubelet would start it again


@pytest.fixture
def plane(tmp_path: Path, cluster: Cluster, namespace: str, kubelet: TestKubelet) -> Iterator[KubePlane]:
    """Nobody serves yet."""
    made = KubePlane(tmp_path, cluster, namespace)
    yield made
    for replica in made.processes:
        print(replica.text)  # shown when the test fails
    made.close()
    kubelet.no_process_left()


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[ApiProxy]:
    made = ApiProxy(cluster)
    yield made
    made.close()


@contextlib.contextmanager
def kept(plane: KubePlane, url: str | None = None) -> Iterator[None]:
    """A control plane that is started again whenever it ends, as a Deployment does."""
    over = threading.Event()
    plane.serve(url=url)

    def keep() -> None:
        while not over.wait(0.1):
            code = plane.replicas["one"].proc.poll()
            if code is not None:
                assert code in RESTARTED, plane.replicas["one"].text
                plane.serve(url=url, wait=False)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)


def program(plane: KubePlane, name: str, world: tuple[int, int, int] = (2, 2, 4)) -> Path:
    """Apply a training with probes of its own folder; they end when it has a file `go`."""
    folder = plane.folder / name
    folder.mkdir()
    manifest = plane.manifest(name, world=world, script=PROBE, args=[str(folder), "wait"])
    plane.kubectl("apply", "-f", "-", input=manifest)
    return folder


def notes(folder: Path, kind: str = "start") -> list[str]:
    return sorted(path.name for path in folder.glob(f"{kind}-*.json"))


def assert_nothing_twice(plane: KubePlane) -> None:
    """No Pod without a training, no worker that started or ended twice, no line of the journal that stands twice."""
    path = f"/api/v1/namespaces/{plane.namespace}/pods"
    for pod in plane.cluster.api("GET", path)["items"]:
        owner = pod["metadata"]["ownerReferences"][0]
        found = plane.object(owner["name"])
        assert found is not None and found["metadata"]["uid"] == owner["uid"]
    for training in plane.client.list():
        events = list(training.events())
        assert len({event.id for event in events}) == len(events)
        for reason in ("WorkerStarted", "WorkerExited"):
            counted = Counter(event.data["worker"] for event in events if event.reason == reason)
            assert set(counted.values()) <= {1}, counted


def shown_events(plane: KubePlane, name: str) -> Counter[tuple[str, str]]:
    """Reason and message of the Kubernetes Events of a training."""
    path = f"/api/v1/namespaces/{plane.namespace}/events"
    found = plane.cluster.api("GET", path, fieldSelector=f"involvedObject.name={name}")["items"]
    return Counter((one["reason"], one["message"]) for one in found)


# The API server goes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compacted", [False, True], ids=["restarted", "history gone"])
def test_an_api_server_that_restarts_under_load(
    plane: KubePlane, cluster: Cluster, kubelet: TestKubelet, compacted: bool
) -> None:
    with kept(plane):
        steady, ending, _ = (program(plane, name) for name in ("steady", "ending", "dying"))
        for name in ("steady", "ending", "dying"):
            plane.phase("ready", name)
        victim = plane.running("dying")[0]
        ranks, pods = notes(steady), plane.running("steady")
        cluster.stop_apiserver()
        (ending / "go").touch()
        kubelet.kill(victim)
        eventually(lambda: len(notes(ending, "done")) == 2, "ranks end while nobody can be told")
        if compacted:
            cluster.compact_etcd()
        cluster.start_apiserver()
        late = eventually(lambda: submitted(plane, "late"), "a training can be submitted again")
        ended = plane.phase("succeeded", "ending")
        assert [exit["exitCode"] for exit in ended["status"]["rankExits"]] == [0, 0]
        plane.kubectl("scale", "training/steady", "--replicas=3")
        for name, count in (("late", 2), ("dying", 2), ("steady", 3)):
            until_full(plane, name, count)
        assert late and set(pods) < set(plane.running("steady"))
        assert notes(steady)[: len(ranks)] == ranks or set(ranks) <= set(notes(steady))
        died = plane.pods("dying")
        assert victim not in plane.running("dying") and len(died) == 3
        assert died[victim]["metadata"].get("finalizers") is None
        assert len(plane.pods("ending")) == 2 and len(plane.pods("steady")) == 3
        assert_nothing_twice(plane)


def submitted(plane: KubePlane, name: str) -> bool:
    try:
        plane.train(name)
    except errors.AlreadyExists:
        return True
    except errors.MusterError:
        return False
    return True


def until_full(plane: KubePlane, name: str, count: int, timeout_s: float = 30.0) -> None:
    try:
        eventually(lambda: full(plane, name, count), f"{name} trains with {count}", timeout_s)
    except AssertionError as error:
        pods = {pod: found["status"] for pod, found in plane.pods(name).items()}
        raise AssertionError(f"{error}: {(plane.object(name) or {}).get('status')}; {pods}") from None


def full(plane: KubePlane, name: str, count: int) -> bool:
    found = plane.object(name)
    status = (found or {}).get("status") or {}
    ready = (status.get("worldSize") or {}).get("ready")
    return status.get("phase") == "ready" and ready == count and len(plane.running(name)) == count


def test_ranks_go_on_and_the_leader_stays_through_a_short_gap_in_which_much_happens(
    plane: KubePlane, proxy: ApiProxy, kubelet: TestKubelet
) -> None:
    """Its watches are gone, and when they come back their history is: only lists tell what happened."""
    plane.serve(url=proxy.url)
    names = ("steady", "scaled", "removed", "replaced", "robbed")
    folders = {name: program(plane, name) for name in names}
    for name in names:
        plane.phase("ready", name)
    ranks, before = notes(folders["steady"]), plane.running("robbed")
    old = plane.object("replaced")
    proxy.refuse()
    begun = lease.boot_time()
    plane.kubectl("scale", "training/scaled", "--replicas=3")
    for name in ("removed", "replaced"):
        plane.cluster.patch(path_of(plane, name), {"metadata": {"finalizers": None}})
        plane.kubectl("delete", "training", name, "--wait=false")
    (folders["replaced"] / "again").touch()
    plane.kubectl("apply", "-f", "-", input=plane.manifest("replaced", world=(1, 1, 4)))
    plane.kubectl("apply", "-f", "-", input=plane.manifest("born", world=(1, 1, 4)))
    plane.kubectl("delete", "pod", before[0], "--wait=false")
    kubelet.kill(plane.running("scaled")[0])
    proxy.expire_watches(coming=2)
    proxy.refuse(False)
    assert lease.boot_time() - begun < lease.GIVE_UP_S - lease.RENEW_EVERY_S, "this machine is too slow for this test"
    for name, count in (("scaled", 3), ("replaced", 1), ("born", 1), ("robbed", 2), ("steady", 2)):
        until_full(plane, name, count)
    plane.gone("removed")
    assert plane.object("replaced") != old and len(plane.pods("replaced")) == 1
    assert notes(folders["steady"]) == ranks and plane.replicas["one"].proc.poll() is None
    assert sum(call.watch for call in proxy.calls if call.path.endswith("/trainings")) >= 2
    assert len([call for call in proxy.calls if call.path.endswith("v1alpha1/trainings") and not call.watch]) >= 2
    assert_nothing_twice(plane)


def path_of(plane: KubePlane, name: str) -> str:
    return f"/apis/muster.dev/v1alpha1/namespaces/{plane.namespace}/trainings/{name}"


# The API server is in trouble ------------------------------------------------------------------------


def life(plane: KubePlane, name: str = "demo", timeout_s: float = 60.0) -> Counter[tuple[str, str]]:
    """Apply, scale up, lose a Pod, end: what the journal says of it."""
    folder = program(plane, name, world=(1, 2, 4))
    plane.phase("ready", name, timeout_s)
    until_full(plane, name, 2, timeout_s)
    plane.kubectl("scale", f"training/{name}", "--replicas=3")
    until_full(plane, name, 3, timeout_s)
    (folder / "go").touch()
    ended = plane.phase("succeeded", name, timeout_s)
    assert [exit["exitCode"] for exit in ended["status"]["rankExits"]] == [0, 0, 0]
    handle = plane.client.get(name)

    def told_of() -> Counter[str]:
        return Counter(event.reason for event in handle.events())

    # The status is written before the journal, and workers leave when the end is stored.
    eventually(lambda: "Succeeded" in told_of(), "its end is told", 10)
    eventually(lambda: told_of()["WorkerStarted"] == told_of()["WorkerExited"], "the end of each worker is told", 30)
    told = Counter((event.reason, str(event.data.get("worker", ""))) for event in handle.events())
    plane.kubectl("delete", "training", name, f"--timeout={timeout_s:g}s", f"--request-timeout={timeout_s:g}s")
    plane.gone(name, timeout_s)
    return told


def test_a_slow_api_server(plane: KubePlane, proxy: ApiProxy) -> None:
    proxy.delay_s = 1.0
    plane.serve(url=proxy.url)
    folder = program(plane, "demo", world=(1, 1, 2))
    plane.phase("ready")
    (folder / "go").touch()
    ended = plane.phase("succeeded")
    assert [exit["exitCode"] for exit in ended["status"]["rankExits"]] == [0]
    proxy.delay_s = 0.0
    plane.kubectl("delete", "training", "demo")
    plane.gone()
    assert plane.replicas["one"].proc.poll() is None
    assert "lease" not in plane.replicas["one"].text


def writes(method: str, part: str) -> Callable[[Call], bool]:
    return lambda call: call.method == method and part in call.path and "dryRun" not in call.query


LOST = (
    (2, writes("POST", "/pods")),
    (2, writes("POST", "/secrets")),
    (2, writes("PUT", "/status")),
    (2, writes("PATCH", "/pods/")),
    (1, writes("PATCH", "/trainings/")),
    (1, writes("POST", "/services")),
    (2, writes("POST", "/events")),
    (1, writes("PUT", "/leases/")),
)


def test_answers_that_are_lost_change_nothing(plane: KubePlane, proxy: ApiProxy, kubelet: TestKubelet) -> None:
    """The same life with and without: the journal tells the same story."""
    plane.serve(url=proxy.url)
    plain = life(plane, "plain")
    for times, when in LOST:
        proxy.lose(times, when)
    lossy = life(plane, "lossy")
    eventually(lambda: proxy.lost_all, "each of them was lost", 10)
    assert renamed(lossy, "lossy") == renamed(plain, "plain")
    assert plane.replicas["one"].proc.poll() is None
    assert set(shown_events(plane, "lossy").values()) == {1}


def renamed(told: Counter[tuple[str, str]], name: str) -> Counter[tuple[str, str]]:
    """Without the names, what is told of the trouble itself, and goodbyes, some of which come after the end."""
    return Counter(
        {
            (reason, worker.removeprefix(name)): count
            for (reason, worker), count in told.items()
            if reason not in ("ReconcileFailed", "WorkerLeft")
        }
    )


def test_a_conflict_on_every_second_write(plane: KubePlane, proxy: ApiProxy) -> None:
    proxy.conflict_every = 2
    with kept(plane, proxy.url):
        told = life(plane, "conflicts")
        assert plane.replicas["one"].proc.poll() is None, "it never had to start again"
        assert {count for (reason, _), count in told.items() if reason == "WorkerStarted"} == {1}, told
        # One whose Pod was refused again and again is given up for another, which is told; three there are.
        assert sum(count for (reason, _), count in told.items() if reason == "WorkerJoined") == 3, told
        shown = eventually(lambda: shown_events(plane, "conflicts"), "kubectl shows events")
        assert set(shown.values()) == {1}
        assert_nothing_twice(plane)


def test_errors_and_broken_connections_all_over_the_place(plane: KubePlane, proxy: ApiProxy) -> None:
    with kept(plane, proxy.url):
        for status in (429, 500, 503, 504):
            proxy.answer(status, times=5, when=sprinkled(7))
        over = threading.Event()

        def cut() -> None:
            while not over.wait(1.0):
                proxy.cut()

        cutting = threading.Thread(target=cut)
        cutting.start()
        try:
            life(plane)
        finally:
            over.set()
            cutting.join()
        assert_nothing_twice(plane)


def sprinkled(every: int) -> Callable[[Call], bool]:
    """Each so-many-th call."""
    count = iter(range(10**9))
    return lambda call: next(count) % every == 0
