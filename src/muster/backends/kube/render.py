"""What is created for a worker? A Pod, and once for all workers of a training a Secret, a Service and claims. Pure.

Everything belongs to the Training: what is left of it goes when it goes, but for claims that are to be kept.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from muster import agent_copy
from muster.backends import orders
from muster.backends.kube import quantities, template
from muster.types.pod_template import AGENT, CONTAINER, GPU, HOME, MANAGED_BY, OWN_VOLUMES, SHM
from muster.types.storage import Storage
from muster.types.training import API_VERSION, KIND, Resources, Training

Json = dict[str, Any]

UID, TRAINING, WORKER = "muster.dev/training-uid", "muster.dev/training", "muster.dev/worker"
ROLE, ROUND = "muster.dev/role", "muster.dev/round"
OURS = {MANAGED_BY: "muster"}
FINALIZER = "muster.dev/exit"  # keeps a Pod until its end is written down
TOKEN_KEY = "run-token"  # no variable can be called like this
LEAVE_MARGIN_S = 10  # for the agent itself, beyond what its ranks may take
USER = 65532
ROOT = 0
_AGENT = AGENT.strip("/")  # the name of its volume and of the init container


def pod(
    training: Training,
    name: str,
    *,
    coordinator: str,
    mesh_endpoint: str = "",
    image: str = "",
    agent_image: str = "",
    user: int | None = USER,
    api_url: str = "",
    priority_class: str = "",
) -> Json:
    """`image` is taken where the training names none. `user` is who runs it; None: the image's own, if it is not root.

    `agent_image` has muster: an init container copies the agent from it, unless it is also the worker's image.
    Without an `agent_image` the worker's image needs muster.

    What is rendered for anyone but root is what Pod Security calls "restricted", before its template has a say.

    The labels for role and round say what it was started for: workers change roles, and rounds come and go, while a
    Pod runs; the status tells what they are now.
    """
    about = training.metadata
    number = 0 if training.status.round is None else training.status.round + 1
    labels = {ROLE: "worker", ROUND: str(number), WORKER: name}
    volumes, mounts = _volumes(training, own_home=_has_own_home(user))
    worker_image = training.spec.image or image
    command = _command(training, name, coordinator, api_url)
    copies = bool(agent_image) and agent_image != worker_image
    if copies:
        command = ["sh", "-c", literally(agent_copy.LAUNCHER), *command]
        volumes.append({"name": _AGENT, "emptyDir": {}})
        mounts.append({"name": _AGENT, "mountPath": AGENT, "readOnly": True})
    container = _container(training, command, mesh_endpoint, user)
    if copies:
        container["env"] = [*container["env"], {"name": agent_copy.VARIABLE, "value": AGENT}]
    shown = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": owned(training, name, labels) | {"finalizers": [FINALIZER]},
        "spec": {
            "restartPolicy": "Never",
            "hostname": name,
            "subdomain": service_name(about.name),
            "terminationGracePeriodSeconds": math.ceil(training.spec.stop_grace_seconds) + LEAVE_MARGIN_S,
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "securityContext": _identity(user),
            **({"priorityClassName": priority_class} if priority_class else {}),
            **({"initContainers": [_agent_container(training, agent_image, user)]} if copies else {}),
            "containers": [container | {"image": worker_image, "volumeMounts": mounts}],
            "volumes": volumes,
        },
    }
    return _with_shared_memory(template.merged(shown, training.spec.template))


def _agent_container(training: Training, image: str, user: int | None) -> Json:
    """Render the init container that copies the agent. It requests no more than the worker, so neither does the Pod."""
    return {
        "name": _AGENT,
        "image": image,
        "command": ["python3", "-m", "muster.agent_copy", AGENT],
        "resources": _resources(replace(training.spec.resources, gpus=0)),
        "securityContext": _rights(user) | {"readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": _AGENT, "mountPath": AGENT}],
    }


def _container(training: Training, command: list[str], mesh_endpoint: str, user: int | None) -> Json:
    spec = training.spec
    folder = {"workingDir": spec.working_dir} if spec.working_dir and spec.package is None else {}
    return {
        "name": CONTAINER,
        "command": command,
        "env": _env(training, mesh_endpoint, {} if _has_own_home(user) else {"HOME": HOME, "USER": "worker"}),
        "resources": _resources(spec.resources),
        "securityContext": _rights(user),
        # What a worker that failed said last is then found in the Pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **folder,
    }


def _volumes(training: Training, *, own_home: bool) -> tuple[list[Json], list[Json]]:
    """The Pod's volumes, and where the worker finds each."""
    volumes: list[Json] = []
    mounts: list[Json] = []
    if not own_home:
        volumes.append({"name": f"{OWN_VOLUMES}home", "emptyDir": {}})
        mounts.append({"name": f"{OWN_VOLUMES}home", "mountPath": HOME})
    for one in training.spec.storage:
        name = f"{OWN_VOLUMES}storage-{one.name}"
        claim = one.claim or claim_name(training.metadata.name, one)
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": name, "mountPath": one.mount})
    return volumes, mounts


def _with_shared_memory(pod: Json) -> Json:
    """As much as half of the memory that it may have: a container has 64 MB, and loaders of data pass tensors there."""
    worker, name = template.worker_of(pod), f"{OWN_VOLUMES}shm"
    mounts = worker.get("volumeMounts") or []
    if any(posixpath.normpath(one["mountPath"]) == SHM for one in mounts):
        return pod
    limit = quantities.read(((worker.get("resources") or {}).get("limits") or {}).get("memory"))
    sized = {} if limit is None else {"sizeLimit": str(int(limit / 2))}
    volume = {"name": name, "emptyDir": {"medium": "Memory", **sized}}
    shown = worker | {"volumeMounts": [*mounts, {"name": name, "mountPath": SHM}]}
    containers = [shown if one is worker else one for one in pod["spec"]["containers"]]
    spec = pod["spec"] | {"containers": containers, "volumes": [*(pod["spec"].get("volumes") or []), volume]}
    return {**pod, "spec": spec}


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
        "metadata": owned(training, secret_name(training.metadata.name)),
        "type": "Opaque",
        "stringData": {TOKEN_KEY: token} | {name: spec.env[name] for name in spec.secret_env},
    }


def service(training: Training) -> Json:
    """Headless: `<worker>.<service>.<namespace>.svc` is the address of a worker, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owned(training, service_name(training.metadata.name)),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {UID: training.uid}},
    }


def claim_name(training: str, storage: Storage) -> str:
    return f"{training}-{storage.name}"


def claims(training: Training) -> list[Json]:
    """Those that are to be made. One that is kept belongs to nobody, so that nothing is lost with the training."""
    return [_claim(training, one) for one in training.spec.storage if one.size is not None]


def _claim(training: Training, storage: Storage) -> Json:
    about = training.metadata
    metadata = owned(training, claim_name(about.name, storage))
    if storage.keep:
        labels = {name: value for name, value in metadata["labels"].items() if name != UID}
        metadata = {"name": metadata["name"], "namespace": metadata["namespace"], "labels": labels}
    named = {} if storage.class_ is None else {"storageClassName": storage.class_}
    asked = {"accessModes": [storage.access], "resources": {"requests": {"storage": storage.size}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": asked | named}


def owned(training: Training, name: str, labels: Json | None = None) -> Json:
    """The metadata of something that belongs to it."""
    about = training.metadata
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": about.name, "uid": training.uid}
    return {
        "name": name,
        "namespace": about.namespace,
        "labels": {**OURS, TRAINING: about.name, UID: training.uid, **(labels or {})},
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
        **{one.variable: _plain(one.mount) for one in spec.storage},
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
