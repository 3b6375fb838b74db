"""How does the test side speak with the API server? Raw JSON, and one list-and-watch that never gives up."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
_AGAIN_S = 0.05


class Refused(Exception):
    """The API server's answer when it is not what was asked for."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason


class Api:
    """Belongs to the event loop that uses it."""

    def __init__(self, url: str, token: str, ca: str) -> None:
        self._client = httpx2.AsyncClient(
            base_url=url,
            verify=ssl.create_default_context(cafile=ca),
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx2.Timeout(30.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=50),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def request(
        self, method: str, path: str, body: Json | None = None, *, kind: str = "application/json", **query: str
    ) -> Json:
        """Raises Refused for an answer that is an error, httpx2.TransportError where there is none."""
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": kind}
        answer = await self._client.request(method, path, content=content, headers=headers, params=query)
        if answer.is_error:
            raise _refusal(answer.status_code, answer.text)
        found: Json = answer.json() if "json" in answer.headers.get("content-type", "") else {"text": answer.text}
        return found

    async def insist(self, method: str, path: str, body: Json | None = None, **query: Any) -> Json | None:
        """Until the API server answers; None when the object is gone."""
        while True:
            try:
                return await self.request(method, path, body, **query)
            except httpx2.TransportError:
                pass
            except Refused as refused:
                if refused.code == 404:
                    return None
                if refused.code != 429 and refused.code < 500:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def follow(self, path: str, **query: str) -> AsyncIterator[tuple[str, Json]]:
        """("LISTED", the list), then each change; a new list after a gap."""
        version = ""
        while True:
            try:
                if not version:
                    listed = await self.request("GET", path, None, **query)
                    version = listed["metadata"]["resourceVersion"]
                    yield "LISTED", listed
                async for kind, item in self.watch(path, {**query, "resourceVersion": version}):
                    version = item["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        yield kind, item
            except (httpx2.TransportError, Refused) as problem:
                if isinstance(problem, Refused) and problem.code == 410:
                    version = ""
                elif isinstance(problem, Refused) and problem.code != 429 and problem.code < 500:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[tuple[str, Json]]:
        asked = {**query, "watch": "1", "allowWatchBookmarks": "true"}
        timeout = httpx2.Timeout(10.0, read=None)
        async with self._client.stream("GET", path, params=asked, timeout=timeout) as answer:
            if answer.is_error:
                raise _refusal(answer.status_code, (await answer.aread()).decode())
            async for line in answer.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _refusal(event["object"].get("code", 500), line)
                yield event["type"], event["object"]


def _refusal(code: int, text: str) -> Refused:
    try:
        status = json.loads(text)
    except ValueError:
        return Refused(code, "", text)
    status = status.get("object", status)
    return Refused(code, status.get("reason", ""), status.get("message", ""))
