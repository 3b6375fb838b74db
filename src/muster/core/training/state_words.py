"""How is it said what of a training's state is safe, and what a loss would cost?

In the same words by `describe`, `explain` and `world show`.
"""

from __future__ import annotations

from collections.abc import Mapping

from muster import trimming
from muster.types.state import KeptState

AGAINST = {
    "ranks": "ranks that fail, not against the loss of a worker",
    "worker": "the loss of any one worker",
    "domain": "the loss of any one failure domain",
}


def safe(state: KeptState) -> str:
    """Which step, and against what."""
    if state.step is None:
        return "no step is whole in memory"
    return f"step {state.step} is safe against {AGAINST.get(state.survives, state.survives)}"


def facts(state: KeptState, age: str = "") -> Mapping[str, str]:
    """All that is known, by name; what is not known is not there. `age`: for how long the step has been safe."""
    newer = state.newest_step is not None and state.newest_step != state.step
    found = {
        "Safe": safe(state) + (f", for {age}" if age and state.step is not None else ""),
        "Newest": f"step {state.newest_step} is whole in memory" if newer else "",
        "Where": state.where,
        "On disk": f"step {state.durable_step}" if state.durable_step is not None else "",
        "Size": _size(state),
        "Copies": _copies(state),
        "Loss": state.loss,
        "Resumed": state.resumed,
        "Lost": state.lost,
        "Refused": state.refused,
    }
    return {name: told for name, told in found.items() if told}


def _size(state: KeptState) -> str:
    parts = [f"{trimming.show(state.bytes)}, each rank once"] if state.bytes else []
    if state.memory_bytes:
        most = trimming.show(state.worker_memory_bytes)
        parts.append(f"{trimming.show(state.memory_bytes)} of memory on all workers, at most {most} on one")
    return "; ".join(parts)


def _copies(state: KeptState) -> str:
    if state.step is None and state.commit_seconds is None:
        return ""
    often = "at every step" if state.every == 1 else f"every {state.every} steps"
    costs = "" if state.commit_seconds is None else f", {duration(state.commit_seconds)} each"
    share = "" if state.overhead is None else f", {state.overhead * 100:.2g} % of the time"
    return f"{often}{costs}{share}"


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
