"""torchrun's door to muster: `torchrun --rdzv-backend=muster --rdzv-endpoint=HOST:PORT --rdzv-id=ID …`.

torch loads this module in every process that imports its elastic package, so it imports nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def handler_creator() -> Callable[[Any], Any]:
    """What the entry point group `torchrun.handlers` expects: called without arguments, returns the creator."""
    return create_handler


def create_handler(params: Any) -> Any:
    from muster.node.torchrun import MusterRendezvous

    return MusterRendezvous(params)
