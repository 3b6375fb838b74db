"""muster: an elastic control plane for distributed training.

Public names are loaded on first use, so that a training process pays only for what it calls.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.node.progress import progress as progress

__version__ = "0.1.0"

_LAZY = {"progress": "muster.node.progress"}

__all__ = ["__version__", "progress"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'muster' has no attribute {name!r}")
