"""The name of an environment: a hash of all that pip or uv reads to make it.

That is the lines, the variables that they use, every setting of pip and uv in variables and files, and the content of
the files and folders that any of them names. What lies behind an address on the network is covered by its address only.
Too much in the name costs another environment; too little lets one training run what another one asked for. Standard
library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import stat
import sys
import tomllib
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

MOST_BYTES = 4 << 30
MOST_FILES = 200_000
MOST_TEXT = 1 << 20
_CHUNK = 1 << 20
_SETTING = re.compile(
    r"(PIP|UV)_.*|(HTTP|HTTPS|FTP|ALL|NO)_PROXY|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|NETRC|XDG_CONFIG_(HOME|DIRS)",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"\$\{([A-Za-z0-9_]+)\}")
_BETWEEN_WORDS = re.compile(r"[\s,;=\"'()<>\[\]{}]+")
_LOCAL = re.compile(r"(?:^|[+@])(file:.*)")  # `git+file:…` and `name@file:…` are local, too
_SHORT = re.compile(r"-[A-Za-z][^-]")  # an option with its value in one word
_EDITABLE = ("-e", "--editable")
# As pip knows archives; a line that is nothing but such a name is a file.
_ARCHIVES = (".whl", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz", ".xz", ".txz", ".tlz", ".lz", ".lzma")
_TEXTS = ("", ".txt", ".in", ".conf", ".cfg", ".ini", ".toml")
_LEFT_OUT = ("__pycache__",)


class CannotMake(Exception):
    """Says in one line why an environment cannot be made."""


def name_of(lines: Sequence[str], env: Mapping[str, str], folder: Path) -> str:
    """Return the name for those lines, read in that folder with those variables."""
    inputs = _Inputs(env, folder)
    inputs.add(sys.version, platform.machine(), sys.prefix)
    uv = shutil.which("uv", path=env.get("PATH"))
    inputs.add("installer", uv or "pip")
    for line in lines:
        inputs.add_text(line, is_option=line.strip().startswith("-"))
    for name in sorted(env):
        if _SETTING.fullmatch(name):
            inputs.add("variable", name)
            inputs.add_text(env[name], is_option=True)
    for path in _settings_files(env):
        inputs.add_path(path, is_option=True)
    if uv:
        for above in (folder, *folder.parents):
            inputs.add_path(above / "uv.toml", is_option=True)
            inputs.add_project(above / "pyproject.toml")
    return inputs.name()


def _settings_files(env: Mapping[str, str]) -> Iterator[Path]:
    home = Path(env.get("HOME") or os.path.expanduser("~"))
    own = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    shared = [Path(word) for word in (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":") if word]
    for folder in (own, *shared, Path("/etc")):
        yield from (folder / "pip" / "pip.conf", folder / "uv" / "uv.toml")
    yield from (Path("/etc/pip.conf"), home / ".pip" / "pip.conf", home / ".pydistutils.cfg")
    yield Path(env.get("NETRC") or home / ".netrc")


class _Inputs:
    """A hash that grows. Each file is read once."""

    def __init__(self, env: Mapping[str, str], folder: Path) -> None:
        self._env = env
        self._folder = folder
        self._hash = hashlib.sha256()
        self._seen: set[str] = set()
        self._bytes = self._files = 0

    def name(self) -> str:
        return self._hash.hexdigest()[:32]

    def add(self, *words: str) -> None:
        for word in words:
            data = word.encode(errors="surrogateescape")
            self._hash.update(len(data).to_bytes(8) + data)

    def add_text(self, text: str, *, is_option: bool, folder: Path | None = None) -> None:
        """Add a text with the variables and files that it names; `folder` has the file that it stands in."""
        self.add(text)
        if any(line.strip().startswith(_EDITABLE) for line in text.splitlines()):
            self.add("editable in", str(self._folder))  # the environment then leads to this very folder
        for variable in _VARIABLE.findall(text):
            self.add("used", variable, self._env.get(variable, ""))
        expanded = _VARIABLE.sub(lambda match: self._env.get(match[1], match[0]), text)
        words = (*_BETWEEN_WORDS.split(expanded), *_with_spaces(expanded))
        for path in (path for word in words for path in _paths_in(word)):
            if path and (is_option or "/" in path or path.startswith(".") or path.lower().endswith(_ARCHIVES)):
                for base in dict.fromkeys((self._folder, folder or self._folder)):
                    self.add_path(base / os.path.expanduser(path), is_option=is_option)

    def add_path(self, path: Path, *, is_option: bool) -> None:
        """Add a file, or a folder with all that is in it. What is not there adds nothing."""
        try:
            real = os.path.realpath(path)
            mode = os.stat(real).st_mode
        except (OSError, ValueError):
            return
        if real in self._seen:
            return
        self._seen.add(real)
        if stat.S_ISDIR(mode):
            self._add_folder(Path(real))
        elif stat.S_ISREG(mode):
            self._add_file(Path(real))
            if Path(real).suffix in _TEXTS and os.path.getsize(real) <= MOST_TEXT:
                text = Path(real).read_text(errors="replace")
                self.add_text(text, is_option=is_option, folder=Path(real).parent)

    def add_project(self, path: Path) -> None:
        """Add what a project says to uv."""
        try:
            settings = tomllib.loads(path.read_text()).get("tool", {}).get("uv")
        except (OSError, ValueError, AttributeError):
            return
        if settings is not None:
            self.add_text(json.dumps(settings, default=str), is_option=True, folder=path.parent)

    def _add_folder(self, top: Path) -> None:
        self.add("folder")
        for where, folders, names in os.walk(top):
            folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
            for name in folders:
                if os.path.islink(os.path.join(where, name)):
                    self.add_path(Path(where, name), is_option=False)
            for name in sorted(names):
                path = Path(where, name)
                self.add(str(path.relative_to(top)))
                if path.is_file():  # not a pipe
                    self._add_file(path)

    def _add_file(self, path: Path) -> None:
        self._files += 1
        try:
            with open(path, "rb") as file:
                self.add("file", str(os.fstat(file.fileno()).st_size))
                while chunk := file.read(_CHUNK):
                    self._bytes += len(chunk)
                    if self._bytes > MOST_BYTES or self._files > MOST_FILES:
                        raise CannotMake(f"the requirements name more files than can be compared, {path} among them")
                    self._hash.update(chunk)
        except OSError as error:
            raise CannotMake(f"{path} cannot be read: {error.strerror}") from None


def _with_spaces(text: str) -> Iterator[str]:
    """Yield what pip could open whose name has spaces: each line, and the rest of it after an option or @."""
    for line in text.splitlines():
        bare = re.sub(r"(^|\s)#.*", "", line).strip()
        for start in [0, *(match.end() for match in re.finditer(r"[\s=]+(?=\S)|@\s*", bare))]:
            rest = re.split(r"\s;|\s--|\[[^\[\]]*\]$", bare[start:])[0]
            yield from (form for form in (rest, _unquoted(rest)) if " " in form)


def _unquoted(text: str) -> str:
    """Return a text as a shell reads it, where it is one word."""
    try:
        words = shlex.split(text)
    except ValueError:
        return ""
    return words[0] if len(words) == 1 else ""


def _paths_in(word: str) -> Iterator[str]:
    """Yield what pip could open for a word: an address of a local file or repository without what stands around it."""
    if (match := _LOCAL.search(word)) is not None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(match[1]).path)
        yield from dict.fromkeys((path, path.rpartition("@")[0] or path))  # a revision stands behind @
    elif "://" not in word:
        yield word.partition("#")[0]
        if _SHORT.match(word):
            yield word[2:]
