"""What may the control plane do in a cluster, and why? Named verbs on named kinds, each with its reason.

One permission is one rule of a role and one row of the table in docs/kubernetes.md (`row`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Permission:
    group: str  # "" is the core group
    resource: str
    verbs: tuple[str, ...]
    reason: str
    names: tuple[str, ...] = ()  # only the objects of these names; without any, all

    def rule(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"apiGroups": [self.group], "resources": [self.resource]}
        return shown | ({"resourceNames": list(self.names)} if self.names else {}) | {"verbs": list(self.verbs)}

    def row(self) -> str:
        """As the documentation shows it."""
        kind = f"{self.resource}.{self.group}" if self.group else self.resource
        named = f" named {', '.join(f'`{name}`' for name in self.names)}" if self.names else ""
        return f"| `{kind}`{named} | {', '.join(self.verbs)} | {self.reason} |"


def _may(group: str, resource: str, verbs: str, reason: str, *names: str) -> Permission:
    return Permission(group, resource, tuple(verbs.split()), reason, names)


# In every namespace, because trainings may be in any.
EVERYWHERE: tuple[Permission, ...] = (
    _may(
        "muster.dev",
        "trainings",
        "list watch create update patch delete",
        "see them; write what the HTTP API is asked for; keep and remove the finalizer; `ttlSecondsAfterFinished`",
    ),
    _may("muster.dev", "trainings/status", "update", "write the status"),
    _may(
        "muster.dev",
        "trainings/finalizers",
        "update",
        "own Pods, Services and Secrets where the server checks who may block a deletion",
    ),
    _may("", "pods", "list watch create patch delete", "workers: start, label, release and remove them"),
    _may("", "pods/log", "get", "`muster logs`"),
    _may("", "services", "create patch", "one headless Service per training, for addresses"),
    _may("", "secrets", "create update", "one Secret per training: its run token and `secretEnv`; never read"),
    _may(
        "",
        "persistentvolumeclaims",
        "create get",
        "`storage` with a size: make the claim; see whose one is that is there already",
    ),
    _may("", "nodes", "get", "`topologyKey`: the label of the node that a worker runs on"),
    _may(
        "scheduling.k8s.io",
        "priorityclasses",
        "list",
        "`priority`: the class that is labelled with it, for the scheduler",
    ),
    _may(
        "kueue.x-k8s.io",
        "workloads",
        "list watch create get",
        "queued trainings, where there is Kueue: one Workload for each",
    ),
    _may("kueue.x-k8s.io", "workloads/status", "update", "tell Kueue that one has ended, or has given back its quota"),
    _may("kueue.x-k8s.io", "resourceflavors", "get", "where the workers of one that it admitted are to run"),
    _may("", "events", "create", "what `kubectl describe` shows"),
)

# In the control plane's own namespace.
AT_HOME: tuple[Permission, ...] = (
    _may("coordination.k8s.io", "leases", "create", "make the Lease; a create cannot be limited to a name"),
    _may("coordination.k8s.io", "leases", "get update", "take the Lease, renew it, give it up", "muster"),
    _may("", "services", "get", "own the EndpointSlices, so that they go with the Service", "muster"),
    _may("discovery.k8s.io", "endpointslices", "create", "make them; a create cannot be limited to a name"),
    _may(
        "discovery.k8s.io",
        "endpointslices",
        "get update",
        "put the leader's address behind the Service",
        "muster-ipv4",
        "muster-ipv6",
    ),
    _may(
        "",
        "secrets",
        "get list watch delete",
        "read the journal, its key and the API tokens, which are Secrets here; tidy the journal",
    ),
)
