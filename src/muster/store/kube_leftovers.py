"""What did others leave, in objects and in the journal, when this control plane opened? What is ours is written down.

The rest is set aside: nothing follows from it, an entry of the journal says so once, and what stands in an object goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from muster import errors
from muster.kube.client import JSON_PATCH, Json, KubeApi
from muster.ports import Record, Store, Stored, Write
from muster.store.kube_log import MADE_UP, KubeLog
from muster.store.kube_objects import path_of, status_of
from muster.store.kube_outbox import OUTBOX, STATUS_OUTBOX, FoundOutbox, Seal, carrying, outboxes
from muster.types.event import Event

log = logging.getLogger("muster.store")

SET_ASIDE = "JournalSetAside"
HOME = "muster"  # the name under which is told what belongs to no training
_AT_ONCE = 500  # records that one write puts right
_MOST_NAMED = 5
_MOST_TOLD = 100  # of a namespace, one by one: its users can make as many as they like
_SLICE = 20  # that are looked at before others get a turn

Journal = Callable[[Write, Stored | None, str], "asyncio.Future[None]"]


class Leftovers:
    def __init__(self, api: KubeApi, journal: KubeLog, store: Store, seal: Seal, write: Journal) -> None:
        """`write` notes entries about an object, under a mark."""
        self._api = api
        self._log = journal
        self._seal = seal
        self._write = write
        self._get, self._record = store.get, store.record
        self._left: list[Json] = []
        self._strangers: list[FoundOutbox] = []
        self._told: Counter[str] = Counter()  # namespace → how often

    def find(self, item: Json) -> None:
        if (left := carrying(item)) is not None:
            self._left.append(left)

    async def settle(self) -> None:
        """Write what a control plane before us did not come to write, and tell what is set aside."""
        left, self._left = self._left, []
        taken: set[str] = set()
        written = [*self._refusals()]
        for at, item in enumerate(left):
            for one in outboxes(item, self._seal):
                written += self._settle(one, taken)
            if at % _SLICE == 0:
                await asyncio.sleep(0)
        written += self._uncounted()
        for done in await asyncio.gather(*written, return_exceptions=True):
            if isinstance(done, errors.InvalidRequest | errors.TooLarge):
                log.warning("what was left for the journal cannot be written: %s", done)
            elif done is not None:
                raise done

    def _settle(self, one: FoundOutbox, taken: set[str]) -> Sequence[asyncio.Future[None]]:
        outbox, stored = one.outbox, self._get(one.key)
        if stored is None or (one.claimed and self._log.knows(one.claimed)):
            return ()
        if outbox is not None and (outbox.mark in taken or self._log.has(outbox)):
            return ()
        if one.wrong:
            return self._set_aside(one, stored)
        assert outbox is not None
        taken.add(outbox.mark)
        return (self._write(outbox.write, stored, outbox.mark),)

    def _uncounted(self) -> Sequence[asyncio.Future[None]]:
        """Of those that were not told one by one: how many there are, and where."""
        more = {namespace: count - _MOST_TOLD for namespace, count in self._told.items() if count > _MOST_TOLD}
        if not more:
            return ()
        named = ", ".join(f"{count} more in {namespace}" for namespace, count in sorted(more.items())[:_MOST_NAMED])
        message = f"nothing is taken for the journal from what objects carry: {named}"
        log.warning("%s", message)
        event = Event(SET_ASIDE, message, "Warning", namespace=self._log.namespace, training=HOME)
        return (self._write(Write(events=(event,)), None, ""),)

    def _set_aside(self, one: FoundOutbox, stored: Stored) -> Sequence[asyncio.Future[None]]:
        self._strangers.append(one)
        if self._log.knows(one.mark):
            return ()
        self._told[one.key.namespace] += 1
        if self._told[one.key.namespace] > _MOST_TOLD:
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
