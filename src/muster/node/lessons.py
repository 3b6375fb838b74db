"""When is known what ranks import by themselves, and who is told?

Their notes are read until they have been the same for a while. The worker of rank 0 tells the coordinator, which tells
spares: they have never run the script, and are to have the same modules when they take a rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from muster.types.frames import Frame, LearnedFrame, ModulesFrame, WelcomeFrame

LOOK_S, LOOKS = 1.0, 300


class Lessons:
    def __init__(self, send: Callable[[Frame], object], learned: Callable[[tuple[str, ...]], None]) -> None:
        self._send = send
        self._learned = learned
        self._told: tuple[str, ...] = ()

    async def follow(self, look: Callable[[], tuple[str, ...] | None], *, tells: bool) -> None:
        """`look` answers None when those ranks are gone."""
        last: tuple[str, ...] | None = None
        for _ in range(LOOKS):
            await asyncio.sleep(LOOK_S)
            seen = look()
            if last is not None and seen in (last, None):
                self._take(last, tells=tells)
            if seen is None:
                return
            last = seen

    def _take(self, modules: tuple[str, ...], *, tells: bool) -> None:
        self._learned(modules)
        if tells and modules and modules != self._told:
            self._told = modules
            self._send(LearnedFrame(modules=modules))

    def hear(self, frame: Frame) -> None:
        if isinstance(frame, ModulesFrame):
            self._learned(frame.modules)
        elif isinstance(frame, WelcomeFrame) and self._told:
            self._send(LearnedFrame(modules=self._told))  # it may be another coordinator
