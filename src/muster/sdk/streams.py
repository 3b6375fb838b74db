"""How does a stream go on when its connection breaks?

Logs and watches are long answers that outlive a restart of the control plane. A watch resumes at the last version
that it saw. Log lines carry no number, so a log is read again from its start, and lines that were already handed out
are left out: counted by content, because lines of several ranks may come in another order the second time.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from muster.errors import Compacted, MusterError, NotFound, Unavailable, from_wire
from muster.sdk.effects import Emit, Flow, HttpRequest, Lost, NextLine, Pause, Response
from muster.sdk.flows import RETRY, Handle, Outage, listed, look, read, unavailable
from muster.types.event import Event
from muster.types.training import Key, Training

HEARTBEAT_S = 60.0  # a watch that is silent for longer has lost its server: heartbeats come more often

_RANK = re.compile(r"\[([0-9]{1,9})\] ")

Kind = Literal["ADDED", "MODIFIED", "DELETED"]


def _open(request: HttpRequest) -> Flow[None]:
    answer: Response | Lost = yield request
    if isinstance(answer, Lost):
        raise unavailable(answer)
    if answer.status >= 400:
        raise from_wire(answer.status, answer.json)


def _next_line() -> Flow[str | None]:
    line: str | Lost | None = yield NextLine()
    if isinstance(line, Lost):
        raise unavailable(line)
    return line


# Logs --------------------------------------------------------------------------------------------


@dataclass
class _HandedOut:
    """Which lines were handed out, so that a second reading leaves them out."""

    whole: bool  # the reading began at the start of the log, not with its tail
    timestamps: bool = False  # before each line; another reading may know them better
    handed_out: Counter[int] = field(default_factory=Counter)
    again: Counter[int] = field(default_factory=Counter)
    known: set[str] = field(default_factory=set)  # ranks of which something was handed out
    unseen: set[str] = field(default_factory=set)  # of these: not yet come to where the first reading began

    def begin(self) -> None:
        self.again = Counter(self.handed_out)
        self.unseen = set() if self.whole else set(self.known)

    def takes(self, line: str) -> bool:
        line = line.partition(" ")[2] if self.timestamps else line
        mark, rank = hash(line), line.partition("] ")[0] if line.startswith("[") else ""
        if self.again[mark] > 0:
            self.again[mark] -= 1
            self.unseen.discard(rank)
            return False
        if rank in self.unseen:
            return False
        self.handed_out[mark] += 1
        self.known.add(rank)
        return True


Told = Callable[[str], object]  # what is handed out for a line; None: nothing


def rank_logs(handle: Handle, ranks: Collection[int] | None, timestamps: bool = False) -> Flow[None]:
    """Emit (rank, line) for all that its ranks write until it is over, or only for some of them."""
    told = functools.partial(_of_rank, ranks, timestamps)
    yield from logs(handle, None, None, True, None, timestamps, told=told)


def _of_rank(ranks: Collection[int] | None, timestamps: bool, line: str) -> tuple[int, str] | None:
    """Lines that no rank wrote are nobody's."""
    stamp = line[: line.find(" ") + 1] if timestamps else ""
    marked = _RANK.match(line, len(stamp))
    if marked is None or (ranks is not None and int(marked[1]) not in ranks):
        return None
    return int(marked[1]), stamp + line[marked.end() :]


def logs(
    handle: Handle,
    rank: int | None,
    round: int | None,
    follow: bool,
    tail: int | None,
    timestamps: bool = False,
    told: Told = str,
) -> Flow[None]:
    """Emit each line. Following goes on until the training is over, through restarts of the control plane."""
    reader, outage = _HandedOut(whole=tail is None, timestamps=timestamps), Outage()
    chosen = {name: "true" for name, wanted in (("follow", follow), ("timestamps", timestamps)) if wanted}
    while True:
        reader.begin()
        asked = {"rank": rank, "round": round, "tail": None if reader.handed_out else tail}
        params = {name: str(value) for name, value in asked.items() if value is not None}
        before = reader.handed_out.total()
        try:
            yield from _log(handle, params | chosen, reader, told)
            if not follow or round is not None or (yield from _is_over(handle)):
                return
            raise Unavailable("the control plane closed the stream while the training runs")
        except Unavailable as lost:
            if not follow and outage.failures:
                raise
            fresh = reader.handed_out.total() > before
            outage = yield from (Outage() if fresh else outage).wait(lost)


def _is_over(handle: Handle) -> Flow[bool]:
    """No more will come: it has ended, or it was deleted under our eyes."""
    try:
        return (yield from look(handle, handle.ask("GET"))).is_terminal
    except NotFound:
        return True


def _log(handle: Handle, params: dict[str, str], reader: _HandedOut, told: Told) -> Flow[None]:
    yield from _open(handle.ask("GET", "/logs", params, timeout_s=None, stream=True))
    while (line := (yield from _next_line())) is not None:
        if reader.takes(line) and (found := told(line)) is not None:
            yield Emit(found)


# Watches -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One change, as the wire tells it."""

    kind: Kind
    training: Training


@dataclass
class _Position:
    """How far a watch has come: the version to go on from, and what is there."""

    version: str | None
    known: dict[Key, Training] = field(default_factory=dict)
    moved: bool = False  # something arrived since the last outage

    def differences(self, now: list[Training]) -> Iterator[Seen]:
        """What must have happened between what was known and what a list shows."""
        there = {training.key: training for training in now}
        for key in [key for key in self.known if key not in there]:
            yield Seen("DELETED", self.known.pop(key))
        for key, training in there.items():
            before = self.known.get(key)
            if before is None or before.uid != training.uid:
                yield Seen("ADDED", training)
            elif before.version != training.version:
                yield Seen("MODIFIED", training)
            self.known[key] = training

    def take(self, seen: Seen) -> None:
        if seen.kind == "DELETED":
            self.known.pop(seen.training.key, None)
        else:
            self.known[seen.training.key] = seen.training


def watch(namespace: str | None, resource_version: str | None, *, events: bool = False) -> Flow[None]:
    """Emit every change of a namespace's trainings, or of all. Without a version, what is there comes first, as added.

    When the server no longer knows the changes since the last one seen, the difference to a new list stands in. With
    `events`, entries of their journals as they are written, too; what is written during an outage is not among them.
    """
    position, outage = _Position(resource_version), Outage()
    while True:
        try:
            if position.version is None:
                now, version = yield from listed(namespace, None, None)
                for seen in position.differences(now):
                    yield Emit(seen)
                position.version = version
            yield from _follow(namespace, position, events)
        except Compacted:
            position.version = None
            yield Pause(RETRY.first_s)
        except Unavailable as lost:
            outage = yield from (Outage() if position.moved else outage).wait(lost)
            position.moved = False


def _follow(namespace: str | None, position: _Position, events: bool) -> Flow[None]:
    version = position.version or ""
    headers = {"Accept": "text/event-stream", "Last-Event-ID": version}
    params = {"resourceVersion": version} | ({} if namespace is None else {"namespace": namespace})
    params |= {"events": "true"} if events else {}
    yield from _open(HttpRequest("GET", "/v1/watch", params, headers=headers, timeout_s=HEARTBEAT_S, stream=True))
    message = _Message()
    while (line := (yield from _next_line())) is not None:
        position.moved = True
        if line:
            message.add(line)
            continue
        seen = message.read()
        if isinstance(seen, Event):
            yield Emit(seen)
        elif seen is not None and namespace in (None, seen.training.metadata.namespace):
            position.take(seen)
            yield Emit(seen)
        position.version = message.id or position.version
        message = _Message()
    raise Unavailable("the control plane closed the stream")


@dataclass
class _Message:
    """One server-sent event, line by line; a line that opens with a colon is a heartbeat."""

    id: str = ""
    event: str = ""
    data: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            self.id = value
        elif name == "event":
            self.event = value
        elif name == "data":
            self.data.append(value)

    def read(self) -> Seen | Event | None:
        if not self.data:
            return None
        try:
            body = json.loads("\n".join(self.data))
        except ValueError as wrong:
            raise MusterError(f"the server's answer cannot be understood: {wrong}") from wrong
        if isinstance(body, dict) and "error" in body:
            raise from_wire(500, body)
        if isinstance(body, dict) and "object" in body:
            self.event, body = str(body.get("type") or self.event), body["object"]
        if self.event.upper() == "EVENT":
            return read(Event, body)
        kinds: dict[str, Kind] = {"ADDED": "ADDED", "MODIFIED": "MODIFIED", "DELETED": "DELETED"}
        kind = kinds.get(self.event.upper())
        return None if kind is None else Seen(kind, read(Training, body))
