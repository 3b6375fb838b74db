"""Which devices does a lease mean to this process, and does it see them? `CUDA_VISIBLE_DEVICES` follows the lease."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from muster.errors import InvalidRequest
from muster.types.sharing import Gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
log = logging.getLogger("muster.sharing")


class Devices:
    """A pipeline's GPUs as devices of its machine, in the order in which the process counts them."""

    def __init__(self, gpus: Iterable[Gpu], names: Sequence[str]) -> None:
        self._names = {gpu: names[gpu] if gpu < len(names) else str(gpu) for gpu in sorted(set(gpus))}

    def __getitem__(self, gpu: Gpu) -> str:
        return self._names[gpu]

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names.values())

    def of(self, gpus: Iterable[Gpu]) -> tuple[str, ...]:
        return tuple(self._names[gpu] for gpu in gpus)

    def index(self, gpu: Gpu) -> int:
        """What the process calls it once they are made visible: `cuda:INDEX`."""
        return list(self._names).index(gpu)

    def make_visible(self, env: MutableMapping[str, str] = os.environ) -> None:
        """Before CUDA has begun: these, and no others. Later that has no effect, and a missing one is an error."""
        wanted, now = ",".join(self.names), env.get(VISIBLE)
        if now == wanted:
            return
        if not _cuda_has_begun():
            log.info("%s is %s now, the pipeline's GPUs; it was %s", VISIBLE, wanted, now or "not set")
            env[VISIBLE] = wanted
            return
        missing = [name for name in self.names if name not in _visible(now)]
        if missing:
            raise InvalidRequest(
                f"this process cannot see {', '.join(missing)}, which its pipeline's GPUs are: CUDA has begun with "
                f"{VISIBLE}={now if now is not None else '(not set)'}",
                hint="connect to the pool before anything uses CUDA",
            )


def _visible(told: str | None) -> list[str]:
    if told is not None:
        return [name.strip() for name in told.split(",") if name.strip()]
    return [str(index) for index in range(_cuda().device_count())]


def _cuda_has_begun() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "cuda") and bool(_cuda().is_initialized())


def _cuda() -> Any:
    return sys.modules["torch"].cuda
