"""Packages of code: clients send them, workers fetch them.

A client that may write in a namespace sends its code there before it submits the training that names it. A worker has
no token of the API; it shows what only somebody who knows its run's token can make, for that one package.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import io
import os
import re
import secrets
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from muster import errors, package, run_proof
from muster.core.keeping import TOKEN
from muster.core.packages import names_package
from muster.ports import Filter, Packages, Store, Stored
from muster.server.answers import StreamedAnswer, as_json
from muster.server.calls import Call
from muster.server.describe import Answer, Body, Operation
from muster.types.codec import to_wire
from muster.types.training import PACKAGE

BYTES = "application/octet-stream"
SLOWEST = 64 << 10  # bytes in a second
LEAST_S = 60.0
CHUNK = 1 << 20
RENEWED_AFTER = timedelta(minutes=1)  # far less than an unused package is safe for

_DIGEST = re.compile(PACKAGE)


def _packages(call: Call) -> Packages:
    if call.services.packages is None or call.services.incoming is None:
        raise errors.NotFound("no code is taken here")
    return call.services.packages


def _digest(call: Call) -> str:
    digest: str = call.request.path_params["digest"]
    if not _DIGEST.fullmatch(digest):
        raise errors.NotFound(f"there is no package {digest[:80]!r}")
    return digest


async def get_package(call: Call) -> Response:
    """Whether it is here; it stays for a while then, so that a training can be submitted with it."""
    namespace, digest = call.namespace, _digest(call)
    call.identity.must_write(namespace)
    kept = _packages(call)
    found = kept.find(namespace, digest)
    if found is None:
        raise errors.NotFound(f"package {digest[:19]}… is not in namespace {namespace!r}", hint="send it")
    if (now := call.services.clock.now()) - found.at > RENEWED_AFTER:
        await kept.renew(namespace, digest, now)
    return as_json(to_wire(found))


def _needed(store: Store, namespace: str) -> set[str]:
    """Return the packages that trainings of a namespace name."""
    stored = store.page(Filter(namespace=namespace)).items
    named = {one.training.spec.package for one in stored if names_package(one.raw)}
    return {digest for digest in named if digest is not None}


async def put_package(call: Call) -> Response:
    namespace, digest = call.namespace, _digest(call)
    call.identity.must_write(namespace)
    kept = _packages(call)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(call.services.checks.place(namespace))
        except errors.TooManyRequests:
            # A client that still sends would see a broken connection instead of the reason.
            await _receive(call.request, None)
            raise
        return await _take(call, kept, namespace, digest)


async def _take(call: Call, kept: Packages, namespace: str, digest: str) -> Response:
    now = call.services.clock.now
    assert call.services.incoming is not None
    draft = call.services.incoming / secrets.token_hex(8)
    try:
        await _receive(call.request, draft)
        if (found := kept.find(namespace, digest)) is None:
            await call.services.checks.check(namespace, draft, digest)
            found = await kept.keep(namespace, digest, draft, now(), lambda: _needed(call.services.store, namespace))
            return as_json(to_wire(found), 201)
        await kept.renew(namespace, digest, now())
        return as_json(to_wire(found))
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


async def _receive(request: Request, draft: Path | None) -> None:
    """Write the body to the draft, or drop it. TooLarge as soon as that is certain."""
    length = request.headers.get("content-length", "")
    expected = int(length[:20]) if length.isascii() and length.isdigit() else package.MOST_PACKED
    if expected > package.MOST_PACKED:
        raise _too_large()
    size = 0
    try:
        file = open(draft or os.devnull, "xb" if draft else "wb", buffering=0, opener=_private)  # noqa: SIM115
    except OSError as error:
        raise _no_room(error) from None
    try:
        async with asyncio.timeout(LEAST_S + expected / SLOWEST):
            async for part in request.stream():
                size += len(part)
                if size > package.MOST_PACKED:
                    raise _too_large()
                await asyncio.to_thread(_write_all, file, part)
    except TimeoutError:
        raise errors.InvalidRequest("the package comes too slowly") from None
    except OSError as error:
        raise _no_room(error) from None
    finally:
        file.close()


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _write_all(file: io.FileIO, part: bytes) -> None:
    """A disk that becomes full takes a part of it first."""
    rest = memoryview(part)
    while rest:
        rest = rest[file.write(rest) :]


def _no_room(error: OSError) -> errors.Unavailable:
    return errors.Unavailable(f"the package cannot be written down: {error.strerror}", hint="make room on its disk")


def _too_large() -> errors.TooLarge:
    most = package.shown(package.MOST_PACKED)
    return errors.TooLarge(f"the package is larger than {most}", hint="leave out what is no code, with .musterignore")


# For workers -------------------------------------------------------------------------------------


async def fetch_package(call: Call) -> Response:
    stored = _shown_by_worker(call)
    namespace, digest = stored.key.namespace, stored.training.spec.package
    assert digest is not None
    path = await _packages(call).file(namespace, digest)
    size = os.stat(path).st_size
    return StreamedAnswer(_content(path, call.services.sending), BYTES, {"Content-Length": str(size)})


def _shown_by_worker(call: Call) -> Stored:
    """The training whose worker this is. Who cannot prove it learns nothing of what is here."""
    refusal = errors.Unauthenticated("only a worker of a training may have its code")
    stored = call.services.store.get(call.key)
    kept = call.services.store.record(TOKEN, stored.uid) if stored is not None else None
    scheme, _, given = (call.header("authorization") or "").partition(" ")
    if stored is None or kept is None or scheme != run_proof.SCHEME or not given.isascii():
        raise refusal
    digest = stored.training.spec.package
    if digest is None or not hmac.compare_digest(run_proof.of_package(str(kept["token"]), digest), given):
        raise refusal
    return stored


async def _content(path: Path, turns: asyncio.Semaphore) -> AsyncIterator[bytes]:
    async with turns:
        with open(path, "rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                yield chunk


_KEPT = Answer("It is here.", "Package")
_REFUSALS = (403, 404, 413, 422)
_ONE = "/v1/namespaces/{namespace}/packages/{digest}"

OPERATIONS = (
    Operation("GET", _ONE, get_package, "Is this code here", {200: _KEPT}, (403, 404)),
    Operation(
        "PUT",
        _ONE,
        put_package,
        "Send code",
        {200: _KEPT, 201: Answer("It is kept.", "Package")},
        _REFUSALS,
        body=Body("PackageContent", (BYTES,)),
    ),
    Operation(
        "GET",
        "/packages/{namespace}/{name}",
        fetch_package,
        "The code of a run, for its workers",
        {200: Answer("The package.", "PackageContent", BYTES)},
        (401, 404),
        open=True,
    ),
)
