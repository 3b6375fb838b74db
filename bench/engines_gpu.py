"""How long does a module take to leave a GPU and to come back, and is all of it gone? It needs torch and muster alone.

    PYTHONPATH=src python bench/engines_gpu.py --billions 1.1 [--json]
    PYTHONPATH=src python bench/engines_gpu.py --billions 0.01 --device cpu     # without a GPU, to see that it runs

A module of random weights in bfloat16 with a cache of 2 GiB goes and comes, by level 1 and by level 2; what it answers
must not change. Then what must be found: a tensor that nobody named, and turns in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

from muster.sharing.engines import MemoryNotFree, TorchEngine, TurnInterrupted

AWAKE = {0: [0]}
STRANGER = 512 << 20


class Layers(nn.Module):
    """The first and the last share their weights."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
        self.first, self.last = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        return self.last(self.inner(self.first(x)))


async def timed(call: Any) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.on = given, torch.device(given.device)
        self.width = 4096 if self.on.type == "cuda" else 256
        torch.manual_seed(0)
        count = max(1, round(given.billions * 1e9 / self.width**2))
        self.model = Layers(self.width, count).to(torch.bfloat16)
        self.weights = {name: one.clone() for name, one in self.model.state_dict().items()}
        self.kv = [torch.zeros((2 << 30) // 8 if self.on.type == "cuda" else 1024, device=self.on) for _ in range(2)]

    def answer(self) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.model(torch.ones(1, self.width, device=self.on, dtype=torch.bfloat16))
        return found.float().cpu()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.on) if self.on.type == "cuda" else 0

    async def level(self, level: int) -> dict[str, Any]:
        engine = TorchEngine(self.model, caches={"kv": self.kv}, level=level, device=self.on)
        engine.publish(level, self.weights)
        await engine.expand(AWAKE)
        before = self.answer()
        shrinks, expands, left = [], [], []
        for _ in range(self.given.times + 1):
            shrinks.append(await timed(engine.shrink([0])))
            left.append(self.reserved())
            expands.append(await timed(engine.expand(AWAKE)))
            assert torch.equal(before, self.answer()), "it answers otherwise than before"
            assert self.model.last.weight is self.model.first.weight
        return {
            "level": level,
            "first shrink s": round(shrinks[0], 4),
            "shrink p50 s": round(statistics.median(shrinks[1:]), 4),
            "expand p50 s": round(statistics.median(expands[1:]), 4),
            "left MiB": max(left) >> 20,
        }

    async def stranger(self) -> str:
        engine = TorchEngine(self.model, caches={"kv": self.kv}, device=self.on)
        await engine.expand(AWAKE)
        unnamed = torch.zeros(STRANGER, dtype=torch.uint8, device=self.on)
        try:
            await engine.shrink([0])
        except MemoryNotFree as error:
            told = error.message
        else:
            told = "not found" if self.on.type == "cuda" else "a CPU has no allocator to be asked"
        del unnamed
        await engine.shrink([0])
        return told

    async def in_flight(self) -> dict[str, Any]:
        engine = TorchEngine(self.model, caches={"kv": self.kv}, device=self.on)
        await engine.expand(AWAKE)
        inside, ended = threading.Event(), []

        def generate() -> None:
            try:
                with engine.turn():
                    while not engine.interrupted():
                        self.answer()
                        inside.set()
            except TurnInterrupted as error:
                ended.append(error.message)

        turn = asyncio.create_task(asyncio.to_thread(generate))
        await asyncio.to_thread(inside.wait)
        took = await timed(engine.shrink([0]))
        await turn
        return {"shrink with a turn in flight s": round(took, 4), "the turn": ended[0]}

    async def run(self) -> dict[str, Any]:
        billions = sum(one.numel() for one in self.model.parameters()) / 1e9
        name = torch.cuda.get_device_name(self.on) if self.on.type == "cuda" else "CPU"
        told: dict[str, Any] = {"device": name, "torch": torch.__version__, "billions": round(billions, 3)}
        told["levels"] = [await self.level(level) for level in (1, 2)]
        return told | {"a stranger": await self.stranger()} | await self.in_flight()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, default=1.1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args()
    told = asyncio.run(Bench(given).run())
    print(json.dumps(told) if given.json else table(told))


def table(result: dict[str, Any]) -> str:
    """Return one line for each value, and a row for each level."""
    levels = result["levels"]
    lines = [f"{name:<32} {value}" for name, value in result.items() if name != "levels"]
    heads = [f"{name:>16}" for name in levels[0]]
    rows = ["".join(f"{value:>16}" for value in level.values()) for level in levels]
    return "\n".join([*lines, "", "".join(heads), *rows])


if __name__ == "__main__":
    main()
