"""How does SGLang sleep and wake? By releasing and resuming memory; --enable-memory-saver must be set.

It has no route that tells whether it sleeps, and must not be asked to resume what it has not released. So it is kept
in mind what was released, and memory decides where that is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from muster.errors import InvalidRequest
from muster.sharing.engines.faults import EngineFault, EngineGarbled, EngineUnreachable
from muster.sharing.engines.http_engine import PROMPT, Answer, HttpEngine, LogprobProof, Publication, Update
from muster.sharing.engines.server import EngineServer

KV_CACHE, WEIGHTS = "kv_cache", "weights"
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


class SglangEngine(HttpEngine):
    """Hooks for SGLang servers: one url, or one for each rank.

    Weights are a folder that the server can read (`update_weights_from_disk`), or your own function,
    `async update(server, version)`. `keeps_weights` is for servers that were started with
    `--enable-weights-cpu-backup`; others have no weights after a sleep, and get the published ones at each wake.
    """

    kind = "SGLang"

    def __init__(self, url: str | Mapping[int, str], *, keeps_weights: bool = False, **options: Any) -> None:
        self.keeps_weights = keeps_weights
        self._released: dict[int, set[str]] = {}  # rank → what it was asked to release; not there: not known
        self._steps: dict[int, asyncio.Task[None]] = {}
        super().__init__(url, **options)

    def _check(self, weights: Update | str | None) -> None:
        if not callable(weights) and not (isinstance(weights, str) and weights):
            raise InvalidRequest("SGLang gets weights from a folder, or by a function of yours")

    async def _pause(self, server: EngineServer) -> None:
        await server.post("/pause_generation", {"mode": "abort"})

    async def _sleep(self, server: EngineServer) -> None:
        await self._settled(server)
        released = self._released.get(server.rank)
        if released == {KV_CACHE, WEIGHTS}:
            return
        if server.gpus and released is None and not await self._watch.held(server.gpus):
            self._released[server.rank] = {KV_CACHE, WEIGHTS}  # asked before, by a call that did not hear the answer
            return
        if server.gpus and not released:
            await self._watch.note_awake(server.gpus)
        await self._pause(server)
        left = [tag for tag in (KV_CACHE, WEIGHTS) if tag not in (released or ())]
        await self._memory(server, RELEASE, left)

    async def _check_asleep(self, server: EngineServer) -> None:
        """It cannot say; memory has spoken."""

    def _disbelieve(self, server: EngineServer) -> None:
        self._released.pop(server.rank, None)

    async def _still_asleep(self, server: EngineServer) -> bool:
        return self._released.get(server.rank) == {KV_CACHE, WEIGHTS}

    async def _wake(self, server: EngineServer, published: Publication | None) -> None:
        await self._resume(server, WEIGHTS)
        await self._bring(server, published)
        await self._resume(server, KV_CACHE)
        await server.post("/flush_cache")
        await server.post("/continue_generation", {})

    async def _resume(self, server: EngineServer, tag: str) -> None:
        await self._settled(server)
        released = self._released.get(server.rank)
        if released is None:
            asleep = not server.gpus or not await self._watch.held(server.gpus)
            released = self._released[server.rank] = {KV_CACHE, WEIGHTS} if asleep else set()
        if tag in released:
            await self._memory(server, RESUME, [tag])

    async def _memory(self, server: EngineServer, path: str, tags: list[str]) -> None:
        """To its end, also when who asked for it is cancelled: what was released must be known."""
        step = self._steps[server.rank] = asyncio.create_task(self._step(server, path, tags))
        step.add_done_callback(_read)
        await asyncio.shield(step)

    async def _step(self, server: EngineServer, path: str, tags: list[str]) -> None:
        before = self._released.pop(server.rank, None)  # not known before it has answered
        try:
            await server.post(path, {"tags": tags})
        except EngineUnreachable:
            raise
        except EngineFault:
            if before is not None:
                self._released[server.rank] = before  # it refused
            raise
        if path == RELEASE:
            self._released[server.rank] = {KV_CACHE, WEIGHTS}
        else:
            self._released[server.rank] = (before or set()) - {*tags}

    async def _settled(self, server: EngineServer) -> None:
        step = self._steps.get(server.rank)
        if step is not None and not step.done() and step.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({step})

    async def _update(self, server: EngineServer, published: Publication) -> None:
        if callable(published.weights):
            await published.weights(server, published.version)
            return
        body = {"model_path": published.weights, "weight_version": published.version, "flush_cache": True}
        told = await server.post("/update_weights_from_disk", body)
        if not isinstance(told, dict) or told.get("success") is not True:
            raise EngineGarbled(f"{server.url}: POST /update_weights_from_disk: {str(told)[:200]!r}")

    async def _label(self, server: EngineServer) -> str | None:
        for path in ("/model_info", "/get_model_info"):
            told = await server.find(path)
            if isinstance(told, dict) and isinstance(told.get("weight_version"), str):
                return str(told["weight_version"])
        return None

    async def _probe(self, server: EngineServer, proof: LogprobProof | None) -> Answer:
        body = {
            "input_ids": list(proof.prompt if proof else PROMPT),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
        }
        told = await server.post("/generate", body)
        try:
            about = told["meta_info"]
            if about["completion_tokens"] != 1 or about["finish_reason"]["type"] == "abort":
                raise ValueError("not one token")
            ((logprob, token, *_),) = about["output_token_logprobs"]
            version = about.get("weight_version")
            return Answer(None if version is None else str(version), int(token), float(logprob))
        except (LookupError, TypeError, ValueError, AttributeError):
            raise EngineGarbled(f"{server.url}: the probe is answered with garbage: {str(told)[:200]!r}") from None


def _read(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
