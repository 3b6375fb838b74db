"""What must a scheduler on Ray remember beside its journal? How it was made, which node is which, and whom to call.

Plain values and two small files, both on the head node: one per Ray session that says how the scheduler was made, so
that whoever recreates it need not know, and one beside the journal with the slots of nodes and the pipelines' actors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from muster import files
from muster.errors import Conflict
from muster.types.codec import from_wire, plain, to_wire
from muster.types.sharing import Pool

T = TypeVar("T")


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
    slots: tuple[NodeSlot, ...] = ()
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


def placed(slots: tuple[NodeSlot, ...], present: Iterable[LivingNode], count: int) -> tuple[NodeSlot, ...]:
    """Which node has which of `count` slots, now that these are there.

    A node that comes back under its name takes its old slot, so that its GPUs keep their ids. A name that was never
    seen takes the next new slot; with none left it stays outside. Nodes that share a name share its slots.
    """
    living = {one.node_id for one in present}
    after = [slot if slot.node_id in living else replace(slot, node_id="") for slot in slots]
    known = {slot.node_id for slot in after}
    newcomers = [one for one in present if one.node_id not in known]
    for one in sorted(newcomers, key=lambda one: (one.name, one.node_id)):
        free = next((slot.index for slot in after if slot.name == one.name and not slot.node_id), None)
        if free is not None:
            after[free] = replace(after[free], node_id=one.node_id)
        elif len(after) < count:
            after.append(NodeSlot(len(after), one.name, one.node_id))
    return tuple(after)


# Files -------------------------------------------------------------------------------------------
# As 0.1 wrote them: a pool, a node's slot and a contact are lists.

_Pool = tuple[int, int]


@dataclass(frozen=True)
class _SettingsFile:
    pool: _Pool | None = None
    journal: str | None = None
    hook_timeout_s: float | None = None
    min_turn_s: float | None = None
    reattach_timeout_s: float | None = None


@dataclass(frozen=True)
class _NotesFile:
    session: str = ""
    pool: _Pool | None = None
    seats: tuple[tuple[str, str], ...] = ()  # in the order of their indices
    contacts: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def read_settings(path: Path) -> RaySettings:
    kept = _read(path, _SettingsFile)
    return RaySettings(**{**vars(kept), "pool": kept.pool and Pool(*kept.pool)})


def write_settings(path: Path, settings: RaySettings) -> None:
    _write(path, _SettingsFile(**{**vars(settings), "pool": _pool(settings.pool)}))


def read_notes(path: Path, session: str) -> Notes:
    """Slots outlive a Ray cluster; actors do not."""
    kept = _read(path, _NotesFile)
    slots = tuple(NodeSlot(index, *rest) for index, rest in enumerate(kept.seats))
    contacts = {name: Contact(*one) for name, one in kept.contacts.items()} if kept.session == session else {}
    return Notes(session, Pool(*kept.pool) if kept.pool else None, slots, contacts)


def write_notes(path: Path, notes: Notes) -> None:
    slots = tuple((slot.name, slot.node_id) for slot in notes.slots)
    contacts = {name: (one.handle, one.process) for name, one in notes.contacts.items()}
    _write(path, _NotesFile(notes.session, _pool(notes.pool), slots, contacts))


def _pool(pool: Pool | None) -> _Pool | None:
    return (pool.gpus, pool.gpus_per_node) if pool else None


def _read(path: Path, kind: type[T]) -> T:
    try:
        return from_wire(kind, json.loads(path.read_text()), strict=False, names=plain)
    except FileNotFoundError:
        return kind()


def _write(path: Path, record: object) -> None:
    files.write_private(path, json.dumps(to_wire(record, names=plain)))
