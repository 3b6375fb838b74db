"""What a rank and its agent say to each other about state. Runs on the keeper's loop.

A rank is the user's program: what it says is looked at as what anybody says, and bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from muster.node import previews
from muster.node.memory import NoRoom, Segment
from muster.node.shelf import Copy
from muster.state import layout
from muster.state.talk import MOST_MESSAGE

if TYPE_CHECKING:
    from muster.node.keeping import Keeper

MOST_SLOTS = 4  # that one rank may have in hand
MOST_TEXT = 500
MOST_SIZE = 1 << 50
MOST_WAIT_S = 1.0


class RankLine:
    """One connection of a rank."""

    def __init__(self, keeper: Keeper, near: socket.socket) -> None:
        self._keeper = keeper
        self._socket = near
        self._rank, self._round = -1, -1
        self._slots: dict[int, Segment] = {}
        near.setblocking(False)
        asyncio.get_running_loop().add_reader(near, self._readable)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(MOST_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        try:
            self._hear(json.loads(data))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            self._answer({"refused": f"not understood: {error}"[:MOST_TEXT]})

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for segment in self._slots.values():
            self._keeper.memory.let_go(segment)
        self._slots.clear()
        self._keeper.copied(self._rank)

    def _answer(self, message: Mapping[str, Any], *fds: int) -> None:
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(fds))

    def _hear(self, told: Mapping[str, Any]) -> None:
        keeper = self._keeper
        match told["do"]:
            case "hello":
                self._rank, self._round = int(told["rank"]), int(told["round"])
                self._answer(keeper.news())
            case "slot":
                keeper.told_pace(self._rank, int(told["every"]), _seconds(told["commit_s"]), _seconds(told["step_s"]))
                size, known = min(int(told["bytes"]), MOST_SIZE), {int(one) for one in told["known"]}
                keeper.tasks.start(self._slot(size, known))
            case "begin":
                keeper.copying[self._rank] = int(told["step"])  # no reply: the training does not wait
            case "preview":
                where = int(told["slot"]), int(told["begin"]), int(told["length"])
                keeper.tasks.start(self._preview(*where, told["told"], int(told["step"]), _seconds(told["wait_s"])))
            case "seal":
                self._seal(int(told["slot"]), int(told["begin"]), int(told["length"]))
            case "free":
                keeper.copied(self._rank)
                if (segment := self._slots.pop(int(told["slot"]), None)) is not None:
                    keeper.memory.let_go(segment)
                self._answer({})
            case "restore":
                folder = told.get("durable")
                keeper.use_folder(str(folder) if folder else None, _seconds(told["every_s"]))
                resume = keeper.resume
                step, ranks, why = (resume.step, resume.ranks, resume.why) if resume is not None else (None, 0, "")
                durable_step = keeper.durable_step_for(self._rank)
                self._answer({"step": step, "ranks": ranks, "where": why, "durable_step": durable_step})
            case "part":
                keeper.tasks.start(self._part(int(told["rank"])))
            case "restored":
                keeper.restored(self._rank)
                self._answer(keeper.news())
            case "damaged":
                again = keeper.found_damage(str(told["why"])[:MOST_TEXT], str(told["hash"]), int(told["length"]))
                self._answer({"again": again})
            case "wait":
                keeper.tasks.start(self._wait())
            case other:
                raise ValueError(f"{other!r} is nothing that is done here")

    async def _slot(self, size: int, known: set[int]) -> None:
        keeper = self._keeper
        try:
            if len(self._slots) >= MOST_SLOTS:
                raise NoRoom("a rank that does not seal what it was given gets no more")
            segment = await keeper.take(size)
        except NoRoom as error:
            if keeper.shelf.has_own(self._rank):  # there is memory, but all of it is in use: later
                self._answer(keeper.news())
                return
            keeper.refuse(str(error))
            self._answer({"refused": str(error), **keeper.news()})
            return
        if self._socket.fileno() < 0:
            keeper.memory.let_go(segment)
            return
        keeper.refuse("")
        self._slots[segment.number] = segment
        fds = () if segment.number in known else (segment.fd,)
        told = {"slot": segment.number, "bytes": segment.size, "slots": keeper.memory.numbers()}
        self._answer(told | keeper.news(), *fds)

    async def _preview(self, number: int, begin: int, length: int, pieces: Any, step: int, wait_s: float) -> None:
        try:
            segment = self._keeper.memory[number]
            preview = previews.read(segment.memory, begin, length, pieces)
            if (preview.manifest.rank, preview.manifest.round) == (self._rank, self._round):
                await self._keeper.peers.spread(preview, min(wait_s, MOST_WAIT_S))
        except (KeyError, ValueError):
            pass  # others hear of it when it is sealed
        self._answer({"previewed": step})

    def _seal(self, number: int, begin: int, length: int) -> None:
        keeper, segment = self._keeper, self._slots.pop(number)
        try:
            if not 0 <= begin <= begin + length <= segment.size:
                raise ValueError("it is not within its memory")
            manifest = layout.read(segment.memory[begin : begin + length], begin)
            if (manifest.rank, manifest.round) != (self._rank, self._round):
                raise ValueError("it is another rank's")
            copy = keeper.shelf.put(manifest, [(segment, piece.offset) for piece in manifest.every], own=True)
        finally:
            keeper.memory.let_go(segment)
        keeper.copied(self._rank)
        keeper.sealed(copy)
        self._answer({"sealed": manifest.step} | keeper.news())

    async def _wait(self) -> None:
        await self._keeper.flush()
        self._answer(self._keeper.news())

    async def _part(self, rank: int) -> None:
        try:
            copy = await self._keeper.part(rank)
        except OSError as error:
            self._answer({"missing": str(error)[:MOST_TEXT]})
            return
        self._give(copy)

    def _give(self, copy: Copy) -> None:
        segments = copy.segments
        index = {segment.number: at for at, segment in enumerate(segments)}
        places = [[index[segment.number], at] for segment, at in copy.spots]
        told = json.dumps({"manifest": json.loads(copy.manifest.write()), "places": places}).encode()
        with open(os.memfd_create("muster-part"), "w+b", buffering=0) as paper:
            paper.write(told)
            answer = {
                "told": len(told),
                "lengths": [segment.size for segment in segments],
                "tier": "own" if copy.own else "buddy",
            }
            self._answer(answer, paper.fileno(), *(one.fd for one in segments))


def _seconds(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found) or found < 0:
        raise ValueError("not a time")
    return found
