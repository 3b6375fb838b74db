"""What happened to a training, as a picture: its rounds, its workers, and numbered marks with what they mean.

Read from the journal alone, so it can be drawn of a training that was deleted. Nothing is said by colour only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from muster.types.event import FINISHED, WORKER_EXITED, WORKER_STARTED, Event

_TOLD = {"Ready", "ScaleRequested", "RoundReleased", "RoundRecovered", "CancelRequested", *FINISHED.values()}
_MOST_NOTES, _MOST_WORKERS = 40, 64
_WIDTH, _AXIS_WIDTH = 14.0, 12.0  # inches
_LANE, _NOTE, _LETTERS = 0.3, 0.15, 8  # inches, inches, points
_UNITS = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes"))


@dataclass(frozen=True)
class Stretch:
    """Something that lasted, in seconds from the first event; `open` still does, or its end is not known."""

    name: str
    start: float
    end: float
    open: bool = False
    lost: bool = False  # it did not leave by itself


@dataclass(frozen=True)
class Note:
    at: float
    reason: str
    text: str
    warns: bool = False


@dataclass(frozen=True)
class TrainingTimeline:
    rounds: tuple[Stretch, ...]
    workers: tuple[Stretch, ...]
    notes: tuple[Note, ...]
    end: float


def timeline_of(events: Sequence[Event], now: datetime) -> TrainingTimeline:
    """From the first event to the last, or to now where it has not ended."""
    dated = [event for event in events if event.at is not None]
    begun = min((event.at for event in dated if event.at), default=now)
    over = any(event.reason in FINISHED.values() for event in dated)
    lasting = [event for event in dated if event.reason in (*FINISHED.values(), WORKER_EXITED)]
    end = max((_seconds(event, begun) for event in lasting), default=0.0) if over else _since(begun, now)
    rounds: dict[int, Stretch] = {}
    workers: dict[str, Stretch] = {}
    notes: list[Note] = []
    for event in dated:
        at = min(_seconds(event, begun), end)
        if event.reason == "RoundReleased" and event.round is not None:
            rounds[event.round] = Stretch(str(event.round), at, end, open=True)
        elif event.reason in ("RoundRecalled", "OutcomeDecided") and event.round in rounds:
            rounds[event.round] = _closed(rounds[event.round], at)
        elif event.reason == WORKER_STARTED:
            workers[event.data["worker"]] = Stretch(event.data["worker"], at, end, open=True)
        elif event.reason == WORKER_EXITED and event.data["worker"] in workers:
            workers[event.data["worker"]] = _closed(workers[event.data["worker"]], at)
        elif event.reason == "WorkerLost" and (name := event.message.partition(":")[0]) in workers:
            workers[name] = replace(_closed(workers[name], at), lost=True)
        if event.reason in _TOLD or event.type == "Warning":
            notes.append(Note(at, event.reason, " ".join(event.message.split()), event.type == "Warning"))
    return TrainingTimeline(tuple(rounds.values()), tuple(workers.values()), tuple(notes), end)


def _seconds(event: Event, begun: datetime) -> float:
    told = event.data.get("at")  # where the time of writing is not the time meant
    at = datetime.fromisoformat(told) if isinstance(told, str) else event.at
    return _since(begun, at or begun)


def _since(begun: datetime, at: datetime) -> float:
    return max(0.0, (at - begun) / timedelta(seconds=1))


def _closed(stretch: Stretch, at: float) -> Stretch:
    return replace(stretch, end=at, open=False) if stretch.open else stretch


# Drawing -----------------------------------------------------------------------------------------


def draw(name: str, events: Sequence[Event], now: datetime, path: Path) -> None:
    from muster.sim import pictures

    line = timeline_of(events, now)
    notes, workers = line.notes[:_MOST_NOTES], line.workers[:_MOST_WORKERS]
    lanes = 2 + len(workers)
    chart, words = 0.9 + _LANE * lanes, 0.3 + _NOTE * (len(notes) + 1)
    figure = pictures.figure(_WIDTH, chart + words)
    panel, below = figure.subplots(2, 1, height_ratios=[chart, words])
    scale, unit = next(((by, unit) for by, unit in _UNITS if line.end >= 3 * by), (1.0, "seconds"))
    span = max(line.end / scale, 1e-3)
    for stretch in line.rounds:
        _bar(panel, 1, stretch, scale, "0.75")
        if pictures.fits(stretch.name, (stretch.end - stretch.start) / scale / span * _AXIS_WIDTH, _LETTERS):
            middle = (stretch.start + stretch.end) / scale / 2
            panel.text(middle, 1, stretch.name, ha="center", va="center", fontsize=_LETTERS)
    for at, stretch in enumerate(workers):
        _bar(panel, 2 + at, stretch, scale, "0.93")
    _marks(panel, notes, scale, span)
    panel.set_yticks(range(1, lanes), ["round", *(one.name for one in workers)], fontsize=_LETTERS)
    panel.set_ylim(lanes - 0.4, -0.7)
    panel.set_xlim(-0.01 * span, 1.01 * span)
    panel.set_xlabel(f"{unit} from {begun_at(events)}", fontsize=_LETTERS)
    more = len(line.workers) - len(workers)
    panel.set_title(f"{name}, without {more} later workers" if more else name, loc="left", fontsize=11)
    _legend(below, notes, len(line.notes) - len(notes), scale)
    pictures.save(figure, path)


def begun_at(events: Sequence[Event]) -> str:
    first = min((event.at for event in events if event.at), default=None)
    return f"{first:%Y-%m-%d %H:%M:%S} UTC" if first else "its start"


def _bar(panel: Any, lane: int, stretch: Stretch, scale: float, shade: str) -> None:
    """What still lasts has an arrow at its end, what was lost a cross."""
    start, length = stretch.start / scale, (stretch.end - stretch.start) / scale
    panel.barh(lane, length, left=start, height=0.7, color=shade, edgecolor="black", linewidth=0.6)
    if stretch.open or stretch.lost:
        marker, size = ("X", 8) if stretch.lost else (">", 5)
        panel.plot([stretch.end / scale], [lane], marker=marker, color="black", markersize=size, clip_on=False)


def _marks(panel: Any, notes: Sequence[Note], scale: float, span: float) -> None:
    """A number over each moment; those too near to tell apart share one."""
    groups: list[list[int]] = []
    for at, note in enumerate(notes):
        if groups and (note.at - notes[groups[-1][0]].at) / scale < 0.025 * span:
            groups[-1].append(at)
        else:
            groups.append([at])
    for group in groups:
        where = notes[group[0]].at / scale
        text = str(group[0] + 1) if len(group) == 1 else f"{group[0] + 1}–{group[-1] + 1}"
        panel.text(where, 0, text, ha="center", va="center", fontsize=_LETTERS)
    for note in notes:
        panel.axvline(note.at / scale, ymax=0.86, color="black", lw=0.8, ls="-" if note.warns else ":", zorder=3)


def _legend(below: Any, notes: Sequence[Note], left_out: int, scale: float) -> None:
    below.axis("off")
    most = 150
    lines = [
        f"{at:>3}  {note.at / scale:>9.2f}  {'! ' if note.warns else '  '}{note.reason:<15} {note.text}"
        for at, note in enumerate(notes, 1)
    ]
    lines += [f"     and {left_out} more: muster events"] if left_out else []
    cut = [text if len(text) <= most else f"{text[: most - 1]}…" for text in lines]
    below.text(0, 1, "\n".join(cut), va="top", family="monospace", fontsize=_LETTERS, transform=below.transAxes)
