"""What must a scheduler on Ray remember beside its journal? How it was made, which node is which, and whom to call.

Plain values and two small files, both on the head node: one per Ray session that says how the scheduler was made, so
that whoever recreates it need not know, and one beside the journal with the seats of nodes and the pipelines' actors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from muster.errors import Conflict
from muster.types.sharing import Pool

_PRIVATE = 0o600


@dataclass(frozen=True)
class RaySettings:
    """How a scheduler is made. None: whatever it was made with before, or the default."""

    pool: Pool | None = None
    journal: str | None = None
    hook_timeout_s: float | None = None
    min_turn_s: float | None = None
    reattach_timeout_s: float | None = None


@dataclass(frozen=True)
class LivingNode:
    """A living node that has GPUs."""

    name: str
    node_id: str


@dataclass(frozen=True)
class NodeSlot:
    """A node's place in the pool: GPUs `index · gpus_per_node` and on. It belongs to a name for good."""

    index: int
    name: str
    node_id: str = ""  # of the Ray node that has it now; "" while that is away


@dataclass(frozen=True)
class Contact:
    """A pipeline's actor: its handle as text, and which process it was when it was last seen."""

    handle: str
    process: str = ""


@dataclass(frozen=True)
class Notes:
    session: str
    pool: Pool | None = None
    seats: tuple[NodeSlot, ...] = ()
    contacts: Mapping[str, Contact] = field(default_factory=dict)


def merged(before: RaySettings, wanted: RaySettings) -> RaySettings:
    """What it was made with, completed by what is asked for now. The two must not contradict each other."""
    for name in ("pool", "journal"):
        there, asked = getattr(before, name), getattr(wanted, name)
        if there is not None and asked is not None and there != asked:
            raise Conflict(
                f"the scheduler has {name} {there}, not {asked}",
                retryable=False,
                hint=f"leave {name} out to use the one that is there, or choose another name",
            )
    given = {name: value for name, value in vars(wanted).items() if value is not None}
    kept = {name: value for name, value in vars(before).items() if value is not None}
    return replace(RaySettings(), **{**given, **kept})


def seated(seats: tuple[NodeSlot, ...], present: Iterable[LivingNode], count: int) -> tuple[NodeSlot, ...]:
    """Who sits where, out of `count` seats, now that these nodes are there.

    A node that comes back under its name takes its old seat, so that its GPUs keep their ids. A name that was never
    seen takes the next new seat; with none left it stays outside. Nodes that share a name share its seats.
    """
    living = {one.node_id for one in present}
    after = [seat if seat.node_id in living else replace(seat, node_id="") for seat in seats]
    known = {seat.node_id for seat in after}
    newcomers = [one for one in present if one.node_id not in known]
    for one in sorted(newcomers, key=lambda one: (one.name, one.node_id)):
        free = next((seat.index for seat in after if seat.name == one.name and not seat.node_id), None)
        if free is not None:
            after[free] = replace(after[free], node_id=one.node_id)
        elif len(after) < count:
            after.append(NodeSlot(len(after), one.name, one.node_id))
    return tuple(after)


# Files -------------------------------------------------------------------------------------------


def read_settings(path: Path) -> RaySettings:
    kept = _read(path)
    return RaySettings(**{**kept, "pool": _read_pool(kept)})


def write_settings(path: Path, settings: RaySettings) -> None:
    _write(path, {**vars(settings), "pool": _pool(settings.pool)})


def read_notes(path: Path, session: str) -> Notes:
    """Seats outlive a Ray cluster; actors do not."""
    kept = _read(path)
    seats = tuple(NodeSlot(index, *rest) for index, rest in enumerate(kept.get("seats", ())))
    contacts = {name: Contact(*one) for name, one in kept.get("contacts", {}).items()}
    return Notes(session, _read_pool(kept), seats, contacts if kept.get("session") == session else {})


def write_notes(path: Path, notes: Notes) -> None:
    seats = [[seat.name, seat.node_id] for seat in notes.seats]
    contacts = {name: [one.handle, one.process] for name, one in notes.contacts.items()}
    _write(path, {"session": notes.session, "pool": _pool(notes.pool), "seats": seats, "contacts": contacts})


def _pool(pool: Pool | None) -> list[int] | None:
    return [pool.gpus, pool.gpus_per_node] if pool else None


def _read_pool(kept: Mapping[str, Any]) -> Pool | None:
    return Pool(*kept["pool"]) if kept.get("pool") else None


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def _write(path: Path, record: Mapping[str, object]) -> None:
    """In one step: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _PRIVATE)
    with open(file, "w") as opened:
        json.dump(record, opened)
    os.replace(draft, path)
