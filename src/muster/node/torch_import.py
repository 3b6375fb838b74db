"""Checks in a rank that imports torch itself: first torch's version, then the connection to the round's store."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from muster.node import store_check, torch_version

_RENDEZVOUS = "torch.distributed.rendezvous"


class _Finder:
    """Hook in `sys.meta_path` that runs the checks when torch is imported, and then removes itself."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name == "torch" and (refusal := torch_version.refusal()):
            raise ImportError(refusal)
        if name != _RENDEZVOUS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            _check_after(spec)
        return spec


def _check_after(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        store_check.install()

    loader.exec_module = exec_module


def watch() -> None:
    """Check torch when this rank imports it."""
    sys.meta_path.insert(0, _Finder())
