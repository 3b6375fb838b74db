"""Where are packages of code in a cluster that has no disk of ours? In Secrets, a piece in each, beside the journal.

A Secret that says what the package is comes first, marked as begun; then its pieces; then the mark goes. So one that
was cut short is known, and is removed. Whoever leads next finds the pieces and puts them together when a worker asks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from muster import errors
from muster.core.packages import KeptPackage
from muster.files import private_folder
from muster.kube.client import KubeApi, again
from muster.store.packages import PackageRoom, is_whole, missing
from muster.types.codec import show_time

log = logging.getLogger("muster.store")

PIECE = 768 << 10  # a Secret holds a mebibyte
MOST = 512 << 20  # etcd has 2 GiB for everything unless it is told otherwise
AT_ONCE = 4
LABEL = "muster.dev/package"
_INDEX, _PIECE = "index", "piece"


@dataclass(frozen=True)
class _Index:
    """What is stored about one."""

    about: KeptPackage
    pieces: int
    begun: bool = False

    @property
    def name(self) -> str:
        return f"muster-package-{self.about.namespace}-{self.about.digest.removeprefix('sha256:')}"

    def piece(self, number: int) -> str:
        return f"{self.name}-{number}"

    def annotations(self) -> dict[str, str]:
        one = self.about
        told = {"namespace": one.namespace, "digest": one.digest, "size": str(one.size), "at": show_time(one.at)}
        told |= {"pieces": str(self.pieces)} | ({"begun": "true"} if self.begun else {})
        return {f"{LABEL}-{name}": value for name, value in told.items()}

    @classmethod
    def read(cls, secret: Mapping[str, Any]) -> _Index | None:
        """None for one that is not as we write them: what others changed is not believed."""
        told = secret["metadata"].get("annotations") or {}
        try:
            values = {name: told[f"{LABEL}-{name}"] for name in ("namespace", "digest", "size", "at", "pieces")}
            at = datetime.fromisoformat(values["at"])
            about = KeptPackage(values["namespace"], values["digest"], int(values["size"]), at)
            made = cls(about, int(values["pieces"]), f"{LABEL}-begun" in told)
        except (KeyError, ValueError):
            return None
        whole = made.name == secret["metadata"]["name"] and made.pieces == -(-about.size // PIECE)
        return made if whole and at.tzinfo is not None else None


class KubePackages:
    """`folder` is where packages are put together for those who read them; it may be lost."""

    def __init__(self, api: KubeApi, namespace: str, folder: Path, most: int = MOST) -> None:
        self._api = api
        self._home = namespace
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._folder = private_folder(folder)
        self._room = PackageRoom(most)
        self._kept: dict[tuple[str, str], _Index] = {}
        self._turns: dict[tuple[str, str], asyncio.Lock] = {}

    async def open(self) -> None:
        """Read which there are. What was begun and not finished is removed."""
        found, _ = await self._api.list(self._path, {"labelSelector": f"{LABEL}={_INDEX}"})
        for secret in found:
            index = _Index.read(secret)
            if index is None:
                log.warning(
                    "the Secret %s tells of no package that can be read: left alone", secret["metadata"]["name"]
                )
            elif index.begun:
                await self._delete(index)
            else:
                self._kept[(index.about.namespace, index.about.digest)] = index

    def kept(self) -> Sequence[KeptPackage]:
        return tuple(one.about for one in self._kept.values())

    def find(self, namespace: str, digest: str) -> KeptPackage | None:
        index = self._kept.get((namespace, digest))
        return index.about if index is not None else None

    def _turn(self, namespace: str, digest: str) -> asyncio.Lock:
        return self._turns.setdefault((namespace, digest), asyncio.Lock())

    async def keep(
        self, namespace: str, digest: str, source: Path, now: datetime, needed: Callable[[], Collection[str]]
    ) -> KeptPackage:
        async with self._turn(namespace, digest):
            if (index := self._kept.get((namespace, digest))) is not None:
                return index.about
            new = KeptPackage(namespace, digest, os.stat(source).st_size, now)
            async with self._room.taken(self, new, needed):
                await self._write(new, source)
        return new

    async def _write(self, new: KeptPackage, source: Path) -> None:
        index = _Index(new, -(-new.size // PIECE))
        await self._put(replace(index, begun=True).name, _INDEX, replace(index, begun=True).annotations())
        turns = asyncio.Semaphore(AT_ONCE)

        async def send(number: int) -> None:
            async with turns:
                piece = await asyncio.to_thread(_piece_of, source, number)
                data = {"piece": base64.b64encode(piece).decode()}
                await self._put(index.piece(number), _PIECE, {}, data)

        await asyncio.gather(*(send(number) for number in range(index.pieces)))
        await self._put(index.name, _INDEX, index.annotations())
        self._kept[(new.namespace, new.digest)] = index

    async def renew(self, namespace: str, digest: str, now: datetime) -> None:
        if (index := self._kept.get((namespace, digest))) is not None:
            renewed = replace(index, about=replace(index.about, at=now))
            self._kept[(namespace, digest)] = renewed
            await self._put(renewed.name, _INDEX, renewed.annotations())

    async def file(self, namespace: str, digest: str) -> Path:
        index = self._kept.get((namespace, digest))
        if index is None:
            raise missing(namespace, digest)
        path = self._folder / namespace / digest.removeprefix("sha256:")
        async with self._turn(namespace, digest):
            if not path.exists():
                await self._put_together(index, path)
        return path

    async def _put_together(self, index: _Index, path: Path) -> None:
        private_folder(path.parent)
        draft = path.with_name(f".{path.name}")
        with open(draft, "wb") as out:
            for number in range(index.pieces):
                secret = await self._api.request("GET", f"{self._path}/{index.piece(number)}")
                out.write(base64.b64decode(secret["data"]["piece"]))
        if not await asyncio.to_thread(is_whole, draft, index.about.digest):
            draft.unlink()
            raise errors.InternalError(
                f"the pieces of package {index.about.digest[:19]}… in namespace {self._home!r} are not what was sent",
                hint="delete the training and submit it again",
            )
        draft.rename(path)

    async def remove(self, namespace: str, digest: str) -> None:
        async with self._turn(namespace, digest):
            index = self._kept.pop((namespace, digest), None)
            with contextlib.suppress(OSError):
                (self._folder / namespace / digest.removeprefix("sha256:")).unlink()
            if index is not None:
                await self._delete(index)
        self._turns.pop((namespace, digest), None)

    async def _delete(self, index: _Index) -> None:
        """Pieces first: as long as the index is there, somebody knows of them."""
        for name in (*(index.piece(number) for number in range(index.pieces)), index.name):
            with contextlib.suppress(errors.NotFound):
                await self._api.request("DELETE", f"{self._path}/{name}")

    async def _put(
        self, name: str, kind: str, annotations: Mapping[str, str], data: Mapping[str, str] | None = None
    ) -> None:
        """Create it, or bring it up to date: one of that name is of the same package."""
        labels = {LABEL: kind, "app.kubernetes.io/managed-by": "muster"}
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": self._home, "labels": labels, "annotations": dict(annotations)},
            "type": LABEL,
        }
        body |= {"data": data} if data is not None else {}
        try:
            await again(lambda: self._api.request("POST", self._path, body=body))
        except errors.AlreadyExists:
            await again(lambda: self._api.request("PUT", f"{self._path}/{name}", body=body))


def _piece_of(source: Path, number: int) -> bytes:
    with open(source, "rb") as file:
        file.seek(number * PIECE)
        return file.read(PIECE)
