"""What does a model keep on its device, and how is it moved without anybody noticing?

Tensors are moved by storage, so that what is tied stays tied, and in place: a parameter, a buffer or a cache is the
same object before and after. Host buffers are kept for the next time, since pinned memory is slow to get.
"""

from __future__ import annotations

import gc
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from muster.errors import InvalidRequest
from muster.sharing.engines.meters import readable_bytes

Named = dict[str, Tensor]
DEEPEST = 8
MOVABLE = (Tensor, nn.Parameter)  # others may have no storage of their own
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class DeviceMemory(Protocol):
    """What the allocator of a device says."""

    def used(self) -> int:
        """Bytes that this process has there."""

    def empty(self) -> None:
        """Give back what is only kept for reuse."""

    def settle(self) -> None:
        """Wait until all that was begun there is done."""


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> int:
        return max(torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device))

    def empty(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


class NoAllocator:
    """A device whose allocator cannot be asked: only tensors that are known by name are looked at."""

    def used(self) -> int:
        return 0

    def empty(self) -> None:
        pass

    def settle(self) -> None:
        pass


def of_model(model: nn.Module) -> Named:
    """Parameters, with their gradients, and buffers; tied ones under each of their names."""
    found: Named = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = parameter
        if parameter.grad is not None:
            found[f"{name}.grad"] = parameter.grad
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def of_cache(name: str, cache: object) -> Named:
    """All tensors in it, also in lists, mappings, optimizers and attributes; of a function, in what it returns."""
    called = cache() if isinstance(cache, types.FunctionType | types.MethodType) else cache
    return dict(_inside(name, called, set(), 0))


def _inside(name: str, thing: object, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(thing, (*_PLAIN, *_CODE)) or id(thing) in seen or depth > DEEPEST:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield name, thing
        return
    if isinstance(thing, nn.Module):
        yield from ((f"{name}.{inner}", tensor) for inner, tensor in of_model(thing).items())
        return
    parts: list[tuple[str, object]] = []
    if isinstance(thing, torch.optim.Optimizer):
        parts = [(f"{name}.state", list(thing.state.values()))]
    elif isinstance(thing, Mapping):
        parts = [(f"{name}[{key!r:.40}]", value) for key, value in thing.items()]
    elif isinstance(thing, Sequence | set | frozenset):
        parts = [(f"{name}[{index}]", value) for index, value in enumerate(thing)]
    elif hasattr(thing, "__dict__"):
        parts = [(f"{name}.{key}", value) for key, value in vars(thing).items()]
    for inner, value in parts:
        yield from _inside(inner, value, seen, depth + 1)


@dataclass(frozen=True)
class _Place:
    """Where one tensor lies in its storage."""

    name: str
    tensor: Tensor
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def point(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        made = torch.empty(0, dtype=self.tensor.dtype, device=device)
        self.tensor.data = made.set_(storage, self.offset, self.size, self.stride)

    def blank(self) -> None:
        """As large as it was, in the memory of one element."""
        self.tensor.data = torch.zeros(1, dtype=self.tensor.dtype).expand(self.size)


@dataclass(frozen=True)
class _Block:
    """One storage with all that lies in it."""

    nbytes: int
    places: tuple[_Place, ...]

    @property
    def key(self) -> str:
        return self.places[0].name


class Mover:
    """Parks tensors on the host and brings them back. A call that was given up leaves each storage at one of both."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._host: dict[str, Tensor] = {}  # kept from one time to the next
        self._parked: dict[str, _Block] = {}
        self._dropped: set[str] = set()

    @property
    def dropped(self) -> frozenset[str]:
        """What came back, or will come back, without its contents."""
        return frozenset(self._dropped)

    def on_device(self, tensor: Tensor) -> bool:
        if tensor.device != self._device or not tensor.untyped_storage().nbytes():
            return False
        return not self._imitated(tensor)

    def _imitated(self, tensor: Tensor) -> bool:
        """On a CPU both sides are the same memory; what lies in a host buffer, or is blank, counts as parked."""
        if self._device.type != "cpu":
            return False
        where = tensor.untyped_storage().data_ptr()
        return is_blank(tensor) or any(where == buffer.untyped_storage().data_ptr() for buffer in self._host.values())

    def park(self, named: Named, drop: Callable[[str], bool], given_up: threading.Event) -> None:
        for block in _blocks({name: tensor for name, tensor in named.items() if self.on_device(tensor)}):
            if given_up.is_set():
                return
            if all(drop(place.name) for place in block.places):
                self._dropped.update(place.name for place in block.places)
                for place in block.places:
                    place.blank()
            else:
                self._store(block)
            self._parked[block.key] = block

    def _store(self, block: _Block) -> None:
        host = self._host.get(block.key)
        if host is None or host.nbytes != block.nbytes:
            host = self._host[block.key] = torch.empty(block.nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        host.copy_(_bytes_of(block.places[0].tensor.untyped_storage(), self._device), non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize(self._device)  # the storage goes as soon as nobody points to it
        for place in block.places:
            place.point(host.untyped_storage(), host.device)

    def bring(self, named: Named, given_up: threading.Event) -> None:
        for key, block in list(self._parked.items()):
            if given_up.is_set():
                return
            there = torch.empty(block.nbytes, dtype=torch.uint8, device=self._device)
            if self._dropped.isdisjoint(place.name for place in block.places):
                there.copy_(self._host[key], non_blocking=self._pinned)
            else:
                there.zero_()
            for place in block.places:
                place.point(there.untyped_storage(), self._device)
            del self._parked[key]
        for block in _blocks({name: tensor for name, tensor in named.items() if not self.on_device(tensor)}):
            if given_up.is_set():
                return
            self._adopt(block)

    def _adopt(self, block: _Block) -> None:
        """What was built on the host, or was put there meanwhile."""
        first = block.places[0].tensor
        there = _bytes_of(first.untyped_storage(), first.device).to(self._device, copy=True)
        for place in block.places:
            place.point(there.untyped_storage(), self._device)

    def loaded(self, name: str) -> None:
        """It has contents again."""
        self._dropped.discard(name)


def is_blank(tensor: Tensor) -> bool:
    """Whether its contents were dropped."""
    return tensor.numel() > 1 and not any(tensor.stride())


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _blocks(named: Named) -> list[_Block]:
    found: dict[tuple[torch.device, int], list[_Place]] = {}
    sizes: dict[tuple[torch.device, int], int] = {}
    for name, tensor in named.items():
        if type(tensor) not in MOVABLE or tensor.layout is not torch.strided:
            raise InvalidRequest(f"{name} is a {type(tensor).__name__}, {tensor.layout}: it cannot be moved by storage")
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            continue
        key = (tensor.device, storage.data_ptr())
        sizes[key] = storage.nbytes()
        place = _Place(name, tensor, int(tensor.storage_offset()), tensor.size(), tensor.stride())
        found.setdefault(key, []).append(place)
    return [_Block(sizes[key], tuple(places)) for key, places in found.items()]


def strangers(device: torch.device, known: Named, most: int = 3) -> str:
    """The largest tensors on the device that nobody named, in words."""
    own = {id(tensor) for tensor in known.values()}
    sizes: dict[int, tuple[int, str]] = {}
    for thing in gc.get_objects():
        if type(thing) not in MOVABLE or id(thing) in own or thing.device != device:
            continue
        storage = thing.untyped_storage()
        told = f"{readable_bytes(storage.nbytes())} in a tensor {tuple(thing.shape)} of {thing.dtype}"
        sizes[storage.data_ptr()] = (storage.nbytes(), told)
    return ", ".join(told for _, told in sorted(sizes.values(), reverse=True)[:most])


def copy_weights(model: nn.Module, weights: Mapping[str, Any], loaded: Callable[[str], None]) -> str:
    """Put published weights into the model, all or none; what is wrong with them, or ""."""
    wanted: Named = {
        name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
    }
    wrong = [f"{name} is not of the model" for name in weights if name not in wanted]
    for name, value in weights.items():
        if name in wanted and tuple(value.shape) != tuple(wanted[name].shape):
            wrong.append(f"{name} is {tuple(value.shape)}, not {tuple(wanted[name].shape)}")
    given = {wanted[name].data_ptr() for name in weights if name in wanted}
    missing = [name for name, value in wanted.items() if value.nbytes and value.data_ptr() not in given]
    wrong += [f"{name} is missing" for name in missing]
    if wrong:
        return "; ".join(wrong[:5])
    with torch.no_grad():
        for name, value in weights.items():
            wanted[name].copy_(value)
    for name, tensor in of_model(model).items():
        if tensor.data_ptr() in given:
            loaded(name)
    return ""
