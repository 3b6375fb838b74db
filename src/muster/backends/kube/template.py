"""How does a training's partial Pod change the Pod of a worker? By the rules of Kubernetes' strategic merge. Pure.

Objects are merged, lists by the key that the Kubernetes API merges them by, every other list and value is replaced, and
null removes. What muster needs is not asked about here: `types.pod_template` has refused a template that touches it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muster.types.pod_template import CONTAINER, KEYED, Keyed

Json = dict[str, Any]

# Of these an entry replaces the one before it: a value and where it comes from exclude each other.
_WHOLE = ("env", "volumes")


def merged(pod: Json, template: Mapping[str, Any] | None) -> Json:
    """The Pod with its template. Containers beside the worker are as unprivileged as it, unless they say otherwise."""
    if not template:
        return pod
    about, spec = pod["metadata"], pod["spec"]
    asked = template.get("metadata") or {}
    given = template.get("spec") or {}
    metadata = {
        name: told
        for name in ("labels", "annotations")
        if (told := _object(about.get(name) or {}, asked.get(name) or {}, {}))
    }
    rights = worker_of(pod).get("securityContext")
    shown = {**pod, "metadata": about | metadata, "spec": _object(spec, given, KEYED)}
    for kind in ("containers", "initContainers"):
        if kind in shown["spec"]:
            shown["spec"][kind] = [_unprivileged(one, rights) for one in shown["spec"][kind]]
    return shown


def worker_of(pod: Json) -> Json:
    """Its container that is muster's."""
    found: Json = next(one for one in pod["spec"]["containers"] if one["name"] == CONTAINER)
    return found


def _unprivileged(container: Json, rights: Json | None) -> Json:
    return container if "securityContext" in container or rights is None else container | {"securityContext": rights}


def _object(ours: Mapping[str, Any], given: Mapping[str, Any], keyed: Mapping[str, Keyed]) -> Json:
    result = dict(ours)
    for name, value in given.items():
        if value is None:
            result.pop(name, None)
        elif name in keyed:
            result[name] = _list(result.get(name) or [], value, keyed[name], whole=name in _WHOLE)
        elif isinstance(value, Mapping):
            before = result.get(name)
            result[name] = _object(before if isinstance(before, Mapping) else {}, value, {})
        else:
            result[name] = value
    return result


def _list(ours: Sequence[Json], given: Sequence[Json], keyed: Keyed, *, whole: bool) -> list[Json]:
    """Ours first, in their order, each as it was given; then what we have not."""
    if not ours:
        return [_object({}, entry, keyed.inner) for entry in given]
    asked = {entry[keyed.key]: entry for entry in given}
    known = {entry[keyed.key] for entry in ours}
    changed = [
        _object({} if whole else entry, asked[entry[keyed.key]], keyed.inner) if entry[keyed.key] in asked else entry
        for entry in ours
    ]
    return [*changed, *(_object({}, entry, keyed.inner) for entry in given if entry[keyed.key] not in known)]
