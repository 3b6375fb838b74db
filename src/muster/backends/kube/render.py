"""What is created for a worker? A Pod, and once for all workers of a training a Secret and a Service. Pure.

Everything belongs to the Training: what is left of it goes when it goes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from muster.backends import orders
from muster.types.training import API_VERSION, KIND, Resources, Training

Json = dict[str, Any]

UID, TRAINING, WORKER = "muster.dev/training-uid", "muster.dev/training", "muster.dev/worker"
ROLE, ROUND = "muster.dev/role", "muster.dev/round"
MANAGED_BY = {"app.kubernetes.io/managed-by": "muster"}
FINALIZER = "muster.dev/exit"  # keeps a Pod until its end is written down
CONTAINER = "worker"
TOKEN_KEY = "run-token"  # no variable can be called like this
GPU = "nvidia.com/gpu"
LEAVE_MARGIN_S = 10  # for the agent itself, beyond what its ranks may take
USER = 65532
ROOT = 0
_HOME = "/home/worker"  # of a user that the image does not know


def pod(
    training: Training,
    name: str,
    *,
    coordinator: str,
    mesh_endpoint: str = "",
    image: str = "",
    user: int | None = USER,
    api_url: str = "",
) -> Json:
    """`image` is taken where the training names none. `user` is who runs it; None: the image's own, if it is not root.

    What is rendered for anyone but root is what Pod Security calls "restricted".

    The labels for role and round say what it was started for: workers change roles, and rounds come and go, while a
    Pod runs; the status tells what they are now.
    """
    spec, about = training.spec, training.metadata
    number = 0 if training.status.round is None else training.status.round + 1
    labels = {ROLE: "worker", ROUND: str(number), WORKER: name}
    container: Json = {
        "name": CONTAINER,
        "image": spec.image or image,
        "command": _command(training, name, coordinator, api_url),
        "env": _env(training, mesh_endpoint, {} if _has_own_home(user) else {"HOME": _HOME, "USER": "worker"}),
        "resources": _resources(spec.resources),
        "securityContext": _rights(user),
        # What a worker that failed said last is then found in the Pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    volumes: list[Json] = []
    if spec.working_dir and spec.package is None:
        container["workingDir"] = spec.working_dir
    if not _has_own_home(user):
        volumes = [{"name": "home", "emptyDir": {}}]
        container["volumeMounts"] = [{"name": "home", "mountPath": _HOME}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(training, name, labels) | {"finalizers": [FINALIZER]},
        "spec": {
            "restartPolicy": "Never",
            "hostname": name,
            "subdomain": service_name(about.name),
            "terminationGracePeriodSeconds": math.ceil(spec.stop_grace_seconds) + LEAVE_MARGIN_S,
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "securityContext": _identity(user),
            "containers": [container],
            "volumes": volumes,
        },
    }


def _has_own_home(user: int | None) -> bool:
    return user in (None, ROOT)


def _identity(user: int | None) -> Json:
    """Who runs it. Without a number the kubelet refuses an image that would run as root."""
    named = {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return {"runAsNonRoot": user != ROOT, **named, "seccompProfile": {"type": "RuntimeDefault"}}


def _rights(user: int | None) -> Json:
    """Root without its usual capabilities could not even read files of others: who chose it keeps them."""
    dropped = {} if user == ROOT else {"capabilities": {"drop": ["ALL"]}}
    return {"allowPrivilegeEscalation": False, **dropped}


def secret_name(training: str) -> str:
    return f"{training}-run"


def service_name(training: str) -> str:
    """A Service's name begins with a letter; a training's need not."""
    return training if training[0].isalpha() else f"t-{training}"


def secret(training: Training, token: str) -> Json:
    """The run's token, and the variables that are secret."""
    spec = training.spec
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(training, secret_name(training.metadata.name)),
        "type": "Opaque",
        "stringData": {TOKEN_KEY: token} | {name: spec.env[name] for name in spec.secret_env},
    }


def service(training: Training) -> Json:
    """Headless: `<worker>.<service>.<namespace>.svc` is the address of a worker, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(training, service_name(training.metadata.name)),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {UID: training.uid}},
    }


def _metadata(training: Training, name: str, labels: Json | None = None) -> Json:
    about = training.metadata
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": about.name, "uid": training.uid}
    return {
        "name": name,
        "namespace": about.namespace,
        "labels": {**MANAGED_BY, TRAINING: about.name, UID: training.uid, **(labels or {})},
        "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
    }


def _command(training: Training, name: str, coordinator: str, api_url: str) -> list[str]:
    own = ["muster-node", "--coordinator", coordinator, "--run-id", training.uid, "--name", name]
    own += ["--local-addr", "$(POD_IP)", "--nproc", str(training.spec.procs_per_worker)]
    source = f"{api_url}/packages/{training.metadata.namespace}/{training.metadata.name}"
    own += [literally(word) for word in orders.package(training, source)]
    return own + [literally(word) for word in orders.words(training.spec)]


def literally(text: str) -> str:
    """A text that Kubernetes, which replaces $(NAME) and $$, leaves as it was."""
    return text.replace("$", "$$")


def _env(training: Training, mesh_endpoint: str, defaults: Mapping[str, str]) -> list[Json]:
    """The user's own variables win over the node's name, but not where ranks wait for their mesh under it."""
    spec = training.spec
    secret_name_ = secret_name(training.metadata.name)
    node = {"NODE_NAME": _field("spec.nodeName")}
    mesh = orders.mesh(training, mesh_endpoint)
    entries: dict[str, Json] = {
        **node,
        **{name: _plain(value) for name, value in {**defaults, **spec.env}.items()},
        **{name: _secret(secret_name_, name) for name in spec.secret_env},
        **{name: _plain(value) for name, value in mesh.items()},
        **(node if "MUSTER_MESH_ENDPOINT" in mesh else {}),
        "POD_IP": _field("status.podIP"),
        "MUSTER_RUN_TOKEN": _secret(secret_name_, TOKEN_KEY),
        "MUSTER_TRAINING": _plain(training.metadata.name),
        "MUSTER_NAMESPACE": _plain(training.metadata.namespace),
    }
    return [{"name": name, **entry} for name, entry in entries.items()]


def _plain(value: str) -> Json:
    return {"value": literally(value)}


def _field(path: str) -> Json:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def _secret(name: str, key: str) -> Json:
    return {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _resources(wanted: Resources) -> Json:
    amounts: dict[str, str] = {}
    if wanted.cpu is not None:
        amounts["cpu"] = f"{math.ceil(wanted.cpu * 1000)}m"
    if wanted.memory is not None:
        amounts["memory"] = wanted.memory
    if wanted.gpus:
        amounts[GPU] = str(wanted.gpus)
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}
