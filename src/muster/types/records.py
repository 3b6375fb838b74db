"""How is a record made without slowing a process down at its start?

`dataclasses.dataclass` compiles six methods for each class. A worker's agent and its guard know some eighty records,
and a machine may start hundreds of them at once. Here all records share their methods; what is asked of a frozen
dataclass (fields, replace, patterns, equality) holds for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError
from typing import Any, NoReturn, TypeVar, dataclass_transform

from muster.types.codec import limited

T = TypeVar("T")


class _Shape:
    """What the shared methods need to know of a record's class."""

    def __init__(self, cls: Any) -> None:
        fields = [one for one in dataclasses.fields(cls) if one.init]
        self.names = tuple(one.name for one in fields)
        self.known = frozenset(self.names)
        self.positional = tuple(one.name for one in fields if not one.kw_only)
        self.defaults = {one.name: one.default for one in fields if one.default is not MISSING}
        self.factories = {one.name: one.default_factory for one in fields if one.default_factory is not MISSING}
        self.completes = hasattr(cls, "__post_init__")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, limited))
def record(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass, and be quick about it."""

    def made(cls: type[T]) -> type[T]:
        if not cls.__doc__:
            cls.__doc__ = cls.__name__  # else one is made of its signature, which takes longer than all the rest
        record_class: Any = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
        record_class.__shape__ = _Shape(record_class)
        for name, method in _METHODS.items():
            setattr(record_class, name, method)
        return cls

    return made


def _init(self: Any, *given: Any, **named: Any) -> None:
    shape: _Shape = self.__shape__
    values = self.__dict__
    values |= shape.defaults
    for name, make in shape.factories.items():
        if name not in named:
            values[name] = make()
    if len(given) > len(shape.positional) or not named.keys().isdisjoint(shape.positional[: len(given)]):
        raise TypeError(
            f"{type(self).__name__} takes {', '.join(shape.positional) or 'no values without a name'}, once"
        )
    values.update(zip(shape.positional, given, strict=False))
    values |= named
    if values.keys() != shape.known:
        wrong = sorted(values.keys() ^ shape.known)
        raise TypeError(f"{type(self).__name__}: {', '.join(wrong)} is missing or not known")
    if shape.completes:
        self.__post_init__()


def replace(known: T, /, **changes: Any) -> T:
    """What `dataclasses.replace` does, for records that are replaced many thousand times a second."""
    given: Any = known
    shape: _Shape = given.__shape__
    if not changes.keys() <= shape.known:
        raise TypeError(f"{type(known).__name__} has no {', '.join(sorted(changes.keys() - shape.known))}")
    made: Any = object.__new__(type(known))
    values = made.__dict__
    values |= given.__dict__
    values |= changes
    if shape.completes:
        made.__post_init__()
    return made  # type: ignore[no-any-return]


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__shape__.names)})"


def _values(self: Any) -> tuple[Any, ...]:
    values = self.__dict__
    return tuple([values[name] for name in self.__shape__.names])


def _eq(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _refuse(self: Any, name: str, *_: object) -> NoReturn:
    raise FrozenInstanceError(f"{type(self).__name__} does not change: {name}")


_METHODS: dict[str, Any] = {
    "__init__": _init,
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _refuse,
    "__delattr__": _refuse,
}
