"""How records travel: JSON on the wire, frozen dataclasses in Python, one JSON schema for both.

A record's fields, their types and their limits (`limited`) are the only description that there is; reading,
writing and the published schema all follow from it. Reading collects every problem before it gives up.
None means absent; an empty list is present and empty.

The API spells names in camelCase. Frames between agents and coordinators, and what coordinators keep, spell them as
Python does (`names=plain`). A record that is marked with `as_list` travels as the list of its values.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import Any, TypeVar

T = TypeVar("T")
Names = Callable[[str], str]  # how a field's name is spelled on the wire

MOST = 1 << 53  # beyond it a number is not the same number for everybody who reads JSON
_MOST_GUESSES = 20


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a document: where, and what."""

    field: str
    message: str


class Invalid(ValueError):
    """Everything that is wrong with a document."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{problem.field}: {problem.message}" for problem in problems))
        self.problems = tuple(problems)


def limited(default: Any = MISSING, *, factory: Any = MISSING, **limits: Any) -> Any:
    """A dataclass field with limits: ge, gt, le, pattern, max_length, max_items, choices, about."""
    return field(default=default, default_factory=factory, metadata={"limits": limits})


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def plain(name: str) -> str:
    return name


def as_list(cls: type[T]) -> type[T]:
    """Of a dataclass: it travels as a list, in the order of its fields. New fields come last, with a default."""
    cls.__travels_as_list__ = True  # type: ignore[attr-defined]
    return cls


def to_wire(record: Any, *, names: Names = camel) -> dict[str, Any]:
    """A record as JSON-ready values."""
    kind: Any = type(record)
    return typing.cast(dict[str, Any], _encoder(kind, names)(record))


def from_wire(cls: type[T], data: object, *, strict: bool = True, at: str = "", names: Names = camel) -> T:
    """A record from JSON values; Invalid lists every problem. Not strict: fields of a newer version are dropped."""
    problems: list[Problem] = []
    kind: Any = cls
    value = _decoder(kind, names)(data, at, problems, strict)
    if problems:
        raise Invalid(problems)
    return typing.cast(T, value)


def prepare(kinds: Iterable[type], *, names: Names = camel) -> None:
    """Find out now how these travel, and not when the first one does."""
    for kind in kinds:
        _encoder(kind, names)
        _decoder(kind, names)


def schema_of(cls: type) -> dict[str, Any]:
    """The JSON schema of a record."""
    return _schema(cls, {})


def is_text(value: object) -> bool:
    """Whether it can be written for everybody: half of a character cannot."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value))


def readable(text: str) -> str:
    """The same with marks for what cannot be written."""
    return text.encode("utf-8", "replace").decode()


def show_time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# Writing -----------------------------------------------------------------------------------------


@functools.cache
def _encoder(kind: Any, names: Names) -> Callable[[Any], Any]:
    kind = _bare(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _record_encoder(typing.cast(type, kind), names)
    if origin in (tuple, Sequence, frozenset):
        if origin is tuple and args[-1] is not Ellipsis:
            parts = [_encoder(part, names) for part in args]
            return lambda values: [
                None if value is None else write(value) for write, value in zip(parts, values, strict=True)
            ]
        item = _encoder(args[0], names)
        if origin is frozenset:
            return lambda values: sorted(item(value) for value in values)
        return lambda values: [item(value) for value in values]
    if kind is datetime:
        return show_time
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inner = _encoder(args[1], names)
        return lambda values: {str(key): None if value is None else inner(value) for key, value in values.items()}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return str
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return int
    return lambda value: value


def _record_encoder(cls: type, names: Names) -> Callable[[Any], Any]:
    parts = [(name, names(name), _encoder(hint, names)) for name, hint in _hints(cls).items()]
    if _is_list(cls):
        values = [(name, write) for name, _, write in parts]
        return lambda record: [
            None if (value := getattr(record, name)) is None else write(value) for name, write in values
        ]

    def encode(record: Any) -> dict[str, Any]:
        shown = {}
        for name, wire, write in parts:
            value = getattr(record, name)
            if value is not None:
                shown[wire] = write(value)
        return shown

    return encode


# Reading -----------------------------------------------------------------------------------------

_Read = Callable[[object, str, list[Problem], bool], Any]


@functools.cache
def _decoder(kind: Any, names: Names) -> _Read:
    kind = _bare(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        cls = typing.cast(type, kind)
        return _positional_decoder(cls, names) if _is_list(cls) else _record_decoder(cls, names)
    if origin is tuple and args[-1] is not Ellipsis:
        return _fixed_decoder([(_decoder(part, names), _optional(part)) for part in args])
    if origin in (tuple, Sequence, frozenset):
        return _list_decoder(_decoder(args[0], names), frozenset if origin is frozenset else tuple)
    if origin is typing.Literal:
        return _choice_decoder(args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_decoder(_bare(args[0]), _decoder(args[1], names), _optional(args[1]))
    if isinstance(kind, type) and issubclass(kind, StrEnum | IntEnum):
        return _enum_decoder(kind)
    if kind is datetime:
        return _read_time
    if kind is Any or kind is object:
        return lambda value, at, problems, strict: value
    return _scalar_decoder(kind)


def _record_decoder(cls: type, names: Names) -> _Read:
    hints = _hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)}
    readers = {
        names(name): (name, _decoder(hint, names), _limits(fields[name]), _optional(hint))
        for name, hint in hints.items()
    }
    required = [names(item.name) for item in fields.values() if item.init and not _has_default(item)]

    def read(data: object, at: str, problems: list[Problem], strict: bool) -> Any:
        if not isinstance(data, dict):
            problems.append(Problem(at or "body", f"must be an object, not {_kind_of(data)}"))
            return None
        before = len(problems)
        values = {}
        for wire, raw in data.items():
            path = f"{at}.{wire}" if at else str(wire)
            if wire not in readers:
                if strict:
                    # Looking for what was meant takes time that a body full of nonsense must not get.
                    meant = _nearest(wire, readers) if len(problems) < _MOST_GUESSES else ""
                    problems.append(Problem(path, f"unknown field{meant}"))
                continue
            name, reader, limits, optional = readers[wire]
            if raw is None:
                if not optional:
                    problems.append(Problem(path, "must not be null"))
                continue
            found = len(problems)
            values[name] = reader(raw, path, problems, strict)
            if limits and len(problems) == found:
                _check(values[name], limits, path, problems)
        for wire in required:
            if wire not in data:
                problems.append(Problem(f"{at}.{wire}" if at else wire, "is required"))
        return None if len(problems) > before else cls(**values)

    return read


def _positional_decoder(cls: type, names: Names) -> _Read:
    order = [names(item.name) for item in dataclasses.fields(cls)]
    inner = _record_decoder(cls, names)
    plainly = _plain_kinds(cls)

    def read(data: object, at: str, problems: list[Problem], strict: bool) -> Any:
        if plainly is not None and _is_plainly(data, plainly):
            return cls(*typing.cast(Any, data))
        if not isinstance(data, list) or (strict and len(data) > len(order)):
            problems.append(Problem(at, f"must be a list of at most {len(order)} values, not {_kind_of(data)}"))
            return None
        told = {name: value for name, value in zip(order, data, strict=False) if value is not None}
        return inner(told, at, problems, strict)

    return read


def _plain_kinds(cls: type) -> list[tuple[type, bool]] | None:
    """What the fields of a record are, and which may be None, if all of them are texts and numbers without a limit."""
    kinds = [(_bare(hint), _optional(hint)) for hint in _hints(cls).values()]
    simple = all(kind in (str, int) for kind, _ in kinds) and not any(map(_limits, dataclasses.fields(cls)))
    nothing = all(
        item.default is None for (_, optional), item in zip(kinds, dataclasses.fields(cls), strict=True) if optional
    )
    return kinds if simple and nothing else None


def _is_plainly(data: Any, kinds: list[tuple[type, bool]]) -> bool:
    """Whether there is nothing to find fault with. A world's seats are read by every member at the same moment."""
    if type(data) is not list or len(data) != len(kinds):
        return False
    return all(
        (value is None and optional) or (type(value) is kind and _is_usual(value))
        for value, (kind, optional) in zip(data, kinds, strict=True)
    )


def _is_usual(value: Any) -> bool:
    return value.isascii() if isinstance(value, str) else -MOST < value < MOST


def _list_decoder(reader: _Read, made: Callable[[Iterable[Any]], Any]) -> _Read:
    def read(data: object, at: str, problems: list[Problem], strict: bool) -> Any:
        if not isinstance(data, list):
            problems.append(Problem(at, f"must be a list, not {_kind_of(data)}"))
            return ()
        return made([reader(value, f"{at}[{index}]", problems, strict) for index, value in enumerate(data)])

    return read


def _fixed_decoder(readers: list[tuple[_Read, bool]]) -> _Read:
    def read(data: object, at: str, problems: list[Problem], strict: bool) -> Any:
        if not isinstance(data, list) or len(data) != len(readers):
            problems.append(Problem(at, f"must be a list of {len(readers)} values, not {_kind_of(data)}"))
            return ()
        return tuple(
            None if value is None and optional else reader(value, f"{at}[{index}]", problems, strict)
            for index, ((reader, optional), value) in enumerate(zip(readers, data, strict=True))
        )

    return read


def _mapping_decoder(key_kind: Any, reader: _Read, optional: bool) -> _Read:
    def read(data: object, at: str, problems: list[Problem], strict: bool) -> Any:
        if not isinstance(data, dict):
            problems.append(Problem(at, f"must be an object, not {_kind_of(data)}"))
            return {}
        values = {}
        for key, value in data.items():
            if key_kind is int and not str(key).lstrip("-").isdecimal():
                problems.append(Problem(f"{at}.{key}", "must have a whole number as its name"))
                continue
            told = None if value is None and optional else reader(value, f"{at}.{key}", problems, strict)
            values[key_kind(key)] = told
        return values

    return read


def _enum_decoder(kind: type[StrEnum] | type[IntEnum]) -> _Read:
    known: dict[Any, Any] = {one.value: one for one in kind}
    choices = [str(one) for one in known]

    def read(data: object, at: str, problems: list[Problem], strict: bool) -> Any:
        if type(data) in (str, int) and data in known:
            return known[data]
        problems.append(Problem(at, f"must be one of {', '.join(choices)}, not {data!r}"))
        return None

    return read


def _choice_decoder(choices: tuple[Any, ...]) -> _Read:
    def read(data: object, at: str, problems: list[Problem], strict: bool) -> Any:
        if not isinstance(data, str) or data not in choices:
            problems.append(Problem(at, f"must be one of {', '.join(map(str, choices))}, not {data!r}"))
        return data

    return read


def _scalar_decoder(kind: type) -> _Read:
    def read(data: object, at: str, problems: list[Problem], strict: bool) -> Any:
        if kind is float and isinstance(data, int) and not isinstance(data, bool) and abs(data) < MOST:
            return float(data)
        if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
            problems.append(Problem(at, f"must be {_KINDS.get(kind, kind.__name__)}, not {_kind_of(data)}"))
        elif isinstance(data, float) and not math.isfinite(data):
            problems.append(Problem(at, "must be a finite number"))
        elif isinstance(data, int) and not isinstance(data, bool) and abs(data) >= MOST:
            problems.append(Problem(at, "is too large a number"))
        elif isinstance(data, str) and not is_text(data):
            problems.append(Problem(at, "is not valid text"))
        return data

    return read


def _read_time(data: object, at: str, problems: list[Problem], strict: bool) -> Any:
    try:
        if isinstance(data, str):
            read = datetime.fromisoformat(data)
            return (read if read.tzinfo else read.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    problems.append(Problem(at, f"must be a time like 2026-01-31T12:00:00Z, not {data!r}"))
    return None


def _check(value: Any, limits: Mapping[str, Any], at: str, problems: list[Problem]) -> None:
    if "ge" in limits and value < limits["ge"]:
        problems.append(Problem(at, f"must be at least {limits['ge']}, not {value}"))
    if "gt" in limits and value <= limits["gt"]:
        problems.append(Problem(at, f"must be greater than {limits['gt']}, not {value}"))
    if "le" in limits and value > limits["le"]:
        problems.append(Problem(at, f"must be at most {limits['le']}, not {value}"))
    if "choices" in limits and value not in limits["choices"]:
        problems.append(Problem(at, f"must be one of {', '.join(limits['choices'])}, not {value!r}"))
    if "max_items" in limits and len(value) > limits["max_items"]:
        problems.append(Problem(at, f"has {len(value)} items, at most {limits['max_items']} are allowed"))
    texts = [("", value)] if isinstance(value, str) else []
    if isinstance(value, tuple):
        texts = [(f"[{index}]", item) for index, item in enumerate(value) if isinstance(item, str)]
    for where, text in texts:
        if "pattern" in limits and not re.fullmatch(limits["pattern"], text):
            problems.append(Problem(at + where, f"{text[:80]!r} {limits.get('about', 'has a wrong form')}"))
        elif len(text) > limits.get("max_length", math.inf):
            problems.append(Problem(at + where, f"is longer than {limits['max_length']} characters"))
        elif "\0" in text:
            problems.append(Problem(at + where, "must not contain a NUL character"))


_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _kind_of(data: object) -> str:
    if data is None:
        return "null"
    if isinstance(data, bool):
        return "true" if data else "false"
    if isinstance(data, int | float):
        return f"the number {str(data)[:40]}"
    if isinstance(data, str):
        return f"the text {data[:40]!r}"
    return "a list" if isinstance(data, list) else "an object"


def _nearest(name: object, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(str(name), known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


# Describing --------------------------------------------------------------------------------------


def _schema(kind: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    kind = _bare(kind)
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _record_schema(typing.cast(type, kind))
    if origin is tuple:
        inner = {key: value for key, value in limits.items() if key in ("pattern", "max_length")}
        listed: dict[str, Any] = {"type": "array", "items": _schema(typing.get_args(kind)[0], inner)}
        return listed | ({"maxItems": limits["max_items"]} if "max_items" in limits else {})
    if origin is typing.Literal:
        return {"type": "string", "enum": list(typing.get_args(kind))}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inside = typing.get_args(kind)[1]
        return {"type": "object"} | ({} if inside is Any else {"additionalProperties": _schema(inside, {})})
    if kind is datetime:
        return {"type": "string", "format": "date-time"}
    names = {str: "string", int: "integer", float: "number", bool: "boolean"}
    shown: dict[str, Any] = {"type": names[kind]} if kind in names else {}
    words = {"ge": "minimum", "le": "maximum", "max_length": "maxLength", "about": "description"}
    shown |= {words[key]: value for key, value in limits.items() if key in words}
    if "gt" in limits:
        shown |= {"minimum": limits["gt"], "exclusiveMinimum": True}
    if "pattern" in limits:
        shown["pattern"] = f"^(?:{limits['pattern']})$"
    return shown | ({"enum": list(limits["choices"])} if "choices" in limits else {})


def _record_schema(cls: type) -> dict[str, Any]:
    properties, required = {}, []
    hints = _hints(cls)
    for item in dataclasses.fields(cls):
        shown_as = _schema(hints[item.name], _limits(item))
        properties[camel(item.name)] = shown_as | ({"nullable": True} if _optional(hints[item.name]) else {})
        if not _has_default(item):
            required.append(camel(item.name))
    shown: dict[str, Any] = {"type": "object", "properties": properties}
    return shown | ({"required": required} if required else {})


# Hints -------------------------------------------------------------------------------------------


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


def _limits(item: dataclasses.Field[Any]) -> Mapping[str, Any]:
    limits: Mapping[str, Any] = item.metadata.get("limits", {})
    return limits


def _optional(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union) and type(None) in typing.get_args(kind)


def _bare(kind: Any) -> Any:
    """A hint without `| None`, and without the name that a NewType gives it."""
    if _optional(kind):
        left = [part for part in typing.get_args(kind) if part is not type(None)]
        assert len(left) == 1, f"{kind} cannot travel"
        kind = left[0]
    while isinstance(kind, typing.NewType):
        kind = kind.__supertype__
    return kind


def _has_default(item: dataclasses.Field[Any]) -> bool:
    return item.default is not MISSING or item.default_factory is not MISSING


def _is_list(cls: type) -> bool:
    return bool(getattr(cls, "__travels_as_list__", False))
