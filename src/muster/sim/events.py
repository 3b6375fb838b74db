"""What do a scheduler's events say about its GPUs? The same recording that a simulation makes, from a real pool.

Events come as JSON lines, one event each, oldest first: what `Scheduler.events()` has, or a pool's event stream.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence

from muster.sim.recording import GpuSpan, PolicyDecision, QueueWait, Recording, Use
from muster.types.codec import Invalid, Problem
from muster.types.sharing import GENERATION_CLUSTER, SharingEvent

_USES = {"expanding": Use.EXPAND, "expanded": Use.SERVE, "shrinking": Use.SHRINK}
_FREEING = {"vacated", "released", "unregistered"}
SILENT = {"started", "stopped", "registered", "admitted", "requested", "released", "vacated", "expanded", "progress"}


def written(events: Iterable[SharingEvent]) -> str:
    """As JSON lines."""
    return "".join(f"{json.dumps(dataclasses.asdict(event))}\n" for event in events)


def parse(text: str) -> list[SharingEvent]:
    """From JSON lines; unknown fields are passed over, so that later versions can say more."""
    known = {field.name for field in dataclasses.fields(SharingEvent)}
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            fields = {name: value for name, value in data.items() if name in known}
            lists = {name: tuple(fields.get(name, ())) for name in ("ranks", "gpus")}
            found.append(SharingEvent(**{**fields, **lists}))
        except (ValueError, AttributeError, TypeError):
            raise Invalid([Problem(f"line {number}", "is not an event of a scheduler")]) from None
    return found


def recording(events: Sequence[SharingEvent], gpus: int = 0) -> Recording:
    """Times count from the first event. Without a number of GPUs, there are as many as the events speak of."""
    teller = _Teller(events[0].at if events else 0.0)
    for event in events:
        teller.hear(event)
    seen = 1 + max((gpu for event in events for gpu in event.gpus), default=-1)
    return teller.finish(max(gpus, seen), events[-1].at if events else 0.0)


class _Teller:
    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._current: dict[int, tuple[str, Use, float]] = {}
        self._asked: dict[tuple[str, str], tuple[str, float]] = {}
        self._spans: list[GpuSpan] = []
        self._waits: list[QueueWait] = []
        self._decisions: list[PolicyDecision] = []
        self._resizes = 0

    def hear(self, event: SharingEvent) -> None:
        at = event.at - self._origin
        use = _USES.get(event.kind)
        if event.kind == "granted" and event.cluster != GENERATION_CLUSTER:
            use = Use.TRAIN
        if use is not None or event.kind in _FREEING:
            for gpu in event.gpus:
                self._turn(gpu, event.pipeline, use, at)
        if use in (Use.EXPAND, Use.SHRINK) or event.kind == "draining":
            self._resizes += len(event.ranks)
        if event.kind == "requested":
            self._asked[event.pipeline, event.cluster] = (event.text, at)
        elif event.kind in ("granted", "withdrawn"):
            text, since = self._asked.pop((event.pipeline, event.cluster), ("", at))
            if at > since:
                self._waits.append(QueueWait(event.pipeline, event.cluster, text, since, at))
        if event.kind not in SILENT:
            self._decisions.append(decision(event, at))

    def _turn(self, gpu: int, pipeline: str, use: Use | None, at: float) -> None:
        before = self._current.pop(gpu, None)
        if before is not None and at > before[2]:
            self._spans.append(GpuSpan(gpu, before[0], before[1], before[2], at))
        if use is not None:
            self._current[gpu] = (pipeline, use, at)

    def finish(self, gpus: int, end: float) -> Recording:
        for gpu in list(self._current):
            self._turn(gpu, "", None, end - self._origin)
        spans = tuple(sorted(self._spans, key=lambda span: (span.start, span.gpu)))
        return Recording(gpus, spans, tuple(self._waits), tuple(self._decisions), resizes=self._resizes)


def decision(event: SharingEvent, at: float) -> PolicyDecision:
    """An event as a mark in a trace."""
    what = " ".join(part for part in (event.kind, event.cluster, _listed(event)) if part)
    return PolicyDecision(at, event.pipeline, what, event.text)


def _listed(event: SharingEvent) -> str:
    if event.ranks:
        return f"rank {', '.join(map(str, event.ranks))}"
    return f"GPU {', '.join(map(str, event.gpus))}" if event.gpus else ""
