"""What every place for keys keeps: what was put is listed and seen over HTTP until it is deleted."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator

import pytest

from muster import errors
from muster.mesh.etcd import EtcdKeys
from muster.mesh.serving import KeyServer
from muster.ports import Keys
from tests.mesh import servers
from tests.mesh.servers import ask

BOUND_S = 20.0
Scenario = Callable[[Keys, str], Awaitable[None]]  # keys, and a prefix of the test's own
Run = Callable[[Scenario], None]


@pytest.fixture(scope="module")
def real_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Etcd]:
    if servers.ETCD is None:
        pytest.skip(servers.NO_ETCD)
    with servers.etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["embedded", "embedded over HTTP", "etcd"])
def run(request: pytest.FixtureRequest) -> Run:
    """Plays a scenario, and looks at the end whether HTTP shows what is listed."""

    async def play(scenario: Scenario) -> None:
        prefix = f"muster/{uuid.uuid4().hex}"
        server = KeyServer()
        embedded = await server.start()
        address = request.getfixturevalue("real_etcd").address if request.param == "etcd" else embedded
        client = EtcdKeys(f"http://{address}/")
        keys: Keys = server.keys if request.param == "embedded" else client
        try:
            async with asyncio.timeout(BOUND_S):
                await scenario(keys, prefix)
                for path, value in (await keys.list(prefix)).items():
                    seen = await asyncio.to_thread(ask, address, "GET", path)
                    assert (seen.status, seen.body["node"]["value"]) == (200, value)
        finally:
            await client.close()
            await server.stop()

    return lambda scenario: asyncio.run(play(scenario))


def test_what_is_put_is_listed_below_its_prefix(run: Run) -> None:
    async def scenario(keys: Keys, prefix: str) -> None:
        await keys.put(f"{prefix}/mesh-ready/a", "1")
        await keys.put(f"{prefix}/mesh-ready/b", "")
        await keys.put(f"{prefix}/mesh-degraded/a", "a & b = ü\n")
        await keys.put(f"{prefix}-other/mesh-ready/a", "not this")
        await keys.put(f"{prefix}/mesh-ready/a", "2")
        ready = {f"{prefix}/mesh-ready/a": "2", f"{prefix}/mesh-ready/b": ""}
        assert await keys.list(f"{prefix}/mesh-ready") == ready
        assert await keys.list(prefix) == {**ready, f"{prefix}/mesh-degraded/a": "a & b = ü\n"}
        assert await keys.list(f"{prefix}/mesh-ready/a") == {f"{prefix}/mesh-ready/a": "2"}

    run(scenario)


def test_slashes_at_the_ends_mean_nothing(run: Run) -> None:
    async def scenario(keys: Keys, prefix: str) -> None:
        await keys.put(f"/{prefix}//a/", "1")
        assert await keys.list(f"/{prefix}/") == {f"{prefix}/a": "1"}

    run(scenario)


def test_odd_names_are_kept(run: Run) -> None:
    async def scenario(keys: Keys, prefix: str) -> None:
        odd = {f"{prefix}/{name}": name for name in ("a b", "ü", "100%", "a?b=c&d#e", "+", "…", "a%2Fb", "~", "*")}
        for path, value in odd.items():
            await keys.put(path, value)
        assert await keys.list(prefix) == odd

    run(scenario)


def test_a_delete_takes_the_key_or_all_below_and_may_come_twice(run: Run) -> None:
    async def scenario(keys: Keys, prefix: str) -> None:
        for name in ("x/a", "x/b", "y"):
            await keys.put(f"{prefix}/{name}", "1")
        await keys.delete(f"{prefix}/y")
        await keys.delete(f"{prefix}/y")
        assert sorted(await keys.list(prefix)) == [f"{prefix}/x/a", f"{prefix}/x/b"]
        await keys.delete(f"{prefix}/x")
        assert await keys.list(prefix) == {}
        await keys.delete(prefix)
        assert await keys.list(prefix) == {}
        await keys.put(prefix, "a key, where a directory was")

    run(scenario)


@pytest.mark.parametrize("path", ["{}/dir", "{}/dir/file/below", "", "/", "{}/../x", "{}/a\0b", "{}" + "/x" * 100])
def test_a_path_that_cannot_be_is_refused_and_changes_nothing(run: Run, path: str) -> None:
    async def scenario(keys: Keys, prefix: str) -> None:
        await keys.put(f"{prefix}/dir/file", "1")
        with pytest.raises(errors.InvalidRequest):
            await keys.put(path.format(prefix), "2")
        assert await keys.list(prefix) == {f"{prefix}/dir/file": "1"}

    run(scenario)


@pytest.mark.parametrize("order", ["delete", "list"])
def test_nothing_is_below_a_key(run: Run, order: str) -> None:
    async def scenario(keys: Keys, prefix: str) -> None:
        await keys.put(f"{prefix}/a", "1")
        with pytest.raises(errors.InvalidRequest):
            await (keys.delete(f"{prefix}/a/b") if order == "delete" else keys.list(f"{prefix}/a/b"))

    run(scenario)


def test_everything_cannot_be_deleted_at_once(run: Run) -> None:
    async def scenario(keys: Keys, prefix: str) -> None:
        await keys.put(f"{prefix}/a", "1")
        with pytest.raises(errors.InvalidRequest):
            await keys.delete("/")

    run(scenario)


@pytest.mark.parametrize("order", ["put", "delete", "list"])
def test_an_etcd_that_is_not_there_is_unavailable(order: str) -> None:
    async def play() -> None:
        keys = EtcdKeys(f"http://127.0.0.1:{servers.free_port()}")
        orders = {"put": keys.put("a", "b"), "delete": keys.delete("a"), "list": keys.list("a")}
        for name, work in orders.items():
            if name != order:
                work.close()
        with pytest.raises(errors.Unavailable, match=r"etcd at http://127\.0\.0\.1:\d+: ") as caught:
            await orders[order]
        assert caught.value.retryable
        await keys.close()

    asyncio.run(play())
