"""How do keepers of different workers give each other state? Each offers what is new; the other says what it lacks.

What both have is found by the content hashes of pieces, so what is the same on all workers goes over the network once,
to those that have none of it. A keeper answers an offer when its own ranks have sealed that step, or have had time to.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from muster import listening
from muster.background import Tasks
from muster.listening import Door
from muster.node import lending, previews
from muster.node.bulk import Bulk
from muster.node.giving import Giver, Rate, send
from muster.node.lending import Borrowers, Lender
from muster.node.memory import Memory, NoRoom, Segment
from muster.node.previews import Preview, Previews, Teller
from muster.node.shelf import Copy, Key, Shelf, Spot
from muster.state import layout
from muster.state.layout import Manifest
from muster.types.frames import Frame, HelloFrame, Introduction, WelcomeFrame
from muster.types.world import MemberId, Path, RunId
from muster.world import wire
from muster.world.opening import Opening
from muster.world.strangers import Strangers
from muster.world.wire import Channel

OPEN_S = 5.0
PATIENCE_S = 1.0  # for one's own ranks to seal the step that is offered
MOST_PLACES = 32  # segments that one copy may lie in: a rank is given each of them

Taking = Callable[[int], Awaitable[Segment]]


class Peers:
    """`take` finds memory, `changed` hears of every new copy."""

    def __init__(
        self,
        run_id: RunId,
        member_id: MemberId,
        token: str | None,
        host: str,
        shelf: Shelf,
        memory: Memory,
        take: Taking,
        changed: Callable[[], None],
        rate: float,
    ) -> None:
        self._run_id = run_id
        self._member = Introduction(member_id, str(member_id))
        self._token = token
        self._host = host
        self._shelf = shelf
        self._memory = memory
        self._take_memory = take
        self._borrowers = Borrowers(memory)
        self._changed = changed
        self._tasks = Tasks()
        self._givers: dict[MemberId, tuple[Path, Giver, asyncio.Task[None]]] = {}
        self._rate = Rate(rate)
        self._teller: Teller | None = None
        self.previews = Previews()
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._strangers = Strangers(lambda run: token if run == run_id else None, open_to_all=not token)
        self.path: Path | None = None

    async def start(self) -> None:
        self._lender = Lender(self._member.member_id, self._shelf, self._memory)
        host = self._host if wire.is_loopback(self._host) else ("::" if ":" in self._host else "0.0.0.0")
        sockets = await listening.bound(host, 0)
        self._doors = [Door(one, self._admit, name="state of this worker") for one in sockets]
        self.path = self._host, int(sockets[0].getsockname()[1])

    def wake(self) -> None:
        """Something is new: whoever waits for that looks again."""
        news, self._news = self._news, asyncio.Event()
        news.set()
        for _, giver, _ in self._givers.values():
            giver.wake()

    # Giving

    def follow(self, targets: Mapping[MemberId, Path], buddy: MemberId | None) -> None:
        for member_id, (path, _, task) in list(self._givers.items()):
            if targets.get(member_id) != path:
                task.cancel()
                del self._givers[member_id]
        for member_id, path in targets.items():
            if member_id not in self._givers:
                giver = Giver(self._shelf, self._memory, functools.partial(self._opened, path), self._rate)
                self._givers[member_id] = path, giver, self._tasks.start(giver.run())
        where = targets.get(buddy) if buddy is not None else None
        if self._teller is None or self._teller.path != where:
            if self._teller is not None:
                self._teller.stop()
            self._teller = Teller(where, functools.partial(self._opened, where), self._tasks) if where else None

    async def spread(self, preview: Preview, wait_s: float) -> None:
        """Until the buddy has heard it, or so long."""
        if self._teller is not None:
            await self._teller.tell(preview, wait_s)

    @property
    def lag_s(self) -> float:
        """How long it takes to give one step to the slowest of them."""
        return max((giver.took_s for _, giver, _ in self._givers.values()), default=0.0)

    async def flush(self) -> None:
        """Until everybody has the newest of our ranks, or cannot be reached."""
        await asyncio.gather(*(giver.flush() for _, giver, _ in self._givers.values()))

    # Taking

    async def fetch(self, key: Key, givers: Iterable[tuple[MemberId, Path]]) -> Copy:
        """From one of those who have it; ConnectionError if none gives it."""
        why = "nobody has it"
        for giver, path in givers:
            try:
                line = await self._opened(path)
                try:
                    line.say(fetch=list(key))
                    told = await line.hear()
                    if "offer" in told:
                        return await self._take(line, told["offer"], giver, key)
                    why = str(told.get("missing", "it is not there"))
                finally:
                    line.close()
            except (OSError, ValueError, NoRoom) as error:
                why = str(error) or type(error).__name__
        raise ConnectionError(f"step {key[2]} of rank {key[0]} cannot be had: {why}")

    async def _take(self, line: Bulk, offer: Any, giver: MemberId, key: Key | None = None) -> Copy:
        manifest = layout.read(json.dumps(offer).encode(), 1 << 61)
        if key is not None and (manifest.rank, manifest.round, manifest.step) != key:
            raise ValueError("that is not what was asked for")
        spots = self._known(manifest)
        wanted = [index for index, spot in enumerate(spots) if spot is None]
        held = list({spot[0].number: spot[0] for spot in spots if spot is not None}.values())
        for known in held:  # it must not be used again while we wait
            known.users += 1
        segment: Segment | None = None
        try:
            length = sum(layout.aligned(manifest.every[index].length) for index in wanted)
            if length >= lending.LARGE and (lent := await self._borrow(giver, manifest)) is not None:
                line.say(want=[])
                return self._put(manifest, lent)
            segment = await self._take_memory(length)
            line.say(want=wanted)
            at = 0
            for index in wanted:
                piece = manifest.every[index]
                if piece.length:
                    with memoryview(segment.memory) as whole:
                        await line.take(whole[at : at + piece.length])
                spots[index] = segment, at
                at = layout.aligned(at + piece.length)
            return self._put(manifest, [spot for spot in spots if spot is not None])
        finally:
            for known in (*held, *([segment] if segment is not None else [])):
                self._memory.let_go(known)

    def _put(self, manifest: Manifest, spots: list[Spot]) -> Copy:
        copy = self._shelf.put(manifest, spots, own=False)
        self._changed()
        return copy

    async def _borrow(self, giver: MemberId, manifest: Manifest) -> list[Spot] | None:
        spots = await self._borrowers.borrow(giver, (manifest.rank, manifest.round, manifest.step))
        if spots is not None and len(spots) == len(manifest.every):
            pairs = zip(manifest.every, spots, strict=True)
            if all(0 <= at <= at + piece.length <= one.size for piece, (one, at) in pairs):
                return spots
        for one in {spot[0].number: spot[0] for spot in spots or ()}.values():
            one.users += 1
            self._memory.let_go(one)
        return None

    def _known(self, manifest: Manifest) -> list[Spot | None]:
        """Where what it has lies here already, in not too many places."""
        found: list[Spot | None] = []
        places: set[int] = set()
        for piece in manifest.every:
            spot = self._shelf.spot(piece)
            if spot is not None and (spot[0].number in places or len(places) < MOST_PLACES):
                places.add(spot[0].number)
                found.append(spot)
            else:
                found.append(None)
        return found

    # Connections

    async def _opened(self, path: Path) -> Bulk:
        loop = asyncio.get_running_loop()
        opening = Opening(self._run_id, "state", self._token, lambda _: HelloFrame(member=self._member), wire.VERSION)
        ready: asyncio.Future[Bulk] = loop.create_future()

        def frame_came(channel: Channel, frame: Frame) -> None:
            if not opening.takes(channel, frame) and isinstance(frame, WelcomeFrame) and not ready.done():
                ready.set_result(Bulk(*channel.hand_over()))

        def ended(channel: Channel, why: str) -> None:
            if not ready.done():
                ready.set_exception(ConnectionError(str(opening.refusal or why)))

        async with asyncio.timeout(OPEN_S):
            await loop.create_connection(lambda: Channel(frame_came, ended, screen=opening.screen), *path)
            return await ready

    def _admit(self, taken: Any, _: str) -> None:
        self._strangers.arrive(taken, self._hear, lambda channel, why: self._strangers.forget(channel))

    def _hear(self, channel: Channel, frame: Frame) -> None:
        if channel in self._strangers and (hello := self._strangers.hear(channel, frame)) is not None:
            if hello.run_id != self._run_id or hello.kind != "state" or hello.member is None:
                channel.refuse("invalid", "here is only state")
                return
            channel.send(WelcomeFrame())
            self._tasks.start(self._serve(Bulk(*channel.hand_over()), hello.member.member_id))

    async def _serve(self, line: Bulk, giver: MemberId) -> None:
        try:
            while True:
                told = await line.hear()
                if "offer" in told:
                    await self._answer_offer(line, told["offer"], giver)
                elif "preview" in told:
                    self.previews.keep(await previews.receive(line, told))
                    line.say(heard=True)
                elif "fetch" in told:
                    await self._answer_fetch(line, told["fetch"])
        except (OSError, ValueError, TypeError, KeyError, IndexError):
            pass  # it has gone, or does not speak as we do
        finally:
            line.abort()

    async def _answer_offer(self, line: Bulk, offer: Any, giver: MemberId) -> None:
        manifest = layout.read(json.dumps(offer).encode(), 1 << 61)
        await self._own_ranks(manifest)
        async with self._turn:  # what is the same on several comes once
            try:
                await self._take(line, offer, giver)
            except NoRoom as error:
                line.say(no_room=str(error))
                return
        line.say(kept=manifest.step)

    async def _own_ranks(self, manifest: Manifest) -> None:
        """Wait a moment until our own ranks have sealed that step, if we have any: most of it may be the same."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    own = [copy.manifest for copy in self._shelf if copy.own and copy.manifest.round == manifest.round]
                    if not own or max(one.step for one in own) >= manifest.step:
                        return
                    await self._news.wait()

    async def _answer_fetch(self, line: Bulk, wanted: Any) -> None:
        rank, number, step = (int(one) for one in wanted)
        copy = self._shelf.get((rank, number, step))
        if copy is None:
            line.say(missing=f"step {step} of rank {rank} is not here any more")
            return
        line.say(offer=json.loads(copy.manifest.write()))
        indices = (await line.hear()).get("want")
        if isinstance(indices, list):
            await send(line, copy, indices, self._rate, self._memory)
