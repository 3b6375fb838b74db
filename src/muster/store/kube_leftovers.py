"""What did others leave, in objects and in the journal, when this control plane opened? What is ours is written down.

The rest is set aside: nothing follows from it, an entry of the journal says so once, and what stands in an object goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from muster import errors
from muster.kube.client import JSON_PATCH, Json, KubeApi
from muster.ports import Record, Store, Stored, Write
from muster.store.kube_log import MADE_UP, KubeLog
from muster.store.kube_objects import path_of, status_of
from muster.store.kube_outbox import OUTBOX, STATUS_OUTBOX, FoundOutbox, Seal, outboxes
from muster.types.event import Event

log = logging.getLogger("muster.store")

SET_ASIDE = "JournalSetAside"
HOME = "muster"  # the name under which is told what belongs to no training
_AT_ONCE = 500  # records that one write puts right
_MOST_NAMED = 5

Journal = Callable[[Write, Stored | None, str], "asyncio.Future[None]"]


class Leftovers:
    def __init__(self, api: KubeApi, journal: KubeLog, store: Store, seal: Seal, write: Journal) -> None:
        """`write` notes entries about an object, under a mark."""
        self._api = api
        self._log = journal
        self._seal = seal
        self._write = write
        self._get, self._record = store.get, store.record
        self._left: list[FoundOutbox] = []
        self._strangers: list[FoundOutbox] = []

    def find(self, items: Sequence[Json]) -> None:
        self._left = [found for item in items for found in outboxes(item, self._seal)]

    async def settle(self) -> None:
        """Write what a control plane before us did not come to write, and tell what is set aside."""
        left, self._left = self._left, []
        taken: set[str] = set()
        written = [*self._refusals()]
        for one in left:
            outbox, stored = one.outbox, self._get(one.key)
            if stored is None or (outbox is not None and (outbox.mark in taken or self._log.has(outbox))):
                continue
            if one.wrong:
                written += self._set_aside(one, stored)
            else:
                assert outbox is not None
                taken.add(outbox.mark)
                written.append(self._write(outbox.write, stored, outbox.mark))
        for done in await asyncio.gather(*written, return_exceptions=True):
            if isinstance(done, errors.InvalidRequest | errors.TooLarge):
                log.warning("what was left for the journal cannot be written: %s", done)
            elif done is not None:
                raise done

    def _set_aside(self, one: FoundOutbox, stored: Stored) -> Sequence[asyncio.Future[None]]:
        self._strangers.append(one)
        if self._log.knows(one.mark):
            return ()
        where = f"the annotation {OUTBOX}" if one.place == OUTBOX else f"status.{STATUS_OUTBOX}"
        message = f"nothing is taken from {where} for the journal: {one.wrong}"
        log.warning("%s: %s", one.key, message)
        return (self._write(Write(events=(Event(SET_ASIDE, message, "Warning"),)), stored, one.mark),)

    def _refusals(self) -> Sequence[asyncio.Future[None]]:
        """What the journal itself holds that muster would not have written: it is told, and its records put right."""
        records, events = list(self._log.refused.items()), self._log.made_up
        if not records and not events:
            return ()
        named = [f"{kind} {str(key)[:80]!r} ({why})" for (kind, key), why in records[:_MOST_NAMED]]
        more = [f"{len(records) - len(named)} more"] if len(records) > len(named) else []
        usage = [f"{len(events)} entries about usage that came with an object"] if events else []
        message = (
            f"the journal held what muster has not written, and it is set aside: {'; '.join([*named, *more, *usage])}"
        )
        log.warning("%s", message)
        right = [Record(kind, key, self._record(kind, key)) for (kind, key), _ in records]
        parts = [Write(records=right[at : at + _AT_ONCE]) for at in range(0, len(right), _AT_ONCE)]
        event = Event(SET_ASIDE, message, "Warning", namespace=self._log.namespace, training=HOME)
        told = Write(events=(event,), records=parts.pop(0).records if parts else ())
        return [self._write(told, None, MADE_UP), *(self._write(part, None, "") for part in parts)]

    async def wipe(self) -> None:
        """Nobody waits for it, and what was written since is left alone: it is known by its mark as well."""
        strangers, self._strangers = self._strangers, []
        for one in strangers:
            if (stored := self._get(one.key)) is None:
                continue
            try:
                await self._wipe(one, stored)
            except (errors.Conflict, errors.NotFound, errors.InvalidRequest):
                pass
            except errors.MusterError as error:
                log.warning("%s: what was set aside stays where it is: %s", one.key, error)

    async def _wipe(self, found: FoundOutbox, stored: Stored) -> None:
        path = path_of(stored.key)
        if found.place == OUTBOX:
            place = f"/metadata/annotations/{OUTBOX.replace('/', '~1')}"
            steps = [{"op": "test", "path": place, "value": found.carried}, {"op": "remove", "path": place}]
            await self._api.request("PATCH", path, body=steps, content_type=JSON_PATCH)
        else:  # a status that the control loop has written since has no place for it any more
            body = status_of(stored.key, stored.version, stored.training.status, "")
            await self._api.request("PUT", f"{path}/status", body=body)
