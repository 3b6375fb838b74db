"""How is a pickle read that somebody else may have written? Only opcodes and names that can do nothing but make data.

What numpy has made is written down as bytes and a kind, because numpy's own way back trusts what it reads. Classes that
a user has allowed to `torch.load` (`torch.serialization.add_safe_globals`) are allowed here.
"""

from __future__ import annotations

import collections
import datetime
import functools
import math
import pickle
import pickletools
import sys
from typing import Any

import torch

# What comes of data that is made up; MemoryError of data that asks for more than there is.
WRONG = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
_OPCODES = """
PROTO FRAME STOP MARK POP POP_MARK MEMOIZE BINGET LONG_BINGET BINPERSID STACK_GLOBAL REDUCE NEWOBJ BUILD
NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8
SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS
EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET
"""
_KINDS = "biufcmMSU?"  # of numpy's types, those that are made of bytes alone


def check(rest: bytes) -> None:
    """UnpicklingError if it has anything in it that our own writer would not have written."""
    allowed = set(_OPCODES.split())
    try:
        odd = next((op.name for op, _, _ in pickletools.genops(rest) if op.name not in allowed), None)
    except WRONG as error:
        raise pickle.UnpicklingError(f"not a pickle: {error}") from None
    if odd is not None:
        raise pickle.UnpicklingError(f"it has {odd} in it")


def harmless(module: str, name: str) -> Any:
    """What a name stands for, if that can do nothing."""
    found = _known().get((module, name)) or _allowed_by_user().get((module, name))
    if found is None:
        raise pickle.UnpicklingError(
            f"it names {module}.{name}; torch.serialization.add_safe_globals([{name}]) allows it"
        )
    return found


class _Maker:
    """A function that nobody can change from outside."""

    __slots__ = ("_make",)
    _make: Any

    def __init__(self, make: Any) -> None:
        object.__setattr__(self, "_make", make)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)


def _counter(counts: Any = ()) -> Any:
    return collections.Counter(dict(counts))


def _bytes(data: Any = b"") -> bytearray:
    if not isinstance(data, bytes | bytearray):
        raise ValueError("bytes of something else")
    return bytearray(data)


def array(data: bytes, kind: str, shape: tuple[int, ...]) -> Any:
    """An array of numpy; its data is its own."""
    import numpy

    made = _plain_kind(kind)
    if len(data) != made.itemsize * math.prod(shape):
        raise ValueError("an array of another length")
    return numpy.frombuffer(bytearray(data), made).reshape(shape)


def scalar(data: bytes, kind: str) -> Any:
    return array(data, kind, ())[()]


def _plain_kind(kind: str) -> Any:
    import numpy

    found = numpy.dtype(kind)
    if not isinstance(kind, str) or found.kind not in _KINDS or found.hasobject:
        raise ValueError(f"not a plain kind: {kind!r}")
    return found


def reduced(obj: Any) -> Any:
    """How to write down what is numpy's; everything else in its own way."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(obj, numpy.ndarray | numpy.generic) and obj.dtype.kind in _KINDS:
        if type(obj) is numpy.ndarray:
            return array, (obj.tobytes(), obj.dtype.str, obj.shape)
        if isinstance(obj, numpy.generic):
            return scalar, (obj.tobytes(), obj.dtype.str)
    return NotImplemented


@functools.cache
def _known() -> dict[tuple[str, str], Any]:
    kinds = [dict, list, tuple, set, frozenset, int, float, complex, bool, str, slice]
    found: dict[tuple[str, str], Any] = {("builtins", one.__name__): one for one in kinds}
    for one in (collections.OrderedDict, collections.defaultdict, collections.deque):
        found[("collections", one.__name__)] = one
    for date in (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone):
        found[("datetime", date.__name__)] = date
    found[("collections", "Counter")] = _Maker(_counter)
    found[("builtins", "bytearray")] = _Maker(_bytes)
    found[(__name__, "array")] = _Maker(array)
    found[(__name__, "scalar")] = _Maker(scalar)
    found[("torch", "Size")] = torch.Size
    found[("torch", "device")] = torch.device
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            found[("torch", name)] = value
    return found


def _allowed_by_user() -> dict[tuple[str, str], Any]:
    found = {}
    for allowed in torch.serialization.get_safe_globals():
        one, name = allowed if isinstance(allowed, tuple) else (allowed, f"{allowed.__module__}.{allowed.__qualname__}")
        module, _, last = name.rpartition(".")
        found[(module, last)] = one
    return found
