"""What does etcd's v2 key space answer? A tree of texts, an index that counts its changes, the last of those changes.

No I/O: `serving` speaks HTTP for it. Left out is what nobody here needs: ttl, conditions, in-order keys. An order that
asks for them is refused, never half done.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from muster import errors

NOT_FOUND = 100
MOST_EVENTS = 1000  # what etcd remembers, too
MOST_KEY = 4096
MOST_NAMES = 64  # in one path
NODE_COST = 512
MOST_VALUE = 16 * 1024


class Refused(Exception):
    """An order that is not carried out, as etcd says it."""

    def __init__(self, status: int, code: int, message: str, cause: str) -> None:
        super().__init__(f"{message}: {cause}")
        self.status, self.code, self.message, self.cause = status, code, message, cause

    def body(self, index: int) -> dict[str, Any]:
        return {"errorCode": self.code, "message": self.message, "cause": self.cause, "index": index}


@contextlib.contextmanager
def as_errors() -> Iterator[None]:
    """For callers in this process: what is not there is no error, what cannot be is `InvalidRequest`."""
    try:
        yield
    except Refused as why:
        if why.code != NOT_FOUND:
            raise errors.InvalidRequest(str(why)) from why


def not_found(path: str) -> Refused:
    return Refused(404, NOT_FOUND, "Key not found", path)


def invalid(cause: str) -> Refused:
    return Refused(400, 209, "Invalid field", cause)


@dataclass
class Node:
    """A key with its value, or a directory."""

    created: int
    modified: int
    value: str | None = None  # None: a directory
    children: dict[str, Node] = field(default_factory=dict)

    def shown(self, path: str, *, depth: int = 0, value: bool = True) -> dict[str, Any]:
        """As etcd writes it, with so many levels of what is below."""
        made: dict[str, Any] = {} if path == "/" else {"key": path}
        if self.value is None:
            made["dir"] = True
            if depth and self.children:
                below = path.rstrip("/")
                made["nodes"] = [
                    child.shown(f"{below}/{name}", depth=depth - 1) for name, child in sorted(self.children.items())
                ]
        elif value:
            made["value"] = self.value
        return made if path == "/" else made | {"modifiedIndex": self.modified, "createdIndex": self.created}

    def cost(self) -> int:
        """About how many bytes it takes, with what is below."""
        return NODE_COST + len(self.value or "") + sum(child.cost() for child in self.children.values())

    def files(self, path: str) -> Iterator[tuple[str, str]]:
        if self.value is not None:
            yield path, self.value
        for name, child in self.children.items():
            yield from child.files(f"{path}/{name}")


@dataclass(frozen=True)
class KeyChange:
    """One change."""

    index: int
    path: str
    body: dict[str, Any]
    created: bool = False
    whole: bool = False  # a directory went, with everything below it

    def concerns(self, path: str, recursive: bool) -> bool:
        """Whether somebody who waits for that path hears of it."""
        if self.path == path:
            return True
        return (recursive and is_below(self.path, path)) or (self.whole and is_below(path, self.path))


def is_below(path: str, above: str) -> bool:
    return path.startswith(above if above == "/" else f"{above}/")


def normal(path: str) -> str:
    """The one way to write it: slashes between names, one in front. Raises `Refused`."""
    names = [name for name in path.split("/") if name]
    made = "/" + "/".join(names)
    if any(name in (".", "..") for name in names) or "\0" in made:
        raise invalid(f"{made!r} is no path")
    if len(names) > MOST_NAMES or len(made.encode(errors="surrogatepass")) > MOST_KEY:
        raise invalid(f"a path has at most {MOST_NAMES} names and {MOST_KEY} bytes")
    return made


class KeySpace:
    """The tree. Paths are those that `normal` gives."""

    def __init__(self, *, keep: int = MOST_EVENTS) -> None:
        self._root = Node(0, 0)
        self._events: deque[KeyChange] = deque(maxlen=keep)
        self.index = 0
        self.size = 0  # what all nodes cost

    def find(self, path: str) -> Node:
        node, way = self._root, ""
        for name in path.split("/")[1:] if path != "/" else ():
            if node.value is not None:
                raise Refused(400, 104, "Not a directory", way)
            way += f"/{name}"
            if name not in node.children:
                raise not_found(way)
            node = node.children[name]
        return node

    def get(self, path: str, *, recursive: bool = False) -> dict[str, Any]:
        return {"action": "get", "node": self.find(path).shown(path, depth=MOST_NAMES if recursive else 1)}

    def files(self, path: str) -> dict[str, str]:
        """Path → value of all keys there and below."""
        node = self._seen(path)
        return dict(node.files(path.rstrip("/"))) if node else {}

    def set(self, path: str, value: str) -> KeyChange:
        if path == "/":
            raise Refused(400, 107, "Root is read only", path)
        if len(value.encode(errors="surrogatepass")) > MOST_VALUE:
            raise Refused(413, 209, "Invalid field", f"a value has at most {MOST_VALUE} bytes")
        old = self._seen(path)
        if old is not None and old.value is None:
            raise Refused(403, 102, "Not a file", path)
        self.index += 1
        node = Node(self.index, self.index, value)
        self._above(path).children[path.rpartition("/")[2]] = node
        self.size += node.cost() - (old.cost() if old is not None else 0)
        body = {"action": "set", "node": node.shown(path)}
        if old is not None:
            body["prevNode"] = old.shown(path)
        return self._note(KeyChange(self.index, path, body, created=old is None))

    def delete(self, path: str, *, recursive: bool = False, directory: bool = False) -> KeyChange:
        if path == "/":
            raise Refused(400, 107, "Root is read only", path)
        node = self.find(path)
        whole = node.value is None
        if whole and not (recursive or directory):
            raise Refused(403, 102, "Not a file", path)
        if whole and node.children and not recursive:
            raise Refused(403, 108, "Directory not empty", path)
        self.index += 1
        del self._above(path).children[path.rpartition("/")[2]]
        self.size -= node.cost()
        gone = Node(node.created, self.index, node.value)
        body = {"action": "delete", "node": gone.shown(path, value=False), "prevNode": node.shown(path)}
        return self._note(KeyChange(self.index, path, body, whole=whole))

    def since(self, index: int, path: str, recursive: bool) -> KeyChange | None:
        """The first change from that index on that concerns the path; None if it has yet to come."""
        if self._events and index < self._events[0].index:
            cause = f"the requested history has been cleared [{self._events[0].index}/{index}]"
            raise Refused(400, 401, "The event in requested index is outdated and cleared", cause)
        found = (event for event in self._events if event.index >= index and event.concerns(path, recursive))
        return next(found, None)

    def _seen(self, path: str) -> Node | None:
        try:
            return self.find(path)
        except Refused as why:
            if why.code != NOT_FOUND:
                raise
            return None

    def _above(self, path: str) -> Node:
        """The directory that the path is in, made where it is missing."""
        node = self._root
        for part in path.split("/")[1:-1]:
            if part not in node.children:
                node.children[part] = Node(self.index, self.index)
                self.size += NODE_COST
            node = node.children[part]
        return node

    def _note(self, event: KeyChange) -> KeyChange:
        self._events.append(event)
        return event
