"""How do two workers of one machine share state without copying it? One lends the other its memory.

Whoever is lent memory holds it as long as it likes: it outlives the lender, and the lender writes nothing to it before
it has come back. Both ends must be the same user's; a worker in another network namespace, or on another machine, does
not find the door, and is sent a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

from muster.node.memory import Memory, Segment
from muster.node.shelf import Key, Shelf, Spot
from muster.types.world import MemberId

LARGE = 1 << 20  # bytes from which on it is worth asking
MOST_MESSAGE = 1 << 16
MOST_LENT = 32  # segments of one copy
ANSWER_S = 5.0
_CREDENTIALS = struct.Struct("3i")


def door_of(member_id: MemberId) -> str:
    """A name of the network namespace, not of a file. It is known to members alone."""
    return f"\0muster-state-{member_id}"


def same_user(other: socket.socket) -> bool:
    _, uid, _ = _CREDENTIALS.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.getuid())


class Lender:
    """Lends what is on our shelf to whoever comes through our door."""

    def __init__(self, member_id: MemberId, shelf: Shelf, memory: Memory) -> None:
        self._shelf = shelf
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._door.bind(door_of(member_id))
        except OSError:  # then everybody is sent copies
            self._door.close()
            return
        self._door.listen(64)
        self._door.setblocking(False)
        self._loop.add_reader(self._door, self._come)

    def _come(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._door.accept()
            if same_user(near):
                _Loan(near, self._shelf, self._memory)
            else:
                near.close()


class _Loan:
    """What one other worker has of ours."""

    def __init__(self, near: socket.socket, shelf: Shelf, memory: Memory) -> None:
        self._socket = near
        self._shelf = shelf
        self._memory = memory
        self._lent: dict[int, Segment] = {}
        near.setblocking(False)
        asyncio.get_running_loop().add_reader(near, self._readable)

    def _readable(self) -> None:
        try:
            told = json.loads(self._socket.recv(MOST_MESSAGE) or b"{}")
            if not told:
                raise ConnectionError
            self._hear(told)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError):
            self._end()

    def _hear(self, told: Mapping[str, Any]) -> None:
        if "back" in told:
            for number in told["back"]:
                if (segment := self._lent.pop(number, None)) is not None:
                    self._memory.let_go(segment)
            return
        rank, number, step = told["lend"]
        copy = self._shelf.get((rank, number, step))
        if copy is None or len(copy.segments) > MOST_LENT:
            self._socket.send(b'{"missing":true}')
            return
        for segment in copy.segments:
            if segment.number not in self._lent:
                segment.users += 1
                self._lent[segment.number] = segment
        index = {segment.number: at for at, segment in enumerate(copy.segments)}
        answer = {"segments": [[segment.number, segment.size] for segment in copy.segments]}
        with open(os.memfd_create("muster-places"), "w+b", buffering=0) as paper:
            paper.write(json.dumps([[index[segment.number], at] for segment, at in copy.spots]).encode())
            fds = [paper.fileno(), *(segment.fd for segment in copy.segments)]
            socket.send_fds(self._socket, [json.dumps(answer).encode()], fds)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for segment in self._lent.values():
            self._memory.let_go(segment)
        self._lent.clear()


class Borrower:
    """Asks one worker of this machine, over one connection; what was lent goes back when nobody uses it any more."""

    def __init__(self, lender: MemberId, memory: Memory) -> None:
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._known: dict[int, Segment] = {}  # by the lender's number
        self._over = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.connect(door_of(lender))
            self._over = not same_user(self._socket)
        except OSError:
            self._over = True

    async def borrow(self, key: Key) -> list[Spot] | None:
        """Where the pieces of that copy lie, in memory that is held for the caller; None if it is not lent."""
        async with self._turn:
            if self._over:
                return None
            try:
                return await self._borrow(key)
            except (OSError, ValueError, KeyError, TypeError, IndexError):
                self._over = True  # what we have is ours as long as the connection is there, so it stays
                return None

    async def _borrow(self, key: Key) -> list[Spot] | None:
        self._socket.send(json.dumps({"lend": key}).encode())
        answered = asyncio.Event()
        self._loop.add_reader(self._socket, answered.set)
        try:
            async with asyncio.timeout(ANSWER_S):
                await answered.wait()
        finally:
            self._loop.remove_reader(self._socket)
        data, fds, _, _ = socket.recv_fds(self._socket, MOST_MESSAGE, MOST_LENT + 1)
        told = json.loads(data or b"{}")
        if not told:
            raise ConnectionResetError("it has gone")
        if "missing" in told:
            return None
        with open(fds[0], "rb", buffering=0) as paper:
            paper.seek(0)
            places = json.loads(paper.read())
        lent = zip(told["segments"], fds[1:], strict=True)
        segments = [self._held(int(number), int(size), fd) for (number, size), fd in lent]
        return [(segments[which], int(at)) for which, at in places]

    def _held(self, number: int, size: int, fd: int) -> Segment:
        """The same memory is one segment, however often it is lent."""
        segment = self._known.get(number)
        if segment is None:
            segment = self._known[number] = self._memory.adopt(fd, size, lambda: self._give_back(number))
        else:
            os.close(fd)
        return segment

    def _give_back(self, number: int) -> None:
        self._known.pop(number, None)
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"back": [number]}).encode())


class Borrowers:
    """One for each worker that gives us state; those that are elsewhere are not asked twice."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._all: dict[MemberId, Borrower] = {}

    async def borrow(self, lender: MemberId, key: Key) -> list[Spot] | None:
        if lender not in self._all:
            self._all[lender] = Borrower(lender, self._memory)
        return await self._all[lender].borrow(key)
