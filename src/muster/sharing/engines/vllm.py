"""How does vLLM sleep and wake? By the routes that it has with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.errors import InvalidRequest
from muster.sharing.engines.faults import EngineFault, EngineGarbled, MemoryNotFree
from muster.sharing.engines.http_engine import PROMPT, Answer, HttpEngine, LogprobProof, Publication, Update
from muster.sharing.engines.server import EngineServer

ENDS = ("length", "stop")
TOKEN_ID = "token_id:"


class VllmEngine(HttpEngine):
    """Hooks for vLLM servers: one url, or one for each rank. `level` 2 drops the weights, so that each wake needs some.

    Weights are brought by your own function, `async update(server, version)`; it ends with
    `POST /finish_weight_update {"weight_version": version}` or with `/update_weight_version`, which is how vLLM knows
    what it has. That is a label. Only a `LogprobProof` looks at the weights themselves.
    """

    kind = "vLLM"

    def __init__(
        self, url: str | Mapping[int, str], *, level: int = 1, model: str | None = None, **options: Any
    ) -> None:
        if level not in (1, 2):
            raise InvalidRequest(f"the level of sleep is 1 or 2, not {level!r}")
        self.level, self._model = level, model
        self.keeps_weights = level == 1
        super().__init__(url, **options)

    def _check(self, weights: Update | str | None) -> None:
        if not callable(weights):
            raise InvalidRequest(
                "vLLM gets weights by a function of yours, async update(server, version)",
                hint="reload_weights of this module is one that reads the server's own model path again",
            )

    async def _pause(self, server: EngineServer) -> None:
        await server.post("/pause", mode="abort")

    async def _sleep(self, server: EngineServer) -> None:
        if server.gpus and not await self._asleep(server):
            await self._watch.note_awake(server.gpus)
        await self._pause(server)
        await server.post("/sleep", level=self.level, mode="abort")

    async def _check_asleep(self, server: EngineServer) -> None:
        if not await self._asleep(server):
            raise MemoryNotFree(f"vLLM of rank {server.rank} answered /sleep with 200, and says that it is awake")

    def _disbelieve(self, server: EngineServer) -> None:
        """Nothing was believed: it is asked each time."""

    async def _still_asleep(self, server: EngineServer) -> bool:
        return await self._asleep(server)

    async def _asleep(self, server: EngineServer) -> bool:
        told = await server.get("/is_sleeping")
        if not isinstance(told, dict) or not isinstance(told.get("is_sleeping"), bool):
            raise EngineGarbled(f"{server.url}: GET /is_sleeping: answers garbage: {str(told)[:200]!r}")
        return bool(told["is_sleeping"])

    async def _wake(self, server: EngineServer, published: Publication | None) -> None:
        await server.post("/wake_up", tags="weights")
        await self._bring(server, published)
        await server.post("/wake_up", tags="kv_cache")
        await server.post("/reset_prefix_cache")
        await server.post("/resume")
        if await self._asleep(server):
            raise EngineFault(f"vLLM of rank {server.rank} answered /wake_up with 200, and says that it sleeps")

    async def _update(self, server: EngineServer, published: Publication) -> None:
        assert callable(published.weights)
        await published.weights(server, published.version)

    async def _label(self, server: EngineServer) -> str | None:
        told = await server.find("/weight_info")
        label = told.get("weight_version") if isinstance(told, dict) else None
        return label if isinstance(label, str) else None

    async def _probe(self, server: EngineServer, proof: LogprobProof | None) -> Answer:
        body = {
            "model": self._model or await self._served(server),
            "prompt": list(proof.prompt if proof else PROMPT),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        told = await server.post("/v1/completions", body)
        try:
            (choice,) = told["choices"]
            ended, text = choice["finish_reason"], choice["text"]
            (token,), (logprob,) = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
            answer = Answer(None, int(str(token).removeprefix(TOKEN_ID)), float(logprob))
        except (LookupError, TypeError, ValueError):
            raise EngineGarbled(f"{server.url}: the probe is answered with garbage: {str(told)[:200]!r}") from None
        if ended not in ENDS or not isinstance(text, str):
            raise EngineGarbled(f"{server.url}: the probe ended by {ended!r}, not with a token")
        return Answer(await self._label(server), answer.token, answer.logprob)

    async def _served(self, server: EngineServer) -> str:
        told = await server.get("/v1/models")
        try:
            return str(told["data"][0]["id"])
        except (LookupError, TypeError):
            raise EngineGarbled(f"{server.url}: GET /v1/models: names no model: {str(told)[:200]!r}") from None


async def reload_weights(server: EngineServer, version: str) -> None:
    """An update: have the server read its own model path again, where the new weights were written."""
    await server.post("/collective_rpc", {"method": "reload_weights"})
    await server.post("/update_weight_version", {"new_version": version})
