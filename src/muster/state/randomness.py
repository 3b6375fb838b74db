"""The generators of a rank: Python's, numpy's and torch's, on the CPU and on its GPUs; and those that a user made."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from muster.state import device

State = dict[str, Any]


def take() -> State:
    found: State = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found["numpy"] = numpy.get_state()
    if device.in_use():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def put(kept: State) -> None:
    random.setstate(kept["python"])
    torch.set_rng_state(kept["torch"].cpu())
    if "numpy" in kept and (numpy := _numpy()) is not None:
        numpy.random.set_state(kept["numpy"])
    if "cuda" in kept and torch.cuda.is_available() and len(kept["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([one.cpu() for one in kept["cuda"]])


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def is_generator(one: Any) -> bool:
    numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random) if numpy is None else (torch.Generator, random.Random, numpy.Generator)
    return isinstance(one, kinds)


def state_of(generator: Any) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case random.Random():
            return generator.getstate()
    return generator.bit_generator.state


def set_state(generator: Any, kept: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(kept.cpu())
        case random.Random():
            generator.setstate(kept)
        case _:
            generator.bit_generator.state = kept
