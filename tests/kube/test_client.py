"""The client of the Kubernetes API: what do its answers mean, and does an informer miss anything?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from lightkube import KubeConfig

from muster import errors
from muster.kube import client
from muster.kube.client import InDoubt, Informer, Json, KubeApi, again, passes, refusal
from tests.kube.api_proxy import ApiProxy
from tests.kube.cluster import NOBODY, Cluster

BOUND_S = 20.0


def status(message: str = "", reason: str = "") -> bytes:
    return json.dumps({"kind": "Status", "message": message, "reason": reason}).encode()


@pytest.mark.parametrize(
    ("code", "content", "kind", "again_later"),
    [
        (400, status("bad"), errors.InvalidRequest, False),
        (401, status("who?"), errors.Unauthenticated, True),
        (403, status('cannot list resource "pods"'), errors.Forbidden, True),
        (404, status("none"), errors.NotFound, False),
        (409, status("there", "AlreadyExists"), errors.AlreadyExists, False),
        (409, status("modified", "Conflict"), errors.Conflict, True),
        (409, status("the UID in the precondition (a) does not match", "Conflict"), errors.NotFound, False),
        (409, status("Precondition failed: UID in precondition: a", "Conflict"), errors.NotFound, False),
        (410, status("too old", "Expired"), errors.Compacted, False),
        (413, b"not JSON", errors.TooLarge, False),
        (422, status("spec: Required"), errors.InvalidRequest, False),
        (429, status("slow down"), errors.Unavailable, True),
        (500, status("etcd timed out"), InDoubt, True),
        (503, b"", errors.Unavailable, True),
        (504, b"[]", InDoubt, True),
    ],
)
def test_an_answer_becomes_the_error_that_it_stands_for(
    code: int, content: bytes, kind: type[errors.MusterError], again_later: bool
) -> None:
    error = refusal(code, content)
    assert type(error) is kind and passes(error) is again_later
    assert error.message.startswith("Kubernetes: ") and len(error.message) > len("Kubernetes: ")
    if code == 403:
        assert "muster kube install --dry-run" in error.hint


@pytest.mark.parametrize("failures", [0, 1, len(client.AGAIN_S)])
def test_what_is_in_doubt_is_asked_again(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AGAIN_S", (0.0,) * len(client.AGAIN_S))
    left: list[errors.MusterError] = [InDoubt("lost"), errors.Conflict("modified"), InDoubt("lost")][:failures]

    async def ask() -> str:
        if left:
            raise left.pop()
        return "done"

    assert asyncio.run(again(ask)) == "done"


def test_what_is_not_in_doubt_is_raised_at_once() -> None:
    async def ask() -> None:
        calls.append(1)
        raise errors.Unavailable("not sent")

    calls: list[int] = []
    with pytest.raises(errors.Unavailable):
        asyncio.run(again(ask))
    assert len(calls) == 1


# On a server -------------------------------------------------------------------------------------


class Seen:
    """What an informer tells: what is there now, and each change."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.story: list[str] = []
        self._stir = asyncio.Event()

    def listed(self, items: Sequence[Json], version: str) -> None:
        self.names = {_name(item): _version(item) for item in items}
        self._note("LISTED")

    def changed(self, kind: str, item: Json) -> None:
        if kind == "DELETED":
            self.names.pop(_name(item))
        else:
            self.names[_name(item)] = _version(item)
        self._note(f"{kind} {_name(item)}")

    def reached(self, version: str) -> None:
        self._note("REACHED")

    def _note(self, word: str) -> None:
        self.story.append(word)
        self._stir.set()

    async def until(self, look: Callable[[], Any]) -> None:
        while not look():
            self._stir.clear()
            await self._stir.wait()


def _name(item: Json) -> str:
    return str(item["metadata"]["name"])


def _version(item: Json) -> int:
    return int(item["metadata"]["resourceVersion"])


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[ApiProxy]:
    made = ApiProxy(cluster)
    yield made
    made.close()


class Place:
    """Config maps of one namespace, seen through a proxy and changed beside it."""

    def __init__(self, cluster: Cluster, namespace: str, proxy: ApiProxy) -> None:
        config = KubeConfig.from_file(cluster.kubeconfig(url=proxy.url)).get()
        assert config is not None
        self.api, self.proxy, self.seen = KubeApi(config), proxy, Seen()
        self.path = f"/api/v1/namespaces/{namespace}/configmaps"
        self.informer = Informer(self.api, self.path, self.seen, {"labelSelector": "mine"})
        self._cluster = cluster

    async def add(self, name: str) -> None:
        body = {"metadata": {"name": name, "labels": {"mine": "yes"}}}
        await asyncio.to_thread(self._cluster.api, "POST", self.path, body)

    async def remove(self, name: str) -> None:
        await asyncio.to_thread(self._cluster.api, "DELETE", f"{self.path}/{name}")

    async def until(self, *names: str) -> None:
        await self.seen.until(lambda: set(self.seen.names) == set(names))

    async def do(self, work: Callable[[], None]) -> None:
        """What the test's other thread does."""
        await asyncio.to_thread(work)

    def watches(self) -> int:
        return sum(call.watch for call in list(self.proxy.calls))


def play(cluster: Cluster, namespace: str, proxy: ApiProxy, scenario: Callable[[Place], Awaitable[None]]) -> None:
    async def bounded() -> None:
        place = Place(cluster, namespace, proxy)
        running: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(BOUND_S):
                await place.informer.start()
                running = asyncio.create_task(place.informer.run())
                await scenario(place)
        finally:
            if running is not None:
                running.cancel()
            await place.api.close()

    asyncio.run(bounded())


def test_a_watch_that_breaks_is_taken_up_where_it_was(cluster: Cluster, namespace: str, proxy: ApiProxy) -> None:
    async def scenario(place: Place) -> None:
        await place.add("a")
        await place.until("a")
        await place.do(proxy.refuse)
        await place.add("b")
        await place.remove("a")
        await place.do(lambda: proxy.refuse(False))
        await place.until("b")
        assert place.seen.story == ["LISTED", "ADDED a", "ADDED b", "DELETED a"], "each change once, and in order"

    play(cluster, namespace, proxy, scenario)


def test_a_history_that_is_gone_means_a_new_list(cluster: Cluster, namespace: str, proxy: ApiProxy) -> None:
    async def scenario(place: Place) -> None:
        await place.add("a")
        await place.until("a")
        await place.do(proxy.refuse)
        await place.remove("a")
        await place.add("b")
        await place.do(lambda: proxy.expire_watches(coming=1))
        await place.do(lambda: proxy.refuse(False))
        await place.seen.until(lambda: place.seen.story.count("LISTED") == 2)
        await place.until("b")
        await place.add("c")
        await place.until("b", "c")

    play(cluster, namespace, proxy, scenario)


def test_a_server_that_refuses_for_a_while_is_asked_again(cluster: Cluster, namespace: str, proxy: ApiProxy) -> None:
    async def scenario(place: Place) -> None:
        for code in (429, 500, 503):
            proxy.answer(code, times=1, when=lambda call: call.watch)
        await place.do(proxy.cut)
        await place.add("a")
        await place.until("a")

    play(cluster, namespace, proxy, scenario)


def test_a_watch_that_falls_silent_is_begun_anew(
    cluster: Cluster, namespace: str, proxy: ApiProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENCE_S", 0.3)

    async def scenario(place: Place) -> None:
        await place.seen.until(lambda: place.seen.story)
        while place.watches() < 3:
            await asyncio.sleep(0.05)
        await place.add("a")
        await place.until("a")
        assert place.seen.story.count("LISTED") == 1

    play(cluster, namespace, proxy, scenario)


def test_a_server_that_is_not_there_and_one_that_refuses_are_told_apart(cluster: Cluster, proxy: ApiProxy) -> None:
    async def asked(user: str) -> None:
        config = KubeConfig.from_file(cluster.kubeconfig(user, url=proxy.url)).get()
        assert config is not None
        api = KubeApi(config)
        try:
            await api.list("/api/v1/pods")
        finally:
            await api.close()

    with pytest.raises(errors.Forbidden, match='cannot list resource "pods"'):
        asyncio.run(asked(NOBODY))
    proxy.lose()
    with pytest.raises(InDoubt, match="cannot be reached"):
        asyncio.run(asked(NOBODY))
    proxy.close()
    with pytest.raises(errors.Unavailable, match="cannot be reached") as raised:
        asyncio.run(asked(NOBODY))
    assert not isinstance(raised.value, InDoubt)


@pytest.mark.parametrize("levels", [3, 90, 5_000, 10_000])
def test_nobody_is_kept_from_reading_by_what_is_nested_too_deeply(levels: int) -> None:
    deep = b'{"a":[' * (levels // 2) + b'"]}\\""' + b"]}" * (levels // 2)
    content = b'{"type":"ADDED","deep":' + deep + b',"after":[1,{"x":"{[\\\\"}]}'
    read = client.decoded(content)
    assert (read["type"], read["after"]) == ("ADDED", [1, {"x": "{[\\"}])
    assert isinstance(read["deep"], dict)
