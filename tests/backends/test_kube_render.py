"""What is created for a worker, before anything is sent."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.backends.kube import priorities, render
from muster.types.storage import Storage
from muster.types.training import Mesh, Resources, Status, Training
from tests.training_builders import a_training

Json = dict[str, Any]


def a_pod(training: Training, **known: Any) -> Json:
    return render.pod(
        training, f"{training.metadata.name}-0", **{"coordinator": "muster:8471", "image": "base"} | known
    )


def container(pod: Json) -> Json:
    (one,) = pod["spec"]["containers"]
    assert isinstance(one, dict)
    return one


def env(pod: Json) -> dict[str, Json]:
    return {
        entry["name"]: {key: value for key, value in entry.items() if key != "name"} for entry in container(pod)["env"]
    }


def mounted(pod: Json) -> list[str]:
    return [one["mountPath"] for one in container(pod)["volumeMounts"]]


def test_a_plain_worker_as_a_whole() -> None:
    training = a_training("demo", namespace="team", uid="u1", args=("--lr", "1"), stop_grace_seconds=2.5)
    owner = {"apiVersion": "muster.dev/v1alpha1", "kind": "Training", "name": "demo", "uid": "u1"}
    assert a_pod(training) == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "demo-0",
            "namespace": "team",
            "labels": {
                "app.kubernetes.io/managed-by": "muster",
                "muster.dev/training": "demo",
                "muster.dev/training-uid": "u1",
                "muster.dev/role": "worker",
                "muster.dev/round": "0",
                "muster.dev/worker": "demo-0",
            },
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
            "finalizers": ["muster.dev/exit"],
        },
        "spec": {
            "restartPolicy": "Never",
            "hostname": "demo-0",
            "subdomain": "demo",
            "terminationGracePeriodSeconds": 13,
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "fsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumes": [
                {"name": "muster-home", "emptyDir": {}},
                {"name": "muster-shm", "emptyDir": {"medium": "Memory"}},
            ],
            "containers": [
                {
                    "name": "worker",
                    "image": "base",
                    "command": [
                        *("muster-node", "--coordinator", "muster:8471", "--run-id", "u1", "--name", "demo-0"),
                        *("--local-addr", "$(POD_IP)", "--nproc", "1", "--", "train.py", "--lr", "1"),
                    ],
                    "env": [
                        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                        {"name": "HOME", "value": "/home/worker"},
                        {"name": "USER", "value": "worker"},
                        {"name": "MUSTER_MESH_PREFIX", "value": "muster/team/demo"},
                        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                        {
                            "name": "MUSTER_RUN_TOKEN",
                            "valueFrom": {"secretKeyRef": {"name": "demo-run", "key": "run-token"}},
                        },
                        {"name": "MUSTER_TRAINING", "value": "demo"},
                        {"name": "MUSTER_NAMESPACE", "value": "team"},
                    ],
                    "resources": {},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [
                        {"name": "muster-home", "mountPath": "/home/worker"},
                        {"name": "muster-shm", "mountPath": "/dev/shm"},
                    ],
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                }
            ],
        },
    }


def test_what_the_spec_says_is_in_the_pod() -> None:
    training = a_training(
        image="mine:1",
        working_dir="/work",
        procs_per_worker=4,
        resources=Resources(cpu=0.25, memory="1.5Gi", gpus=2),
        env={"A": "plain", "KEY": "hidden"},
        secret_env=("KEY",),
        status=Status(round=4),
    )
    pod = a_pod(training)
    amounts = {"cpu": "250m", "memory": "1.5Gi", "nvidia.com/gpu": "2"}
    assert container(pod)["resources"] == {"requests": amounts, "limits": amounts}
    assert container(pod)["image"] == "mine:1" and container(pod)["workingDir"] == "/work"
    assert container(pod)["command"][container(pod)["command"].index("--nproc") + 1] == "4"
    assert pod["metadata"]["labels"]["muster.dev/round"] == "5"
    assert env(pod)["A"] == {"value": "plain"}
    assert env(pod)["KEY"] == {"valueFrom": {"secretKeyRef": {"name": "demo-run", "key": "KEY"}}}
    assert "hidden" not in str(pod)


def test_who_runs_a_worker_is_chosen_and_keeps_the_home_that_its_image_gives_it() -> None:
    known = {"name": "demo-0", "coordinator": "muster:8471", "image": "base"}
    ours, own, root = (render.pod(a_training(), user=user, **known) for user in (1000, None, 0))
    assert ours["spec"]["securityContext"]["runAsUser"] == 1000 and env(ours)["HOME"] == {"value": "/home/worker"}
    assert own["spec"]["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert "HOME" not in env(own) and mounted(own) == ["/dev/shm"]
    assert root["spec"]["securityContext"]["runAsUser"] == 0 and not root["spec"]["securityContext"]["runAsNonRoot"]
    assert container(root)["securityContext"] == {"allowPrivilegeEscalation": False} and "HOME" not in env(root)
    assert env(a_pod(a_training(env={"HOME": "/mine"})))["HOME"] == {"value": "/mine"}, "their own word counts"


def test_the_secret_has_the_token_and_exactly_the_secret_variables() -> None:
    training = a_training(env={"A": "plain", "token": "mine"}, secret_env=("token",), uid="u1")
    secret = render.secret(training, "run's")
    assert secret["stringData"] == {"run-token": "run's", "token": "mine"}
    assert secret["metadata"]["name"] == "demo-run" and secret["metadata"]["ownerReferences"][0]["uid"] == "u1"


@pytest.mark.parametrize(("training", "service"), [("demo", "demo"), ("3d", "t-3d")])
def test_the_service_is_headless_and_its_name_is_one(training: str, service: str) -> None:
    shown = render.service(a_training(training, uid="u1"))
    assert shown["metadata"]["name"] == service
    assert shown["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"muster.dev/training-uid": "u1"},
    }
    assert a_pod(a_training(training))["spec"]["subdomain"] == service


def test_ranks_wait_for_their_mesh_under_their_nodes_name_whatever_the_user_sets() -> None:
    gate = Mesh(required=True, timeout_seconds=45.0, probe_address="10.8.0.0/16")
    pod = a_pod(a_training(mesh=gate, env={"NODE_NAME": "mine"}), mesh_endpoint="muster:8472")
    assert env(pod)["NODE_NAME"] == {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    assert env(pod)["MUSTER_MESH_ENDPOINT"] == {"value": "muster:8472"}
    assert env(pod)["MUSTER_MESH_TIMEOUT_S"] == {"value": "55"}
    assert "10.8.0.0/16" in container(pod)["command"]
    plain = env(a_pod(a_training(env={"NODE_NAME": "mine"}), mesh_endpoint="muster:8472"))
    assert plain["NODE_NAME"] == {"value": "mine"} and "MUSTER_MESH_ENDPOINT" not in plain


def expanded(text: str, values: dict[str, str]) -> str:
    """As Kubernetes does it: $$ is $, $(NAME) is its value if it has one, anything else is itself."""
    put = lambda match: "$" if match[1] == "$" else values.get(match[2], match[0])  # noqa: E731
    return re.sub(r"\$(\$|\(([^)]*)\))", put, text)


@given(st.lists(st.text("$()AB _", max_size=8), max_size=4))
def test_what_users_write_is_not_expanded(words: list[str]) -> None:
    values = {"A": "x", "B": "y", "POD_IP": "10.0.0.1"}
    pod = a_pod(a_training(args=tuple(words), env={f"E{at}": word for at, word in enumerate(words)}))
    command = [expanded(word, values) for word in container(pod)["command"]]
    assert command[command.index("--") + 1 :] == ["train.py", *words]
    assert command[command.index("--local-addr") + 1] == "10.0.0.1"
    assert [expanded(env(pod)[f"E{at}"]["value"], values) for at in range(len(words))] == words


# Memory, storage, and the class of priority


@pytest.mark.parametrize(
    ("spec", "template", "limit"),
    [
        ({}, {}, None),
        ({"memory": "8Gi"}, {}, str(4 * 2**30)),
        ({"memory": "1.5Gi"}, {}, str(3 * 2**28)),
        ({"memory": "7"}, {}, "3"),
        ({}, {"limits": {"memory": "2k"}}, "1000"),
        ({"memory": "8Gi"}, {"limits": {"memory": "4Gi"}}, str(2 * 2**30)),
        ({"memory": "8Gi"}, {"limits": {"memory": None}}, None),
    ],
)
def test_shared_memory_is_half_of_what_the_worker_may_have(spec: Json, template: Json, limit: str | None) -> None:
    given = {"spec": {"containers": [{"name": "worker", "resources": template}]}}
    pod = a_pod(a_training(resources=Resources(**spec), template=given))
    asked = {"medium": "Memory"} | ({} if limit is None else {"sizeLimit": limit})
    assert {"name": "muster-shm", "emptyDir": asked} in pod["spec"]["volumes"]


def test_who_mounts_shared_memory_has_no_other() -> None:
    mount = {"name": "own", "mountPath": "/dev/shm/"}
    given = {
        "spec": {
            "volumes": [{"name": "own", "emptyDir": {}}],
            "containers": [{"name": "worker", "volumeMounts": [mount]}],
        }
    }
    pod = a_pod(a_training(template=given))
    assert mounted(pod) == ["/home/worker", "/dev/shm/"]
    assert [one["name"] for one in pod["spec"]["volumes"]] == ["muster-home", "own"]


def test_storage_is_a_claim_that_is_there_or_one_that_is_made() -> None:
    training = a_training(
        "demo",
        namespace="team",
        uid="u1",
        storage=(
            Storage("ckpt", "/ckpt", size="1Ti", class_="fast"),
            Storage("scratch", "/scratch", size="10Gi", access="ReadWriteOnce", keep=False),
            Storage("data", "/data", claim="datasets"),
        ),
    )
    pod = a_pod(training)
    assert {one["name"]: one["persistentVolumeClaim"]["claimName"] for one in pod["spec"]["volumes"][1:-1]} == {
        "muster-storage-ckpt": "demo-ckpt",
        "muster-storage-scratch": "demo-scratch",
        "muster-storage-data": "datasets",
    }
    assert mounted(pod) == ["/home/worker", "/ckpt", "/scratch", "/data", "/dev/shm"]
    assert env(pod)["MUSTER_STORAGE_CKPT"] == {"value": "/ckpt"}
    kept, removed = render.claims(training)
    assert kept == {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": "demo-ckpt",
            "namespace": "team",
            "labels": {"app.kubernetes.io/managed-by": "muster", "muster.dev/training": "demo"},
        },
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Ti"}},
            "storageClassName": "fast",
        },
    }
    assert removed["metadata"]["ownerReferences"][0]["uid"] == "u1"
    assert removed["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}


def test_a_class_of_priority_is_named_only_where_there_is_one() -> None:
    assert "priorityClassName" not in a_pod(a_training(priority=5))["spec"]
    assert a_pod(a_training(priority=5), priority_class="high")["spec"]["priorityClassName"] == "high"


@pytest.mark.parametrize(
    ("labels", "priority", "name"),
    [
        ({}, 5, ""),
        ({"low": "-10", "mid": "1", "high": "100"}, 5, "mid"),
        ({"low": "-10", "mid": "1", "high": "100"}, 1, "mid"),
        ({"low": "-10", "mid": "1", "high": "100"}, 1000, "high"),
        ({"low": "-10", "mid": "1", "high": "100"}, -3, "low"),
        ({"low": "-10", "mid": "1", "high": "100"}, -11, ""),
        ({"b": "1", "a": "1"}, 1, "a"),
        ({"odd": "very", "mid": "1"}, 5, "mid"),
    ],
)
def test_the_class_of_a_priority_is_the_highest_that_is_not_above_it(
    labels: dict[str, str], priority: int, name: str
) -> None:
    known = [{"metadata": {"name": one, "labels": {priorities.LABEL: at}}} for one, at in labels.items()]
    assert priorities.chosen([*known, {"metadata": {"name": "foreign"}}], priority) == name
