"""How does a rank speak to its worker's agent about state? Over a socket that the agent names in the environment.

One message each way; memory comes as descriptors. Without an agent there is none of this, and state lives on disk.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from muster.node.fencing import check_lease
from muster.state import layout, talk
from muster.state.layout import Manifest, Piece
from muster.state.pace import Pace
from muster.state.talk import MOST_MESSAGE, MOST_PARTS

if TYPE_CHECKING:
    from muster.state.copying import Slot

ANSWER_S = 600.0  # to fetch a state over a slow network takes long
MOST_TEXT = 500
LOOK_S = 0.1


class AgentGone(ConnectionError):
    pass


class Damaged(Exception):
    """A piece is not what its manifest says."""

    def __init__(self, why: str, digest: str = "", length: int = 0) -> None:
        super().__init__(why)
        self.hash, self.length = digest, length


class File:
    """A descriptor that is closed with the last one who holds this."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class Part:
    """The kept state of one rank, in memory that is only read."""

    manifest: Manifest
    memories: Sequence[torch.Tensor]  # of each piece, the rest's last: two may lie in one, or each elsewhere
    tier: str
    offsets: Sequence[int] | None = None  # where they are not those of the manifest
    files: Sequence[File] = ()  # the memories, as files

    def place(self, piece: Piece) -> tuple[int, int]:
        """In which file, and where in it."""
        index = self._index[id(piece)]
        return self.files[index].fd, piece.offset if self.offsets is None else self.offsets[index]

    def data(self, piece: Piece) -> torch.Tensor:
        index = self._index[id(piece)]
        begin = piece.offset if self.offsets is None else self.offsets[index]
        return self.memories[index][begin : begin + piece.length]

    @functools.cached_property
    def _index(self) -> dict[int, int]:
        return {id(piece): index for index, piece in enumerate(self.manifest.every)}


@dataclass(frozen=True)
class Offer:
    """Where this round goes on. Without parts: from that step on disk, or from the beginning."""

    step: int | None
    ranks: int = 0
    where: str = ""
    durable_step: int | None = None  # the newest step that the run ever had on disk


@dataclass
class Saved:
    """The newest step that a loss does not cost, and where it is."""

    step: int | None = None
    where: str = ""


class Line:
    """One connection to the agent; calls from several threads come one after the other."""

    def __init__(self, path: str, rank: int, number: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        with talk.short(path) as name:
            self._socket.connect(name)
        self._lock = threading.Lock()
        self._made = path, rank, number
        self.ask(do="hello", rank=rank, round=number)

    def another(self) -> Line:
        return Line(*self._made)

    def ask(self, **message: Any) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            try:
                self._socket.send(json.dumps(message).encode())
                self._await_reply()
                data, fds, _, _ = socket.recv_fds(self._socket, MOST_MESSAGE, MOST_PARTS)
            except OSError as error:
                raise AgentGone(f"the worker's agent does not answer: {error}") from None
        if not data:
            raise AgentGone("the worker's agent has closed the connection")
        answer: dict[str, Any] = json.loads(data)
        return answer, fds

    def send(self, **message: Any) -> None:
        """Send a message that has no reply. The socket sends whole messages, so another thread may wait for a reply."""
        try:
            self._socket.send(json.dumps(message).encode())
        except OSError as error:
            raise AgentGone(f"the worker's agent does not answer: {error}") from None

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message from the agent, or None after `timeout_s`."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        data = self._socket.recv(MOST_MESSAGE)
        if not data:
            raise AgentGone("the worker's agent has closed the connection")
        reply: dict[str, Any] = json.loads(data)
        return reply

    def _await_reply(self) -> None:
        """Wait for the reply, but not longer than the worker's lease: a stopped agent does not reply."""
        poll, until = select.poll(), time.monotonic() + ANSWER_S
        poll.register(self._socket, select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            check_lease()
            if time.monotonic() > until:
                raise TimeoutError("timed out")
        check_lease()

    def damaged(self, error: Damaged) -> bool:
        """Tell that a piece cannot be used; whether it could be had from another place."""
        answer, _ = self.ask(do="damaged", why=str(error)[:MOST_TEXT], hash=error.hash, length=error.length)
        return bool(answer["again"])

    def offer(self, durable: Path | None, every_s: float) -> Offer:
        """Where this round goes on."""
        answer, _ = self.ask(do="restore", durable=str(durable) if durable is not None else None, every_s=every_s)
        return Offer(answer["step"], answer["ranks"], answer["where"], answer.get("durable_step"))

    def part(self, rank: int) -> Part:
        """What one rank of the world of that step has kept; ConnectionError if it cannot be had any more."""
        answer, fds = self.ask(do="part", rank=rank)
        if "missing" in answer:
            raise AgentGone(answer["missing"])
        paper = File(fds[0])
        told = mapped(paper.fd, answer["told"], write=False)
        files = [File(fd) for fd in fds[1:]]
        memories = [mapped(file.fd, length, write=False) for file, length in zip(files, answer["lengths"], strict=True)]
        known = json.loads(bytes(told.numpy()))
        manifest = layout.read(json.dumps(known["manifest"]).encode(), 1 << 61)
        places = known["places"]
        kept, offsets = [memories[which] for which, _ in places], [at for _, at in places]
        return Part(manifest, kept, answer["tier"], offsets, [files[which] for which, _ in places])

    def close(self) -> None:
        self._socket.close()


def mapped(fd: int, length: int, *, write: bool) -> torch.Tensor:
    """Memory of a descriptor as bytes. What is only read is ours alone as soon as somebody writes to it."""
    kind = mmap.MAP_SHARED if write else mmap.MAP_PRIVATE
    memory = mmap.mmap(fd, length, flags=kind, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class AgentSlot:
    def __init__(self, line: Line, keeping: AgentKeeping, number: int, memory: torch.Tensor) -> None:
        self._line = line
        self._keeping = keeping
        self.number = number
        self.memory = memory

    def seal(self, manifest: Manifest) -> None:
        """The manifest comes last, behind everything else."""
        told = manifest.write()
        begin = layout.aligned(manifest.length)
        self.memory[begin : begin + len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        answer, _ = self._line.ask(do="seal", slot=self.number, begin=begin, length=len(told))
        if "refused" in answer:
            raise ValueError(answer["refused"])
        self._keeping.heard(answer)

    def free(self) -> None:
        self._line.ask(do="free", slot=self.number)


class AgentKeeping:
    """Memory of the agent's. Slots come again and again: each is mapped once."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._words = line.another()  # this one is never busy
        self._slots: dict[int, AgentSlot] = {}
        self._pace = Pace(1.0)
        self.every = 1
        self.refused = ""
        self.safe: int | None = None

    def heard(self, news: Mapping[str, Any]) -> None:
        self.every, self.safe = news["every"], news["safe"]

    def wants(self, step: int) -> bool:
        return step % max(1, self.every) == 0

    def skipped(self) -> None:
        pass

    def take(self, length: int) -> AgentSlot | None:
        pace = self._pace
        answer, fds = self._line.ask(
            do="slot",
            bytes=length,
            known=sorted(self._slots),
            every=pace.every,
            commit_s=pace.copy_s or 0.0,
            step_s=pace.step_s or 0.0,
        )
        self.refused = answer.get("refused", "")
        self.heard(answer)
        if "slot" not in answer:
            return None
        for gone in set(self._slots) - set(answer["slots"]):
            del self._slots[gone]
        number = answer["slot"]
        if fds:
            file = File(fds[0])
            self._slots[number] = AgentSlot(self._line, self, number, mapped(file.fd, answer["bytes"], write=True))
        return self._slots[number]

    def told_pace(self, pace: Pace) -> None:
        self._pace = pace

    def begin(self, step: int) -> None:
        """Report to the agent that a copy begins: the agent ends no rank in the middle of a copy."""
        self._words.send(do="begin", step=step)

    def preview(self, slot: Slot, manifest: Manifest, included: Sequence[int]) -> None:
        """Have the agent send the worker's buddy the hashes of a step, with the bytes of the pieces in `included`."""
        assert isinstance(slot, AgentSlot)
        text, begin = manifest.write(), layout.aligned(manifest.length)
        if begin + len(text) <= slot.memory.numel():
            slot.memory[begin : begin + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            where = {"slot": slot.number, "begin": begin, "length": len(text)}
            self._words.send(do="preview", told=list(included), step=manifest.step, wait_s=self._pace.left_s, **where)

    def wait_for_preview(self, step: int, timeout_s: float) -> None:
        """Wait until the buddy has the preview of this step. Skip late replies for earlier steps."""
        deadline = time.monotonic() + timeout_s
        while (reply := self._words.receive(max(0.0, deadline - time.monotonic()))) is not None:
            if reply.get("previewed") == step:
                return

    def wait(self) -> None:
        """Until others have what was sealed, as far as they can be reached."""
        self.heard(self._line.ask(do="wait")[0])
