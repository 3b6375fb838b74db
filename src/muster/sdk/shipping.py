"""Which files go along with a training, and what is its program called there?

What git does not ignore, or everything where there is no git, without what `.musterignore` names; never files that look
like secrets, and no link that leads out of the folder. What was packed is remembered by names, sizes and times of the
files, so that unchanged code is neither packed nor sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster import files, package
from muster.errors import InvalidRequest
from muster.package import BadPackage, Entry
from muster.types.codec import Problem

IGNORE = ".musterignore"
CALLER = "muster.sdk.call"  # what runs a decorated function
MOST_VARIABLE = "MUSTER_PACKAGE_BYTES"
MOST_REMEMBERED = 50
_GIT_S = 30.0
_LARGEST_SHOWN = 3
_NOBODYS = re.compile(r"(^|/)(\.git|\.hg|\.svn|__pycache__|\.venv)/|\.pyc$|(^|/)\.musterignore$")
SECRETS = (
    *(".env", ".env.*", "!.env.example", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "id_rsa*", "id_dsa*"),
    *("id_ecdsa*", "id_ed25519*", ".netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials", ".htpasswd"),
    *(".ssh/", ".aws/", ".kube/", ".docker/config.json", ".azure/", ".gnupg/", "credentials.json", "*.kdbx"),
    *("service-account*.json", "secrets.y*ml", "*.ovpn", "kubeconfig", ".huggingface/token", ".muster/"),
)
# Matching patterns takes a while for many files: these words are in all of them.
_MAY_BE_SECRET = re.compile(
    r"\.env|\.pem|\.key|\.p12|\.pfx|\.jks|id_|rc$|\.pgpass|credentials|\.htpasswd|\.ssh|\.aws|\.kube|config\.json|\.azure"
    r"|\.gnupg|\.kdbx|service-account|secrets\.|\.ovpn|kubeconfig|token|\.muster|netrc"
)


@dataclass(frozen=True)
class Parcel:
    """What would travel from a folder, and what would not although nothing says that it should not."""

    folder: Path
    entries: tuple[Entry, ...]
    stamp: str  # of names, rights, sizes and times: what changes a file changes one of them
    secrets: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()  # neither files nor links

    @property
    def size(self) -> int:
        return sum(one.size for one in self.entries)

    def warnings(self) -> Iterator[str]:
        for names, why in ((self.secrets, "looks like a secret"), (self.odd, "is neither a file nor a link")):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                yield f"left behind: {', '.join(names[:5])}{more} ({why})"


@dataclass(frozen=True)
class Packed:
    """A package as a file of ours."""

    digest: str
    path: Path
    size: int

    def content(self) -> bytes:
        return self.path.read_bytes()


# Which files -------------------------------------------------------------------------------------


def collect(folder: Path) -> Parcel:
    """Raises InvalidRequest if something in the folder cannot travel."""
    folder = folder.resolve()
    ignored, secret = _ignored(folder), _patterns(SECRETS)
    entries: list[Entry] = []
    secrets: list[str] = []
    odd: list[str] = []
    problems: list[Problem] = []
    stamp = hashlib.sha256(str(folder).encode())
    for name, about in sorted(_found(folder)):
        if _NOBODYS.search(name) or ignored(name):
            continue
        if _MAY_BE_SECRET.search(name) and secret(name):
            secrets.append(name)
            continue
        entry = _entry(folder, name, about, problems)
        if entry is None:
            odd.append(name)
            continue
        entries.append(entry)
        told = (name, about.st_mode, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino, entry.link)
        stamp.update(repr(told).encode(errors="surrogateescape"))
    if problems:
        listed = "; ".join(f"{one.field}: {one.message}" for one in problems[:5])
        raise InvalidRequest(f"the code of {folder} cannot be sent: {listed}", problems=tuple(problems))
    return Parcel(folder, tuple(entries), stamp.hexdigest(), tuple(secrets), tuple(odd))


def _ignored(folder: Path) -> Callable[[str], bool]:
    try:
        return _patterns((folder / IGNORE).read_text().splitlines())
    except FileNotFoundError:
        return lambda name: False


def _patterns(lines: Iterable[str]) -> Callable[[str], bool]:
    import pathspec

    match: Callable[[str], bool] = pathspec.GitIgnoreSpec.from_lines(lines).match_file
    return match


def _found(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """All files and links below, as git sees them."""
    known = _known_to_git(folder)
    for name in _walked(folder, "") if known is None else known:
        try:
            about = os.lstat(f"{folder}/{name}")
        except OSError:
            continue  # gone, though git has not heard of it
        if stat.S_ISDIR(about.st_mode):  # a repository within the repository
            yield from ((below, os.lstat(f"{folder}/{below}")) for below in _walked(folder, name))
        else:
            yield name, about


def _known_to_git(folder: Path) -> list[str] | None:
    """None where git knows nothing of this folder, or ignores all of it."""
    listing = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        asked = subprocess.run(listing, capture_output=True, timeout=_GIT_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    names = dict.fromkeys(os.fsdecode(name).rstrip("/") for name in asked.stdout.split(b"\0") if name)
    return list(names) or None


def _walked(folder: Path, below: str) -> Iterator[str]:
    for where, folders, names in os.walk(folder / below):
        base = os.path.relpath(where, folder)
        prefix = "" if base == "." else f"{base}/"
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        folders[:] = sorted(
            name
            for name in folders
            if name not in links
            and not _NOBODYS.search(f"{prefix}{name}/")
            and not os.path.exists(os.path.join(where, name, "pyvenv.cfg"))
        )
        yield from (f"{prefix}{name}" for name in (*names, *links))


def _entry(folder: Path, name: str, about: os.stat_result, problems: list[Problem]) -> Entry | None:
    """None if it is neither a file nor a link."""
    path = f"{folder}/{name}"
    if not name.isprintable() or "\udc80" <= max(name) <= "\udcff":
        problems.append(Problem(repr(name)[:120], "its name is not UTF-8, or has control characters"))
    if stat.S_ISLNK(about.st_mode):
        target = os.readlink(path)
        if not package.stays_inside(name, target):
            problems.append(Problem(name[:120], f"is a link that leads out of the folder, to {target[:120]!r}"))
        return Entry(name, path, link=target)
    if not stat.S_ISREG(about.st_mode):
        return None
    return Entry(name, path, about.st_size, bool(about.st_mode & 0o100))


# Packing -----------------------------------------------------------------------------------------


def pack(parcel: Parcel, cache: Path) -> Packed:
    """From the cache if nothing has changed. Raises InvalidRequest if it is too much."""
    folder = files.private_folder(cache / "packages")
    known = folder / f"{parcel.stamp}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(files.read_private(known))
        path = folder / str(told["digest"]).removeprefix("sha256:")
        if path.stat().st_size == told["size"]:
            os.utime(known)
            return Packed(told["digest"], path, told["size"])
    return _pack_anew(parcel, folder, known)


def _pack_anew(parcel: Parcel, folder: Path, known: Path) -> Packed:
    if not parcel.entries:
        raise _refused(f"there is nothing to send in {parcel.folder}")
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as draft:
        try:
            digest, size = package.pack(parcel.entries, draft, _most())
        except BadPackage as error:
            os.unlink(draft.name)
            raise _refused(f"the code in {parcel.folder} is too much to send: {error}", hint=_largest(parcel)) from None
        except OSError as error:
            os.unlink(draft.name)
            what = f"{error.filename}: {error.strerror}" if error.filename else "a file changed while it was read"
            raise _refused(f"the code in {parcel.folder} cannot be packed: {what}") from None
    path = folder / digest.removeprefix("sha256:")
    os.replace(draft.name, path)
    files.write_private(known, json.dumps({"digest": digest, "size": size}))
    _forget(folder)
    return Packed(digest, path, size)


def _forget(folder: Path) -> None:
    """The oldest, where there are many."""
    known = sorted(folder.glob("*.json"), key=lambda one: one.stat().st_mtime, reverse=True)
    stays = set()
    for one in known[:MOST_REMEMBERED]:
        with contextlib.suppress(OSError, ValueError, KeyError):
            stays.add(str(json.loads(files.read_private(one))["digest"]).removeprefix("sha256:"))
    for old in known[MOST_REMEMBERED:]:
        old.unlink(missing_ok=True)
    for path in folder.iterdir():
        if len(path.name) == 64 and path.name not in stays:
            path.unlink(missing_ok=True)


def _most() -> int:
    given = os.environ.get(MOST_VARIABLE, "")
    return min(int(given), package.MOST_PACKED) if given.isascii() and given.isdigit() else package.MOST_PACKED


def _largest(parcel: Parcel) -> str:
    largest = sorted(parcel.entries, key=lambda one: -one.size)[:_LARGEST_SHOWN]
    shown = ", ".join(f"{one.name} ({package.shown(one.size)})" for one in largest)
    return f"name what is no code in {IGNORE}; the largest: {shown}"


def _refused(message: str, hint: str = "") -> InvalidRequest:
    return InvalidRequest(message, problems=(Problem("package", message),), hint=hint)


# The program, seen from the package ----------------------------------------------------------------


def is_here(given: Mapping[str, Any]) -> bool:
    """Whether the program is in the folder that would travel. If not it is in the image, or wherever workers run."""
    folder = Path(given.get("working_dir") or ".").absolute()
    module, script = given.get("module"), given.get("script")
    words = [script] if script is not None else list(given.get("command") or ())
    if module == CALLER:
        return True
    if module is not None:
        top = folder / str(module).partition(".")[0]
        return top.is_dir() or top.with_suffix(".py").is_file()
    for word in words:
        path = Path(os.path.abspath(folder / os.fspath(word)))
        if path.is_file() and path.is_relative_to(folder):
            return True
    return False


def placed(given: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The folder that travels, and the request as it is from within: paths are relative to it."""
    values = dict(given)
    asked = values.pop("working_dir", None)
    folder = Path(asked).absolute() if asked is not None else Path.cwd()
    if not folder.is_dir():
        raise _refused(f"there is no folder {folder}")
    if values.get("module") == CALLER:
        folder, values["args"] = _function_placed(folder, values["args"])
    script = values.get("script")
    if script is not None:
        values["script"] = _within(folder, (folder if asked is not None else Path.cwd()) / os.fspath(script), "script")
    values["working_dir"] = ""  # the package's top
    return folder, values


def _function_placed(folder: Path, words: Sequence[str]) -> tuple[Path, list[str]]:
    """Of a decorated function: where its module is imported from travels, too."""
    target, sent, root = words
    if not Path(root).is_relative_to(folder):
        folder = Path(root)
    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        target = f"{_within(folder, Path(where), 'file')}:{name}"
    return folder, [target, sent, os.path.relpath(root, folder)]


def _within(folder: Path, path: Path, what: str) -> str:
    try:
        return str(Path(os.path.abspath(path)).relative_to(os.path.abspath(folder)))
    except ValueError:
        where = f"the {what} {path} is not in {folder}, which is what is sent"
        raise _refused(where, hint="start in a folder above it, or name one as the working directory") from None


def requirements_of(given: object) -> object:
    """A list as it is; of a file its lines, without comments."""
    if not isinstance(given, str | os.PathLike):
        return given
    try:
        text = Path(given).read_text()
    except OSError as error:
        raise _refused(f"the requirements in {os.fspath(given)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _refused(f"the requirements in {os.fspath(given)} cannot be read: it is no text") from None
    joined = text.replace("\\\n", " ")
    lines = (line.split(" #")[0].strip() for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
