"""How much memory of a GPU is in use? Asked of the driver, which has no reason to please anybody."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from muster.errors import InvalidRequest
from muster.sharing.engines.faults import EngineFault, MemoryNotFree

SMI_S = 20.0
FALLS = 0.9  # what sleeps has at most this share of what it had awake
CANNOT = "cannot verify that memory is free"
HINT = "give a meter= of your own"
Device = int | str  # as the driver counts it, or its UUID


class Meter(Protocol):
    def used(self, gpus: Sequence[int], /) -> Mapping[int, int]:
        """Bytes in use on each of these GPUs of the pool. It may block."""


class NvmlMeter:
    """By nvidia-ml-py. With `pids`, only what these processes use counts, not all that is on the GPU."""

    def __init__(
        self, devices: Mapping[int, Device] | None = None, *, pids: Callable[[], Collection[int]] | None = None
    ) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._devices, self._pids = devices, pids
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise InvalidRequest(f"{CANNOT}: NVML says: {error}", hint=HINT) from error

    def used(self, gpus: Sequence[int], /) -> dict[int, int]:
        try:
            return {gpu: self._used(self._handle(_device(self._devices, gpu))) for gpu in gpus}
        except self._nvml.NVMLError as error:
            raise EngineFault(f"cannot read the memory of GPUs {list(gpus)}: NVML says: {error}") from error

    def _handle(self, device: Device) -> Any:
        if isinstance(device, int):
            return self._nvml.nvmlDeviceGetHandleByIndex(device)
        return self._nvml.nvmlDeviceGetHandleByUUID(device)

    def _used(self, handle: Any) -> int:
        if self._pids is None:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        own = set(self._pids())
        return sum(int(process.usedGpuMemory or 0) for process in running if process.pid in own)


class SmiMeter:
    """By nvidia-smi, where nvidia-ml-py is not installed. A reading takes some tenths of a second."""

    def __init__(self, devices: Mapping[int, Device] | None = None, *, program: str = "nvidia-smi") -> None:
        self._program, self._devices = program, devices

    def used(self, gpus: Sequence[int], /) -> dict[int, int]:
        found: dict[Device, int] = {}
        for line in self._rows():
            index, uuid, mebibytes = (part.strip() for part in line.split(","))
            found[int(index)] = found[uuid] = int(mebibytes) << 20
        missing = [gpu for gpu in gpus if _device(self._devices, gpu) not in found]
        if missing:
            raise EngineFault(f"{self._program} does not list GPU {', '.join(map(str, missing))}")
        return {gpu: found[_device(self._devices, gpu)] for gpu in gpus}

    def _rows(self) -> list[str]:
        asked = [self._program, "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=SMI_S, check=True)
        return [line for line in done.stdout.splitlines() if line.strip()]


def _device(devices: Mapping[int, Device] | None, gpu: int) -> Device:
    return gpu if devices is None else devices[gpu]


def default() -> Meter:
    """What this machine has. Without any, an engine would have to believe replies, and is refused."""
    try:
        return NvmlMeter()
    except ImportError:
        if shutil.which("nvidia-smi"):
            return SmiMeter()
    raise InvalidRequest(f"{CANNOT}: nvidia-ml-py is not installed and there is no nvidia-smi", hint=HINT)


class Watch:
    """When is an engine's memory free? When little of it is left, and less than when it was awake."""

    def __init__(self, meter: Meter, *, may_keep: int, within_s: float, poll_s: float) -> None:
        self._meter, self._may_keep, self.within_s, self._poll_s = meter, may_keep, within_s, poll_s
        self._awake: dict[int, int] = {}

    async def read(self, gpus: Sequence[int]) -> Mapping[int, int]:
        """Not on the event loop: a driver may take its time. What is wrong with the meter is told as such."""
        try:
            found = await asyncio.to_thread(self._meter.used, gpus)
            return {gpu: int(found[gpu]) for gpu in gpus}
        except (OSError, subprocess.SubprocessError, LookupError, TypeError, ValueError) as error:
            raise EngineFault(f"cannot read the memory of GPUs {list(gpus)}: {error!r}") from error

    async def note_awake(self, gpus: Sequence[int]) -> None:
        """How much it has while it works: what is as much as that later has not been freed."""
        for gpu, used in (await self.read(gpus)).items():
            self._awake[gpu] = max(used, self._awake.get(gpu, 0))

    def forget(self, gpus: Iterable[int]) -> None:
        for gpu in gpus:
            self._awake.pop(gpu, None)

    async def held(self, gpus: Sequence[int]) -> str:
        """What is still in use, in words, or ""."""
        told = [self._told(gpu, used) for gpu, used in (await self.read(gpus)).items()]
        return "; ".join(one for one in told if one)

    def _told(self, gpu: int, used: int) -> str:
        awake = self._awake.get(gpu)
        if used > self._may_keep:
            return f"GPU {gpu} has {readable_bytes(used)} in use, and {readable_bytes(self._may_keep)} may stay"
        if awake and used > awake * FALLS:
            return f"GPU {gpu} has {readable_bytes(used)} in use, as much as while awake ({readable_bytes(awake)})"
        return ""

    async def until_free(self, gpus: Sequence[int], who: str) -> None:
        """Wait until memory falls: an engine may answer before it is done."""
        clock = asyncio.get_running_loop().time
        until = clock() + self.within_s
        while held := await self.held(gpus):
            if clock() >= until:
                raise MemoryNotFree(f"{who} says that it sleeps, but after {self.within_s:g} s {held}")
            await asyncio.sleep(self._poll_s)


def readable_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
