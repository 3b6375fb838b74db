"""Where does a training keep what outlives its workers: checkpoints, data? Volumes, by name."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from muster.types.codec import Problem, limited
from muster.types.pod_template import AGENT, HOME, SHM

VARIABLE = "MUSTER_STORAGE_"  # tells ranks where each is, by its name
_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_CLASS = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_SIZE = r"[1-9][0-9]*(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?"
_ABOUT_NAME = "is not a name: lower-case letters, digits and dashes, with a letter or digit at both ends"
_MOUNTED_BY_US = {
    HOME: "is the home of the worker's user",
    AGENT: "has the agent",
    SHM: "is shared memory, which nothing outlives",
}


@dataclass(frozen=True)
class Storage:
    """A claim that is there, or one of that size, which is made."""

    name: str = limited(pattern=_NAME, max_length=40, about=_ABOUT_NAME)
    mount: str = limited(max_length=1024)
    claim: str | None = limited(None, pattern=_CLASS, max_length=253, about="is not a claim's name")
    size: str | None = limited(None, pattern=_SIZE, max_length=20, about="is not an amount of storage like 100Gi")
    class_: str | None = limited(None, pattern=_CLASS, max_length=253, about="is not a storage class's name")
    access: Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"] = "ReadWriteMany"
    keep: bool = True

    @property
    def variable(self) -> str:
        return VARIABLE + self.name.upper().replace("-", "_")


def problems(storage: Sequence[Storage], at: str = "spec.storage") -> list[Problem]:
    """What is wrong between the fields of each, and between them."""
    found: list[Problem] = []
    names: set[str] = set()
    mounts: set[str] = set()
    for one in storage:
        where = f"{at}[{one.name}]"
        if one.name in names:
            found.append(Problem(where, "is given twice"))
        names.add(one.name)
        found += _source_problems(one, where)
        mount = posixpath.normpath(one.mount)
        if not one.mount.startswith("/") or mount.strip("/") == "" or ":" in mount or ".." in one.mount.split("/"):
            found.append(Problem(f"{where}.mount", f"{one.mount[:80]!r} is not an absolute path below /"))
        elif mount in _MOUNTED_BY_US:
            found.append(Problem(f"{where}.mount", f"{mount} {_MOUNTED_BY_US[mount]}"))
        elif mount in mounts:
            found.append(Problem(f"{where}.mount", f"{mount} is the mount of another one, too"))
        mounts.add(mount)
    return found


def _source_problems(one: Storage, where: str) -> list[Problem]:
    if (one.claim is None) == (one.size is None):
        return [Problem(where, "needs either the claim that it is or the size that it is to have")]
    if one.claim is None:
        return []
    found = [] if one.class_ is None else [Problem(f"{where}.class", "is of no use with a claim that is there")]
    return found if one.keep else [*found, Problem(f"{where}.keep", "a claim that muster did not make is not removed")]
