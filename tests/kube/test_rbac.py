"""With exactly the rendered rights everything works; without any one of them, who looks is told which it is."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from lightkube import KubeConfig

from muster import errors
from muster.backends.kube import workloads
from muster.kube import rbac
from muster.kube.client import KubeApi
from muster.ports import Write
from muster.store import kube_batches, kube_log
from muster.store.kube_log import KubeLog
from muster.store.ledger import Ledger
from muster.types.event import Event
from tests.fleet import eventually
from tests.kube.api import Json
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane

pytestmark = pytest.mark.xdist_group("rbac")  # one control plane for all
HINT = "muster kube install --dry-run"


@dataclass(frozen=True)
class Right:
    """One verb on one kind."""

    home: bool
    grant: rbac.Permission
    verb: str

    def __str__(self) -> str:
        return f"{'home-' if self.home else ''}{self.grant.resource}-{self.verb}"

    @property
    def said(self) -> str:
        """The words of the API server."""
        kind, _, part = self.grant.resource.partition("/")
        group = re.escape(f'in API group "{self.grant.group}"')
        return rf'cannot {self.verb} resource "{kind}{f"/{part}" if part else ""}" {group}'


RIGHTS = [
    Right(home, grant, verb)
    for home, grants in ((False, rbac.EVERYWHERE), (True, rbac.AT_HOME))
    for grant in grants
    for verb in grant.verbs
    if grant.group != workloads.GROUP  # this cluster has no Kueue: test_kueue.py has what those are for
]


class Stage:
    """A control plane under its own account, whose rights can be taken away."""

    def __init__(self, plane: KubePlane, kubelet: TestKubelet) -> None:
        self.plane, self.kubelet, self.cluster = plane, kubelet, plane.cluster
        self.user = f"system:serviceaccount:{plane.own}:muster"
        self._count = 0

    def new_name(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def serve(self, *, wait: bool = True) -> None:
        self.plane.serve(user=self.user, wait=wait)

    @property
    def running(self) -> bool:
        replica = self.plane.replicas.get("one")
        return replica is not None and replica.proc.poll() is None

    def stop(self) -> None:
        if self.running:
            self.plane.replicas["one"].kill(15)
            self.plane.replicas["one"].wait()

    def begin(self) -> None:
        if not self.running:
            self.serve()

    def expect(self, right: Right) -> None:
        self.plane.replicas["one"].expect(right.said, 20)

    def apply(self, **spec: Any) -> str:
        name = self.new_name()
        self.plane.kubectl("apply", "-f", "-", input=self.plane.manifest(name, world=(1, 1, 3), **spec))
        return name

    @contextmanager
    def without(self, right: Right) -> Iterator[None]:
        role = "/apis/rbac.authorization.k8s.io/v1/"
        role += f"namespaces/{self.plane.own}/roles/muster" if right.home else "clusterroles/muster"
        grants = rbac.AT_HOME if right.home else rbac.EVERYWHERE
        less = [
            replace(grant, verbs=tuple(verb for verb in grant.verbs if (grant, verb) != (right.grant, right.verb)))
            for grant in grants
        ]
        self.cluster.patch(role, {"rules": [grant.rule() for grant in less if grant.verbs]})
        self._until_allowed(right, False)
        try:
            yield
        finally:
            self.cluster.patch(role, {"rules": [grant.rule() for grant in grants]})
            self._until_allowed(right, True)

    def _until_allowed(self, right: Right, allowed: bool) -> None:
        """The server learns of it a moment later."""
        kind, _, part = right.grant.resource.partition("/")
        asked: Json = {"group": right.grant.group, "resource": kind, "subresource": part, "verb": right.verb}
        asked["namespace"] = self.plane.own if right.home else self.plane.namespace
        asked |= {"name": right.grant.names[0]} if right.grant.names else {}
        body = {"spec": {"user": self.user, "resourceAttributes": asked}}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        eventually(lambda: self.cluster.api("POST", path, body)["status"].get("allowed", False) == allowed, str(right))


@pytest.fixture(autouse=True)
def tidied_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_log, "TIDY_EVERY_S", 3600.0)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[Stage]:
    kubelet = TestKubelet(cluster)
    namespace = cluster.new_namespace()
    plane = KubePlane(tmp_path_factory.mktemp("rbac"), cluster, namespace)
    yield Stage(plane, kubelet)
    plane.close()
    cluster.drop_namespace(namespace)
    kubelet.close()


# With all of them --------------------------------------------------------------------------------


def test_with_exactly_these_rights_a_whole_life_works(stage: Stage) -> None:
    plane = stage.plane
    stage.begin()
    plane.kubectl("apply", "-f", "-", input=plane.manifest("whole", env={"KEY": "hidden"}, secretEnv=["KEY"]))
    plane.phase("ready", "whole")
    handle = plane.client.get("whole")
    handle.scale(3)
    handle.wait_until_target_world(timeout=30)
    victim = plane.running("whole")[0]
    stage.kubelet.kill(victim)
    eventually(lambda: victim not in plane.running("whole") and len(plane.running("whole")) == 3, "it is replaced")
    first = plane.replicas["one"]
    stage.stop()
    stage.serve()
    handle.wait_until_target_world(timeout=30)
    handle.scale(2)
    handle.wait_until_target_world(timeout=30)
    assert list(handle.logs()) == []  # probes say nothing, and may be asked
    handle.cancel()
    plane.phase("cancelled", "whole")
    told = plane.kubectl("get", "events", "--field-selector=involvedObject.name=whole")
    assert "Created" in told and "Cancelled" in told
    submitted = plane.train("asked", world=(1, 1, 1))
    submitted.wait_until_target_world(timeout=30)
    for name in ("whole", "asked"):
        plane.client.get(name).delete()
        plane.gone(name)
    for replica in (first, plane.replicas["one"]):
        assert "forbidden" not in replica.text and "cannot" not in replica.text, replica.text


# Without one -------------------------------------------------------------------------------------


def refuses_to_start(stage: Stage, right: Right) -> None:
    stage.stop()
    with stage.without(right):
        stage.serve(wait=False)
        stage.expect(right)
        replica = stage.plane.replicas["one"]
        assert replica.wait(20) == 1
        last = replica.text.strip().splitlines()[-1]
        assert last.startswith("muster server: ") and re.search(right.said, last) and HINT in last


def refuses_to_lead(stage: Stage, right: Right) -> None:
    """The first leader makes the EndpointSlice, and each later one updates it."""
    stage.begin()
    stage.stop()
    if right.verb == "create":
        stage.cluster.api("DELETE", f"{stage.cluster.slices(stage.plane.own)}/muster-ipv4")
    refuses_to_start(stage, right)


def serves_with_the_tokens_of_its_start(stage: Stage, right: Right) -> None:
    stage.stop()
    with stage.without(right):
        stage.serve()
        stage.expect(right)
        assert stage.plane.client.list() is not None, "it serves"


def stands_by(stage: Stage, right: Right) -> None:
    """It says so, and begins as soon as it may."""
    stage.begin()  # there is a lease after that
    stage.stop()
    if right.verb == "create":
        stage.cluster.api("DELETE", f"/apis/coordination.k8s.io/v1/namespaces/{stage.plane.own}/leases/muster")
    with stage.without(right):
        stage.serve(wait=False)
        stage.plane.replicas["one"].expect(rf"standing by: .*{right.said}.*{HINT}", 20)
    stage.plane.replicas["one"].expect("muster serves on")


def says_so_and_goes_on(stage: Stage, right: Right) -> None:
    """It cannot be seen what changes; from when it can, all is well."""
    stage.stop()
    with stage.without(right):
        stage.serve()
        stage.plane.replicas["one"].expect(rf"cannot be watched, trying again: .*{right.said}", 20)
        name = stage.apply()
    stage.plane.phase("ready", name)


def refuses_the_caller(order: Callable[[KubePlane, str], None]) -> Callable[[Stage, Right], None]:
    def act(stage: Stage, right: Right) -> None:
        stage.begin()
        name = stage.apply()
        stage.plane.phase("ready", name)
        with stage.without(right), pytest.raises(errors.MusterError, match=right.said) as raised:
            order(stage.plane, name)
        assert HINT in raised.value.hint
        order(stage.plane, name)

    return act


def fails_to_reconcile(said: str = "", **spec: Any) -> Callable[[Stage, Right], None]:
    """The training's own events tell, and it is carried out as soon as it may."""

    def act(stage: Stage, right: Right) -> None:
        stage.begin()
        with stage.without(right):
            name = stage.apply(**spec)
            stage.plane.replicas["one"].expect(said or right.said, 20)
            told_of(stage, name, said or right.said)
        stage.plane.phase("ready", name)

    return act


def told_of(stage: Stage, name: str, said: str) -> None:
    """By `muster describe` and by kubectl."""
    handle = stage.plane.client.get(name)
    told = eventually(
        lambda: [event for event in handle.events() if event.reason == "ReconcileFailed"], "it is in the journal", 20
    )
    assert re.search(said, told[0].message) and HINT in told[0].message
    selector = f"--field-selector=involvedObject.name={name},reason=ReconcileFailed"
    eventually(
        lambda: re.search(said, stage.plane.kubectl("get", "events", selector, "-o", "jsonpath={..message}")),
        "kubectl shows it",
        20,
    )


def cannot_stop_a_worker(stage: Stage, right: Right) -> None:
    """One that has not begun cannot be asked to leave."""
    stage.begin()
    name = stage.apply(resources={"gpus": 1})
    eventually(lambda: stage.plane.running(name), "it waits for a GPU that no node has")
    with stage.without(right):
        stage.plane.client.get(name).cancel()
        stage.expect(right)
        told_of(stage, name, right.said)
    stage.plane.phase("cancelled", name)
    eventually(lambda: not stage.plane.running(name), "its worker has gone")


def cannot_let_go(stage: Stage, right: Right) -> None:
    stage.begin()
    name = stage.apply()
    stage.plane.phase("ready", name)
    with stage.without(right):
        stage.kubelet.kill(f"{name}-0")
        stage.expect(right)
    path = f"/api/v1/namespaces/{stage.plane.namespace}/pods/{name}-0"
    stage.cluster.until(path, lambda pod: pod and not pod["metadata"].get("finalizers"), "it is let go")


def cannot_claim(stage: Stage, right: Right) -> None:
    stage.begin()
    with stage.without(right):
        name = stage.apply()
        stage.expect(right)
    stage.plane.phase("ready", name)


def cannot_be_told_by_kubectl(stage: Stage, right: Right) -> None:
    stage.begin()
    with stage.without(right):
        name = stage.apply()
        stage.plane.replicas["one"].expect(rf"is not shown by kubectl: .*{right.said}", 20)
        stage.plane.phase("ready", name)


def cannot_be_written_down(stage: Stage, right: Right) -> None:
    """Neither the journal nor what a training's workers share: nothing is begun until it can be."""
    stage.begin()
    with stage.without(right):
        name = stage.apply()
        stage.plane.replicas["one"].expect(rf"the journal cannot be written, trying again: .*{right.said}", 20)
        assert not stage.plane.pods(name)
    stage.plane.phase("ready", name)


def cannot_renew_what_workers_share(stage: Stage, right: Right) -> None:
    stage.begin()
    name = stage.apply()
    stage.plane.phase("ready", name)
    stage.stop()
    stage.serve()
    with stage.without(right):
        stage.plane.kubectl("scale", f"training/{name}", "--replicas=2")
        stage.expect(right)
        told_of(stage, name, right.said)
    eventually(lambda: len(stage.plane.running(name)) == 2, "it has two")


def cannot_see_whose_a_claim_is(stage: Stage, right: Right) -> None:
    stage.begin()
    storage = [{"name": "ckpt", "mount": "/ckpt", "size": "1Gi"}]
    name = stage.apply(storage=storage)
    stage.plane.phase("ready", name)
    stage.plane.client.get(name).delete()
    stage.plane.gone(name)
    with stage.without(right):
        stage.plane.kubectl("apply", "-f", "-", input=stage.plane.manifest(name, world=(1, 1, 3), storage=storage))
        stage.expect(right)
        told_of(stage, name, right.said)
    stage.plane.phase("ready", name)


def cannot_tell_where_a_worker_is(stage: Stage, right: Right) -> None:
    """It is waited for: nobody trains in a segment of which nothing is known."""
    stage.begin()
    with stage.without(right):
        name = stage.apply(topologyKey="kubernetes.io/hostname", segment=1)
        stage.plane.replicas["one"].expect(rf"node node-1: trying again: .*{right.said}", 20)
    stage.plane.phase("ready", name)


def cannot_tidy(stage: Stage, right: Right) -> None:
    """The journal grows, and says why."""
    stage.stop()
    with stage.without(right), pytest.raises(errors.Forbidden, match=right.said) as raised:
        asyncio.run(tidied(stage))
    assert HINT in raised.value.hint
    asyncio.run(tidied(stage))


async def tidied(stage: Stage) -> None:
    config = KubeConfig.from_file(stage.cluster.kubeconfig(stage.user, namespace=stage.plane.own)).get()
    assert config is not None
    api, ledger = KubeApi(config), Ledger()
    log = KubeLog(api, stage.plane.own, "test", commit=ledger.commit, value=ledger.record, now=ledger.clock.steady)
    try:
        records, last = await log.open()
        ledger.load((), records, 0, last)
        log.start()
        for _ in range(kube_batches.MERGE_AT + 2):
            await log.append(ledger.prepare(Write(events=(Event("Said"),))))
        await log.tidy()
    finally:
        await log.close()
        await api.close()


def logs(plane: KubePlane, name: str) -> None:
    list(plane.client.get(name).logs())


def submit(plane: KubePlane, name: str) -> None:
    plane.train(f"{name}-next", world=(1, 1, 1))


def scale(plane: KubePlane, name: str) -> None:
    plane.client.get(name).scale(2)


def delete(plane: KubePlane, name: str) -> None:
    plane.client.get(name).delete()


ACTS: dict[str, Callable[[Stage, Right], None]] = {
    "trainings-list": refuses_to_start,
    "trainings-watch": says_so_and_goes_on,
    "trainings-create": refuses_the_caller(submit),
    "trainings-update": refuses_the_caller(scale),
    "trainings-patch": cannot_claim,
    "trainings-delete": refuses_the_caller(delete),
    "trainings/status-update": fails_to_reconcile(),
    "trainings/finalizers-update": fails_to_reconcile("trainings/finalizers"),
    "pods-list": refuses_to_start,
    "pods-watch": says_so_and_goes_on,
    "pods-create": fails_to_reconcile(),
    "pods-patch": cannot_let_go,
    "pods-delete": cannot_stop_a_worker,
    "pods/log-get": refuses_the_caller(logs),
    "services-create": fails_to_reconcile(),
    "services-patch": cannot_renew_what_workers_share,
    "secrets-create": cannot_be_written_down,
    "secrets-update": cannot_renew_what_workers_share,
    "persistentvolumeclaims-create": fails_to_reconcile(storage=[{"name": "ckpt", "mount": "/ckpt", "size": "1Gi"}]),
    "persistentvolumeclaims-get": cannot_see_whose_a_claim_is,
    "nodes-get": cannot_tell_where_a_worker_is,
    "priorityclasses-list": fails_to_reconcile(priority=5),
    "events-create": cannot_be_told_by_kubectl,
    "home-leases-create": stands_by,
    "home-leases-get": stands_by,
    "home-leases-update": stands_by,
    "home-services-get": refuses_to_start,
    "home-endpointslices-create": refuses_to_lead,
    "home-endpointslices-get": refuses_to_lead,
    "home-endpointslices-update": refuses_to_lead,
    "home-secrets-get": refuses_to_start,
    "home-secrets-list": refuses_to_start,
    "home-secrets-watch": serves_with_the_tokens_of_its_start,
    "home-secrets-delete": cannot_tidy,
}


def test_every_right_has_a_use() -> None:
    assert sorted(map(str, RIGHTS)) == sorted(ACTS)


@pytest.mark.parametrize("right", RIGHTS, ids=str)
def test_a_right_that_is_missing_is_named(stage: Stage, right: Right) -> None:
    ACTS[str(right)](stage, right)


def test_the_rights_that_the_tests_take_away_are_those_that_are_installed(stage: Stage) -> None:
    group = "/apis/rbac.authorization.k8s.io/v1"
    for path, grants in (
        (f"{group}/clusterroles/muster", rbac.EVERYWHERE),
        (f"{group}/namespaces/{stage.plane.own}/roles/muster", rbac.AT_HOME),
    ):
        found = stage.cluster.get(path)
        assert found is not None and json.loads(json.dumps(found["rules"])) == [grant.rule() for grant in grants]
