"""Which numbered Secrets hold the log, and which of them can be put together or go?

Small ones are merged: what they hold together is put into the last of them, and the others are deleted. A crash in
between leaves both, which means the same: an event has its id, and of a record the last value counts.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from muster import errors
from muster.kube.client import Json, KubeApi
from muster.store.ledger import Entry

LABEL = "muster.dev/log"
MERGE_AT = 64  # small batches that are put together
FULL = 400_000  # bytes that a batch may have before it is compressed; the server takes a million


@dataclass(eq=False)
class Batch:
    """What one Secret holds."""

    number: int
    events: list[Json] = field(default_factory=list)
    records: dict[tuple[str, str], Any] = field(default_factory=dict)  # None: removed
    by: str = ""
    version: str = ""
    size: int = 0

    @property
    def name(self) -> str:
        return f"muster-log-{self.number:012d}"

    @property
    def last_event(self) -> int:
        return int(self.events[-1]["id"]) if self.events else 0

    def take(self, entry: Entry, mark: str = "") -> None:
        more = {"mark": mark} if mark else {}
        self.events += [{**msgspec.json.decode(noted.raw), **more} for noted in entry.events]
        for kept in entry.records:
            self.records[(kept.record.kind, kept.record.key)] = kept.record.value
        self.size += sum(len(noted.raw) for noted in entry.events) + sum(len(kept.raw or b"") for kept in entry.records)

    def to_secret(self) -> Json:
        records = [[kind, key, value] for (kind, key), value in self.records.items()]
        packed = gzip.compress(msgspec.json.encode({"by": self.by, "events": self.events, "records": records}), 1)
        metadata = {"name": self.name, "labels": {LABEL: "true", "app.kubernetes.io/managed-by": "muster"}}
        if self.version:
            metadata["resourceVersion"] = self.version
        data = {"batch": base64.b64encode(packed).decode()}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": LABEL, "data": data}

    @classmethod
    def from_secret(cls, secret: Json) -> Batch:
        """Raises InternalError for one that muster has not written like that."""
        about = secret["metadata"]
        try:
            plain = gzip.decompress(base64.b64decode(secret["data"]["batch"]))
            held = msgspec.json.decode(plain)
            records = {(kind, key): value for kind, key, value in held["records"]}
            events = {int(event["id"]): event for event in held["events"]}
            number = int(about["name"].rpartition("-")[2])
            return cls(number, list(events.values()), records, held["by"], about["resourceVersion"], len(plain))
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
            raise errors.InternalError(
                f"the Secret {about['name']} holds no part of the journal that can be read: {error!r}",
                hint=f"put it back from a backup, or delete it: what it held is lost then ({LABEL} marks the others)",
            ) from error


class Batches:
    """Those that are stored."""

    def __init__(self, api: KubeApi, namespace: str, identity: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._identity = identity
        self.last = 0
        self._last_events: dict[int, int] = {}  # number → the id of its last event, oldest first
        self._rubbish: list[int] = []  # those whose contents others hold, to be deleted
        self._small: list[Batch] = []  # the latest ones, which wait to be merged
        self._where: dict[tuple[str, str], int] = {}  # which one holds the current value of a record

    async def read(self) -> list[Batch]:
        found: list[Batch] = []
        async for secrets, _ in self._api.pages(self._path, {"labelSelector": LABEL}, limit=100):
            found += map(Batch.from_secret, secrets)
        return sorted(found, key=lambda batch: batch.number)

    async def get(self, batch: Batch) -> Batch:
        """What is stored under that number."""
        return Batch.from_secret(await self._api.request("GET", f"{self._path}/{batch.name}"))

    def next(self) -> Batch:
        return Batch(self.last + 1, by=self._identity)

    async def create(self, batch: Batch, *, again: bool = False) -> None:
        """`again`: after a failure, which may have been a success; what is there may be what we wrote."""
        try:
            answer = await self._api.request("POST", self._path, body=batch.to_secret())
            batch.version = str(answer["metadata"]["resourceVersion"])
        except errors.AlreadyExists:
            if not again or (found := await self.get(batch)).by != self._identity:
                raise
            batch.version = found.version

    def add(self, batch: Batch, *, stays: bool = False) -> None:
        """One that is stored, newer than all others. `stays`: its number stays taken, whatever it holds."""
        self.last = batch.number
        self._last_events[batch.number] = batch.last_event
        for which, value in batch.records.items():
            if value is None:
                self._where.pop(which, None)
            else:
                self._where[which] = batch.number
        if batch.size >= FULL / 2:
            self._small.clear()  # what lies before a full one has been merged as far as it goes
        elif not stays:
            self._small.append(batch)

    @property
    def oldest(self) -> tuple[int, int]:
        """Its number, and the id of its last event."""
        return next(iter(self._last_events.items()))

    def records_of(self, number: int) -> Iterable[tuple[str, str]]:
        """Records whose current value it holds."""
        return [which for which, at in self._where.items() if at == number]

    def drop(self, *numbers: int) -> None:
        """Nothing needs them any more."""
        self._small = [batch for batch in self._small if batch.number not in numbers]
        for number in numbers:
            self._last_events.pop(number, None)
        self._rubbish += numbers

    async def sweep(self) -> None:
        while self._rubbish:
            with contextlib.suppress(errors.NotFound):
                await self._api.request("DELETE", f"{self._path}/{Batch(self._rubbish[-1]).name}")
            self._rubbish.pop()

    async def merge(self) -> None:
        """Put the contents of small ones together into the last of them, as far as one can hold them."""
        if len(self._small) <= MERGE_AT:
            return
        merged = Batch(0, by=self._identity)
        sources: list[Batch] = []
        for batch in self._small[:-1]:  # the newest stays: it may be in the middle of being told about
            merged.events += batch.events
            merged.records |= batch.records
            merged.size += batch.size
            sources.append(batch)
            if merged.size >= FULL:
                break
        merged.number, merged.version = sources[-1].number, sources[-1].version
        merged.size = len(msgspec.json.encode([merged.events, list(merged.records.values())]))
        try:
            answer = await self._api.request("PUT", f"{self._path}/{merged.name}", body=merged.to_secret())
        except (errors.Conflict, errors.NotFound):
            # Put before, with an answer that was lost, or by the control plane before us. They stay as they are.
            self._small = [batch for batch in self._small if batch not in sources]
            return
        merged.version = str(answer["metadata"]["resourceVersion"])
        self._merged(merged, sources)

    def _merged(self, merged: Batch, sources: Sequence[Batch]) -> None:
        for which, number in self._where.items():
            if sources[0].number <= number < merged.number:
                self._where[which] = merged.number
        self._last_events[merged.number] = merged.last_event
        # Meanwhile a full batch may have come: what lies before it is not put together with what comes after.
        in_line = bool(self._small) and self._small[0] is sources[0]
        self._small = [batch for batch in self._small if batch not in sources]
        if in_line and merged.size < FULL / 2:
            self._small.insert(0, merged)
        self.drop(*(batch.number for batch in sources[:-1]))
