"""Several clients write at once while the control plane is killed again and again; then everything is counted."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import muster
from muster import DistributedTraining
from tests.plane import Plane

PATIENCE_S = 180.0
ENDS = ("Succeeded", "Failed", "Cancelled")
EXITS = (0, 0, 0, 3)


@dataclass
class Accepted:
    """A training whose submission was answered, and what was answered since."""

    training: DistributedTraining
    exits: int
    target: int | None = 1
    cancelled: bool = False
    deleted: bool = False
    uncertain: bool = False  # an order was not answered: it may have been carried out


@dataclass
class Tally:
    kills: int = 0
    writes: int = 0
    unanswered: int = 0
    lost: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return [*self.lost, *self.duplicates, *self.orphans, *self.unknown]


class _Client:
    def __init__(self, plane: Plane, number: int, rng: Random, over: threading.Event) -> None:
        self._plane = plane
        self._number = number
        self._rng = rng
        self._over = over
        self.accepted: list[Accepted] = []
        self.unsure: set[str] = set()  # submissions that were not answered
        self.writes = self.unanswered = 0
        self.failure: BaseException | None = None
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with muster.Client(url=self._plane.url, token=self._plane.api_token) as client:
                client.list()
                self.ready.set()
                turn = 0
                while not self._over.is_set():
                    turn += 1
                    self._one(client, f"c{self._number}-{turn}")
        except (muster.MusterError, AssertionError, OSError) as error:
            self.failure = error

    def _one(self, client: muster.Client, name: str) -> None:
        code = self._rng.choice(EXITS)
        script = f"sleep {self._rng.uniform(0, 1.0):.2f}; exit {code}"
        command = ["/bin/sh", "-c", script]
        try:
            training = self._plane.train(name, client=client, command=command, world=(1, 1, 3), max_restarts=0)
        except muster.Unavailable:
            self.unsure.add(name)
            self.unanswered += 1
            return
        self.writes += 1
        one = Accepted(training, code)
        self.accepted.append(one)
        order = self._rng.choice((self._wait, self._wait, self._scale, self._cancel, self._delete))
        try:
            order(one)
        except muster.Unavailable:
            one.uncertain = True
            self.unanswered += 1

    def _wait(self, one: Accepted) -> None:
        with contextlib.suppress(muster.TrainingFailed):
            one.training.result(timeout=PATIENCE_S)

    def _scale(self, one: Accepted) -> None:
        target = self._rng.choice((2, 3))
        try:
            one.training.scale(target)
        except muster.UDTerminalState:
            one.target = None  # it has ended; if an answer was lost before, it had been scaled by then
        else:
            one.target = target
            self.writes += 1

    def _cancel(self, one: Accepted) -> None:
        one.training.cancel(grace_seconds=1)
        one.cancelled = True
        self.writes += 1

    def _delete(self, one: Accepted) -> None:
        one.training.delete(timeout=PATIENCE_S)
        one.deleted = True
        self.writes += 1


def storm(plane: Plane, rng: Random, kills: int, clients: int) -> Tally:
    """It must serve already."""
    over, tally = threading.Event(), Tally()
    crowd = [_Client(plane, number, Random(rng.random()), over) for number in range(clients)]
    for client in crowd:
        client.thread.start()
    try:
        for client in crowd:
            assert client.ready.wait(PATIENCE_S)
        for _ in range(kills):
            time.sleep(rng.uniform(0.0, 0.6))  # the random moment is the point
            plane.crash()
            plane.serve()
            tally.kills += 1
    finally:
        over.set()
        for client in crowd:
            client.thread.join(2 * PATIENCE_S)
    for client in crowd:
        assert not client.thread.is_alive(), "a client is stuck"
        if client.failure is not None:
            raise client.failure
        tally.writes += client.writes
        tally.unanswered += client.unanswered
    unsure = {name for client in crowd for name in client.unsure}
    _count(plane, [one for client in crowd for one in client.accepted], unsure, tally)
    return tally


def _count(plane: Plane, accepted: list[Accepted], unsure: set[str], tally: Tally) -> None:
    found = {one.training.uid: one for one in plane.client.list()}
    known = {one.training.training.uid: one for one in accepted}
    foreign = [one.name for uid, one in found.items() if uid not in known and one.name not in unsure]
    tally.duplicates += [f"{name} is there and nobody submitted it" for name in foreign]
    for uid, one in known.items():
        if uid in found:
            with contextlib.suppress(muster.TrainingFailed, muster.TrainingCancelled):
                found[uid].result(timeout=PATIENCE_S)
            _compare(one, found[uid], tally)
        elif not one.deleted and not one.uncertain:
            tally.lost.append(f"{one.training.name} was accepted and is gone")
    deadline = time.monotonic() + 20
    while plane.worker_pids() and time.monotonic() < deadline:
        time.sleep(0.1)
    tally.orphans += [f"worker {name} runs" for name in plane.worker_pids()]
    tally.orphans += [line for line in plane.left_over() if "muster.daemon" not in line]


def _compare(one: Accepted, now: DistributedTraining, tally: Tally) -> None:
    now.refresh()
    name = now.name
    if one.deleted:
        tally.lost.append(f"{name}: its removal was accepted, and it is there")
    if one.target not in (None, now.training.spec.world_size.target) and not one.uncertain:
        tally.lost.append(f"{name}: was scaled to {one.target}, has {now.training.spec.world_size.target}")
    if one.cancelled and now.training.spec.cancel is None and now.phase not in ("succeeded", "failed"):
        tally.lost.append(f"{name}: its cancellation was accepted and is not there")
    events = now.events()
    ends = [event.reason for event in events if event.reason in ENDS]
    if len(ends) != 1:
        tally.duplicates.append(f"{name}: ended {len(ends)} times: {ends}")
    if [event.id for event in events] != sorted({event.id for event in events}):
        tally.duplicates.append(f"{name}: its events are not in order")
    began = Counter(str(event.data["worker"]) for event in events if event.reason == "WorkerStarted")
    tally.duplicates += [f"{name}: {worker} began {count} times" for worker, count in began.items() if count > 1]
    wrong = [exit for exit in now.rank_exits if exit.exit_code is None]
    if not one.cancelled and not one.uncertain:
        wrong += [exit for exit in now.rank_exits if exit.exit_code not in (one.exits, 143, 137)]
        if now.phase != ("succeeded" if one.exits == 0 else "failed"):
            tally.unknown.append(f"{name}: {now.phase}, exits {one.exits} were meant")
    tally.unknown += [f"{name}: rank {exit.rank}: {exit.exit_code} {exit.termination_reason}" for exit in wrong]
