"""What does a worker process do? It holds a policy while it has a GPU, and nothing when it has none.

Imports torch; runs in processes that `nursery` forks. A worker ends when its socket does, so that none outlives the
demo, however that ended.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import deque
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from muster.sharing.demo import policy as policies
from muster.sharing.demo.policy import Part, Policy
from muster.sharing.demo.tasks import Digits
from muster.sharing.demo.wire import (
    Answer,
    Answers,
    Begin,
    Done,
    Drop,
    Failed,
    Generate,
    Join,
    Learn,
    Letter,
    Load,
    LogProbs,
    Memory,
    Order,
    Publish,
    Role,
    Rows,
    Weigh,
)

_PAGE = os.sysconf("SC_PAGE_SIZE")
_FOREIGN_ERRORS = (RuntimeError, OSError, ValueError, TypeError, LookupError)  # what torch raises


def serve(role: Role, connection: Connection) -> None:
    """Follow orders until the demo hangs up."""
    desk = Desk(connection)
    worker = Generator(desk) if role is Role.GENERATOR else Trainer()
    while (letter := desk.take()) is not None:
        desk.answer(letter, _attempt(worker, letter.content))


def _attempt(worker: Generator | Trainer, order: Order | Answer) -> Answer:
    try:
        return worker.follow(order)
    except _FOREIGN_ERRORS as error:
        return Failed(f"{type(error).__name__}: {error}")


class Desk:
    """Letters in order of arrival, with a look at those that have arrived meanwhile."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: deque[Letter] = deque()

    def take(self) -> Letter | None:
        """The next letter; None when the other side is gone."""
        try:
            return self._waiting.popleft() if self._waiting else self._connection.recv()
        except (EOFError, ConnectionError):
            return None

    def answer(self, letter: Letter, answer: Answer) -> None:
        try:
            self._connection.send(Letter(letter.number, answer))
        except ConnectionError:
            return  # `take` will see it too

    def told_to_drop(self, within_s: float) -> bool:
        """Has an order to drop everything come, or does it come within that time?"""
        while not self._waiting and self._connection.poll(within_s):
            try:
                self._waiting.append(self._connection.recv())
            except (EOFError, ConnectionError):
                return True
        return any(isinstance(letter.content, Drop) for letter in self._waiting)


class Generator:
    """A rank of `actor_infer`."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._policy: Policy | None = None

    def follow(self, order: Order | Answer) -> Answer:
        match order:
            case Load(weights):
                self._policy = None  # the old ones go first: there is no room for two
                self._policy = policies.load(weights)
                return weigh()
            case Drop():
                self._policy = None
                return _freed()
            case Weigh():
                return weigh()
            case Generate():
                return self._generate(order)
        raise ValueError(f"a generator cannot {order!r}")

    def _generate(self, order: Generate) -> Answer:
        if self._policy is None:
            return Answers(None)
        answers: tuple[Digits, ...] = ()
        for said in policies.speak(self._policy, order.prompt, order.count, order.seed):
            if self._desk.told_to_drop(order.pace_s):
                return Answers(None)
            answers = said
        return Answers(answers)


class Trainer:
    """A data-parallel rank of `actor_train`."""

    def __init__(self) -> None:
        self._part = Part()
        self._policy: Policy | None = None
        self._optimiser: policies.Adam | None = None

    def follow(self, order: Order | Answer) -> Answer:
        match order:
            case Join(rank, world, meeting):
                self._part = Part(rank, world)
                dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
            case Begin(seed):
                torch.manual_seed(seed)
                self._policy = Policy()
                self._optimiser = policies.Adam(self._policy)
            case Load(weights, optimiser):
                self._policy = policies.load(weights)
                self._optimiser = policies.load_optimiser(self._policy, optimiser) if optimiser else None
            case Drop():
                self._policy = self._optimiser = None
                return _freed()
            case Weigh():
                return weigh()
            case LogProbs(groups):
                return Rows(policies.log_probs(self._loaded(), groups, self._part))
            case Learn():
                self._learn(order)
            case Publish():
                self._publish(order)
            case _:
                raise ValueError(f"a trainer cannot {order!r}")
        return Done()

    def _learn(self, order: Learn) -> None:
        policy = self._loaded()
        if self._optimiser is None:
            raise ValueError("told to learn without an optimiser")
        policies.learn(policy, self._optimiser, order.groups, order.old, order.seed, self._part, self._average)

    def _publish(self, order: Publish) -> None:
        if self._part.rank != 0:
            return  # all ranks have the same
        if self._optimiser is not None:
            policies.save_optimiser(self._optimiser, order.optimiser)
        policies.save(self._loaded(), order.weights)

    def _average(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)
        tensor /= self._part.world

    def _loaded(self) -> Policy:
        if self._policy is None:
            raise ValueError("has no weights")
        return self._policy


def weigh() -> Memory:
    """Counts tensors that are alive, whoever holds them; what was there before the fork is frozen and not seen."""
    living = (one for one in gc.get_objects() if issubclass(type(one), Tensor))
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * _PAGE
    return Memory(tensors=sum(one.numel() * one.element_size() for one in living), resident=resident)


def _freed() -> Memory:
    gc.collect()
    _trim()
    return weigh()


def _trim() -> None:
    """Give freed memory back to the machine: the allocator would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # only glibc has it
        trim(0)
