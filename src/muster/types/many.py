"""How are very many known of whom one changes at a time? Not by copying all of them for each.

What it was before stays as it was, as with every other value. Few are plainly copied.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Set, ValuesView
from itertools import chain
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

FEW = 64


def changed(known: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """The same with another value for that key. A dictionary that is given here must not change any more."""
    if isinstance(known, Many):
        return known.changed(key, value)
    return {**known, key: value} if len(known) <= FEW else Many(known, {key: value})


def merged(known: Mapping[K, V], news: Mapping[K, V]) -> Mapping[K, V]:
    """The same with several other values."""
    if len(news) > FEW or not isinstance(known, Many):
        return {**dict(known.items()), **news}
    for key, value in news.items():
        known = known.changed(key, value)
    return known


def joined(known: Set[T], one: T) -> Set[T]:
    """The same with one more."""
    if isinstance(known, Crowd):
        return known.joined(one)
    return frozenset((*known, one)) if len(known) <= FEW else Crowd(frozenset(known), frozenset()).joined(one)


class Many(Mapping[K, V]):
    """A mapping in two parts: what most versions share, and the few that have changed since."""

    __slots__ = ("_base", "_news", "_whole")

    def __init__(self, base: Mapping[K, V], news: dict[K, V]) -> None:
        self._base = base
        self._news = news
        self._whole: dict[K, V] | None = None

    def changed(self, key: K, value: V) -> Many[K, V]:
        if self._whole is not None or len(self._news) >= FEW:
            return Many(self._all, {key: value})
        return Many(self._base, {**self._news, key: value})

    @property
    def _all(self) -> dict[K, V]:
        """Both parts as one, for whoever goes through all of them; in the order of a dictionary."""
        if self._whole is None:
            self._whole = {**self._base, **self._news}
        return self._whole

    def __getitem__(self, key: K) -> V:
        return self._news[key] if key in self._news else self._base[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return self._news[key] if key in self._news else self._base.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._news or key in self._base

    def __iter__(self) -> Iterator[K]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def keys(self) -> KeysView[K]:
        return self._all.keys()

    def values(self) -> ValuesView[V]:
        return self._all.values()

    def items(self) -> ItemsView[K, V]:
        return self._all.items()

    def __repr__(self) -> str:
        return repr(self._all)


class Crowd(Set[T]):
    """A set that grows, in two parts like `Many`."""

    __slots__ = ("_base", "_news")

    def __init__(self, base: frozenset[T], news: frozenset[T]) -> None:
        self._base = base
        self._news = news

    def joined(self, one: T) -> Crowd[T]:
        if one in self:
            return self
        if len(self._news) >= FEW:
            return Crowd(self._base | self._news, frozenset((one,)))
        return Crowd(self._base, self._news | {one})

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        return frozenset(it)

    def __contains__(self, one: object) -> bool:
        return one in self._news or one in self._base

    def __iter__(self) -> Iterator[T]:
        return chain(self._base, self._news)

    def __len__(self) -> int:
        return len(self._base) + len(self._news)

    def __repr__(self) -> str:
        return repr(frozenset(self))
