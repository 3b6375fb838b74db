"""What do engines behind HTTP have in common? Asleep is what memory says; awake is who has answered a probe.

Each contract (`vllm`, `sglang`) says how to put to sleep, to wake, to update weights and to ask for one token. Here is
what makes them true: waiting for memory, comparing the version, and keeping in mind what is known of each server.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from muster.errors import InvalidRequest
from muster.sharing.engines import meters
from muster.sharing.engines.faults import EngineUnreachable, MemoryNotFree, StaleWeights, Unproven
from muster.sharing.engines.meters import Meter, Watch
from muster.sharing.engines.ranks import together
from muster.sharing.engines.server import EngineServer, numbers

log = logging.getLogger("muster.sharing")

MAY_KEEP = 4 << 30  # what a sleeping engine keeps: its CUDA context, captured graphs, communicators
PROMPT = (1,)

Update = Callable[[EngineServer, str], Awaitable[object]]


@dataclass(frozen=True)
class LogprobProof:
    """What the published weights answer: after `prompt` the likeliest token, and its log-probability."""

    prompt: Sequence[int]
    token: int
    logprob: float
    within: float = 0.05

    def problem(self, token: int, logprob: float) -> str:
        if token == self.token and abs(logprob - self.logprob) <= self.within:
            return ""
        return f"token {token} with {logprob:.4f}, where they give token {self.token} with {self.logprob:.4f}"


@dataclass(frozen=True)
class Publication:
    version: str
    weights: Update | str | None
    proof: LogprobProof | None
    serial: int


@dataclass(frozen=True)
class Answer:
    """What came back for one token."""

    version: str | None = None  # as the answer, or the server, says
    token: int | None = None
    logprob: float | None = None


class HttpEngine(abc.ABC):
    kind: str
    keeps_weights: bool  # over a sleep; where it does not, each expand needs published ones

    def __init__(
        self,
        url: str | Mapping[int, str],
        *,
        gpus: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
        meter: Meter | None = None,
        may_keep: int = MAY_KEEP,
        free_within_s: float = 30.0,
        request_s: float = 60.0,
        poll_s: float = 0.1,
        api_key: str | None = None,
    ) -> None:
        urls = {0: url} if isinstance(url, str) else dict(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._servers = {rank: EngineServer(one, rank, headers, request_s) for rank, one in urls.items()}
        for rank, owned in gpus.items() if isinstance(gpus, Mapping) else ((0, gpus),) if gpus is not None else ():
            self._server(rank).gpus = numbers(owned)
        watched = meter or meters.default()
        self._watch = Watch(watched, may_keep=may_keep, within_s=free_within_s, poll_s=poll_s)
        self._published: Publication | None = None
        self._loaded: dict[int, int] = {}  # rank → the serial of what it has
        self._proved_awake: dict[int, int] = {}  # rank → the serial with which it answered its probe
        self._proved_asleep: set[int] = set()
        self._asked_since: dict[tuple[int, ...], float] = {}

    # What the pipeline calls

    @property
    def version(self) -> str | None:
        """What was published last, and what a probe must prove."""
        return self._published.version if self._published else None

    @property
    def awake(self) -> frozenset[int]:
        """Ranks that may be sent work: they answered a probe with the newest weights, and were not told to sleep."""
        return frozenset(rank for rank, serial in self._proved_awake.items() if serial == self._serial)

    def publish(
        self,
        version: str | int,
        weights: Update | str | os.PathLike[str] | None = None,
        *,
        proof: LogprobProof | None = None,
    ) -> None:
        """New weights exist. Ranks get them when they wake; those that are awake take no work before `refresh`."""
        given = os.fspath(weights) if isinstance(weights, os.PathLike) else weights
        self._check(given)
        self._published = Publication(str(version), given, proof, self._serial + 1)

    async def refresh(self) -> None:
        """Bring newer weights to the ranks that are awake."""
        stale = [rank for rank in self._proved_awake if rank not in self.awake]
        await together(self._refresh(self._server(rank)) for rank in stale)

    # What the scheduler calls

    async def shrink(self, ranks: Sequence[int]) -> None:
        servers = [self._server(rank) for rank in ranks]
        for rank in ranks:
            self._proved_awake.pop(rank, None)  # no work goes there from now on
        await together(self._shrink(server) for server in servers)

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        servers = [(self._server(rank), numbers(gpus)) for rank, gpus in ranks.items()]
        for server, gpus in servers:
            server.gpus = server.gpus or gpus
        await together(self._expand(server) for server, _ in servers)

    async def vacated(self, gpus: Sequence[int]) -> bool:
        """For engines that were told to sleep before it was known which GPUs they have."""
        asked = numbers(gpus)
        known = {gpu for rank in self._proved_asleep for gpu in self._servers[rank].gpus}
        if known.issuperset(asked):
            return True
        now = asyncio.get_running_loop().time()
        held = await self._watch.held(asked)
        if held and now - self._asked_since.setdefault(asked, now) >= self._watch.within_s:
            del self._asked_since[asked]
            raise MemoryNotFree(f"{self.kind} says that it sleeps, but after {self._watch.within_s:g} s {held}")
        if not held:
            self._asked_since.pop(asked, None)
        return not held

    # One rank

    async def _shrink(self, server: EngineServer) -> None:
        if server.rank in self._proved_asleep:
            try:
                if await self._still_asleep(server):
                    return  # what is on its GPUs now is somebody else's
            except EngineUnreachable as gone:
                if gone.refused:
                    return
                raise
        self._proved_asleep.discard(server.rank)
        if not self.keeps_weights:
            self._loaded.pop(server.rank, None)  # before it is asked: a call that is cancelled may have done it
        who = f"{self.kind} of rank {server.rank}"
        try:
            await self._sleep(server)
        except EngineUnreachable as gone:
            if not (gone.refused and server.gpus) or await self._watch.held(server.gpus):
                raise
            log.warning("%s is gone, and so is what it had on GPUs %s: %s", who, list(server.gpus), gone.message)
        else:
            await self._asleep_by_memory(server, who)
        if server.gpus:
            self._watch.forget(server.gpus)
            self._proved_asleep.add(server.rank)

    async def _asleep_by_memory(self, server: EngineServer, who: str) -> None:
        try:
            if server.gpus:
                await self._watch.until_free(server.gpus, who)
        except MemoryNotFree:
            self._disbelieve(server)
            raise
        await self._check_asleep(server)

    async def _expand(self, server: EngineServer) -> None:
        published = self._published
        if server.rank in self.awake:
            self._prove(server, published, await self._probe(server, published.proof if published else None))
            return
        if published is None and not self.keeps_weights:
            raise Unproven(f"{self.kind} of rank {server.rank} keeps no weights over a sleep, and none were published")
        self._proved_asleep.discard(server.rank)
        await self._wake(server, published)
        self._prove(server, published, await self._probe(server, published.proof if published else None))
        if server.gpus:
            await self._watch.note_awake(server.gpus)
        self._proved_awake[server.rank] = published.serial if published else 0
        if published is not self._published:
            await self._refresh(server)  # others came meanwhile

    async def _refresh(self, server: EngineServer) -> None:
        await self._pause(server)
        await self._expand(server)

    async def _bring(self, server: EngineServer, published: Publication | None) -> None:
        """The published weights, if the server does not have them."""
        if published is None or await self._has(server, published):
            return
        self._loaded.pop(server.rank, None)
        await self._update(server, published)
        self._loaded[server.rank] = published.serial

    async def _has(self, server: EngineServer, published: Publication) -> bool:
        if self._loaded.get(server.rank) != published.serial:
            return False
        label = await self._label(server)
        return label is None or label == published.version

    def _prove(self, server: EngineServer, published: Publication | None, answer: Answer) -> None:
        if published is None:
            return  # it has what it was started with; nothing else was promised
        who, version = f"{self.kind} of rank {server.rank}", published.version
        if answer.version is not None and answer.version != version:
            self._loaded.pop(server.rank, None)
            raise StaleWeights(f"{who} answers with weights {answer.version!r}, and {version!r} were published")
        if published.proof is not None:
            if answer.token is None or answer.logprob is None:
                raise Unproven(f"{who} tells no log-probability, by which {version!r} was to be proved")
            if told := published.proof.problem(answer.token, answer.logprob):
                self._loaded.pop(server.rank, None)
                raise StaleWeights(f"{who} calls its weights {version!r}, but answers {told}")
        elif answer.version is None:
            raise Unproven(
                f"{who} does not say which weights it has, so that nothing proves {version!r}",
                hint="publish with proof=LogprobProof(...), or use a version that tells",
            )

    def _server(self, rank: int) -> EngineServer:
        if rank not in self._servers:
            raise InvalidRequest(f"there is no {self.kind} server for rank {rank}, only for {sorted(self._servers)}")
        return self._servers[rank]

    @property
    def _serial(self) -> int:
        return self._published.serial if self._published else 0

    # The contracts

    @abc.abstractmethod
    def _check(self, weights: Update | str | None) -> None:
        """Raise if it cannot be updated like that."""

    @abc.abstractmethod
    async def _pause(self, server: EngineServer) -> None:
        """Stop taking work; end what is in flight."""

    @abc.abstractmethod
    async def _sleep(self, server: EngineServer) -> None:
        """Pause, and ask for memory to be freed. What is in flight ends, and its client queues it again."""

    @abc.abstractmethod
    async def _check_asleep(self, server: EngineServer) -> None:
        """Raise if it says itself that it is awake."""

    @abc.abstractmethod
    def _disbelieve(self, server: EngineServer) -> None:
        """It said that it sleeps, and that is not so: what is known of it by its own word is void."""

    @abc.abstractmethod
    async def _still_asleep(self, server: EngineServer) -> bool:
        """Whether it was not woken by anybody since it was proved to sleep."""

    @abc.abstractmethod
    async def _wake(self, server: EngineServer, published: Publication | None) -> None:
        """Memory back, weights brought (`_bring`), caches emptied, work taken."""

    @abc.abstractmethod
    async def _update(self, server: EngineServer, published: Publication) -> None: ...

    @abc.abstractmethod
    async def _label(self, server: EngineServer) -> str | None:
        """What it calls its weights; None if it has no word for them."""

    @abc.abstractmethod
    async def _probe(self, server: EngineServer, proof: LogprobProof | None) -> Answer:
        """Have it generate one token."""
