"""How does a worker come by the code that was sent with its training? Fetched, checked, and unpacked where it runs.

Where the file lies on this machine it is read there; else the control plane has it, and wants a proof that we know the
run's token. Whoever we ask need not be believed: the hash says whether it is the right package. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from muster import files, package, run_proof
from muster.backoff import Backoff

PATIENCE_S = 60.0
GONE_S = 10.0  # for a control plane that has just changed to know what it keeps
SILENT_S = 30.0
RETRY = Backoff(0.1, 3.0)


class CannotFetch(Exception):
    """Nobody has it now; another worker may have more luck."""


def code(digest: str, source: str, token: str | None, folder: Path | None) -> Path:
    """A folder with the code in it, ours alone. BadPackage or CannotFetch say in one line why there is none."""
    into = _made(folder)
    if not source.startswith(("http://", "https://")):
        _unpack(Path(source), digest, into)
        return into
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=files.PREFIX) as scratch:
        packed = Path(scratch) / "package"
        download(source, run_proof.of_package(token or "", digest), packed)
        _unpack(packed, digest, into)
    return into


def _made(folder: Path | None) -> Path:
    """Empty: what a worker before us left there, under the same name, is not ours."""
    try:
        if folder is None:
            return Path(tempfile.mkdtemp(prefix=files.PREFIX, dir=files.scratch("code")))
        shutil.rmtree(folder, ignore_errors=True)
        files.private_folder(folder.parent)
        folder.mkdir(mode=0o700)
        return folder
    except OSError as error:
        raise CannotFetch(f"there is no place for the code: {error}") from None


def _unpack(packed: Path, digest: str, into: Path) -> None:
    try:
        package.unpack(packed, digest, into)
    except package.BadPackage as wrong:
        raise package.BadPackage(f"package {digest[:19]}… is refused: {wrong}") from None
    except FileNotFoundError:
        raise CannotFetch(f"package {digest[:19]}… is not there") from None
    except OSError as error:
        raise CannotFetch(f"package {digest[:19]}… cannot be unpacked: {error}") from None


# From the control plane --------------------------------------------------------------------------


def download(url: str, proof: str, into: Path, clock: Callable[[], float] = time.monotonic) -> None:
    """Asked again for a while: a control plane may be changing over."""
    began, failures = clock(), 0
    while True:
        try:
            return _attempt(url, proof, into)
        except urllib.error.HTTPError as error:
            why, most_s = (
                f"{url} answers {error.code} {error.reason}",
                GONE_S if error.code in (401, 404) else PATIENCE_S,
            )
            error.close()
        except (OSError, ValueError, EOFError) as error:
            why, most_s = f"{url} cannot be read: {getattr(error, 'reason', error)}", PATIENCE_S
        failures += 1
        if clock() - began + RETRY.after(failures) > most_s:
            raise CannotFetch(f"the code cannot be fetched: {why}")
        time.sleep(RETRY.after(failures))


def _attempt(url: str, proof: str, into: Path) -> None:
    request = urllib.request.Request(url, headers={"Authorization": f"{run_proof.SCHEME} {proof}"})
    unproved = ssl.create_default_context()
    unproved.check_hostname, unproved.verify_mode = False, ssl.CERT_NONE  # the hash proves what comes
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unproved))
    with urllib.request.build_opener(*handlers).open(request, timeout=SILENT_S) as answer, open(into, "wb") as out:
        length, size = int(answer.headers.get("Content-Length") or 0), 0
        while chunk := answer.read(package.CHUNK):
            size += len(chunk)
            if size > package.MOST_PACKED:
                raise ValueError("it is larger than a package may be")
            out.write(chunk)
        if size != length:
            raise EOFError(f"it ended after {size} of {length} bytes")


def within(folder: Path, name: str) -> Path:
    """A folder of the package. ValueError if there is none of that name."""
    found = (folder / name).resolve()
    with contextlib.suppress(ValueError):
        found.relative_to(folder.resolve())
        if found.is_dir():
            return found
    raise ValueError(f"there is no folder {name!r} in the package")


def enter(folder: Path) -> None:
    os.chdir(folder)
    os.environ["PWD"] = str(folder)
