"""The files that go along with a training, and the name of its program there.

They are the files that git does not ignore, or all where there is no git, without those that `.musterignore` names. A
file that looks like a secret travels only if `.musterignore` names it wholly behind a `!`. No link is followed, and
none that leads out of the folder travels. What was packed is remembered by names, sizes and times of the
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from muster import files, package
from muster.errors import InvalidRequest
from muster.package import BadPackage, Entry, Tree
from muster.sdk.secret_names import SEARCHED_BYTES, may_contain_secret, secret_content, secret_pattern
from muster.types.codec import Problem

IGNORE = ".musterignore"
CALLER = "muster.sdk.call"  # what runs a decorated function
MOST_VARIABLE = "MUSTER_PACKAGE_BYTES"
MOST_REMEMBERED = 50
_GIT_S = 30.0
_LARGEST_SHOWN = 3
_NOBODYS = re.compile(r"(^|/)(\.git|\.hg|\.svn|__pycache__|\.venv)/|\.pyc$|(^|/)\.musterignore$")
_SHOWN_NAMES = 5


class Why(StrEnum):
    """Why a file stays."""

    SECRET = "looks like a secret"
    ODD = "is neither a file nor a link"
    IGNORED = f"named in {IGNORE}"


@dataclass(frozen=True)
class LeftOut:
    """A file that does not travel."""

    name: str
    why: Why
    pattern: str = ""  # the pattern of its name, or a description of the secret in its text

    def explanation(self) -> str:
        if self.why is not Why.SECRET:
            return f"left out: {self.name} ({self.why})"
        return f"left out: {self.name} ({self.why}: {self.pattern}); to send it, add the line !{self.name} to {IGNORE}"


@dataclass(frozen=True)
class Parcel:
    """The files of a folder that would travel, and those that would not."""

    folder: Path
    entries: tuple[Entry, ...]
    stamp: str  # of names, rights, sizes and times: what changes a file changes one of them
    left_out: tuple[LeftOut, ...] = ()

    @property
    def size(self) -> int:
        return sum(one.size for one in self.entries)

    def warnings(self) -> Iterator[str]:
        """Return a line for each reason why files stay that the user has not named."""
        for why in (Why.SECRET, Why.ODD):
            if names := [file.name for file in self.left_out if file.why is why]:
                yield f"left behind: {_listed(names)} ({why})"

    def explanations(self) -> Iterator[str]:
        """Return a line for each file that stays; those that the user has named have one together."""
        yield from (file.explanation() for file in self.left_out if file.why is not Why.IGNORED)
        if names := [file.name for file in self.left_out if file.why is Why.IGNORED]:
            yield f"left out: {_listed(names)} ({Why.IGNORED})"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


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
    """List what would travel. InvalidRequest if something in the folder cannot."""
    folder = folder.resolve()
    lines = _ignore_lines(folder)
    ignored, wanted = _patterns(lines), _named_on_purpose(lines)
    entries: list[Entry] = []
    left_out: list[LeftOut] = []
    problems: list[Problem] = []
    stamp = hashlib.sha256(str(folder).encode())
    with Tree(folder) as tree:
        for name in sorted(_names(folder, tree)):
            if _NOBODYS.search(name):
                continue
            if ignored(name):
                left_out.append(LeftOut(name, Why.IGNORED))
                continue
            if name not in wanted and (pattern := secret_pattern(name)) is not None:
                left_out.append(LeftOut(name, Why.SECRET, pattern))
                continue
            try:
                about = tree.stat(name)
                entry = _entry(name, about, tree, problems)
                content = _secret_in(name, entry, tree) if name not in wanted else None
            except OSError:
                continue  # it is gone, or a folder above it is a link now
            if entry is None:
                left_out.append(LeftOut(name, Why.ODD))
                continue
            if content is not None:
                left_out.append(LeftOut(name, Why.SECRET, content))
                continue
            entries.append(entry)
            seen = (name, about.st_mode, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino, entry.link)
            stamp.update(repr(seen).encode(errors="surrogateescape"))
    if problems:
        listed = "; ".join(f"{one.field}: {one.message}" for one in problems[:5])
        raise InvalidRequest(f"the code of {folder} cannot be sent: {listed}", problems=tuple(problems))
    return Parcel(folder, tuple(entries), stamp.hexdigest(), tuple(left_out))


def _ignore_lines(folder: Path) -> Sequence[str]:
    try:
        return files.read_text(folder / IGNORE).splitlines()
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise _refused(f"{folder / IGNORE} cannot be read: {why}") from None


def _named_on_purpose(lines: Iterable[str]) -> Collection[str]:
    """Return the files that a line `!NAME` names wholly: they travel though they look like secrets."""
    return {line.strip()[1:].removeprefix("/") for line in lines if line.startswith("!")}


def _patterns(lines: Sequence[str]) -> Callable[[str], bool]:
    if not lines:
        return lambda name: False
    import pathspec

    match: Callable[[str], bool] = pathspec.GitIgnoreSpec.from_lines(lines).match_file
    return match


def _names(folder: Path, tree: Tree) -> Iterator[str]:
    """Return all files and links below, as git sees them."""
    known = _known_to_git(folder)
    if known is None:
        yield from _walked(folder, "")
        return
    for name in known:
        try:
            is_folder = stat.S_ISDIR(tree.stat(name).st_mode)
        except OSError:
            continue  # git has not noticed yet that it is gone
        if is_folder:  # a repository within the repository
            yield from _walked(folder, name)
        else:
            yield name


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


def _entry(name: str, about: os.stat_result, tree: Tree, problems: list[Problem]) -> Entry | None:
    """Return None if it is neither a file nor a link."""
    if not _is_plain(name):
        problems.append(Problem(repr(name)[:120], "its name is not UTF-8, or has control characters"))
    if stat.S_ISLNK(about.st_mode):
        target = tree.link_of(name)
        if not package.stays_inside(name, target):
            problems.append(Problem(name[:120], f"is a link that leads out of the folder, to {target[:120]!r}"))
        elif not _is_plain(target) or package.wrong_link(name, target):
            problems.append(Problem(name[:120], f"is a link that no package can have, to {target[:120]!r}"))
        return Entry(name, link=target)
    if not stat.S_ISREG(about.st_mode):
        return None
    return Entry(name, about.st_size, bool(about.st_mode & 0o100), inode=(about.st_dev, about.st_ino))


def _secret_in(name: str, entry: Entry | None, tree: Tree) -> str | None:
    """Return a description of the secret in the text of a small file, or None. Packing reports an unreadable file."""
    if entry is None or entry.link is not None or not may_contain_secret(name, entry.size):
        return None
    try:
        with open(tree.open(name), "rb") as file:
            return secret_content(file.read(SEARCHED_BYTES))
    except OSError:
        return None


def _is_plain(text: str) -> bool:
    """Return whether it is UTF-8 without control characters."""
    return text.isprintable() and not "\udc80" <= max(text) <= "\udcff"


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
            digest, size = package.pack(parcel.folder, parcel.entries, draft, _most())
        except BadPackage as error:
            os.unlink(draft.name)
            raise _refused(f"the code in {parcel.folder} is too much to send: {error}", hint=_largest(parcel)) from None
        except OSError as error:
            os.unlink(draft.name)
            what = f"{error.filename}: {error.strerror}"
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
