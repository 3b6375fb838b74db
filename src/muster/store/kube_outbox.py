"""What travels with an object for the journal, and which of what is found there is taken? Pure.

With each change of an object travels what the journal is to say of it, its *outbox*: in an annotation with the spec, in
a field with the status. A control plane that dies before it has written the journal leaves it there for the next one.

Whoever may write a training may write that annotation too, so nothing in it is believed for standing there: it carries
a seal that only muster can make, for one object. What has none, or somebody else's, is input that nobody asked for.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from muster.core import keeping
from muster.kube.client import Json
from muster.ports import Record, Write
from muster.types.codec import from_wire, to_wire
from muster.types.event import TRIMMED, WORKER_BACK, WORKER_EXITED, WORKER_LENT, WORKER_STARTED, Event
from muster.types.training import REQUEST, Key

OUTBOX = "muster.dev/journal"  # annotation
STATUS_OUTBOX = "journal"  # field of the status
LARGEST = 65_536  # characters
ASIDE = "aside-"  # how the mark begins of an entry that tells what was not taken
_SEAL = 64  # characters, and a dot after them
_MARK = re.compile(r'(?:[0-9a-f]{64}\.)?\{"mark": ?"([0-9a-f]{16})"')  # how what muster wrote begins, whatever its seal
# Is written together with its worker or not at all, and never travels.
USAGE = (WORKER_STARTED, WORKER_EXITED, WORKER_LENT, WORKER_BACK, TRIMMED)


@dataclass(frozen=True)
class Owner:
    """The object that an outbox belongs to. When it is created it has no uid yet, only what its request asked for."""

    key: Key
    uid: str = ""
    request: str = ""


@dataclass(frozen=True)
class Outbox:
    """`mark` tells later whether the journal has it."""

    mark: str
    write: Write


@dataclass(frozen=True)
class _Carried:
    """An outbox as an object carries it."""

    mark: str
    events: tuple[Event, ...]
    records: tuple[tuple[str, str, Mapping[str, Any] | None], ...]


class Seal:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def close(self, outbox: Outbox | None, owner: Owner) -> str:
        """What an object carries; nothing where there is nothing, or more than an object should carry."""
        if outbox is None or not (owner.uid or owner.request):
            return ""
        own = tuple((one.kind, one.key, one.value) for one in outbox.write.records if is_own(one, owner.key))
        carried = _Carried(outbox.mark, tuple(outbox.write.events), own)
        text = json.dumps(to_wire(carried), separators=(",", ":"))
        return f"{self._mac(text, owner)}.{text}" if len(text) <= LARGEST else ""

    def is_on(self, carried: str, owner: Owner) -> bool:
        given, dot, text = carried[:_SEAL], carried[_SEAL : _SEAL + 1], carried[_SEAL + 1 :]
        if dot != "." or not given.isascii() or not (owner.uid or owner.request):
            return False
        return hmac.compare_digest(given, self._mac(text, owner))

    def _mac(self, text: str, owner: Owner) -> str:
        said = json.dumps([owner.key.namespace, owner.key.name, owner.uid, owner.request, text])
        return hmac.new(self._key, said.encode(), hashlib.sha256).hexdigest()


# What was found ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundOutbox:
    """`wrong` says why it is not taken. Only what is sealed is read: to read what others wrote could take for ever."""

    key: Key
    place: str
    carried: str
    mark: str  # for the entry that says that it was not taken
    claimed: str = ""  # the mark that it says it has
    outbox: Outbox | None = None
    wrong: str = ""


def carrying(item: Json) -> Json | None:
    """As much of an object as `outboxes` needs; None if it carries nothing."""
    about, status = item["metadata"], item.get("status") or {}
    notes = {name: text for name, text in (about.get("annotations") or {}).items() if name in (OUTBOX, REQUEST)}
    if OUTBOX not in notes and STATUS_OUTBOX not in status:
        return None
    metadata = {name: about[name] for name in ("namespace", "name", "uid")} | {"annotations": notes}
    return {"metadata": metadata, "status": {STATUS_OUTBOX: status.get(STATUS_OUTBOX)}}


def outboxes(item: Json, seal: Seal) -> Iterator[FoundOutbox]:
    about = item["metadata"]
    notes, status = about.get("annotations") or {}, item.get("status") or {}
    key, uid = Key(about["namespace"], about["name"]), about["uid"]
    owners = [Owner(key, uid), Owner(key, request=notes.get(REQUEST, ""))]
    for place, carried in ((OUTBOX, notes.get(OUTBOX)), (STATUS_OUTBOX, status.get(STATUS_OUTBOX))):
        if carried:
            digest = hashlib.sha256(f"{uid} {carried}".encode("utf-8", "replace")).hexdigest()
            yield _judged(FoundOutbox(key, place, carried, f"{ASIDE}{digest[:16]}"), owners, seal)


def _judged(found: FoundOutbox, owners: list[Owner], seal: Seal) -> FoundOutbox:
    carried = found.carried
    if len(carried) > LARGEST + _SEAL + 1:
        return replace(found, wrong=f"it has {len(carried)} characters, more than muster writes")
    if not any(seal.is_on(carried, owner) for owner in owners):
        begins = _MARK.match(carried)
        claimed = begins[1] if begins is not None else ""
        return replace(found, claimed=claimed, wrong="it does not carry this control plane's seal")
    if (outbox := _read(carried[_SEAL + 1 :])) is None:
        return replace(found, wrong="it cannot be read")
    return replace(found, outbox=outbox, wrong=strange(outbox.write, owners[0]))


def _read(text: str) -> Outbox | None:
    """Anything may stand there."""
    try:
        held = from_wire(_Carried, json.loads(text), strict=False)
    except (ValueError, RecursionError):
        return None
    return Outbox(held.mark, Write(events=held.events, records=tuple(Record(*one) for one in held.records)))


# What may travel ---------------------------------------------------------------------------------


def strange(write: Write, owner: Owner) -> str:
    """Why entries cannot be those of that object's own changes; empty if they can."""
    for event in write.events:
        about = (event.namespace or owner.key.namespace, event.training or owner.key.name, event.uid or owner.uid)
        if about != (owner.key.namespace, owner.key.name, owner.uid):
            return "it speaks of another training"
        if event.reason in USAGE:
            return "it speaks of usage, which never travels"
    for record in write.records:
        if not is_own(record, owner.key):
            return "it holds a record that never travels"
        if record.value is not None and keeping.problem_with(record.kind, record.key, record.value):
            return "it holds a record that cannot be read"
    return ""


def is_own(record: Record, key: Key) -> bool:
    """All else is written on its own, or is found out again: only the key of the request that made it goes with it."""
    return record.kind == keeping.IDEMPOTENCY and str(record.key).startswith(f"{key.namespace}/")
