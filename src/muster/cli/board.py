"""What does `muster top` show? Lines that fit a screen: trainings, then who holds and who awaits the GPUs of each pool.

Pure: a terminal, a clock and a control plane are somebody else's. A reason is never cut off: it stands in the last
column where that is wide enough, else below its row.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from typing import Any

from muster.cli.choosing import KEYS
from muster.cli.safe_text import shown
from muster.cli.trainings import reason_of, target_of
from muster.core.training.explain import show_age
from muster.types.training import Training, Uid

TITLES = ("NAME", "PHASE", "READY", "SPARES", "GPUS", "ROUND", "STEP", "RESTARTS", "AGE", "REASON")
_PHASE_STYLES = {"pending": "yellow", "ready": "green", "succeeded": "green", "failed": "red", "cancelled": "magenta"}
_STATE_STYLES = {"granting": "yellow", "draining": "yellow", "out of use": "red"}

_ORDER = {"ready": 0, "pending": 1}  # what ended comes last
_GAP = 2
_LEAST_LAST = 40  # a last column that is narrower than this goes below its row
_MOST_LINES = 4  # of one reason
_NARROWEST = 12  # to which a name is cut before a column goes
_LEFT_OUT_FIRST = ("GPUS", "SPARES", "RESTARTS", "ROUND", "AGE", "STEP", "PRIORITY", "CLUSTER")  # on a narrow screen


@dataclass(frozen=True)
class Board:
    """What is known at one moment."""

    trainings: tuple[Training, ...] = ()
    pools: tuple[Mapping[str, Any], ...] = ()
    namespace: str = ""
    url: str = ""
    trouble: str = ""  # why what stands here may be old
    heals: Mapping[Uid, str] = field(default_factory=dict)  # what was told of losses a moment ago
    warning: str = ""  # what the control plane says is wrong with itself
    chosen: str = ""  # the uid of a training
    without_ended: bool = False
    said: str = ""  # to whoever types


@dataclass(frozen=True)
class StyledText:
    text: str
    style: str = ""


Line = tuple[StyledText, ...]
Block = tuple[Line, ...]  # a row, with what belongs below it


def lines(board: Board, now: datetime, width: int, height: int) -> list[Line]:
    """As many as fit. Trainings give way to pools, but keep half of the screen."""
    head = _head(board, now, width)
    pools = [line for pool in board.pools for line in _pool(pool, width)]
    room = max(height - len(head) - 1, 0)
    for_trainings = max(room - len(pools), (room + 1) // 2)
    listed = in_order(board)
    at = next((at for at, one in enumerate(listed) if one.uid == board.chosen), None)
    found = _fitted(_marked(_trainings(board, listed, now, width), at), for_trainings, at)
    found = found or [(StyledText("no trainings here yet: muster run SCRIPT", "dim"),)]
    shown_pools = pools[: max(room - len(found), 0)]
    if len(shown_pools) < len(pools) and shown_pools:
        shown_pools[-1] = (StyledText("… there is more: muster pool", "dim"),)
    return [_clipped(line, width) for line in [*head, (), *found, *shown_pools][:height]]


def in_order(board: Board) -> list[Training]:
    """The trainings that are shown, from top to bottom."""
    found = [one for one in board.trainings if not (board.without_ended and one.is_terminal)]
    return sorted(found, key=lambda one: (_ORDER.get(one.status.phase, 2), one.metadata.name))


def logged(name: str, output: Sequence[str], width: int, height: int) -> list[Line]:
    """The end of a training's log."""
    head = (StyledText(f"log of {shown(name)}   q quits, esc goes back", "bold"),)
    texts = [shown(line) for line in output] or ["no output yet"]
    room = max(height - 2, 0)
    return [_clipped(line, width) for line in [head, (), *((StyledText(text),) for text in texts[-room:])]][:height]


def plain(board: Board, now: datetime) -> Iterator[str]:
    """All of it, as wide as it is."""
    for block in _trainings(board, in_order(board), now, None):
        yield from map(text_of, block)
    for pool in board.pools:
        yield from map(text_of, _pool(pool, None))


def text_of(line: Line) -> str:
    return "".join(span.text for span in line).rstrip()


def changes(pool: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a line of its own tells of a pool: of what, and how it is."""
    name = shown(pool["name"])
    for row in _lanes(pool):
        gpus, pipeline, cluster, state, _ = row
        who = "" if pipeline == "-" else f"  {pipeline} {cluster}"
        yield f"{name} {gpus}", f"pool {name}  GPU {gpus}{who}  {state}"
    for who, what, _, why in _waits(pool):
        yield f"{name} {who} {what}", f"pool {name}  {who} waits for {what}  {why}"
    for pipeline, why in pool["quarantined"].items():
        yield f"{name} {pipeline}", f"pool {name}  {shown(pipeline)} is quarantined  {shown(why)}"


# Parts -------------------------------------------------------------------------------------------


def _head(board: Board, now: datetime, width: int) -> list[Line]:
    counts = {
        phase: sum(one.status.phase == phase for one in board.trainings) for phase in ("ready", "pending", "failed")
    }
    told = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
    clock = f"{now.astimezone():%H:%M:%S}"
    namespace = shown(board.namespace)
    fullest = (f"{namespace} at {shown(board.url)}", told, "arrows choose, q quits", clock)
    told_less = (fullest, (namespace, told, "q quits"), (told, "q quits"), ("q quits",))
    texts = ["   ".join(part for part in ("muster top", *parts) if part) for parts in told_less]
    head: list[Line] = [(StyledText(next((text for text in texts if len(text) <= width), texts[-1][:width]), "bold"),)]
    if board.said or board.chosen:
        head += [(StyledText(line, "dim"),) for line in _wrapped(shown(board.said or KEYS), width)]
    if board.warning:
        head += [(StyledText(line, "red"),) for line in _wrapped(shown(f"warning: {board.warning}"), width)]
    if board.trouble:
        head += [(StyledText(line, "red"),) for line in _wrapped(shown(f"out of date: {board.trouble}"), width)]
    return head


def _trainings(board: Board, ordered: Sequence[Training], now: datetime, width: int | None) -> list[Block]:
    rows = [_row(one, now, board.heals.get(one.uid, "")) for one in ordered]
    return _grid(TITLES, rows, width, {1: _PHASE_STYLES}) if ordered or not width else []


def _row(training: Training, now: datetime, heal: str) -> tuple[str, ...]:
    status, created = training.status, training.metadata.creation_timestamp
    steps = [rank.step for rank in status.ranks if rank.step is not None]
    return (
        shown(training.metadata.name),
        shown(status.phase),
        "-" if training.is_terminal else f"{status.world_size.ready}/{target_of(training)}",
        f"{status.spares.ready}/{training.spec.spares}",
        str((status.world_size.ready + status.spares.ready) * training.spec.resources.gpus),
        "-" if status.round is None else str(status.round),
        str(min(steps, default="-")),
        str(status.restarts),
        show_age(now - created) if created else "-",
        shown(reason_of(training) or (heal and f"healed: {heal}")),
    )


def _pool(pool: Mapping[str, Any], width: int | None) -> list[Line]:
    total, idle = pool["gpus"], len(pool["idle"])
    waits = list(_waits(pool))
    counted = f"{total} GPUs, {idle} idle, {len(waits)} waiting"
    found: list[Line] = [(), (StyledText(f"POOL {shown(pool['name'])}", "bold"), StyledText(f"   {counted}"))]
    lanes = ("GPU", "HOLDER", "CLUSTER", "STATE", "LEFT")
    found += _flat(_grid(lanes, list(_lanes(pool)), width, {3: _STATE_STYLES}))
    if waits:
        found += _flat(_grid(("WAITS", "CLUSTER", "PRIORITY", "REASON"), waits, width))
    if pool["quarantined"]:
        rows = [(shown(name), shown(why)) for name, why in pool["quarantined"].items()]
        found += _flat(_grid(("QUARANTINED", "REASON"), rows, width))
    return found


def _waits(pool: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for one in pool["pending"]:
        yield (shown(one["pipeline"]), shown(one["cluster"]), shown(one["priority"]), shown(one["reason"]))
    for one in pool.get("waiting", ()):
        if one.get("training") is not None:
            yield (shown(f"training {one['training']}"), "workers", shown(one.get("state")), shown(one["reason"]))


def _lanes(pool: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """GPUs beside each other that one cluster has in one state share a row."""
    left = {one["id"]: f"{one['remaining']} of {one['target']}" for one in pool["pipelines"] if "remaining" in one}

    def lane(gpu: int) -> tuple[str, str, str, str]:
        holder = pool["leases"].get(str(gpu))
        if holder is None and (worker := pool.get("workers", {}).get(str(gpu))) is not None:
            return (shown(f"training {worker['training']}"), "workers", shown(worker["state"]), "")
        if holder is None:
            return ("-", "-", "idle" if gpu in pool["idle"] else "out of use", "")
        generates = holder["cluster"] == "actor_infer"
        todo = left.get(holder["pipeline"], "") if generates else ""
        return (shown(holder["pipeline"]), shown(holder["cluster"]), shown(holder["state"]), shown(todo))

    for (pipeline, cluster, state, todo), run in groupby(range(pool["gpus"]), key=lane):
        gpus = list(run)
        yield (str(gpus[0]) if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}", pipeline, cluster, state, todo)


# Rows and columns --------------------------------------------------------------------------------


def _grid(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    styles: Mapping[int, Mapping[str, str]] | None = None,
) -> list[Block]:
    """Columns that line up. The last one is wrapped; on a narrow screen the first is cut and others are left out."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(titles, *rows, strict=True)]
    others = sum(widths[1:-1]) + _GAP * (len(widths) - 1)
    too_wide = width is not None and min(widths[0], _NARROWEST) + others > width
    gone = next((titles.index(title) for title in _LEFT_OUT_FIRST if title in titles[1:-1]), None)
    if too_wide and gone is not None:
        shorter = [(*row[:gone], *row[gone + 1 :]) for row in (titles, *rows)]
        moved = {at - (at > gone): style for at, style in (styles or {}).items() if at != gone}
        return _grid(shorter[0], shorter[1:], width, moved)
    if width is not None:
        widths[0] = max(min(widths[0], width - others), min(widths[0], _NARROWEST))
    left = widths[0] + others
    room = None if width is None else width - left
    fits = room is None or widths[-1] <= room or room >= _LEAST_LAST
    named = titles if fits else titles[:-1]
    found: list[Block] = [
        (tuple(StyledText(_padded(text, size), "dim") for text, size in zip(named, widths, strict=False)),)
    ]
    for row in rows:
        cells = [
            StyledText(_padded(text, size), (styles or {}).get(at, {}).get(text, ""))
            for at, (text, size) in enumerate(zip(row[:-1], widths, strict=False))
        ]
        found.append(_with_last(tuple(cells), row[-1], left, room if fits else None, width))
    return found


def _with_last(cells: Line, last: str, left: int, room: int | None, width: int | None) -> Block:
    """A row and its last column: beside the others, or below them."""
    if width is None:
        return ((*cells, StyledText(last or "-")),)
    if room is not None:
        first, *more = _wrapped(last or "-", room)
        return ((*cells, StyledText(first)), *((StyledText(" " * left + line),) for line in more))
    below = _wrapped(last, width - 4) if last else []
    return (cells, *((StyledText(f"    {line}"),) for line in below))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 10), max_lines=_MOST_LINES, placeholder=" …") or [""]


def _padded(text: str, size: int) -> str:
    from rich.cells import cell_len

    text = _cut(text, size)
    return text + " " * (size - cell_len(text) + _GAP)


def _cut(text: str, size: int) -> str:
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= size else f"{set_cell_size(text, size - 1)}…"


def _clipped(line: Line, width: int) -> Line:
    """The last resort: a line that is too long would break the screen."""
    from rich.cells import cell_len

    kept: list[StyledText] = []
    for span in (*line[:-1], StyledText(line[-1].text.rstrip(), line[-1].style)) if line else ():
        if width <= 0:
            break
        kept.append(StyledText(_cut(span.text, width), span.style))
        width -= cell_len(span.text)
    return tuple(kept)


def _marked(blocks: Sequence[Block], at: int | None) -> list[Block]:
    """With the row of the one that is chosen in reverse; the first block is the titles."""
    if at is None:
        return list(blocks)
    row, *below = blocks[at + 1]
    marked = (tuple(StyledText(span.text, "reverse") for span in row), *below)
    return [*blocks[: at + 1], marked, *blocks[at + 2 :]]


def _fitted(blocks: Sequence[Block], room: int, at: int | None = None) -> list[Line]:
    """Whole blocks, and a line that says how many more there are. Those above give way to the one that is chosen."""
    if sum(map(len, blocks)) <= room:
        return _flat(blocks)
    while at and sum(map(len, blocks[: at + 2])) + 1 > room:
        blocks, at = [blocks[0], *blocks[2:]], at - 1
    kept: list[Line] = []
    for at, block in enumerate(blocks):
        if len(kept) + len(block) + 1 > room:
            return [*kept, (StyledText(f"… and {len(blocks) - at} more: muster ps", "dim"),)]
        kept += block
    return kept


def _flat(blocks: Sequence[Block]) -> list[Line]:
    return [line for block in blocks for line in block]
