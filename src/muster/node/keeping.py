"""The worker's keeper: memory for what ranks commit, and copies of it with other workers.

It has a loop on a thread of its own, because what it does takes long: the agent's own loop keeps the lease. Ranks ask
over a socket that is a file (`node.rank_lines`), agents of other workers over the network (`node.peers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from muster.background import LoopThread, Tasks
from muster.node import previews
from muster.node.durable import Durable
from muster.node.memory import Memory, Segment, room
from muster.node.peers import Peers
from muster.node.rank_lines import RankLine
from muster.node.shelf import Copy, Shelf
from muster.state import talk
from muster.types.frames import CopiesFrame
from muster.types.records import record
from muster.types.state import Holding, Resume
from muster.types.world import MemberId, RunId

TELL_EVERY_S = 0.02  # what has changed meanwhile is told together
FLUSH_S = 30.0
SETTLE_S = 5.0
LOOK_S = 1.0  # limit for reading the durable folder, whose disk may not answer
COPY_S = 3.0


@record()
class Means:
    """What a worker gives for state."""

    memory: int | None = None  # bytes at most; else a share of what is free
    rate: float = 0.0  # bytes in a second to other workers; 0: no limit


class Keeper:
    """What runs on the keeper's own loop."""

    def __init__(
        self,
        run_id: RunId,
        member_id: MemberId,
        token: str | None,
        host: str,
        on_change: Callable[[Holding], None],
        means: Means,
    ) -> None:
        self._on_change = on_change
        self._member_id = member_id
        self.memory = Memory(lambda: room(self.memory.taken, means.memory))
        self.shelf = Shelf(self.memory)
        self.tasks = Tasks()
        self.resume: Resume | None = None
        self._number = -1
        self._durable_step: int | None = None  # the newest step that the run had on disk when the round began
        self._restored: set[int] = set()  # ranks that have restored their state in this round
        self._every = 1
        self._paces: dict[int, tuple[int, float, float]] = {}  # of each rank: every, seconds of a commit, of a step
        self._refused = self._damage = ""
        self.copying: dict[int, int] = {}  # of each rank the step that it copies now
        self._none_copies = asyncio.Event()
        self._telling: asyncio.TimerHandle | None = None
        self._told_at = 0.0
        self._durable = Durable(self.tasks, self.changed)
        self.peers = Peers(run_id, member_id, token, host, self.shelf, self.memory, self.take, self.changed, means.rate)

    async def start(self) -> None:
        await self.peers.start()
        self.changed()

    # What the agent says

    def begin(self, number: int, resume: Resume | None, durable_step: int | None = None) -> None:
        self._number, self.resume = number, resume
        self._durable_step = durable_step
        self._restored.clear()
        self._paces.clear()
        if resume is not None and resume.sources:
            self.shelf.tell_safe((resume.round, resume.step))
        self.changed()

    def order(self, frame: CopiesFrame) -> None:
        self._every, self.shelf.stride = frame.every, frame.stride
        if frame.safe is not None:
            self.shelf.tell_safe(frame.safe)
            if frame.safe[0] >= self._number > -1:
                self.shelf.abandon(self._number, self.resume.step if self.resume is not None else 0)
        self._durable.write_at = frame.write_at
        self.peers.follow(dict(frame.targets), frame.buddy)

    async def finish_copies(self) -> None:
        """Until no rank is in the middle of one."""
        while self.copying:
            self._none_copies.clear()
            await self._none_copies.wait()

    async def settle(self) -> None:
        """The ranks have ended: what they have sealed, and what others said of theirs, is all that there will be."""
        await previews.adopt(self.peers.previews, self.shelf, self.take)
        with contextlib.suppress(TimeoutError):
            look = self.tasks.start(self._durable.look())  # a rank may have set a step aside
            await asyncio.wait_for(asyncio.shield(look), LOOK_S)
        self._tell()

    async def flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self.peers.flush()
        self._tell()

    # What ranks say

    def news(self) -> dict[str, Any]:
        """What each answer tells a rank."""
        safe = self.shelf.safe
        return {"every": self._every, "safe": safe[1] if safe is not None else None}

    def told_pace(self, rank: int, every: int, commit_s: float, step_s: float) -> None:
        self._paces[rank] = max(1, every), commit_s, step_s

    def copied(self, rank: int) -> None:
        self.copying.pop(rank, None)
        if not self.copying:
            self._none_copies.set()

    async def take(self, size: int) -> Segment:
        return await self.memory.take(size, self.shelf.let_one_go)

    def refuse(self, why: str) -> None:
        if why != self._refused:
            self._refused = why
            self.changed()

    def sealed(self, copy: Copy) -> None:
        self._durable.sealed(copy, self._step_s)
        self.changed()

    def restored(self, rank: int) -> None:
        self._restored.add(rank)

    def durable_step_for(self, rank: int) -> int | None:
        """Return the step that the folder of this rank must have. A second `State` may have another folder."""
        return None if rank in self._restored else self._durable_step

    def use_folder(self, folder: str | None, every_s: float) -> None:
        self._durable.use(folder, every_s)

    def found_damage(self, why: str, total: str, length: int) -> bool:
        """A rank cannot use a piece. Whether it could be had from another place."""
        self._damage = why
        self.shelf.discard(total, length)
        self.tasks.start(self._durable.look())  # a damaged step on disk was set aside
        self._tell()
        resume = self.resume
        return resume is not None and any(source.member_id != self._member_id for source in resume.sources)

    async def part(self, rank: int) -> Copy:
        """The state with which a rank of this round goes on, from wherever it is; ConnectionError if from nowhere."""
        resume = self.resume
        if resume is None:
            raise ConnectionError("this round does not go on from memory")
        key = (rank, resume.round, resume.step)
        if (found := self.shelf.get(key)) is None:
            others = [one for one in resume.sources if one.rank == rank and one.member_id != self._member_id]
            givers = [(MemberId(one.member_id), one.path) for one in others if one.path is not None]
            found = await self.peers.fetch(key, givers)
        return found

    # What is told of it

    @property
    def _step_s(self) -> float:
        return max((step_s for _, _, step_s in self._paces.values()), default=0.0)

    def changed(self) -> None:
        """Tell it soon, others that have asked at once."""
        self.peers.wake()
        if self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_at(max(loop.time(), self._told_at + TELL_EVERY_S), self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        self._told_at = asyncio.get_running_loop().time()
        every = max((every for every, _, _ in self._paces.values()), default=1)
        lag_s, step_s = self.peers.lag_s, self._step_s
        stride = every * -(-int(1e6 * lag_s) // max(1, int(1e6 * step_s * every))) if step_s and lag_s else every
        holding = Holding(
            self.shelf.held(),
            self.peers.path,
            self._durable.newest,
            self._durable.wish,
            every,
            max(1, stride),
            self._refused or self._durable.failed,
            self._damage,
            max((commit_s for _, commit_s, _ in self._paces.values()), default=0.0),
            step_s,
            self.memory.taken,
            self.memory.limit,
        )
        self._on_change(holding)


class Keeping:
    """The agent's handle on its keeper, which is there from the first word about state on."""

    def __init__(
        self,
        run_id: RunId,
        member_id: MemberId,
        token: str | None,
        host: Callable[[], str],
        scratch: str,
        on_change: Callable[[Holding], None],
        means: Means,
    ) -> None:
        self._made = run_id, member_id, token
        self._host = host
        self._means = means
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._thread: LoopThread | None = None
        self._keeper: Keeper | None = None
        self._begun: tuple[int, Resume | None, int | None] | None = None
        self.path = os.path.join(scratch, "state")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with talk.short(self.path) as name:
            self._listener.bind(name)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._come)

    def _come(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        keeper = self._hire()
        self._call(RankLine, keeper, near)

    def begin(self, number: int, resume: Resume | None, durable_step: int | None = None) -> None:
        self._begun = number, resume, durable_step
        if resume is not None or self._keeper is not None:
            self._call(self._hire().begin, number, resume, durable_step)

    def order(self, frame: CopiesFrame) -> None:
        self._call(self._hire().order, frame)

    async def finish_copies(self) -> None:
        """No rank is ended in the middle of one, unless that takes too long."""
        if self._thread is None or self._keeper is None:
            return
        asked = asyncio.run_coroutine_threadsafe(self._keeper.finish_copies(), self._thread.loop)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(asked), COPY_S)

    async def settle(self) -> None:
        """Until all that ranks have said is heard, and told."""
        if self._thread is None or self._keeper is None:
            return
        asked = asyncio.run_coroutine_threadsafe(self._settled(self._keeper), self._thread.loop)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(asked), SETTLE_S)
        await asyncio.sleep(0)

    @staticmethod
    async def _settled(keeper: Keeper) -> None:
        """What ranks said before they ended is in their sockets: the loop reads that before it comes back to us."""
        for _ in range(3):
            await asyncio.sleep(0)
        await keeper.settle()

    def _hire(self) -> Keeper:
        if self._keeper is None:
            self._thread = LoopThread("muster-keeper")
            self._thread.start()
            made: Future[Keeper] = Future()

            async def make() -> None:
                keeper = Keeper(*self._made, self._host(), self._tell, self._means)
                made.set_result(keeper)
                await keeper.start()

            asyncio.run_coroutine_threadsafe(make(), self._thread.loop)
            self._keeper = made.result()
            if self._begun is not None:
                self._call(self._keeper.begin, *self._begun)
        return self._keeper

    def _tell(self, holding: Holding) -> None:
        with contextlib.suppress(RuntimeError):  # the agent has ended
            self._loop.call_soon_threadsafe(self._on_change, holding)

    def _call(self, call: Callable[..., object], *args: object) -> None:
        assert self._thread is not None
        self._thread.loop.call_soon_threadsafe(call, *args)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
