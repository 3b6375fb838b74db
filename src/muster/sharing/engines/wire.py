"""How is one request made of an engine? Bounded in time and size, no redirect followed, every failure told in words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from muster.sharing.engines.faults import EngineGarbled, EngineUnreachable

MOST_BYTES = 1 << 20
CONNECT_S = 5.0
SHOWN = 200  # characters of an answer that is not understood


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    params: Mapping[str, str | int]
    body: object = None

    def __str__(self) -> str:
        asked = "&".join(f"{name}={value}" for name, value in self.params.items())
        return f"{self.method} {self.path}{'?' + asked if asked else ''}"


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes

    @property
    def shown(self) -> str:
        return self.body[: SHOWN * 4].decode(errors="replace")[:SHOWN].strip()

    def value(self, asked: str) -> Any:
        """Its JSON; nothing where it is empty."""
        if not self.body.strip():
            return None
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise EngineGarbled(f"{asked}: answers garbage: {self.shown!r}") from None


async def send(url: str, request: Request, headers: Mapping[str, str], within_s: float) -> Reply:
    asked = f"{url}: {request}"
    try:
        async with asyncio.timeout(within_s):
            return await _exchange(url, request, headers, within_s, asked)
    except (TimeoutError, httpx2.TimeoutException):
        raise EngineUnreachable(f"{asked}: no answer within {within_s:g} s") from None
    except httpx2.ConnectError as error:
        raise EngineUnreachable(f"{asked}: nobody listens there ({error})", refused=True) from error
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        raise EngineUnreachable(f"{asked}: it broke off in the middle ({type(error).__name__}: {error})") from error


async def _exchange(url: str, request: Request, headers: Mapping[str, str], within_s: float, asked: str) -> Reply:
    secure = urlsplit(url).scheme == "https"
    timeout = httpx2.Timeout(within_s, connect=min(CONNECT_S, within_s))
    made: dict[str, Any] = {"params": dict(request.params), "headers": {"Accept-Encoding": "identity", **headers}}
    if request.body is not None:
        made["json"] = request.body
    async with (
        httpx2.AsyncClient(timeout=timeout, trust_env=False, follow_redirects=False, verify=secure) as client,
        client.stream(request.method, url + request.path, **made) as answer,
    ):
        if answer.is_redirect:
            raise EngineGarbled(f"{asked}: redirects to {answer.headers.get('location', 'nowhere')[:SHOWN]!r}")
        body = bytearray()
        async for part in answer.aiter_raw():
            body += part
            if len(body) > MOST_BYTES:
                raise EngineGarbled(f"{asked}: answers with more than {MOST_BYTES} bytes")
        return Reply(answer.status_code, bytes(body))
