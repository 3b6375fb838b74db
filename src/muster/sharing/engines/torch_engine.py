"""How does a module of this process give its GPU away and come back? It is moved, and memory is looked at.

Work is done in a thread of the engine's own, one piece at a time: the event loop is not held up, and a call that is
made again waits until the one before, which was given up, has let go.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from muster.errors import InvalidRequest
from muster.sharing.engines import tensors
from muster.sharing.engines.faults import EngineFault, MemoryNotFree, StaleWeights, Unproven
from muster.sharing.engines.gate import Gate, Turn
from muster.sharing.engines.meters import readable_bytes
from muster.sharing.engines.tensors import CudaMemory, DeviceMemory, Mover, Named, NoAllocator

MAY_KEEP = 128 << 20  # workspaces of libraries, which the allocator does not give back

UNKNOWN = -1
TOLD = "it was told to sleep"
StateDict = Mapping[str, Any]
Weights = StateDict | Callable[[], StateDict]


@dataclass(frozen=True)
class _Published:
    version: str | None
    weights: Weights | None  # None: the module has them itself
    serial: int


class TorchEngine:
    """Hooks for any module that generates in this process, on one device.

    `caches` names what else is on the device for its sake: tensors, lists or mappings of them, optimizers, objects
    that hold some, or functions that return such. `level` 1 parks all of it in pinned host memory. `level` 2 drops
    parameters and the contents of caches; parameters are loaded from what was published, caches come back as zeros.
    `probe(model)` is called after each wake; what it returns, unless None, must be the published version.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        caches: Mapping[str, object] | Sequence[object] = (),
        level: int = 1,
        device: str | torch.device | None = None,
        probe: Callable[[nn.Module], object] | None = None,
        memory: DeviceMemory | None = None,
        may_keep: int = MAY_KEEP,
        turn_s: float = 30.0,
    ) -> None:
        if level not in (1, 2):
            raise InvalidRequest(f"the level of sleep is 1 or 2, not {level!r}")
        if probe is not None and inspect.iscoroutinefunction(probe):
            raise InvalidRequest("probe must be a plain function: it is called in the engine's own thread")
        if blank := [name for name, one in model.named_parameters() if tensors.is_blank(one)]:
            raise InvalidRequest(f"parameters were dropped by another engine, which must wake first: {blank[0]}")
        self.model, self.level = model, level
        self.device = _whole(torch.device(device) if device is not None else _device_of(model))
        self._caches = caches if isinstance(caches, Mapping) else {f"caches[{i}]": one for i, one in enumerate(caches)}
        self._probe = probe
        self._memory = memory or (CudaMemory(self.device) if self.device.type == "cuda" else NoAllocator())
        self._may_keep, self._turn_s = may_keep, turn_s
        self._mover = Mover(self.device)
        self._gate = Gate("it has no lease yet: the scheduler has not expanded it")
        self._published = _Published(None, None, 0)
        self._loaded = 0
        self._lock = threading.Lock()  # of what is published, against the moment of opening
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="muster-engine")

    # What the pipeline calls

    @property
    def version(self) -> str | None:
        """What was published last."""
        return self._published.version

    @property
    def awake(self) -> bool:
        """Whether a turn would be let in now."""
        return self._gate.open

    def interrupted(self, *_: object, **__: object) -> bool:
        """Whether turns have to stop. Cheap; it can be given to `generate(stopping_criteria=[engine.interrupted])`."""
        return self._gate.interrupted

    def turn(self, wait_s: float | None = 0.0) -> Turn:
        """`with engine.turn():` around each generation. Asleep it raises `Asleep`, after waiting; None: no limit.

        If the lease ends meanwhile, `interrupted` becomes true and the block ends with `TurnInterrupted`.
        """
        return Turn(self._gate, wait_s)

    def publish(self, version: str | int, weights: Weights | None = None) -> None:
        """New weights exist: a state dict, or a function that returns one. None: the module itself was trained.

        Those are loaded at the next wake; while it is awake, no turn is let in before `refresh`.
        """
        if weights is None and self._without_contents():
            raise InvalidRequest(f"the parameters were dropped: {version} needs weights to be loaded from")
        with self._lock:
            if weights is not None and self._gate.open:
                # The gate closes first: between both statements another thread could begin a turn with the old weights.
                self._gate.close(f"weights {version} were published and are not loaded yet")
            self._published = _Published(str(version), weights, self._published.serial + 1)
            if weights is None:
                self._loaded = self._published.serial
                self._gate.renew(str(version))

    async def refresh(self) -> None:
        """Load what was published while awake, probe it, and let turns in again."""
        if not self._mover.on_device(_first(self.model)):
            raise InvalidRequest("it sleeps: published weights are loaded when the scheduler wakes it")
        await self._run(self._expanded)

    # What the scheduler calls

    async def shrink(self, ranks: Sequence[int]) -> None:
        self._check(ranks)
        if ranks:
            self._gate.close(TOLD)
            await self._run(self._shrunk)

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        self._check(ranks)
        if ranks:
            await self._run(self._expanded)

    def _check(self, ranks: Sequence[int] | Mapping[int, Sequence[int]]) -> None:
        if any(rank != 0 for rank in ranks):
            raise InvalidRequest(f"one TorchEngine has rank 0 alone, not {sorted(ranks)}: EngineRanks takes several")

    # In the thread

    async def _run(self, work: Callable[[threading.Event], None]) -> None:
        given_up = threading.Event()
        doing = self._worker.submit(work, given_up)
        try:
            await asyncio.wrap_future(doing)
        except asyncio.CancelledError:
            given_up.set()
            self._gate.close("its last call was cancelled")
            raise

    def _shrunk(self, given_up: threading.Event) -> None:
        self._gate.close(TOLD)  # again: a call before this one may just have opened it
        self._gate.drain(self._turn_s, given_up)
        if self.level == 2 and self._published.weights is None:
            raise Unproven(
                "parameters cannot be dropped (level 2): nothing was published that they could be loaded from"
            )
        named = self._named()
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        self._memory.settle()
        if self.level == 2:
            self._loaded = UNKNOWN
        self._mover.park(named, lambda name: self.level == 2 and name not in buffers, given_up)
        if given_up.is_set():
            return
        self._memory.empty()
        self._verify_gone(named)

    def _verify_gone(self, named: Named) -> None:
        left = {name: tensor for name, tensor in self._named().items() if self._mover.on_device(tensor)}
        if left:
            told = ", ".join(f"{name} ({readable_bytes(one.nbytes)})" for name, one in list(left.items())[:5])
            raise MemoryNotFree(f"still on {self.device}: {told}")
        if self._memory.used() > self._may_keep:
            gc.collect()  # slow, and seldom needed: tensors that only a cycle of objects keeps alive
            self._memory.empty()
        if (used := self._memory.used()) > self._may_keep:
            known = f"{readable_bytes(used)} are in use, and {readable_bytes(self._may_keep)} may stay"
            others = tensors.strangers(self.device, named) if self.device.type != "cpu" else ""
            raise MemoryNotFree(
                f"the model has left {self.device}, but {known}" + (f"; among them {others}" if others else ""),
                hint="name what belongs to the engine in caches=",
            )

    def _expanded(self, given_up: threading.Event) -> None:
        while not given_up.is_set():
            published = self._published
            if self._gate.open and self._loaded == published.serial:
                return
            self._gate.drain(self._turn_s, given_up)
            self._mover.bring(self._named(), given_up)
            if given_up.is_set():
                return
            self._load(published)
            self._memory.settle()
            self._prove(published)
            with self._lock:
                if self._published is published:
                    self._gate.admit(published.version, given_up)
                    return

    def _load(self, published: _Published) -> None:
        if self._loaded == published.serial:
            return
        if published.weights is None:
            raise Unproven(f"weights {published.version} are nowhere: the module's own were dropped")
        self._loaded = UNKNOWN  # until all of them are there
        weights = published.weights() if callable(published.weights) else published.weights
        if wrong := tensors.copy_weights(self.model, weights, self._mover.loaded):
            raise StaleWeights(f"weights {published.version} do not fit the model: {wrong}")
        self._loaded = published.serial

    def _prove(self, published: _Published) -> None:
        away = [name for name, one in self._named().items() if one.nbytes and not self._mover.on_device(one)]
        if away:
            raise EngineFault(f"not on {self.device} after waking: {', '.join(away[:5])}")
        if empty := self._without_contents():
            raise StaleWeights(f"dropped, and not among weights {published.version}: {', '.join(empty[:5])}")
        said = self._probe(self.model) if self._probe is not None else None
        if said is not None and str(said) != published.version:
            raise StaleWeights(f"the probe answers with weights {said!s}, and {published.version} were published")

    def _without_contents(self) -> list[str]:
        """Parameters that were dropped and not loaded since."""
        dropped = self._mover.dropped
        return [name for name, _ in self.model.named_parameters(remove_duplicate=False) if name in dropped]

    def _named(self) -> Named:
        found = tensors.of_model(self.model)
        for name, cache in self._caches.items():
            found.update(tensors.of_cache(name, cache))
        return found


def _first(model: nn.Module) -> torch.Tensor:
    for parameter in model.parameters():
        return parameter
    raise InvalidRequest("the model has no parameters")


def _device_of(model: nn.Module) -> torch.device:
    return _first(model).device


def _whole(device: torch.device) -> torch.device:
    """With its index: a tensor's device always has one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
