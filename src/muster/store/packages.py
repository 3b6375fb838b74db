"""Where are packages of code on one machine? In a folder of the home, one file each, named by its hash."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from muster import errors, package
from muster.core.packages import KeptPackage, plan_room
from muster.files import private_folder, sync_folder
from muster.ports import Packages

MOST = 4 << 30
_HEX = re.compile(r"[0-9a-f]{64}")


class PackageRoom:
    """The room for packages, with those that are being written."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._coming: list[KeptPackage] = []

    @asynccontextmanager
    async def taken(
        self, packages: Packages, new: KeptPackage, needed: Callable[[], Collection[str]]
    ) -> AsyncIterator[None]:
        """Make room and hold it while the package is written. QuotaExceeded if its namespace has none left."""
        plan = plan_room((*packages.kept(), *self._coming), new, self._most, needed)
        if plan.refusal:
            raise errors.QuotaExceeded(
                plan.refusal,
                resource="package bytes",
                current=plan.taken,
                requested=new.size,
                limit=plan.share,
                hint="delete trainings that are no longer needed: their code goes with them",
            )
        self._coming.append(new)
        try:
            for old in plan.removed:
                await packages.remove(old.namespace, old.digest)
            yield
        finally:
            self._coming.remove(new)


class PackageFolder:
    """Every file under its final name is whole: it is written beside, and renamed."""

    def __init__(self, folder: Path, most: int = MOST) -> None:
        self._folder = private_folder(folder)
        self._room = PackageRoom(most)
        self._kept = {(one.namespace, one.digest): one for one in self._found()}

    def _found(self) -> Iterator[KeptPackage]:
        for space in os.scandir(self._folder):
            if space.is_dir(follow_symlinks=False):
                for file in os.scandir(space.path):
                    if _HEX.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                        about = file.stat()
                        at = datetime.fromtimestamp(about.st_mtime, UTC)
                        yield KeptPackage(space.name, f"sha256:{file.name}", about.st_size, at)

    def path(self, namespace: str, digest: str) -> Path:
        return self._folder / namespace / digest.removeprefix("sha256:")

    def kept(self) -> Sequence[KeptPackage]:
        return tuple(self._kept.values())

    def find(self, namespace: str, digest: str) -> KeptPackage | None:
        return self._kept.get((namespace, digest))

    async def keep(
        self, namespace: str, digest: str, source: Path, now: datetime, needed: Callable[[], Collection[str]]
    ) -> KeptPackage:
        new = KeptPackage(namespace, digest, os.stat(source).st_size, now)
        async with self._room.taken(self, new, needed):
            await asyncio.to_thread(self._take, source, self.path(namespace, digest), now)
            self._kept[(namespace, digest)] = new
        return new

    def _take(self, source: Path, path: Path, now: datetime) -> None:
        private_folder(path.parent)
        with open(source, "rb") as file:
            os.fsync(file.fileno())
        os.utime(source, (now.timestamp(), now.timestamp()))
        os.replace(source, path)
        sync_folder(path.parent)

    async def renew(self, namespace: str, digest: str, now: datetime) -> None:
        if (one := self._kept.get((namespace, digest))) is not None:
            self._kept[(namespace, digest)] = KeptPackage(namespace, digest, one.size, now)
            with contextlib.suppress(OSError):
                os.utime(self.path(namespace, digest), (now.timestamp(), now.timestamp()))

    async def file(self, namespace: str, digest: str) -> Path:
        path = self.path(namespace, digest)
        if (namespace, digest) not in self._kept or not await asyncio.to_thread(path.is_file):
            raise missing(namespace, digest)
        return path

    async def remove(self, namespace: str, digest: str) -> None:
        self._kept.pop((namespace, digest), None)
        with contextlib.suppress(OSError):
            os.unlink(self.path(namespace, digest))
            os.rmdir(self.path(namespace, digest).parent)


def missing(namespace: str, digest: str) -> errors.NotFound:
    return errors.NotFound(
        f"there is no package {digest[:19]}… in namespace {namespace!r}",
        hint="submit the training again: its code goes along",
    )


def is_whole(path: Path, digest: str) -> bool:
    """Whether that file is that package, as far as its hash tells."""
    try:
        return package.digest_of(path) == digest
    except OSError:
        return False
