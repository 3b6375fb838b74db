"""How much may a namespace have at once? An optional file says; what has not ended counts."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from muster.errors import QuotaExceeded, Unavailable
from muster.files import read_text
from muster.ports import Filter, Store
from muster.types import plural
from muster.types.codec import Invalid, from_wire, limited
from muster.types.training import TERMINAL, Training

EVERYONE_ELSE = "*"


@dataclass(frozen=True)
class Quota:
    """Limits of one namespace; None: no limit."""

    trainings: int | None = limited(None, ge=0)
    gpus: int | None = limited(None, ge=0)


class Quotas:
    """The limits in one file: `{"namespace": {"trainings": N, "gpus": N}}`, "*" for those that are not named."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._limits: dict[str, Quota] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def limits_of(self, namespace: str) -> Quota | None:
        self._refresh()
        return self._limits.get(namespace, self._limits.get(EVERYONE_ELSE))

    def turn(self, namespace: str) -> asyncio.Lock:
        """Held from check to write, so that two requests cannot both take the last place."""
        return self._locks[namespace]

    def check(self, store: Store, training: Training, before: Training | None = None) -> None:
        """Whether the namespace may have this training, new or instead of what it was before.

        One that takes no more than before is let through, also where the quota was lowered in between.
        """
        namespace = training.metadata.namespace
        quota = self.limits_of(namespace)
        if quota is None or training.is_terminal:
            return
        others = [
            one
            for one in store.page(Filter(namespace=namespace)).items
            if one.phase not in TERMINAL and one.key != training.key
        ]
        if before is None and quota.trainings is not None and len(others) + 1 > quota.trainings:
            raise _exceeded(namespace, "trainings", quota.trainings, len(others), 1)
        had = gpus_of(before) if before else 0
        added = gpus_of(training) - had
        if quota.gpus is not None and added > 0:
            used = had + sum(gpus_of(one.training) for one in others)
            if used + added > quota.gpus:
                raise _exceeded(namespace, "gpus", quota.gpus, used, added)

    def _refresh(self) -> None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            self._limits, self._stamp = {}, None
            return
        stamp = (found.st_mtime_ns, found.st_size)
        if stamp == self._stamp:
            return
        try:
            data = json.loads(read_text(self._path))
            self._limits = {name: from_wire(Quota, limits) for name, limits in data.items()}
        except (OSError, ValueError, AttributeError, Invalid) as error:
            # Guessing that there is no limit would be worse than to refuse until somebody mends the file.
            raise Unavailable(f"the quotas of this server cannot be read from {self._path.name}") from error
        self._stamp = stamp


def gpus_of(training: Training) -> int:
    spec = training.spec
    return (spec.world_size.target + spec.spares) * spec.resources.gpus


def _exceeded(namespace: str, what: str, limit: int, used: int, wanted: int) -> QuotaExceeded:
    may = plural.counted(limit, what.removesuffix("s"))
    usage = f"{used} {'is' if used == 1 else 'are'} in use, {wanted} more {'was' if wanted == 1 else 'were'} asked for"
    return QuotaExceeded(
        f"namespace {namespace!r} may have {may}: {usage}",
        resource=what,
        current=used,
        requested=wanted,
        limit=limit,
        hint="cancel or shrink another training of that namespace, or ask for a higher quota",
    )
