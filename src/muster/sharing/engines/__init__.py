"""What turns a generation engine into hooks? One object each, which believes memory and a probe, and no reply.

Public names are loaded on first use: who needs `VllmEngine` needs no torch. `torch_engine` moves a module of this
process (`gate`: who may generate, `tensors`: what is moved), `vllm` and `sglang` speak to servers (`http_engine`: what
both do, `server`: one of them, `wire`: one request). `meters` reads memory, `faults` are the lies that are told.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.sharing.engines.faults import Asleep as Asleep
    from muster.sharing.engines.faults import EngineFault as EngineFault
    from muster.sharing.engines.faults import EngineGarbled as EngineGarbled
    from muster.sharing.engines.faults import EngineUnreachable as EngineUnreachable
    from muster.sharing.engines.faults import MemoryNotFree as MemoryNotFree
    from muster.sharing.engines.faults import StaleWeights as StaleWeights
    from muster.sharing.engines.faults import TurnInterrupted as TurnInterrupted
    from muster.sharing.engines.faults import Unproven as Unproven
    from muster.sharing.engines.http_engine import LogprobProof as LogprobProof
    from muster.sharing.engines.meters import Meter as Meter
    from muster.sharing.engines.meters import NvmlMeter as NvmlMeter
    from muster.sharing.engines.meters import SmiMeter as SmiMeter
    from muster.sharing.engines.ranks import EngineRanks as EngineRanks
    from muster.sharing.engines.server import EngineServer as EngineServer
    from muster.sharing.engines.sglang import SglangEngine as SglangEngine
    from muster.sharing.engines.torch_engine import TorchEngine as TorchEngine
    from muster.sharing.engines.vllm import VllmEngine as VllmEngine

_PLACES = {
    "faults": (
        "Asleep EngineFault EngineGarbled EngineUnreachable MemoryNotFree StaleWeights TurnInterrupted Unproven"
    ),
    "http_engine": "LogprobProof",
    "meters": "Meter NvmlMeter SmiMeter",
    "ranks": "EngineRanks",
    "server": "EngineServer",
    "sglang": "SglangEngine",
    "torch_engine": "TorchEngine",
    "vllm": "VllmEngine",
}
_LAZY = {name: f"{__name__}.{module}" for module, names in _PLACES.items() for name in names.split()}

__all__ = [*_LAZY]  # noqa: PLE0604  # the names are those above, written once


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value  # found at once the next time
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
