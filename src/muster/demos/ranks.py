"""What does a rank's process do? It holds a policy while it has a GPU, and nothing when it has none.

Imports torch; runs in processes that are forked from one that has it in memory already.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.demos import orders
from muster.demos import policy as policies
from muster.demos.policy import DigitPolicy, Part
from muster.demos.tasks import LENGTH, Digits
from muster.node import system

_PAGE = os.sysconf("SC_PAGE_SIZE")
_FOREIGN_ERRORS = (RuntimeError, OSError, ValueError, TypeError, LookupError)  # what torch raises


def warm_up() -> None:
    """In the fork server: all that the first use of torch would set up, but threads, which a fork does not copy."""
    torch.set_num_threads(1)
    for _ in policies.speak(DigitPolicy(), (0,) * LENGTH, count=1, seed=0):
        pass
    gc.collect()
    gc.freeze()  # a rank's collections neither touch nor copy what is shared


def serve(cluster: str, connection: Connection) -> None:
    """Follow orders until the demo hangs up."""
    system.die_with_parent(os.getppid())
    rank = Generator(connection) if cluster == orders.INFER else Trainer()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(_attempt(rank, connection.recv()))


def _attempt(rank: Generator | Trainer, order: orders.RankOrder[Any]) -> object:
    try:
        return rank.follow(order)
    except _FOREIGN_ERRORS as error:
        return orders.Failed(f"{type(error).__name__}: {error}")


class Generator:
    """A rank of `actor_infer`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._policy: DigitPolicy | None = None

    def follow(self, order: orders.RankOrder[Any]) -> object:
        match order:
            case orders.Load(weights):
                self._policy = None  # the old ones go first: there is no room for two
                self._policy = policies.load(weights)
            case orders.Unload():
                self._policy = None
                _free()
            case orders.Weigh():
                pass
            case orders.Generate():
                return self._generate(order)
            case _:
                raise ValueError(f"a generator cannot {order!r}")
        return _weigh()

    def _generate(self, order: orders.Generate) -> tuple[Digits, ...] | None:
        if self._policy is None:
            return None
        answers: tuple[Digits, ...] = ()
        for said in policies.speak(self._policy, order.prompt, order.count, order.seed):
            if self._connection.poll(order.pace_s):  # by the next order, or because the demo is gone
                return None
            answers = said
        return answers


class Trainer:
    """A data-parallel rank of `actor_train`."""

    def __init__(self) -> None:
        self._part = Part()
        self._policy: DigitPolicy | None = None
        self._optimiser: policies.Adam | None = None

    def follow(self, order: orders.RankOrder[Any]) -> object:
        match order:
            case orders.Join(rank, world, meeting):
                self._part = Part(rank, world)
                dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
            case orders.Begin(seed):
                torch.manual_seed(seed)
                self._policy = DigitPolicy()
                self._optimiser = policies.Adam(self._policy)
            case orders.Load(weights, optimiser):
                self._policy = policies.load(weights)
                self._optimiser = policies.load_optimiser(self._policy, optimiser) if optimiser else None
                return _weigh()
            case orders.Unload():
                self._policy = self._optimiser = None
                _free()
                return _weigh()
            case orders.LogProbs(groups):
                return policies.log_probs(self._loaded(), groups, self._part)
            case orders.Learn():
                self._learn(order)
            case orders.Publish():
                self._publish(order)
            case _:
                raise ValueError(f"a trainer cannot {order!r}")
        return None

    def _learn(self, order: orders.Learn) -> None:
        policy = self._loaded()
        if self._optimiser is None:
            raise ValueError("told to learn without an optimiser")
        policies.learn(policy, self._optimiser, order.groups, order.old, order.seed, self._part, self._average)

    def _publish(self, order: orders.Publish) -> None:
        if self._part.rank != 0:
            return  # all ranks have the same
        if self._optimiser is not None:
            policies.save_optimiser(self._optimiser, order.optimiser)
        policies.save(self._loaded(), order.weights)

    def _average(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)
        tensor /= self._part.world

    def _loaded(self) -> DigitPolicy:
        if self._policy is None:
            raise ValueError("has no weights")
        return self._policy


def _weigh() -> orders.Memory:
    """Counts tensors that are alive, whoever holds them; what was there before the fork is frozen and not seen."""
    living = (one for one in gc.get_objects() if issubclass(type(one), Tensor))
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * _PAGE
    return orders.Memory(tensors=sum(one.numel() * one.element_size() for one in living), resident=resident)


def _free() -> None:
    """Give freed memory back to the machine: the allocator would keep it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # only glibc has it
        trim(0)
