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
    made = await first.keep("team", digest, path, NOON)
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


async def has_only_so_much_room(opened: Open, folder: Path) -> None:
    packages = await opened()
    for number in range(5):
        digest, path = a_file(folder, os.urandom(SIZE))
        await packages.keep(f"team-{number}", digest, path, NOON)
    digest, path = a_file(folder, os.urandom(SIZE))
    with pytest.raises(errors.TooLarge, match="take 9 MiB"):
        await packages.keep("team", digest, path, NOON)
    assert packages.find("team", digest) is None


SCENARIOS = (keeps_and_removes, has_only_so_much_room)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_a_place_for_packages(run: Run, tmp_path: Path, scenario: Callable[[Open, Path], Awaitable[None]]) -> None:
    run(lambda opened: scenario(opened, tmp_path))
