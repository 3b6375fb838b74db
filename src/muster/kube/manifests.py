"""What does `muster kube install` put into a cluster? All of it as plain values, in the order in which to apply it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from muster import __version__
from muster.kube import crd, rbac

Manifest = dict[str, Any]

NAME = "muster"
DEFAULT_IMAGE = f"muster:{__version__}"
PORTS = {"api": 8470, "coordinator": 8471, "mesh": 8472}
WORKER_LABEL = "muster.dev/training"  # every worker's Pod has it

_SCRATCH = "/var/lib/muster"  # a volume, which everybody in the container may write
_HOME = f"{_SCRATCH}/home"  # made by the control plane, and its own
_TLS = "/etc/muster/tls"
_USER = 65532
_LABELS = {"app.kubernetes.io/name": NAME}
_POD_LABELS = _LABELS | {"app.kubernetes.io/component": "control-plane"}
_RBAC = "rbac.authorization.k8s.io"


@dataclass(frozen=True)
class InstallOptions:
    namespace: str = "muster"
    image: str = DEFAULT_IMAGE
    worker_image: str | None = None  # the same image unless named
    worker_user: str | None = None  # the control plane's own default unless named
    replicas: int = 2
    tls_secret: str | None = None  # of type kubernetes.io/tls; without it the API is served in clear
    pull_secrets: tuple[str, ...] = ()  # with which nodes get the control plane's image
    cpu: str | None = None  # asked for, for each replica
    memory: str | None = None  # asked for and the most, for each replica
    gpus: int = 0  # of the cluster, that trainings and pipelines share; 0: the cluster alone says who gets some


def render(options: InstallOptions) -> list[Manifest]:
    return [
        _labelled(crd.custom_resource_definition()),
        _cluster_wide("v1", "Namespace", options.namespace),
        _in(options, "v1", "ServiceAccount", automountServiceAccountToken=False),
        _cluster_wide(f"{_RBAC}/v1", "ClusterRole", NAME, rules=_rules(rbac.EVERYWHERE)),
        _cluster_wide(f"{_RBAC}/v1", "ClusterRoleBinding", NAME, **_binding(options, "ClusterRole")),
        _in(options, f"{_RBAC}/v1", "Role", rules=_rules(rbac.AT_HOME)),
        _in(options, f"{_RBAC}/v1", "RoleBinding", **_binding(options, "Role")),
        _service(options),
        # Empty, so that the leader need not be allowed to create any. Without `subsets` an upgrade leaves its address.
        _network_policy(options),
        _deployment(options),
    ]


def kustomization(rendered: Sequence[Manifest]) -> dict[str, Manifest]:
    """The same as a base for kustomize: the names of files, and what is in each."""
    files = {f"{one['kind'].lower()}.yaml": one for one in rendered}
    index = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": list(files)}
    return {"kustomization.yaml": index, **files}


def is_ours(found: Manifest) -> bool:
    """Whether an object of a cluster is one of these: by its label."""
    labels = found["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in _LABELS.items())


def _in(options: InstallOptions, version: str, kind: str, **more: Any) -> Manifest:
    metadata = {"name": NAME, "namespace": options.namespace, "labels": _LABELS}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **more}


def _cluster_wide(version: str, kind: str, name: str, **more: Any) -> Manifest:
    return _labelled({"apiVersion": version, "kind": kind, "metadata": {"name": name}, **more})


def _labelled(manifest: Manifest) -> Manifest:
    return manifest | {"metadata": manifest["metadata"] | {"labels": _LABELS}}


# Permissions -------------------------------------------------------------------------------------


def _rules(grants: Sequence[rbac.Permission]) -> list[Manifest]:
    return [grant.rule() for grant in grants]


def _binding(options: InstallOptions, kind: str) -> Manifest:
    return {
        "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": NAME},
        "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": options.namespace}],
    }


# Network -----------------------------------------------------------------------------------------


def _service(options: InstallOptions) -> Manifest:
    """Without a selector: the leader alone is behind it, because it writes its own address into an EndpointSlice."""
    ports = [{"name": name, "port": port, "targetPort": port, "protocol": "TCP"} for name, port in PORTS.items()]
    return _in(options, "v1", "Service", spec={"type": "ClusterIP", "ports": ports})


def _network_policy(options: InstallOptions) -> Manifest:
    """The API is for whoever has a token; the coordinator and the mesh's keys are for workers."""
    workers = {
        "namespaceSelector": {},
        "podSelector": {"matchExpressions": [{"key": WORKER_LABEL, "operator": "Exists"}]},
    }
    spec = {
        "podSelector": {"matchLabels": _POD_LABELS},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": _tcp("api")}, {"from": [workers], "ports": _tcp("coordinator", "mesh")}],
    }
    return _in(options, "networking.k8s.io/v1", "NetworkPolicy", spec=spec)


def _tcp(*names: str) -> list[Manifest]:
    return [{"protocol": "TCP", "port": PORTS[name]} for name in names]


# The control plane -------------------------------------------------------------------------------


def _deployment(options: InstallOptions) -> Manifest:
    pod = {
        "serviceAccountName": NAME,
        "automountServiceAccountToken": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _POD_LABELS},
            }
        ],
        "containers": [_container(options)],
        "volumes": _volumes(options),
    }
    if options.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in options.pull_secrets]
    spec = {
        "replicas": options.replicas,
        "selector": {"matchLabels": _POD_LABELS},
        "template": {"metadata": {"labels": _POD_LABELS}, "spec": pod},
    }
    return _in(options, "apps/v1", "Deployment", spec=spec)


def _container(options: InstallOptions) -> Manifest:
    scheme = "HTTPS" if options.tls_secret else "HTTP"
    mounts: list[Manifest] = [{"name": "home", "mountPath": _SCRATCH}]
    if options.tls_secret:
        mounts.append({"name": "tls", "mountPath": _TLS, "readOnly": True})
    return {
        "name": NAME,
        "image": options.image,
        "command": ["muster"],
        "args": arguments(options),
        "env": [
            {"name": "MUSTER_HOME", "value": _HOME},
            {"name": "TMPDIR", "value": _SCRATCH},
            *([{"name": "MUSTER_GPUS", "value": str(options.gpus)}] if options.gpus else []),
            _downward("POD_NAME", "metadata.name"),
            _downward("POD_NAMESPACE", "metadata.namespace"),
            _downward("POD_IP", "status.podIP"),
        ],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in PORTS.items()],
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "api", "scheme": scheme},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "resources": {
            "requests": {"cpu": options.cpu or "250m", "memory": options.memory or "256Mi"},
            "limits": {"memory": options.memory or "1Gi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def arguments(options: InstallOptions) -> list[str]:
    """Of the control plane's command line; `$(…)` is filled in by the kubelet."""
    secured = (
        ["--tls-cert", f"{_TLS}/tls.crt", "--tls-key", f"{_TLS}/tls.key"] if options.tls_secret else ["--insecure"]
    )
    return [
        *("server", "--store", "kube", "--backend", "kube"),
        *("--listen", f"0.0.0.0:{PORTS['api']}", *secured),
        *("--coordinator-port", str(PORTS["coordinator"]), "--mesh-port", str(PORTS["mesh"])),
        *("--namespace", "$(POD_NAMESPACE)", "--identity", "$(POD_NAME)", "--address", "$(POD_IP)"),
        *("--advertise", f"{NAME}.$(POD_NAMESPACE).svc"),
        *("--image", options.worker_image or options.image),
        *("--agent-image", options.image),
        *(("--worker-user", options.worker_user) if options.worker_user else ()),
    ]


def _downward(name: str, field: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _volumes(options: InstallOptions) -> list[Manifest]:
    found: list[Manifest] = [{"name": "home", "emptyDir": {"sizeLimit": "1Gi"}}]
    if options.tls_secret:
        found.append({"name": "tls", "secret": {"secretName": options.tls_secret, "defaultMode": 0o440}})
    return found
