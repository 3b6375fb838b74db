"""How can a recording be looked at? As a Chrome/Perfetto trace, or as a picture with a line per GPU.

A trace opens in https://ui.perfetto.dev or chrome://tracing: one row per GPU with who has it and for what, one row
per pipeline with what it waits for, and every decision as a mark with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.sim import events, pictures
from muster.sim.recording import GpuSpan, PolicyDecision, QueueWait, Recording, Use
from muster.types.codec import Invalid, Problem

KIND = "muster-sharing-recording"
_GPUS, _QUEUE, _DECISIONS = 1, 2, 3  # process numbers in a trace
_WIDTH, _BARS_WIDTH = 16.0, 15.0  # of the picture and of its time axis, in inches
_LABEL = 7  # points
_STYLES = {
    Use.TRAIN: ("", 1.0),
    Use.SERVE: ("", 0.55),
    Use.EXPAND: ("//", 0.3),
    Use.SHRINK: ("xx", 0.3),
    Use.FILL: ("..", 0.8),
    Use.RESIZE: ("xx", 0.3),
}


# Files -------------------------------------------------------------------------------------------


def save(recording: Recording, path: Path) -> None:
    path.write_text(json.dumps({"kind": KIND, **asdict(recording)}))


def load(path: Path) -> Recording:
    """From a file that `save` wrote, or one with a scheduler's events as JSON lines."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid([Problem("FILE", f"{path} cannot be read as text: {error}")]) from None
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict) or data.pop("kind", None) != KIND:
        return events.recording(events.parse(text))
    spans = tuple(GpuSpan(**{**span, "use": Use(span["use"])}) for span in data.pop("spans"))
    waits = tuple(QueueWait(**wait) for wait in data.pop("waits"))
    decisions = tuple(PolicyDecision(**decision) for decision in data.pop("decisions"))
    return Recording(spans=spans, waits=waits, decisions=decisions, **data)


# Chrome/Perfetto ---------------------------------------------------------------------------------


def chrome(recording: Recording) -> dict[str, Any]:
    """The trace, in the JSON format that Chrome and Perfetto read; times in microseconds."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(recording))}


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    rows = {name: at for at, name in enumerate(_pipelines(recording))}
    yield from _names(recording.gpus, rows)
    for span in recording.spans:
        name = f"{span.pipeline} {span.use}"
        yield _slice(_GPUS, span.gpu, name, span.start, span.end, {"pipeline": span.pipeline, "use": span.use.value})
    for wait in recording.waits:
        if wait.end > wait.start:
            args = {"pipeline": wait.pipeline, "cluster": wait.cluster, "priority": wait.priority}
            name = f"{wait.cluster} {wait.priority}"
            yield _slice(_QUEUE, rows[wait.pipeline], name, wait.start, wait.end, args)
    for decision in recording.decisions:
        yield {
            "ph": "i",
            "s": "t",
            "pid": _DECISIONS,
            "tid": rows[decision.pipeline],
            "ts": decision.at * 1e6,
            "name": decision.what,
            "args": {"pipeline": decision.pipeline, "reason": decision.reason},
        }


def _names(gpus: int, rows: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for pid, name in ((_GPUS, "GPUs"), (_QUEUE, "queue"), (_DECISIONS, "decisions")):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for gpu in range(gpus):
        yield {"ph": "M", "pid": _GPUS, "tid": gpu, "name": "thread_name", "args": {"name": f"GPU {gpu}"}}
    for pid in (_QUEUE, _DECISIONS):
        for name, tid in rows.items():
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, start: float, end: float, args: Mapping[str, str]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "name": name,
        "args": args,
    }


def _pipelines(recording: Recording) -> list[str]:
    seen = {span.pipeline for span in recording.spans} | {wait.pipeline for wait in recording.waits}
    return sorted(seen | {decision.pipeline for decision in recording.decisions})


# Pictures ----------------------------------------------------------------------------------------


def draw(recordings: Sequence[tuple[str, Recording]], path: Path) -> None:
    """GPU timelines under each other on one time axis.

    A colour per pipeline, darker or hatched by what the GPU does; its name stands in each bar that has room for it,
    so that the picture can be read without colours.
    """
    lanes = sum(recording.gpus for _, recording in recordings)
    figure = pictures.figure(_WIDTH, 1.2 * len(recordings) + 0.25 * lanes)
    from matplotlib.patches import Patch

    names = sorted({name for _, recording in recordings for name in _pipelines(recording)})
    colours = {name: f"C{at % 10}" for at, name in enumerate(names)}
    end = max((span.end for _, recording in recordings for span in recording.spans), default=1.0)
    panels = figure.subplots(len(recordings), 1, sharex=True, squeeze=False)
    for (title, recording), panel in zip(recordings, panels[:, 0], strict=True):
        _draw_one(panel, title, recording, colours, _BARS_WIDTH / (end or 1.0))
    panels[-1, 0].set_xlabel("seconds")
    panels[-1, 0].set_xlim(0, end or 1.0)
    shades = [
        Patch(facecolor="grey", alpha=alpha, hatch=hatch, label=use.value) for use, (hatch, alpha) in _STYLES.items()
    ]
    pipelines = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=pipelines + shades, loc="outside upper right", ncols=len(pipelines) + len(shades))
    pictures.save(figure, path)


def _draw_one(
    panel: Any, title: str, recording: Recording, colours: Mapping[str, str], inches_per_second: float
) -> None:
    for name, colour in colours.items():
        for use, (hatch, alpha) in _STYLES.items():
            for gpu in range(recording.gpus):
                bars = [
                    (span.start, span.end - span.start)
                    for span in recording.spans
                    if span.gpu == gpu and span.pipeline == name and span.use is use
                ]
                if bars:
                    panel.broken_barh(bars, (gpu - 0.45, 0.9), facecolors=colour, alpha=alpha, hatch=hatch)
    for span in recording.spans:
        if pictures.fits(span.pipeline, (span.end - span.start) * inches_per_second, _LABEL):
            weight = "bold" if span.use is Use.TRAIN else "normal"
            middle = (span.start + span.end) / 2
            panel.text(middle, span.gpu, span.pipeline, ha="center", va="center", fontsize=_LABEL, weight=weight)
    panel.set_title(title, loc="left", fontsize=10)
    panel.set_yticks(range(recording.gpus), [f"GPU {gpu}" for gpu in range(recording.gpus)], fontsize=_LABEL)
    panel.invert_yaxis()
