"""How are keys kept in a real etcd? Over its v2 API (`--enable-v2=true`), one request per order.

Nothing is tried twice here: whoever keeps keys true writes them again anyway. A directory does not list names that
begin with an underscore, nor do we.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2

from muster import errors
from muster.mesh.keys import NOT_FOUND, as_errors, normal

TIMEOUT_S = 5.0
MOST_ANSWER = 64 * 1024 * 1024
_OUR_FAULT = {102, 104, 107, 108, 209}  # not a file, not a directory, the root, not empty, not a field


class EtcdKeys:
    """`ports.Keys` at a URL such as http://host:2379."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.name = f"etcd at {_checked(url)}"
        self._base = url.rstrip("/") + "/v2/keys"
        self._timeout_s = timeout_s
        self._http = httpx2.AsyncClient(timeout=timeout_s, trust_env=False, follow_redirects=False)

    async def put(self, path: str, value: str) -> None:
        await self._ask("PUT", path, data={"value": value})

    async def delete(self, path: str) -> None:
        await self._ask("DELETE", path, params={"recursive": "true"})

    async def list(self, prefix: str) -> Mapping[str, str]:
        answer = await self._ask("GET", prefix, params={"recursive": "true", "quorum": "true"})
        return dict(_files(answer.get("node")))

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, method: str, path: str, **more: Any) -> Mapping[str, Any]:
        """The body of the answer; an empty one if there is no such key."""
        with as_errors():
            path = normal(path)
        url = self._base + quote(path, safe="/", errors="surrogateescape")
        with self._translated():
            async with asyncio.timeout(self._timeout_s), self._http.stream(method, url, **more) as answer:
                content = bytearray()
                async for chunk in answer.aiter_bytes():
                    content += chunk
                    if len(content) > MOST_ANSWER:
                        raise errors.Unavailable(f"{self.name} sends without end")
        return self._read(answer.status_code, bytes(content))

    def _read(self, status: int, content: bytes) -> Mapping[str, Any]:
        try:
            body = json.loads(content)
        except ValueError:
            body = None
        if isinstance(body, dict) and status in (200, 201):
            return body
        code = body.get("errorCode") if isinstance(body, dict) else None
        if not isinstance(code, int):
            hint = "start it with --enable-v2=true" if status == 404 else ""
            raise errors.Unavailable(f"{self.name} answered {status}, not as its v2 API does", hint=hint)
        if code == NOT_FOUND:
            return {}
        said = f"{self.name} answered {status}: {body.get('message')}: {body.get('cause')}"
        raise errors.InvalidRequest(said) if code in _OUR_FAULT else errors.Unavailable(said)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as why:
            raise errors.Unavailable(f"{self.name} did not answer in {self._timeout_s:g} s") from why
        except (httpx2.HTTPError, httpx2.StreamError) as why:
            raise errors.Unavailable(f"{self.name}: {str(why) or type(why).__name__}") from why


def _checked(url: str) -> str:
    """The address as people may read it, without its password."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise errors.InvalidRequest(f"{url!r} is not the address of an etcd", hint="give http://host:2379")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _files(node: object) -> Iterator[tuple[str, str]]:
    if not isinstance(node, Mapping):
        return
    if "value" in node:
        yield str(node.get("key")).lstrip("/"), str(node["value"])
    below = node.get("nodes")
    for child in below if isinstance(below, list) else ():
        yield from _files(child)
