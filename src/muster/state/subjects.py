"""What may be given to `muster.State`, how is its state taken, and how is it given back?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from muster.errors import InvalidRequest
from muster.state import leaves, randomness, shards

_MOST_NAME = 1024
_MOST_WRAPPED = 4


class Subjects:
    """The named things of one State. `values` are those that are read and set through it."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        if odd := [name for name in named if "." in name or not name]:
            raise InvalidRequest(f"{odd[0]!r} cannot be the name of something that is kept: it has a dot in it")
        self._named = dict(named)
        self.values = {name for name, one in named.items() if _is_value(one)}
        self._copies: dict[str, bool] = {}

    def __getitem__(self, name: str) -> Any:
        return self._named[name]

    def set(self, name: str, value: Any) -> None:
        if name not in self.values and not isinstance(self._named.get(name), list):
            raise KeyError(f"{name!r} is kept in place: change the object itself")
        self._named[name] = value

    def take(self) -> dict[str, Any]:
        return {name: _taken(one) for name, one in self._named.items()}

    def put(self, kept: Mapping[str, Any]) -> list[str]:
        """Give everything back; sentences about what was not kept, and what is not wanted any more."""
        for name in [name for name in self._named if name in kept]:  # on all ranks in the same order
            try:
                self._named[name] = _blended(self._named[name], kept[name], name)
            except InvalidRequest:
                raise
            except Exception as error:
                raise InvalidRequest(
                    f"{name!r} does not take its state back: {type(error).__name__}: {error}",
                    hint="it is not the object that it was when this was kept; another durable folder starts anew",
                ) from error
        new = [f"{name} was not kept before, and stays as it is" for name in self._named if name not in kept]
        return new + [f"{name} was kept before, and nobody wants it now" for name in kept if name not in self._named]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those whose `step` is the only thing that changes what they were given."""
        found = (_optimizer(one) for _, one in _objects(self._named))
        return list({id(one): one for one in found if one is not None}.values())

    def steady(self) -> Iterator[torch.Tensor]:
        """Tensors that nobody changes between two steps of an optimizer."""
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                yield from group["params"]
            for kept in optimizer.state.values():
                yield from (one for one in kept.values() if isinstance(one, torch.Tensor))

    def copies(self, name: str) -> bool:
        """Whether what is given to whoever has a tensor of that name is copied by it, and not held on to."""
        owner = name.partition(".")[0]
        if owner not in self._copies:
            self._copies[owner] = _loads_plainly(self._named.get(owner))
        return self._copies[owner]

    def templates(self) -> dict[str, torch.Tensor]:
        """What tensors that were kept should be like now, by their names."""
        found = {name: tensor for name, tensor in named_tensors(self.take())}
        for name, one in _objects(self._named):
            if (optimizer := _optimizer(one)) is not None:
                params = (param for group in optimizer.param_groups for param in group["params"])
                found |= {f"{name}.state.{index}": param.detach() for index, param in enumerate(params)}
        return found


def _has_state(one: Any) -> bool:
    return callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))


def _is_value(one: Any) -> bool:
    return not (_is_object(one) or isinstance(one, torch.Tensor | dict))


def _is_object(one: Any) -> bool:
    return _has_state(one) or randomness.is_generator(one)


def _objects(one: Any, name: str = "", within: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """All that have a state of their own, with the way to them."""
    if _has_state(one):
        yield name, one
    elif isinstance(one, dict | list | tuple) and id(one) not in within:
        for key, value in one.items() if isinstance(one, dict) else enumerate(one):
            yield from _objects(value, f"{name}.{key}" if name else str(key), (*within, id(one)))


def _optimizer(one: Any) -> torch.optim.Optimizer | None:
    """The optimizer of a scheduler, and the one within a wrapper that has no hooks of its own."""
    for _ in range(_MOST_WRAPPED):
        if not isinstance(inner := getattr(one, "optimizer", None), torch.optim.Optimizer):
            break
        one = inner
    return one if isinstance(one, torch.optim.Optimizer) else None


def _holds_objects(one: Any) -> bool:
    if isinstance(one, dict):
        return any(map(_holds_objects, one.values()))
    return any(map(_holds_objects, one)) if isinstance(one, list | tuple) else _is_object(one)


def _taken(one: Any) -> Any:
    """Objects in lists and dictionaries are kept as their states, too."""
    if _has_state(one):
        return one.state_dict()
    if randomness.is_generator(one):
        return randomness.state_of(one)
    try:
        if not _holds_objects(one):
            return one
    except RecursionError:
        return one  # it holds itself: pickle can do that
    if isinstance(one, dict):
        return {key: _taken(value) for key, value in one.items()}
    return [_taken(value) for value in one] if isinstance(one, list) else tuple(map(_taken, one))


def _blended(there: Any, value: Any, name: str) -> Any:
    """What there is, changed in place as far as things are alike: others may hold on to what is in it."""
    if _has_state(there):
        there.load_state_dict(value)
        return there
    if randomness.is_generator(there):
        randomness.set_state(there, value)
        return there
    if isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor):
        if there.shape != value.shape:
            raise InvalidRequest(f"{name} was kept in the shape {tuple(value.shape)} and is {tuple(there.shape)} now")
        with torch.no_grad():
            there.copy_(value)
        return there
    if isinstance(there, dict) and isinstance(value, Mapping):
        for key in [key for key in there if key not in value]:
            del there[key]
        for key, one in value.items():
            there[key] = _blended(there[key], one, f"{name}.{key}") if key in there else one
        return there
    if isinstance(there, list) and isinstance(value, list):
        there[:] = _side_by_side(there, value, name)
        return there
    if type(there) is tuple and type(value) is tuple and len(there) == len(value):
        return tuple(_side_by_side(there, value, name))
    return value


def _side_by_side(there: Sequence[Any], value: Sequence[Any], name: str) -> list[Any]:
    both = [
        _blended(one, other, f"{name}.{index}") for index, (one, other) in enumerate(zip(there, value, strict=False))
    ]
    return both + list(value[len(there) :])


def _loads_plainly(one: Any) -> bool:
    """A module that copies what it is given, and has nobody in it who does otherwise."""
    if not isinstance(one, torch.nn.Module) or type(one).load_state_dict is not torch.nn.Module.load_state_dict:
        return False
    return not torch.__future__.get_swap_module_params_on_conversion() and all(map(_is_plain, one.modules()))


def _is_plain(module: torch.nn.Module) -> bool:
    if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
        return False
    kind = type(module)
    plain = kind.set_extra_state is torch.nn.Module.set_extra_state
    loads = kind._load_from_state_dict is torch.nn.Module._load_from_state_dict
    return plain and (loads or kind._load_from_state_dict.__module__.startswith("torch.nn.modules."))


def named_tensors(value: Any, name: str = "", within: tuple[int, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with the way to it, as others write it: `model.layer.weight`."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif id(value) not in within:
        inside: Iterator[tuple[Any, Any]] = iter(())
        if isinstance(value, Mapping):
            inside = iter(value.items())
        elif isinstance(value, list | tuple):
            inside = iter(enumerate(value))
        for key, one in inside:
            yield from named_tensors(one, f"{name}.{key}" if name else str(key), (*within, id(value)))


def names_of(whole: Any, places: Sequence[leaves.Place]) -> list[str]:
    """Return the name of the tensor in each place. Two tensors of one name get a number."""
    known: dict[Any, str] = {}
    for name, tensor in named_tensors(whole):
        known.setdefault(leaves.place_of(tensor), name)
    found: dict[str, None] = {}
    for index, place in enumerate(places):
        name = known.get(place, f"tensor.{index}").encode(errors="replace").decode()[:_MOST_NAME]
        while name in found:
            name = f"{name}.{index}"
        found[name] = None
    return list(found)


def template_for(name: str, templates: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """What it is like now; a state of an optimizer is like its parameter, even before there is one."""
    if name in templates:
        return templates[name]
    way, _, last = name.rpartition(".")
    owner = templates.get(way) if ".state." in name else None
    return owner if owner is not None and not (last == "step" and shards.is_part(owner)) else None
