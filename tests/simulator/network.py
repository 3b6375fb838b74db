"""What arrives, and when? Connections between machines: ordered, slow, and sometimes cut.

A cut holds bytes back and loses none, as TCP does: they arrive in order when it heals, unless an end gave up before.
A machine that lost its power never answers again; nobody is told. What posts say to each other can come a second time,
later than what was said after it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

from muster.types.frames import Frame, KeepFrame, KeptFrame, VoiceFrame, VoteFrame
from muster.world.wire import understood
from tests.simulator.clock import VirtualClock

if TYPE_CHECKING:
    from tests.simulator.coordinator import SimulatedCoordinator

COORDINATOR = "coordinator"  # the machine of the one that was there first
UP = "up"  # away from a machine
DOWN = "down"
BOTH = frozenset({UP, DOWN})

Item = bytes | None  # None: the other side ended the connection
RESET = b""  # that, but not cleanly
Sink = Callable[[Item], None]
BETWEEN_POSTS = (KeepFrame, KeptFrame, VoteFrame, VoiceFrame)
REPEATED, LATEST_S = 0.3, 4.0


@lru_cache(maxsize=256)
def frame_of(data: bytes) -> Frame:
    """Many members send or get the same bytes; nobody changes a frame."""
    return understood(json.loads(data[4:]))


class Network:
    def __init__(
        self, clock: VirtualClock, rng: Random, *, fastest_s: float = 0.0002, slowest_s: float = 0.004
    ) -> None:
        self.clock = clock
        self._rng = rng
        self._fastest_s = fastest_s
        self._spread_s = slowest_s - fastest_s
        self._cuts: dict[str, frozenset[str]] = {}
        self._ways: dict[str, list[Way]] = {}
        self._dead: set[str] = set()
        self.was_cut: set[str] = set()
        self.listeners: dict[tuple[str, int], SimulatedCoordinator] = {}  # who answers where
        self._apart: set[tuple[str, str]] = set()
        self.repeats_until = 0.0

    def delay(self, rng: Random | None = None) -> float:
        return self._fastest_s + self._spread_s * (rng or self._rng).random()

    def reaches(self, machine: str, target: str = COORDINATOR) -> bool:
        return (
            machine not in self._cuts
            and target not in self._cuts
            and not self._apart & {(machine, target), (target, machine)}
        )

    def joins(self, source: str, target: str) -> bool:
        """Whether a worker reaches another. Their ways to the coordinator have nothing to do with it."""
        return target not in self._dead and (source, target) not in self._apart

    def part(self, source: str, target: str) -> None:
        self._apart.add((source, target))

    def join(self, source: str, target: str) -> None:
        self._apart.discard((source, target))
        self._resume(source)

    def is_cut(self, source: str, target: str) -> bool:
        if not self._cuts and not self._apart:
            return False
        return UP in self._cuts.get(source, ()) or DOWN in self._cuts.get(target, ()) or (source, target) in self._apart

    def cut(self, machine: str, directions: frozenset[str] = BOTH) -> None:
        self._cuts[machine] = directions
        self.was_cut.add(machine)

    def power_off(self, machine: str) -> None:
        self._dead.add(machine)
        self._cuts[machine] = BOTH

    def is_off(self, machine: str) -> bool:
        return machine in self._dead

    def heal(self, machine: str) -> None:
        if machine not in self._dead and self._cuts.pop(machine, None) is not None:
            self._resume(machine)

    def _resume(self, machine: str) -> None:
        ways = self._ways[machine] = [way for way in self._ways.get(machine, ()) if not way.closed]
        for way in ways:
            way.resume()

    def way(self, source: str, target: str, rng: Random | None = None) -> Way:
        made = Way(self, source, target, rng or self._rng)
        for machine in (source, target):
            self._ways.setdefault(machine, []).append(made)
        return made


class Way:
    """One direction of one connection."""

    def __init__(self, network: Network, source: str, target: str, rng: Random) -> None:
        self._network = network
        self._rng = rng
        self._source = source
        self._target = target
        self._items: deque[Item] = deque()
        self._held = 0
        self._last_at = 0.0
        self.repeats = False
        self.sink: Sink | None = None

    @property
    def closed(self) -> bool:
        return self.sink is None and not self._items

    def send(self, item: Item) -> None:
        self._items.append(item)
        self._schedule()
        if self.repeats and item and self._network.clock.now < self._network.repeats_until:
            self._repeat(item)

    def _repeat(self, item: bytes) -> None:
        if isinstance(frame_of(item), BETWEEN_POSTS) and self._rng.random() < REPEATED:
            self._network.clock.after(self._rng.uniform(0.0, LATEST_S), self._again, item)

    def _again(self, item: bytes) -> None:
        if self.sink is not None:
            self._items.append(item)
            self._schedule()

    def _schedule(self) -> None:
        clock = self._network.clock
        at = clock.now + self._network.delay(self._rng)
        if at > self._last_at:
            self._last_at = at
        clock.at(self._last_at, self._arrive)

    def _arrive(self) -> None:
        if not self._items:
            return
        if self._network.is_cut(self._source, self._target):
            self._held += 1
            return
        item = self._items.popleft()
        if self.sink is not None:
            self.sink(item)

    def resume(self) -> None:
        held, self._held = self._held, 0
        for _ in range(held):
            self._schedule()

    def lose_all(self) -> None:
        """What was still under way is gone: the sender's machine answered with a reset."""
        self._items.clear()


class Cable:
    """One connection, seen from both of its ends. With an `rng` of its own it leaves the pace of others as it is."""

    def __init__(self, network: Network, machine: str, target: str = COORDINATOR, rng: Random | None = None) -> None:
        self.machine = machine
        self.up = network.way(machine, target, rng)
        self.down = network.way(target, machine, rng)
