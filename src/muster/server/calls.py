"""What did a client send? Path, query, headers and body of one call, read strictly, with every problem listed.

Bodies are parsed here and not by the framework: one description of each record (`types.codec`) serves the wire, the
published schema and the errors.
"""

from __future__ import annotations

import asyncio
import json
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.requests import Request

from muster.core.training.edits import refused
from muster.errors import InvalidRequest, NotFound, TooLarge
from muster.ports import Stored
from muster.server.auth import Identity
from muster.server.services import Services
from muster.types.codec import Invalid, Problem, camel, from_wire
from muster.types.training import DNS_LABEL, Key

T = TypeVar("T")

UID_HEADER = "x-muster-uid"

MOST = (1 << 53) - 1  # beyond it, JSON numbers are no longer exact
MOST_BYTES = 1 << 20
BODY_TIMEOUT_S = 30.0
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
_DEEPEST = 64
_DNS_LABEL = re.compile(DNS_LABEL)
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][-+]?[0-9]{1,3})?")
_FLAGS = {"true": True, "false": False}
_VERSION = re.compile(r'(?:W/)?"([0-9]{1,15})"|([0-9]{1,15})')  # the second without the quotes that curl users forget


@dataclass(frozen=True)
class Call:
    """One request of one caller."""

    services: Services
    request: Request

    @property
    def identity(self) -> Identity:
        identity: Identity = self.request.scope["muster.identity"]
        return identity

    @property
    def namespace(self) -> str:
        """The namespace of the address; what cannot be one does not exist."""
        namespace: str = self.request.path_params["namespace"]
        if not is_label(namespace, 63):
            raise NotFound(f"there is no namespace {namespace[:80]!r}")
        return namespace

    @property
    def key(self) -> Key:
        namespace, name = self.namespace, self.request.path_params["name"]
        if not is_label(name, 52):
            raise no_training(Key(namespace, name[:80]))
        return Key(namespace, name)

    def readable(self) -> Key:
        key = self.key
        self.identity.must_read(key.namespace)
        return key

    def writable(self) -> Key:
        key = self.key
        self.identity.must_write(key.namespace)
        return key

    def found(self, key: Key) -> Stored:
        stored = self.services.store.get(key)
        if stored is None:
            raise no_training(key)
        self.must_be_meant(stored)
        return stored

    def must_be_meant(self, stored: Stored) -> None:
        """Whoever names a uid means that very training, not another one that was given its name."""
        meant = self.header(UID_HEADER)
        if meant and meant != stored.uid:
            raise NotFound(
                f"training {stored.key} was deleted; another one has its name now",
                hint=f"get {stored.key.name!r} again to follow the new one",
            )

    def header(self, name: str) -> str | None:
        found: str | None = self.request.headers.get(name)
        return found

    def query(self, record: type[T]) -> T:
        return read_query(record, self.request.scope["query_string"])

    async def json(self, *kinds: str, empty: object = None) -> object:
        """The parsed body. `empty` is what no body at all stands for; None: there must be one."""
        raw = await read_body(self.request)
        if not raw and empty is not None:
            return empty
        check_media_type(self.header("content-type"), kinds or (JSON,))
        return parse_json(raw)

    async def record(self, record: type[T], *, empty: object = None) -> T:
        data = await self.json(empty=empty)
        try:
            return from_wire(record, data)
        except Invalid as invalid:
            raise refused(list(invalid.problems), "the body") from None

    def expected_version(self) -> int | None:
        """The version that If-Match insists on."""
        given = self.header("if-match")
        if given is None or given.strip() == "*":
            return None
        match = _VERSION.fullmatch(given.strip())
        if match is None:
            raise refused([Problem("If-Match", 'must be a version in quotes, like "42", or *')], "the request")
        return int(match[1] or match[2])


def is_label(text: str, longest: int) -> bool:
    return len(text) <= longest and _DNS_LABEL.fullmatch(text) is not None


def no_training(key: Key) -> NotFound:
    return NotFound(
        f"there is no training {key.name!r} in namespace {key.namespace!r}",
        hint=f"`muster ps -n {key.namespace}` lists what is there",
    )


# Queries -----------------------------------------------------------------------------------------


def read_query(record: type[T], raw: bytes) -> T:
    """A query string as a record; texts become what the record's fields are."""
    try:
        pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True, max_num_fields=100) if raw else []
    except ValueError:
        raise refused([Problem("query", "has more than 100 parameters")], "the query") from None
    hints = {camel(name): hint for name, hint in typing.get_type_hints(record).items()}
    problems = [Problem(name[:80], "is given twice") for name in _twice([name for name, _ in pairs])]
    data = {name: _converted(text, hints.get(name)) for name, text in pairs}
    try:
        read = from_wire(record, data)
    except Invalid as invalid:
        raise refused([*problems, *invalid.problems], "the query") from None
    if problems:
        raise refused(problems, "the query")
    return read


def _twice(names: list[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def _converted(text: str, hint: Any) -> object:
    """What a text stands for; one that does not fit stays a text, which the record then refuses by name."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if bool in kinds:
        return _FLAGS.get(text, text)
    if int in kinds:
        return int(text) if _WHOLE.fullmatch(text) else text
    if float in kinds:
        return float(text) if _NUMBER.fullmatch(text) else text
    return text


def read_selector(text: str) -> dict[str, str]:
    """`a=b,c=d` as the labels that must be there."""
    clauses = [clause.replace("==", "=").partition("=") for clause in text.split(",")] if text else []
    return {name: value for name, _, value in clauses}


# Bodies ------------------------------------------------------------------------------------------


async def read_body(request: Request) -> bytes:
    """All of the body, or TooLarge as soon as that is certain."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > MOST_BYTES:
        raise _too_large()
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BYTES:
                    raise _too_large()
                parts.append(part)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT_S:g} seconds") from None
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise refused([Problem("Content-Encoding", "is not understood: send the body as it is")], "the request")
    return b"".join(parts)


def _too_large() -> TooLarge:
    return TooLarge(
        f"the body is larger than {MOST_BYTES} bytes",
        hint="keep data in files that the training reads, not in its description",
    )


def check_media_type(given: str | None, allowed: tuple[str, ...]) -> None:
    kind = (given or allowed[0]).partition(";")[0].strip().lower()
    if kind not in allowed:
        wanted = f"must be {' or '.join(allowed)}, not {kind[:80]!r}"
        raise refused([Problem("Content-Type", wanted)], "the request")


def parse_json(raw: bytes) -> object:
    """JSON as RFC 8259 has it: UTF-8, no NaN, and no deeper than any document of ours."""
    if not raw:
        raise refused([Problem("body", "is missing: JSON is expected")], "the body")
    if raw.count(b"[") + raw.count(b"{") > _DEEPEST and _depth(raw) > _DEEPEST:
        raise refused([Problem("body", f"is nested deeper than {_DEEPEST} levels")], "the body")
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        # The text around the position is not shown: it may be a secret.
        where = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise refused([Problem("body", where)], "the body") from None
    except UnicodeDecodeError as error:
        raise refused([Problem("body", f"is not UTF-8 at byte {error.start}")], "the body") from None
    except (ValueError, RecursionError):
        raise refused([Problem("body", "has a number that is not a JSON number")], "the body") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def _depth(raw: bytes) -> int:
    """How deep the brackets go that are outside of texts. A text without an end is taken to the end, in one pass."""
    deepest = depth = 0
    for match in re.finditer(rb'"(?:[^"\\]+|\\.)*+"?|[\[{]|[\]}]', raw, re.DOTALL):
        opened = match[0]
        if opened in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif opened in (b"]", b"}"):
            depth -= 1
    return deepest
