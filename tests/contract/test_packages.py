"""What every place for packages keeps: what was sent is there, for whoever starts next too, until it is removed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from muster import errors, package
from muster.ports import Packages
from muster.store.packages import PackageFolder

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
BOUND_S = 60.0
Open = Callable[[], Awaitable[Packages]]  # each time as a control plane that has just started
Scenario = Callable[[Open], Awaitable[None]]
Run = Callable[[Scenario], None]
SIZE = 2_000_000  # some pieces


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """On one machine; `tests/kube/test_packages.py` has the same in a cluster."""

    async def opened() -> Packages:
        return PackageFolder(tmp_path / "packages", most=10_000_000)

    return lambda scenario: asyncio.run(asyncio.wait_for(scenario(opened), BOUND_S))


def a_file(folder: Path, content: bytes) -> tuple[str, Path]:
    path = folder / "sent"
    path.write_bytes(content)
    return package.digest_of(path), path


async def keeps_and_removes(opened: Open, folder: Path) -> None:
    content = os.urandom(SIZE)
    digest, path = a_file(folder, content)
    first = await opened()
    assert first.find("team", digest) is None
    with pytest.raises(errors.NotFound):
        await first.file("team", digest)
    made = await first.keep("team", digest, path, NOON, set)
    assert (made.namespace, made.digest, made.size, made.at) == ("team", digest, SIZE, NOON)
    assert (await first.file("team", digest)).read_bytes() == content
    for one in (first, await opened()):
        assert list(one.kept()) == [made] and one.find("team", digest) == made
        assert one.find("other", digest) is None
        assert (await one.file("team", digest)).read_bytes() == content
    later = NOON + timedelta(minutes=5)
    await first.renew("team", digest, later)
    again = await opened()
    assert [one.at for one in again.kept()] == [later]
    await again.remove("team", digest)
    await again.remove("team", digest)
    for one in (again, await opened()):
        assert list(one.kept()) == []
        with pytest.raises(errors.NotFound):
            await one.file("team", digest)


async def leaves_room_for_other_namespaces(opened: Open, folder: Path) -> None:
    """No namespace takes all, and none pushes out what belongs to another one."""
    packages = await opened()
    sent = []
    for namespace in ("a", "b", "c", "d"):
        digest, path = a_file(folder, os.urandom(SIZE))
        sent.append((namespace, digest))
        await packages.keep(namespace, digest, path, NOON, set)
        _, path = a_file(folder, os.urandom(SIZE))
        with pytest.raises(errors.QuotaExceeded, match=f"namespace '{namespace}' has 1.91 MiB of code"):
            await packages.keep(namespace, package.digest_of(path), path, NOON, set)
    later = NOON + timedelta(hours=2)
    digest, path = a_file(folder, os.urandom(SIZE))
    with pytest.raises(errors.QuotaExceeded, match="namespace 'e' has 0 MiB of code") as refused:
        await packages.keep("e", digest, path, later, set)
    assert refused.value.limit == 1_000_000 and "delete trainings" in refused.value.hint
    small, path = a_file(folder, os.urandom(SIZE // 2))
    await packages.keep("e", small, path, later, set)
    assert {(one.namespace, one.digest) for one in packages.kept()} == {*sent, ("e", small)}


async def removes_what_its_namespace_does_not_use(opened: Open, folder: Path) -> None:
    packages = await opened()
    digests = []
    for minutes in (0, 10, 20, 30):
        digest, path = a_file(folder, os.urandom(SIZE // 2))
        digests.append(digest)
        now = NOON + timedelta(minutes=minutes)
        await packages.keep("team", digest, path, now, lambda: {digests[0]})
    assert [packages.find("team", digest) is not None for digest in digests] == [True, False, False, True]
    _, path = a_file(folder, os.urandom(SIZE // 2))
    with pytest.raises(errors.QuotaExceeded):  # one is in use, and the other was sent just now
        await packages.keep("team", package.digest_of(path), path, now, lambda: {digests[0]})
    assert len(packages.kept()) == 2 == len((await opened()).kept())


SCENARIOS = (keeps_and_removes, leaves_room_for_other_namespaces, removes_what_its_namespace_does_not_use)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_a_place_for_packages(run: Run, tmp_path: Path, scenario: Callable[[Open, Path], Awaitable[None]]) -> None:
    run(lambda opened: scenario(opened, tmp_path))
