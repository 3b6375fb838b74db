"""What ranks wrote, as the cluster keeps it: the output of all Pods in order of time, as it is or as it grows.

Times are the kubelets'. A node whose clock is wrong has its lines in the wrong place, and in their own order.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from muster import errors, log_times
from muster.backends.kube import pods
from muster.backends.kube.pod_lines import RankLine, Reader
from muster.backends.kube.pods import Pod
from muster.core.training.log_lines import LINE_COSTS, RoundMarkers
from muster.kube.client import KubeApi
from muster.ports import LogQuery
from muster.types.pod_template import CONTAINER
from muster.types.training import Uid

LOOK_S = 0.5  # how often it is asked whether the training has ended, when nothing else happens
AGAIN_S = 1.0
LAST_S = 5.0  # what an ended training's Pods still have to say must come by then
LAST_TRIES = 5  # to read what an ended Pod wrote
AHEAD = 64  # pieces that are read before somebody takes them
GATHER_S = 0.1  # lines of several Pods that come within that are put in order
MOST_TAIL = 1 << 24  # bytes of all ranks together

log = logging.getLogger("muster.kube")

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


class _Words:
    """What is shown of lines: those that were asked for, with the rank in front, and where a round begins."""

    def __init__(self, query: LogQuery) -> None:
        self._query = query
        self._markers = RoundMarkers(query.markers, query.timestamps)

    def of(self, lines: Iterable[RankLine]) -> bytes:
        return b"".join(self._shown(line) for line in lines if self.wanted(line))

    def wanted(self, line: RankLine) -> bool:
        return self._query.rank in (None, line.rank) and self._query.round in (None, line.round)

    def _shown(self, line: RankLine) -> bytes:
        rank = b"[%d] " % line.rank if self._query.rank is None else b""
        text = (_stamp(line.time_ns) if self._query.timestamps else b"") + rank + line.text + b"\n"
        return self._markers.before(line.round, text) + text


def _stamp(time_ns: int) -> bytes:
    return log_times.stamp(time_ns) if time_ns else log_times.UNKNOWN


async def read(
    api: KubeApi, find: Find, listeners: PodListeners, uid: Uid, query: LogQuery, ended: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    readers: dict[str, Reader] = defaultdict(Reader)
    words, whole = _Words(query), not query.follow or ended()
    if query.tail is not None:
        if chunk := words.of(await _tail(api, find(), query.tail, words, readers, whole=whole)):
            yield chunk
    else:
        streams = [_whole(api, pod, readers[pod.uid], unfinished=whole) for pod in find()]
        async with aclosing(_in_order(streams)) as found:
            async for lines in found:
                if chunk := words.of(lines):
                    yield chunk
    if query.follow:
        async with aclosing(_Follower(api, find, listeners, uid, words, readers).chunks(ended)) as chunks:
            async for chunk in chunks:
                yield chunk


async def _in_order(streams: Sequence[AsyncGenerator[list[RankLine], None]]) -> AsyncGenerator[list[RankLine], None]:
    """Round by round and in order of time; of each Pod no more is held than came at once."""
    heads: list[tuple[tuple[int, int, int], int, deque[RankLine]]] = []
    try:
        heads += [(lines[0].place, at, lines) for at, lines in enumerate(await _firsts(streams)) if lines]
        heapq.heapify(heads)
        while heads:
            _, at, lines = heads[0]
            others = min((head[:2] for head in heads[1:3]), default=None)  # a heap: the next is one of them
            taken = []
            while lines and (others is None or (lines[0].place, at) <= others):
                taken.append(lines.popleft())
            yield taken
            if lines or (lines := await _next(streams[at])):
                heapq.heapreplace(heads, (lines[0].place, at, lines))
            else:
                heapq.heappop(heads)
    finally:
        for stream in streams:
            await stream.aclose()


async def _firsts(streams: Sequence[AsyncGenerator[list[RankLine], None]]) -> list[deque[RankLine]]:
    """The first lines of all, who are asked at once. Nobody is still being asked when it is over, however it ends."""
    asking = [asyncio.create_task(_next(stream)) for stream in streams]
    try:
        return [await task for task in asking]
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _next(stream: AsyncGenerator[list[RankLine], None]) -> deque[RankLine]:
    """The next lines of a Pod; none if it has no more."""
    async for lines in stream:
        if lines:
            return deque(lines)
    return deque()


async def _tail(
    api: KubeApi, found: list[Pod], most: int, words: _Words, readers: dict[str, Reader], *, whole: bool
) -> list[RankLine]:
    """The last lines of all ranks together: those of the last round, then of those before it."""
    kept: list[tuple[tuple[int, int, int], int, RankLine]] = []  # a heap: the first of them goes first
    size, count = 0, itertools.count()
    for pod in found:
        async for lines in _whole(api, pod, readers[pod.uid], unfinished=whole):
            for line in filter(words.wanted, lines):
                heapq.heappush(kept, (line.place, next(count), line))
                size += len(line.text) + LINE_COSTS
                while kept and (len(kept) > most or size > MOST_TAIL):
                    size -= len(heapq.heappop(kept)[-1].text) + LINE_COSTS
    return [line for *_, line in sorted(kept)]


async def _pieces(
    api: KubeApi, pod: Pod, reader: Reader, *, follow: bool = False
) -> AsyncGenerator[list[RankLine], None]:
    """A Pod that has nothing to show, not yet or no longer, shows nothing."""
    if pod.started_at is None:
        return
    path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/log"
    asked = {"container": CONTAINER, "timestamps": "true"} | ({"follow": "true"} if follow else {})
    reader.begin()
    try:
        async for chunk in api.stream(path, asked):
            yield list(reader.take(chunk))
    except (errors.NotFound, errors.InvalidRequest):
        return


async def _whole(
    api: KubeApi, pod: Pod, reader: Reader, *, unfinished: bool = True
) -> AsyncGenerator[list[RankLine], None]:
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
        self, api: KubeApi, find: Find, listeners: PodListeners, uid: Uid, words: _Words, readers: dict[str, Reader]
    ) -> None:
        self._api = api
        self._find = find
        self._listeners = listeners
        self._uid = uid
        self._words = words
        self._readers = readers
        self._pieces: asyncio.Queue[list[RankLine]] = asyncio.Queue(AHEAD)
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
                    if chunk := self._gathered():
                        yield chunk
                    if over:
                        until = until or loop.time() + LAST_S
                        if all(task.done() for task in self._tasks.values()) or loop.time() > until:
                            break
                    await self._something()
            finally:
                for task in self._tasks.values():
                    task.cancel()
        while chunk := self._gathered():
            yield chunk

    def _gathered(self) -> bytes:
        """What has come from all Pods since the last time, in order."""
        lines: list[RankLine] = []
        while not self._pieces.empty():
            lines += self._pieces.get_nowait()
        lines.sort(key=lambda line: line.place[:2])  # those of one Pod stay as they are: their times ascend
        return self._words.of(lines)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        for pod in self._find():
            if pod.uid not in self._tasks and pod.started_at is not None:
                task = loop.create_task(self._follow(pod))
                self._tasks[pod.uid] = task
                task.add_done_callback(lambda _: self._stir.set())

    async def _something(self) -> None:
        """Until there is news, with what comes soon after it, or it is time to ask whether the training has ended."""
        try:
            async with asyncio.timeout(LOOK_S):
                await self._stir.wait()
        except TimeoutError:
            return
        if not self._pieces.empty():
            await asyncio.sleep(GATHER_S)
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
        if wanted := [line for line in lines if self._words.wanted(line)]:
            await self._pieces.put(wanted)
            self._stir.set()

    def _running(self, pod: Pod) -> bool:
        return any(one.uid == pod.uid and pods.end(one) is None for one in self._find())
