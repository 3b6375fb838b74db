"""On a real API server: is what `muster kube install` applies taken, kept, and enough? What does kubectl make of it?

The definition is one for the whole cluster, so tests that share a cluster install the same one; each installation has
a namespace of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.kube import leader_slice, rbac
from muster.types.codec import show_time, to_wire
from muster.types.training import Condition, Outcome, RankExit, RankStatus
from tests.kube.api import Refused
from tests.kube.cluster import ADMIN, NOBODY, Cluster
from tests.kube.test_manifests import GOLDEN, HOSTILE
from tests.training_builders import BIRTH, a_status

pytestmark = [pytest.mark.kube, pytest.mark.xdist_group("kube-install")]

Json = dict[str, Any]
EXPLAINED_S = 20.0  # the server publishes the words of a new definition a moment later


def muster(cluster: Cluster, *words: str, user: str = ADMIN) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "muster.cli.main", *words]
    return subprocess.run(argv, env=cluster.env(user), capture_output=True, text=True, timeout=60)


def installed(cluster: Cluster, namespace: str, *words: str) -> dict[str, str]:
    """What became of each kind of object."""
    done = muster(cluster, "kube", "install", "-n", namespace, "-o", "json", *words)
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one["change"] for one in json.loads(done.stdout)["items"]}


@pytest.fixture
def home(cluster: Cluster) -> Iterator[str]:
    """A namespace with an installation."""
    made = cluster.new_namespace("muster")
    installed(cluster, made)
    yield made
    cluster.drop_namespace(made)


@pytest.fixture(scope="module")
def definition(cluster: Cluster) -> Iterator[None]:
    """Trainings can be written."""
    made = cluster.new_namespace("muster")
    installed(cluster, made)
    yield
    cluster.drop_namespace(made)


with_definition = pytest.mark.usefixtures("definition")


def collection(namespace: str) -> str:
    return f"/apis/muster.dev/v1alpha1/namespaces/{namespace}/trainings"


def a_manifest(name: str = "first", **spec: Any) -> Json:
    about = {"apiVersion": "muster.dev/v1alpha1", "kind": "Training", "metadata": {"name": name}}
    return {**about, "spec": {"script": "train.py", "worldSize": {"max": 4}, **spec}}


# Installing --------------------------------------------------------------------------------------


def test_each_object_is_told_in_one_line_with_the_next_command(cluster: Cluster, namespace: str) -> None:
    done = muster(cluster, "kube", "install", "-n", namespace)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    assert told[0][0] == "customresourcedefinition/trainings.muster.dev"
    assert ["deployment/muster", "created"] in told and len(told) == 10
    assert f"kubectl -n {namespace} get secret muster-token" in done.stderr and "muster ps" in done.stderr


def test_installing_again_changes_nothing_and_an_option_only_what_it_is_about(cluster: Cluster, home: str) -> None:
    deployment = f"/apis/apps/v1/namespaces/{home}/deployments/muster"
    seen = cluster.until(deployment, lambda it: it and it.get("status", {}).get("observedGeneration") == 1)
    assert seen is not None and seen["spec"]["replicas"] == 2
    again = installed(cluster, home)
    assert {kind for kind, change in again.items() if change != "unchanged"} <= {"Deployment"}  # its status moves yet
    more = installed(cluster, home, "--replicas", "3")
    assert more.pop("Deployment") == "configured"
    assert set(more.values()) == {"unchanged"}
    assert cluster.api("GET", deployment)["spec"]["replicas"] == 3


def test_an_upgrade_leaves_the_leaders_address(cluster: Cluster, home: str) -> None:
    path = cluster.slices(home)
    service = cluster.api("GET", f"/api/v1/namespaces/{home}/services/muster")
    version = path.split("/")[3]
    led = leader_slice.rendered(version, service, "IPv4", "10.1.2.3", {"api": 8470})
    cluster.api("POST", path, led)
    assert set(installed(cluster, home).values()) <= {"unchanged", "configured"}
    assert cluster.api("GET", f"{path}/muster-ipv4")["endpoints"][0]["addresses"] == ["10.1.2.3"]
    printed = muster(cluster, "kube", "install", "-n", home, "--dry-run").stdout
    cluster.kubectl("apply", "-f", "-", input=printed)
    assert cluster.api("GET", f"{path}/muster-ipv4")["endpoints"][0]["addresses"] == ["10.1.2.3"]


def test_kubectl_applies_what_a_dry_run_prints(cluster: Cluster) -> None:
    name = cluster.new_namespace("dry")
    try:
        printed = muster(cluster, "kube", "install", "-n", name, "--dry-run").stdout
        told = cluster.kubectl("apply", "-f", "-", input=printed).stdout
        assert "deployment.apps/muster created" in told
        assert cluster.kubectl("diff", "-f", "-", input=printed).stdout == ""
    finally:
        cluster.drop_namespace(name)


def test_who_may_not_install_is_told_whom_to_ask(cluster: Cluster) -> None:
    done = muster(cluster, "kube", "install", user=NOBODY)
    assert done.returncode == 5 and done.stdout == ""
    assert "forbidden" in done.stderr and "muster kube install --dry-run" in done.stderr


def test_the_control_plane_may_do_what_the_table_says_and_nothing_else(cluster: Cluster, home: str) -> None:
    asked = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

    def may(verb: str, group: str, resource: str, namespace: str, name: str = "") -> bool:
        kind, _, part = resource.partition("/")
        what = {
            "verb": verb,
            "group": group,
            "resource": kind,
            "subresource": part,
            "namespace": namespace,
            "name": name,
        }
        spec = {"user": f"system:serviceaccount:{home}:muster", "resourceAttributes": what}
        return bool(cluster.api("POST", path, {**asked, "spec": spec})["status"]["allowed"])

    for grant in rbac.EVERYWHERE:
        assert all(may(verb, grant.group, grant.resource, "default") for verb in grant.verbs), grant
    for grant in rbac.AT_HOME:
        for name in grant.names or ("",):
            assert all(may(verb, grant.group, grant.resource, home, name) for verb in grant.verbs), grant
    refused = [
        ("get", "", "secrets", "default", ""),
        ("list", "", "secrets", "kube-system", ""),
        ("delete", "", "secrets", "default", ""),
        ("update", "discovery.k8s.io", "endpointslices", home, "other"),
        ("get", "", "services", home, "other"),
        ("update", "coordination.k8s.io", "leases", home, "other"),
        ("create", "", "pods/exec", "default", ""),
        ("create", "", "serviceaccounts/token", home, ""),
        ("update", "rbac.authorization.k8s.io", "clusterroles", "", "muster"),
        ("delete", "", "nodes", "", ""),
        ("delete", "apiextensions.k8s.io", "customresourcedefinitions", "", ""),
    ]
    assert [one for one in refused if may(*one)] == []


def test_the_golden_files_are_what_a_server_takes(cluster: Cluster) -> None:
    """A dry run by the server: everything is checked, nothing is kept, so namespaces must be there before."""
    cluster.kubectl("create", "namespace", "training-system")
    try:
        for name in ("default.yaml", "options.yaml"):
            text = (GOLDEN / name).read_text().replace("namespace: muster\n", "namespace: training-system\n")
            told = cluster.kubectl(
                "apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", "-", input=text
            )
            assert told.stdout.count("serverside-applied") == 10
    finally:
        cluster.drop_namespace("training-system")


# Trainings ---------------------------------------------------------------------------------------


@with_definition
def test_kubectl_explains_every_field_with_a_sentence(cluster: Cluster) -> None:
    deadline = time.monotonic() + EXPLAINED_S
    while (said := cluster.kubectl("explain", "training.spec.worldSize", check=False)).returncode:
        assert time.monotonic() < deadline, said.stderr  # the server has no event for it
        time.sleep(0.2)
    assert "How many workers train together" in said.stdout
    assert "kubectl scale changes it" in said.stdout and "<integer>" in said.stdout
    assert "128+n for signal n" in cluster.kubectl("explain", "mt.status.outcome.firstFailure").stdout


@with_definition
def test_a_training_is_taken_and_shows_what_was_left_out(cluster: Cluster, namespace: str) -> None:
    wanted = a_manifest(args=["", "x"], env={"EMPTY": ""}, hangTimeoutSeconds=None, command=None)
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(wanted))
    spec = cluster.api("GET", f"{collection(namespace)}/first")["spec"]
    assert spec["worldSize"] == {"min": 1, "target": 1, "max": 4}
    assert (spec["backend"], spec["maxRestarts"], spec["stopGraceSeconds"]) == ("kube", 3, 15)
    assert (spec["args"], spec["env"]) == (["", "x"], {"EMPTY": ""})
    assert "command" not in spec and "hangTimeoutSeconds" not in spec


@with_definition
@pytest.mark.parametrize("case", HOSTILE)
def test_the_server_refuses_what_could_never_run(cluster: Cluster, namespace: str, case: str) -> None:
    body = {**a_manifest(), **{"metadata": {"name": "h"}, "spec": {}}, **HOSTILE[case]}
    if "spec" not in HOSTILE[case]:
        del body["spec"]
    with pytest.raises(Refused) as refused:
        cluster.api("POST", collection(namespace), body)
    assert refused.value.code == 422 and "is invalid" in str(refused.value)


@with_definition
def test_kubectl_names_a_field_that_it_does_not_know(cluster: Cluster, namespace: str) -> None:
    text = json.dumps(a_manifest(worldsize={"target": 2}))
    deadline = time.monotonic() + EXPLAINED_S
    while (
        'unknown field "worldsize"'
        not in cluster.kubectl("-n", namespace, "apply", "--dry-run=client", "-f", "-", input=text, check=False).stderr
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@with_definition
def test_kubectl_scales_within_the_schemas_bounds(cluster: Cluster, namespace: str) -> None:
    cluster.api("POST", collection(namespace), a_manifest())
    cluster.kubectl("-n", namespace, "scale", "mt/first", "--replicas", "3")
    for wrong in ("0", "10001"):
        said = cluster.kubectl("-n", namespace, "scale", "mt/first", "--replicas", wrong, check=False)
        assert said.returncode != 0 and "spec.worldSize.target" in said.stderr
    found = cluster.api("GET", f"{collection(namespace)}/first")
    assert found["spec"]["worldSize"]["target"] == 3 and found["metadata"]["generation"] == 2


@with_definition
def test_a_whole_status_is_kept_and_shown_in_columns(cluster: Cluster, namespace: str) -> None:
    made = cluster.api("POST", collection(namespace), a_manifest())
    failed = RankExit(0, 1, "Exit 1", finished_at=BIRTH)
    status = to_wire(
        a_status(
            ready=1,
            observed_generation=1,
            phase="failed",
            conditions=(Condition("TargetReached", "True", "", "", BIRTH, 1),),
            round=0,
            restarts=2,
            ranks=(RankStatus(0, started_at=BIRTH),),
            rank_exits=(),
            outcome=Outcome("failed", "TooManyRestarts", "", failed),
        )
    )
    kept = cluster.api("PUT", f"{collection(namespace)}/first/status", made | {"status": status})
    assert kept["status"] == status
    assert kept["status"]["conditions"][0]["lastTransitionTime"] == show_time(BIRTH)
    assert kept["metadata"]["generation"] == 1
    cluster.kubectl("-n", namespace, "wait", "--for=condition=TargetReached", "mt/first", "--timeout=10s")
    title, row = cluster.kubectl("-n", namespace, "get", "trainings").stdout.splitlines()
    assert title.split() == ["NAME", "PHASE", "READY", "TARGET", "ROUND", "AGE"]
    assert row.split()[:5] == ["first", "failed", "1", "1", "0"]
    wide = cluster.kubectl("-n", namespace, "get", "mt", "-o", "wide").stdout.splitlines()[1]
    assert wide.split()[-2:] == ["2", "TooManyRestarts"]


@with_definition
def test_an_ordinary_write_cannot_touch_the_status(cluster: Cluster, namespace: str) -> None:
    made = cluster.api("POST", collection(namespace), a_manifest() | {"status": {"phase": "succeeded"}})
    assert "status" not in made


@with_definition
def test_what_the_page_says_about_an_example_is_so(cluster: Cluster, namespace: str) -> None:
    page = (Path(__file__).parents[2] / "docs/kubernetes.md").read_text()
    example = page.split("```yaml\n")[1].split("```")[0]
    assert "created" in cluster.kubectl("-n", namespace, "apply", "-f", "-", input=example).stdout
    said = cluster.kubectl("-n", namespace, "scale", "mt/first", "--replicas", "0", check=False).stderr
    assert said.strip() in page
