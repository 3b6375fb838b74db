"""On a real API server: does `muster kube uninstall` take back what install made, all of it, and nothing else?

The definition is one for a whole cluster, so this is a cluster of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from muster import errors
from muster.kube import uninstall
from tests.kube import network
from tests.kube.cluster import NOBODY, Cluster
from tests.kube.house import api_of
from tests.kube.test_install import a_manifest, collection, installed, muster

pytestmark = [pytest.mark.kube, pytest.mark.xdist_group("kube-uninstall")]

TRAINING = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainings.muster.dev"


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    network.isolate()
    made = Cluster(tmp_path_factory.mktemp("lonely"))
    yield made
    made.close()


def removed(cluster: Cluster, *words: str) -> dict[str, str]:
    """What became of each kind of object."""
    done = muster(cluster, "kube", "uninstall", "--yes", "-o", "json", *words)
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one["change"] for one in json.loads(done.stdout)["items"]}


def test_what_install_made_goes_and_a_second_time_there_is_nothing(lonely: Cluster) -> None:
    installed(lonely, "muster")
    told = muster(lonely, "kube", "uninstall", "--yes")
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert (
        lines[0] == "deployment/muster deleted" and lines[-1] == "customresourcedefinition/trainings.muster.dev deleted"
    )
    assert len(lines) == 10 and all(line.endswith(" deleted") for line in lines)
    assert lonely.get("/api/v1/namespaces/muster") is None and lonely.get(TRAINING) is None
    assert set(removed(lonely).values()) == {"absent"}
    assert "Deployment" in installed(lonely, "muster")  # and it can come back
    removed(lonely)


def test_without_yes_it_says_what_would_go_and_removes_nothing(lonely: Cluster) -> None:
    installed(lonely, "muster")
    said = muster(lonely, "kube", "uninstall")
    assert said.returncode == 2 and "nothing was removed yet" in said.stderr and "--yes" in said.stderr
    assert "deployment/muster deleted" in said.stdout
    assert lonely.get("/apis/apps/v1/namespaces/muster/deployments/muster") is not None
    removed(lonely)


def test_trainings_hold_it_up_until_somebody_says_what_becomes_of_them(lonely: Cluster) -> None:
    installed(lonely, "muster")
    lonely.api("POST", collection("default"), a_manifest())
    said = muster(lonely, "kube", "uninstall", "--yes")
    assert said.returncode == 4 and "default/first" in said.stderr and "--delete-trainings" in said.stderr
    assert lonely.get("/apis/apps/v1/namespaces/muster/deployments/muster") is not None
    kept = removed(lonely, "--keep-crd")
    assert kept.pop("CustomResourceDefinition") == "left" and set(kept.values()) == {"deleted"}
    assert lonely.get(f"{collection('default')}/first") is not None
    gone = removed(lonely, "--delete-trainings")
    assert (gone["Training"], gone["CustomResourceDefinition"]) == ("deleted", "deleted")
    assert lonely.get(TRAINING) is None


def test_trainings_that_nobody_ends_are_named_and_the_rest_stays(lonely: Cluster) -> None:
    installed(lonely, "muster")
    held = a_manifest() | {"metadata": {"name": "held", "finalizers": ["muster.dev/training"]}}
    lonely.api("POST", collection("default"), held)

    async def delete() -> None:
        api = api_of(lonely)
        try:
            await uninstall.delete_trainings(api, timeout_s=1.0)
        finally:
            await api.close()

    with pytest.raises(errors.Unavailable, match="default/held not gone after 1 s"):
        asyncio.run(delete())
    assert lonely.get("/apis/apps/v1/namespaces/muster/deployments/muster") is not None
    lonely.patch(f"{collection('default')}/held", {"metadata": {"finalizers": None}})
    removed(lonely, "--delete-trainings")


def test_what_is_not_ours_stays(lonely: Cluster) -> None:
    """A namespace that was there before, and a role of that name that somebody else wrote."""
    own = lonely.new_namespace("shared")
    installed(lonely, own)
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{own}/roles/muster"
    lonely.patch(role, {"metadata": {"labels": {"app.kubernetes.io/name": "other"}}})
    done = removed(lonely, "-n", own)
    assert (done["Namespace"], done["Role"], done["Deployment"]) == ("left", "left", "deleted")
    assert lonely.get(role) is not None


def test_another_installation_keeps_the_rights_that_it_has_taken_over(lonely: Cluster) -> None:
    installed(lonely, "one")
    installed(lonely, "two")
    done = removed(lonely, "-n", "one")
    assert (done["ClusterRole"], done["ClusterRoleBinding"], done["CustomResourceDefinition"]) == ("left",) * 3
    assert (done["Deployment"], done["Namespace"]) == ("deleted", "deleted")
    removed(lonely, "-n", "two")
    assert lonely.get(TRAINING) is None


def test_who_may_not_is_told_whom_to_ask(lonely: Cluster) -> None:
    installed(lonely, "muster")
    done = muster(lonely, "kube", "uninstall", "--yes", user=NOBODY)
    assert done.returncode == 5 and done.stdout == "" and "administrator" in done.stderr
    removed(lonely)
