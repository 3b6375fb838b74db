"""What would Pod Security "restricted" say of a Pod? Its rules as they are published, baseline included. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.kube.api import Json

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_syncookies",
}
_SELINUX_TYPES = {"", None, "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_SECCOMP = {"RuntimeDefault", "Localhost"}
_APPARMOR = {"RuntimeDefault", "Localhost"}
_APPARMOR_NOTE = "container.apparmor.security.beta.kubernetes.io/"
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def violations(pod: Json) -> list[str]:
    """`pod` is one, or the template of one. Each rule that it breaks, by the name that the rule has."""
    return sorted({name for name, broken in _RULES.items() if broken(pod)})


def _containers(pod: Json) -> list[Json]:
    kinds = ("initContainers", "containers", "ephemeralContainers")
    return [one for kind in kinds for one in pod["spec"].get(kind) or ()]


def _own(one: Json) -> Json:
    """The security context of a Pod's spec, or of a container."""
    found: Json = one.get("securityContext") or {}
    return found


def _all(pod: Json) -> list[Json]:
    return [_own(pod["spec"]), *map(_own, _containers(pod))]


def _said(pod: Json, *path: str) -> Iterator[Any]:
    """A field of every security context that has it."""
    for one in _all(pod):
        found: Any = one
        for name in path:
            found = (found or {}).get(name)
        if found is not None:
            yield found


def _for_each(pod: Json, name: str, fine: Callable[[Any], bool]) -> bool:
    """Whether it is fine for every container, by its own word or else by the Pod's."""
    whole = _own(pod["spec"]).get(name)
    return all(fine(_own(one).get(name, whole)) for one in _containers(pod))


def _handlers(pod: Json) -> Iterator[Json]:
    for one in _containers(pod):
        hooks = one.get("lifecycle") or {}
        yield from (found for name in _PROBES if (found := one.get(name)))
        yield from (found for name in ("postStart", "preStop") if (found := hooks.get(name)))


def _bad_capabilities(pod: Json) -> bool:
    held = [_own(one).get("capabilities") or {} for one in _containers(pod)]
    return any("ALL" not in (one.get("drop") or ()) or set(one.get("add") or ()) - {"NET_BIND_SERVICE"} for one in held)


def _bad_selinux(pod: Json) -> bool:
    options = list(_said(pod, "seLinuxOptions"))
    return any(one.get("type") not in _SELINUX_TYPES or one.get("user") or one.get("role") for one in options)


def _bad_apparmor(pod: Json) -> bool:
    notes = pod["metadata"].get("annotations") or {}
    noted = [value for name, value in notes.items() if name.startswith(_APPARMOR_NOTE)]
    by_note = any(one not in ("", "runtime/default") and not one.startswith("localhost/") for one in noted)
    return by_note or any(one not in _APPARMOR for one in _said(pod, "appArmorProfile", "type"))


_RULES: dict[str, Callable[[Json], bool]] = {
    "host process": lambda pod: any(_said(pod, "windowsOptions", "hostProcess")),
    "host namespaces": lambda pod: any(pod["spec"].get(name) for name in ("hostNetwork", "hostPID", "hostIPC")),
    "privileged": lambda pod: any(_said(pod, "privileged")),
    "capabilities": _bad_capabilities,
    "volume types": lambda pod: any(
        set(one) - {"name"} - _VOLUMES or len(one) < 2 for one in pod["spec"].get("volumes") or ()
    ),
    "host ports": lambda pod: any(port.get("hostPort") for one in _containers(pod) for port in one.get("ports") or ()),
    "host probes": lambda pod: any(
        (one.get(kind) or {}).get("host") for one in _handlers(pod) for kind in ("httpGet", "tcpSocket")
    ),
    "apparmor": _bad_apparmor,
    "selinux": _bad_selinux,
    "proc mount": lambda pod: any(one != "Default" for one in _said(pod, "procMount")),
    "sysctls": lambda pod: any(one["name"] not in _SYSCTLS for one in _own(pod["spec"]).get("sysctls") or ()),
    "seccomp": lambda pod: not _for_each(pod, "seccompProfile", lambda one: (one or {}).get("type") in _SECCOMP),
    "privilege escalation": lambda pod: any(
        _own(one).get("allowPrivilegeEscalation") is not False for one in _containers(pod)
    ),
    "non-root": lambda pod: not _for_each(pod, "runAsNonRoot", lambda one: one is True),
    "root user": lambda pod: 0 in _said(pod, "runAsUser"),
}
