"""What ranks wrote, as the cluster keeps it: the output of each Pod, oldest Pod first, as it is or as it grows.

An agent copies what its ranks write with their rank in front, and says itself which round they belong to; its own
lines are not shown.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from muster import errors
from muster.backends.kube import pods
from muster.backends.kube.pods import Pod
from muster.kube.client import KubeApi
from muster.ports import LogQuery
from muster.types.pod_template import CONTAINER
from muster.types.training import Uid

LOOK_S = 0.5  # how often it is asked whether the training has ended, when nothing else happens
AGAIN_S = 1.0
LAST_S = 5.0  # what an ended training's Pods still have to say must come by then
LAST_TRIES = 5  # to read what an ended Pod wrote
AHEAD = 64  # pieces that are read before somebody takes them
LONGEST = 1 << 20  # of a line: what has no end is cut
MOST_TAIL = 1 << 24  # bytes of all ranks together
_LINE_COSTS = 200  # bytes that a line takes besides its text

log = logging.getLogger("muster.kube")
_RANK = re.compile(rb"\[(\d{1,9})\] (.*)", re.DOTALL)
_ROUND = re.compile(rb"muster-node\[[^]]{0,300}\] round (\d{1,18}): ")

Find = Callable[[], list[Pod]]


class PodListeners:
    """Whom a change of a training's Pods is told."""

    def __init__(self) -> None:
        self._listeners: dict[Uid, list[Callable[[], None]]] = {}

    def tell(self, uid: Uid) -> None:
        for hear in self._listeners.get(uid, ()):
            hear()

    @contextmanager
    def hearing(self, uid: Uid, hear: Callable[[], None]) -> Iterator[None]:
        listeners = self._listeners.setdefault(uid, [])
        listeners.append(hear)
        try:
            yield
        finally:
            listeners.remove(hear)
            if not listeners:
                self._listeners.pop(uid, None)


@dataclass(frozen=True)
class RankLine:
    round: int
    rank: int
    text: bytes


class Reader:
    """Takes one Pod's output piece by piece; lines that were taken before are passed over."""

    def __init__(self) -> None:
        self._taken = 0
        self._at = 0
        self._rest = b""
        self._round = -1

    def begin(self) -> None:
        """From the first line again."""
        self._at, self._rest = 0, b""

    def take(self, chunk: bytes) -> Iterator[RankLine]:
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        while len(self._rest) > LONGEST:
            whole.append(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]
        for text in itertools.chain.from_iterable(map(_cut, whole)):
            self._at += 1
            if self._at <= self._taken:
                continue
            self._taken = self._at
            if (begun := _ROUND.match(text)) is not None:
                self._round = int(begun[1])
            elif (said := _RANK.fullmatch(text)) is not None:
                yield RankLine(self._round, int(said[1]), said[2])

    def finish(self) -> Iterator[RankLine]:
        """A line that was not finished."""
        return self.take(b"\n") if self._rest else iter(())


def _cut(text: bytes) -> Iterator[bytes]:
    """The same pieces however it came, so that they can be counted."""
    return (text[at : at + LONGEST] for at in range(0, len(text) or 1, LONGEST))


def _wanted(line: RankLine, query: LogQuery) -> bool:
    return query.rank in (None, line.rank) and query.round in (None, line.round)


def _shown(line: RankLine, query: LogQuery) -> bytes:
    return (b"[%d] " % line.rank if query.rank is None else b"") + line.text + b"\n"


async def read(
    api: KubeApi, find: Find, listeners: PodListeners, uid: Uid, query: LogQuery, ended: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    readers: dict[str, Reader] = defaultdict(Reader)
    if query.tail is not None:
        whole = not query.follow or ended()
        if chunk := b"".join(_shown(line, query) for line in await _tail(api, find(), query, readers, whole=whole)):
            yield chunk
    if query.follow:
        async with aclosing(_Follower(api, find, listeners, uid, query, readers).chunks(ended)) as chunks:
            async for chunk in chunks:
                yield chunk
    elif query.tail is None:
        for pod in find():
            async for lines in _whole(api, pod, readers[pod.uid]):
                if chunk := b"".join(_shown(line, query) for line in lines if _wanted(line, query)):
                    yield chunk


async def _tail(
    api: KubeApi, found: list[Pod], query: LogQuery, readers: dict[str, Reader], *, whole: bool
) -> list[RankLine]:
    """The last lines of each rank of the last round; older rounds are passed over."""
    assert query.tail is not None
    last, ranks, size = -1, dict[int, deque[RankLine]](), 0
    for pod in found:
        async for lines in _whole(api, pod, readers[pod.uid], unfinished=whole):
            for line in lines:
                if not _wanted(line, query) or line.round < last:
                    continue
                if line.round > last:
                    last, ranks, size = line.round, {}, 0
                kept = ranks.setdefault(line.rank, deque())
                kept.append(line)
                size += len(line.text) + _LINE_COSTS
                if len(kept) > query.tail or size > MOST_TAIL:
                    size -= len(kept.popleft().text) + _LINE_COSTS
                if not kept:
                    del ranks[line.rank]
    return [line for rank in sorted(ranks) for line in ranks[rank]]


async def _pieces(api: KubeApi, pod: Pod, reader: Reader, *, follow: bool = False) -> AsyncIterator[list[RankLine]]:
    """A Pod that has nothing to show, not yet or no longer, shows nothing."""
    if pod.started_at is None:
        return
    path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/log"
    reader.begin()
    try:
        async for chunk in api.stream(path, {"container": CONTAINER} | ({"follow": "true"} if follow else {})):
            yield list(reader.take(chunk))
    except (errors.NotFound, errors.InvalidRequest):
        return


async def _whole(api: KubeApi, pod: Pod, reader: Reader, *, unfinished: bool = True) -> AsyncIterator[list[RankLine]]:
    """What there is now. A node that does not answer keeps nobody from what others have to show."""
    try:
        async for lines in _pieces(api, pod, reader):
            yield lines
        if unfinished:
            yield list(reader.finish())
    except errors.Unavailable as error:
        log.warning("%s/%s: its log cannot be read: %s", *pod.place, error)


class _Follower:
    """Follows all Pods of a training at once, and those that come."""

    def __init__(
        self, api: KubeApi, find: Find, listeners: PodListeners, uid: Uid, query: LogQuery, readers: dict[str, Reader]
    ) -> None:
        self._api = api
        self._find = find
        self._listeners = listeners
        self._uid = uid
        self._query = query
        self._readers = readers
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(AHEAD)
        self._stir = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def chunks(self, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        until: float | None = None
        with self._listeners.hearing(self._uid, self._stir.set):
            try:
                while True:
                    over = ended()
                    self._begin(loop)
                    while not self._pieces.empty():
                        yield self._pieces.get_nowait()
                    if over:
                        until = until or loop.time() + LAST_S
                        if all(task.done() for task in self._tasks.values()) or loop.time() > until:
                            break
                    await self._something()
            finally:
                for task in self._tasks.values():
                    task.cancel()
        while not self._pieces.empty():
            yield self._pieces.get_nowait()

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        for pod in self._find():
            if pod.uid not in self._tasks and pod.started_at is not None:
                task = loop.create_task(self._follow(pod))
                self._tasks[pod.uid] = task
                task.add_done_callback(lambda _: self._stir.set())

    async def _something(self) -> None:
        """Until there is news, or it is time to ask whether the training has ended."""
        try:
            async with asyncio.timeout(LOOK_S):
                await self._stir.wait()
        except TimeoutError:
            return
        self._stir.clear()

    async def _follow(self, pod: Pod) -> None:
        """To its end, however often the connection breaks: what was read is passed over the next time."""
        reader, tries = self._readers[pod.uid], LAST_TRIES
        while tries:
            running = self._running(pod)
            try:
                async for lines in _pieces(self._api, pod, reader, follow=True):
                    await self._put(lines)
                if not running:
                    await self._put(list(reader.finish()))
                    return
            except errors.Unavailable:
                tries -= not running
            except errors.MusterError as error:
                log.warning("%s/%s: its log cannot be followed: %s", *pod.place, error)
                return
            if running and not self._running(pod):
                continue  # all that there is can be read now
            await asyncio.sleep(AGAIN_S)

    async def _put(self, lines: list[RankLine]) -> None:
        if chunk := b"".join(_shown(line, self._query) for line in lines if _wanted(line, self._query)):
            await self._pieces.put(chunk)
            self._stir.set()

    def _running(self, pod: Pod) -> bool:
        return any(one.uid == pod.uid and pods.end(one) is None for one in self._find())
