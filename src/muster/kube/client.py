"""How is the Kubernetes API spoken to? Plain JSON over one pool of connections, with the answers' errors as ours.

lightkube reads the credentials (a kubeconfig, a Pod's own account with its rotating token) and prepares TLS. Its typed
objects are not used: a control plane with thousands of Pods looks at a few fields of each, and its watch has no
bookmarks. Nothing is tried twice here; `Informer` is what keeps up with a collection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import httpx2
import msgspec
from lightkube import ConfigError, KubeConfig
from lightkube.config.client_adapter import ConnectionParams
from lightkube.config.kubeconfig import SingleConfig

from muster import errors
from muster.backoff import Backoff

log = logging.getLogger("muster.kube")

Json = dict[str, Any]
T = TypeVar("T")

TIMEOUT_S = 30.0  # for an answer; a slow server is waited for, a dead one is not
CONNECT_S = 5.0
AT_ONCE = 32  # requests under way; more only queue up in the server
PAGE = 500
WATCH_S = 290  # after which the server ends a watch by itself
SILENCE_S = 90.0  # bookmarks come every minute: a watch that says nothing for longer is dead
RETRY = Backoff(0.1, 5.0)
AGAIN_S = (0.05, 0.2, 1.0)
DEEPEST = 100  # levels of JSON that are kept of an answer with so many that it cannot be read
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]')
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class InDoubt(errors.Unavailable):
    """No answer came to a request that was sent: it may have been carried out."""


class KubeApi:
    """One API server, as one user. `guard` is called before every request that writes, and may raise."""

    def __init__(self, config: SingleConfig, *, guard: Callable[[], None] = lambda: None) -> None:
        self.guard = guard
        self.namespace = config.namespace
        self.server = config.cluster.server
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=AT_ONCE)
        timeout = httpx2.Timeout(TIMEOUT_S, connect=CONNECT_S)
        with _translated("the cluster's credentials"):
            options = ConnectionParams(timeout=timeout, trust_env=False).httpx_params(config)
        self._http = httpx2.AsyncClient(**options, limits=limits)
        self._room = asyncio.Semaphore(AT_ONCE)

    @classmethod
    def connect(cls, *, context: str | None = None, guard: Callable[[], None] = lambda: None) -> Self:
        """As this Pod's account, or as the kubeconfig says. Raises Unavailable if there is neither."""
        with _translated("the cluster's credentials"):
            config = KubeConfig.from_env().get(context)
        assert config is not None
        return cls(config, guard=guard)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """The answer's body. An answer that is none of success raises the error that it stands for."""
        writes = method != "GET"
        content = None if body is None else _encoded(body)
        headers = {} if body is None else {"Content-Type": content_type}
        async with self._room:
            if writes:
                self.guard()
            with _translated(f"the Kubernetes API at {self.server}"):
                answer = await self._http.request(method, path, content=content, params=params, headers=headers)
        if answer.status_code >= 300:
            raise refusal(answer.status_code, answer.content)
        return decoded(answer.content)

    async def list(self, path: str, params: Mapping[str, str] | None = None) -> tuple[Sequence[Json], str]:
        """All objects of a collection, and the version at which it was like that."""
        found: list[Json] = []
        version = ""
        async for items, at in self.pages(path, params):
            found += items
            version = at
        return found, version

    async def pages(
        self, path: str, params: Mapping[str, str] | None = None, *, limit: int = PAGE
    ) -> AsyncIterator[tuple[Sequence[Json], str]]:
        more = {"limit": str(limit), **(params or {})}
        while True:
            answer = await self.request("GET", path, params=more)
            about = answer.get("metadata") or {}
            yield answer.get("items") or [], str(about.get("resourceVersion") or "0")
            if not about.get("continue"):
                return
            more["continue"] = about["continue"]

    async def watch(
        self, path: str, since: str, params: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[str, Json]]:
        """(type, object) of each change after a version, bookmarks too, until the server ends it. 410 is Compacted."""
        asked = {"watch": "true", "resourceVersion": since, "allowWatchBookmarks": "true"}
        asked |= {"timeoutSeconds": str(WATCH_S), **(params or {})}
        async for line in _lines(self.stream(path, asked, silence_s=SILENCE_S)):
            event = decoded(line)
            if event["type"] == "ERROR":
                status = event["object"]
                raise refusal(int(status.get("code") or 500), msgspec.json.encode(status))
            yield event["type"], event["object"]

    async def stream(
        self, path: str, params: Mapping[str, str] | None = None, *, silence_s: float | None = None
    ) -> AsyncIterator[bytes]:
        """The answer piece by piece, as long as it comes."""
        timeout = httpx2.Timeout(silence_s, connect=CONNECT_S)
        with _translated(f"the Kubernetes API at {self.server}"):
            async with self._http.stream("GET", path, params=params, timeout=timeout) as answer:
                if answer.status_code >= 300:
                    raise refusal(answer.status_code, await answer.aread())
                async for chunk in answer.aiter_bytes():
                    yield chunk

    async def close(self) -> None:
        await self._http.aclose()


def _encoded(body: object) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:  # text that no encoding can hold: it is replaced, or it could never be read back
        return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def decoded(content: bytes) -> Json:
    """What the server says. Somebody may have written what is nested more deeply than can be read: null is there then.

    The server takes ten thousand levels where a field may be anything, and whoever watches must not stumble over it.
    """
    try:
        found: Json = msgspec.json.decode(content)
    except RecursionError:
        found = msgspec.json.decode(_cut(content))
    return found


def _cut(content: bytes) -> bytes:
    """JSON without what is deeper than `DEEPEST`."""
    kept, depth, at = [], 0, 0
    for token in _TOKEN.finditer(content):
        if token[0] in (b"{", b"["):
            depth += 1
            if depth == DEEPEST + 1:
                kept += [content[at : token.start()], b"null"]
        elif token[0] in (b"}", b"]"):
            depth -= 1
            if depth == DEEPEST:
                at = token.end()
    return b"".join([*kept, content[at:]])


# Errors ------------------------------------------------------------------------------------------

_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:
        kind = errors.Unavailable if isinstance(error, _NOT_SENT) else InDoubt
        raise kind(f"{what} cannot be reached: {str(error) or type(error).__name__}") from error
    except (ConfigError, OSError, KeyError, AssertionError) as error:
        hint = "inside a cluster the Pod's account is used, outside it KUBECONFIG or ~/.kube/config"
        raise errors.Unavailable(f"{what} cannot be read: {error}", retryable=False, hint=hint) from error


def refusal(code: int, content: bytes) -> errors.MusterError:
    """What an answer means for us. The server's own words are kept: they name the object, the field or the verb."""
    try:
        status = msgspec.json.decode(content)
    except msgspec.DecodeError:
        status = {}
    said = status.get("message") if isinstance(status, dict) else ""
    reason = status.get("reason") if isinstance(status, dict) else ""
    message = f"Kubernetes: {said or f'it answered {code}'}"
    if code == 409 and reason == "AlreadyExists":
        return errors.AlreadyExists(message)
    if code == 409 and "precondition" in (said or "") and "UID" in (said or ""):
        return errors.NotFound(message)  # another object has its name by now
    if code == 500 and "request is too large" in (said or ""):  # etcd's words, for more than 1.5 MB
        return errors.TooLarge(message)
    if code == 403 and "blockOwnerDeletion" in (said or ""):
        message += " (update of trainings/finalizers)"  # the server does not say which permission that is
    if code == 403 and "cannot" in (said or ""):
        hint = "muster's role lacks this permission: kubectl apply what muster kube install --dry-run prints"
        return errors.Forbidden(message, hint=hint)
    kinds: dict[int, type[errors.MusterError]]
    kinds = {400: errors.InvalidRequest, 401: errors.Unauthenticated, 403: errors.Forbidden, 404: errors.NotFound}
    kinds |= {409: errors.Conflict, 410: errors.Compacted, 413: errors.TooLarge, 422: errors.InvalidRequest}
    kinds |= {500: InDoubt, 504: InDoubt}  # the server gave up, perhaps after it had written
    return kinds.get(code, errors.Unavailable)(message)


def passes(error: errors.MusterError) -> bool:
    """Whether it may be otherwise later. A permission may be granted yet: whoever waits says what is missing."""
    return error.retryable or isinstance(error, errors.Forbidden | errors.Unauthenticated)


async def again(ask: Callable[[], Awaitable[T]]) -> T:
    """Asked once more, a few times, where an answer was lost or somebody wrote at the same moment.

    No two that are in each other's way try again in step.
    """
    for pause in AGAIN_S:
        try:
            return await ask()
        except (InDoubt, errors.Conflict):
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
    return await ask()


# Watching ----------------------------------------------------------------------------------------


class Handler(Protocol):
    """Who is told about a collection."""

    def listed(self, items: Sequence[Json], version: str) -> None:
        """Everything that there is, at that version: whatever else was known is gone."""

    def changed(self, kind: str, item: Json) -> None:
        """ADDED, MODIFIED or DELETED."""

    def reached(self, version: str) -> None:
        """Nothing else has changed up to that version."""


class Informer:
    """Tells a handler what is there, and from then on every change, for ever: a list, then a watch; never a poll.

    A watch that breaks is taken up where it was. When the server no longer knows that far back, the list is read
    again.
    """

    def __init__(
        self,
        api: KubeApi,
        path: str,
        handler: Handler,
        params: Mapping[str, str] | None = None,
        *,
        cut: Callable[[Json], Json] = lambda item: item,
        page: int = PAGE,
    ) -> None:
        """`cut` takes from each object of a list what the handler needs: the whole list is never in memory."""
        self._api = api
        self._cut, self._page = cut, page
        self._path = path
        self._handler = handler
        self._params = params or {}
        self._version = ""
        self._failures = 0

    async def start(self) -> None:
        """Read the list; raises if that is not possible."""
        items: list[Json] = []
        self._version = ""
        async for page, version in self._api.pages(self._path, self._params, limit=self._page):
            items += map(self._cut, page)
            at = version
        self._version = at
        self._handler.listed(items, at)

    async def run(self) -> None:
        """Go on from there."""
        while True:
            try:
                if not self._version:
                    await self.start()
                await self._follow()
            except errors.Compacted:
                log.info("%s: its history is gone, so it is read again", self._path)
                self._version = ""
            except errors.MusterError as error:
                await self._pause(error)

    async def _follow(self) -> None:
        async for kind, item in self._api.watch(self._path, self._version, self._params):
            self._failures = 0
            self._version = item["metadata"]["resourceVersion"]
            if kind == "BOOKMARK":
                self._handler.reached(self._version)
            else:
                self._handler.changed(kind, item)

    async def _pause(self, error: errors.MusterError) -> None:
        self._failures += 1
        if self._failures in (1, 10):
            log.warning("%s cannot be watched, trying again: %s", self._path, error)
        await asyncio.sleep(RETRY.after(self._failures) * random.uniform(0.5, 1.0))


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line:
                yield line
