"""How is an object taken apart into tensors and all the rest, and put together again?

The rest is pickled, with a number in place of each tensor. Two names of the same memory are one tensor. What was
written where others can write is read by `muster.state.careful`.
"""

from __future__ import annotations

import functools
import io
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from muster.errors import InvalidRequest
from muster.state import careful as reading
from muster.state import shards

Pid = int | tuple[int, str, tuple[int, ...]]  # which tensor; of which kind; its strides if they are not usual
_SHELL = re.compile(r"torch\.(u?int[1-7]|bits.*)")  # kinds of numbers that torch itself cannot copy
_KINDS = ("", "grad", "param", "frozen")
_USUAL_TYPES = {torch.Tensor, torch.nn.Parameter}  # a shorter path for most tensors, so that a commit takes less time
Place = tuple[Any, ...]


class Taken(NamedTuple):
    """The parts of an object: its tensors, and the pickled rest."""

    rest: bytes
    tensors: list[torch.Tensor]  # in the order in which `put_together` wants them
    places: list[Place]  # where each of them lies


class _Taker(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.places: list[Place] = []
        self._known: dict[Place, int] = {}
        self._alive: list[Any] = []  # what is made while we look would else give its place to the next

    def persistent_id(self, obj: Any) -> Pid | None:
        if not isinstance(obj, torch.Tensor) or is_made_of_others(obj):
            return None
        _check(obj)
        key = place_of(obj)
        if key not in self._known:
            self._known[key] = len(self.tensors)
            self._alive.append(obj)
            self.tensors.append(_plain(obj))
            self.places.append(key)
        index = self._known[key]
        kind, strides = _kind(obj), _unusual(obj)
        return (index, kind, strides) if kind or strides else index

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and is_made_of_others(obj):
            names, about = obj.__tensor_flatten__()  # type: ignore[attr-defined]
            inner = {name: getattr(obj, name) for name in names}
            return _wrapped, (type(obj), inner, about, tuple(obj.shape), obj.stride())
        return reading.reduced(obj)


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """A quantised weight, say: tensors with a name that behave as one."""
    return type(tensor) not in _USUAL_TYPES and is_traceable_wrapper_subclass(tensor) and not shards.is_part(tensor)


def _wrapped(kind: Any, inner: dict[str, torch.Tensor], about: Any, shape: Any, stride: Any) -> Any:
    return kind.__tensor_unflatten__(inner, about, shape, stride)


def _check(tensor: torch.Tensor) -> None:
    own = shards.local(tensor)
    if own.layout is not torch.strided or own.is_nested or own.is_quantized or _is_shell(own.dtype):
        raise InvalidRequest(
            f"a tensor that is {_oddity(own)} cannot be kept: give the dense tensors that it is made of"
        )
    if own.device.type == "meta":
        raise InvalidRequest("a tensor on the meta device has nothing that could be kept")
    if shards.is_part(tensor):
        shards.check(tensor)
        if is_traceable_wrapper_subclass(own):
            raise InvalidRequest(f"parts of a {type(own).__name__} cannot be kept")


@functools.cache
def _is_shell(dtype: torch.dtype) -> bool:
    return _SHELL.fullmatch(str(dtype)) is not None


def _oddity(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    return str(tensor.layout if tensor.layout is not torch.strided else tensor.dtype)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, without history and without operations that are still to be done."""
    found = tensor.detach()
    if type(found) is torch.Tensor and not found.is_complex():
        return found.resolve_neg() if found.is_neg() else found
    if shards.is_part(tensor):
        return found
    return found.as_subclass(torch.Tensor).resolve_conj().resolve_neg()


def _kind(tensor: torch.Tensor) -> str:
    if isinstance(tensor, torch.nn.Parameter):
        return "param" if tensor.requires_grad else "frozen"
    return "grad" if tensor.is_leaf and tensor.requires_grad else ""


def _unusual(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of what lies dense in another order, as images do: kernels ask for the same order in all they get."""
    if shards.is_part(tensor) or tensor.is_contiguous():
        return ()
    order = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in order:
        if size != 1 and stride != expected:
            return ()
        expected *= size
    return tuple(tensor.stride())


def place_of(tensor: torch.Tensor) -> Place:
    """Where it lies; a view of the same memory in another shape is another tensor."""
    if type(tensor) in _USUAL_TYPES and tensor.layout is torch.strided and (where := tensor.data_ptr()):
        kind = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
        return (tensor.device, where, tensor.shape, tensor.stride(), *kind)
    own = shards.local(tensor)
    if is_made_of_others(own):
        return (id(tensor),)
    spread = (tuple(tensor.shape), tuple(tensor.placements)) if shards.is_part(tensor) else ()  # type: ignore[attr-defined]
    kind = (own.dtype, own.is_conj(), own.is_neg())
    where = own.data_ptr() if own.numel() else own.untyped_storage()._cdata
    return (own.device, where, tuple(own.shape), own.stride(), *kind, *spread)


def take_apart(value: Any) -> Taken:
    """Separate the tensors of an object from all the rest, which is pickled."""
    out = io.BytesIO()
    taker = _Taker(out)
    try:
        taker.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"muster.State cannot keep this: {error}") from None
    return Taken(out.getvalue(), taker.tensors, taker.places)


class _Putter(pickle.Unpickler):
    """Each tensor is asked for once, however many names it has."""

    def __init__(self, rest: bytes, tensor: Callable[[int], torch.Tensor]) -> None:
        super().__init__(io.BytesIO(rest))
        self._tensor = tensor
        self._made: dict[Pid, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        index, kind, strides = _pid(pid)
        if pid not in self._made:
            self._made[pid] = self._tensor(index) if pid == index else self._like(index, kind, strides)
        return self._made[pid]

    def _like(self, index: int, kind: str, strides: tuple[int, ...]) -> torch.Tensor:
        plain: Pid = (index, "", strides) if strides else index
        if kind:
            found: torch.Tensor = self.persistent_load(plain)
            if kind == "grad":
                return found.detach().requires_grad_()
            return torch.nn.Parameter(found, requires_grad=kind == "param")
        found = self.persistent_load(index)
        if len(strides) != found.dim() or sorted(strides) != sorted(_unusual_of(found.shape, strides)):
            raise pickle.UnpicklingError("strides that are not of a dense tensor")
        made = torch.empty_strided(tuple(found.shape), strides, dtype=found.dtype, device=found.device)
        return made.copy_(found)


def _unusual_of(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides that a dense tensor of that shape would have in that order."""
    expected, found = 1, []
    for stride, size in sorted(zip(strides, shape, strict=True)):
        found.append(stride if size == 1 else expected)
        expected *= size
    return found


def _pid(pid: Any) -> tuple[int, str, tuple[int, ...]]:
    match pid:
        case int(index):
            return index, "", ()
        case (int(index), str(kind), tuple(strides)) if kind in _KINDS and all(
            isinstance(one, int) and one >= 0 for one in strides
        ):
            return index, kind, strides
    raise pickle.UnpicklingError("a tensor without a number")


class _Careful(_Putter):
    def find_class(self, module: str, name: str) -> Any:
        return reading.harmless(module, name)


def put_together(
    rest: bytes, tensors: Sequence[torch.Tensor] | Callable[[int], torch.Tensor], *, careful: bool = False
) -> Any:
    """The value again. `careful`: nothing but data is read, else pickle.UnpicklingError says what it names."""
    tensor = tensors if callable(tensors) else tensors.__getitem__
    if not careful:
        return _Putter(rest, tensor).load()
    reading.check(rest)
    try:
        return _Careful(rest, tensor).load()
    except reading.WRONG as error:
        raise pickle.UnpicklingError(f"it is not what it says: {type(error).__name__} {error}") from None


class _Looking(_Careful):
    def persistent_load(self, pid: Any) -> None:
        _pid(pid)


def refused(rest: bytes) -> str:
    """Why `careful` would not read it, or nothing: to be told when it is written, not when it is needed."""
    try:
        reading.check(rest)
        _Looking(rest, torch.empty).load()
    except pickle.UnpicklingError as error:
        return str(error)
    except reading.WRONG as error:
        return f"{type(error).__name__} {error}"
    return ""
