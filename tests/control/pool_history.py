"""Trainings and pipelines on one pool, and anything may happen: a history on virtual time, as its seed wants it.

The scheduler, its journal's records and what the control loop says to the pool are real. Workers, ranks, engines and
the coordinator are imitated, and remember on which GPUs something of them really is: whoever is let onto a GPU that
somebody else is still on is found out, whatever the scheduler believes. The control plane dies without ceremony, and
with it what its journal had not yet written.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

from muster.control.pool_claims import PoolClaims
from muster.core.sharing import records
from muster.core.sharing.planner import plan
from muster.core.sharing.plans import SharePlan
from muster.core.training.admission import Grant
from muster.errors import JournalUnusable, MusterError
from muster.sharing import ClusterSpec, Pool, Priority, ProgressReport, Scheduler
from muster.types.sharing import Shares, gpus_of
from muster.types.training import Resources, Training, Uid, WorldSize
from muster.types.worker import Worker
from muster.types.world import Role
from tests.core.sharing import invariants
from tests.training_builders import a_training

POOL = Pool(gpus=8, gpus_per_node=4)
EPOCH = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
LAG_S = 0.02  # of a journal
CLEARED_S = 3.0  # what is left of a dead worker runs for at most so long
BOUND_S = 120.0  # nobody waits longer for what nobody keeps from it
HOOK_S = (0.0, 0.2, 2.0)


class Journal:
    """Everything is written a moment later, or never, if the process dies before."""

    def __init__(self, durable: dict[str, records.Value]) -> None:
        self.durable = durable
        self._pending: records.Changes = {}
        self._written: asyncio.Future[None] | None = None
        self.dead = False

    def open(self, empty: Shares) -> records.KeptShares:
        return records.read(self.durable, empty, "the journal")

    def rewrite(self, shares: Shares, at: float, reasons: Mapping[int, str]) -> None:
        stale: records.Changes = dict.fromkeys(self.durable)
        self._put(stale | records.changes(Shares(shares.pool), shares, at, reasons=reasons))

    def append(self, before: Shares, after: Shares, at: float, reasons: Mapping[int, str] | None = None) -> None:
        self._put(records.changes(before, after, at, reasons=reasons))

    def _put(self, changes: records.Changes) -> None:
        if self.dead:
            return
        self._pending |= changes
        if self._written is None:
            loop = asyncio.get_running_loop()
            self._written = loop.create_future()
            loop.call_later(LAG_S, self._flush, self._written)

    def _flush(self, written: asyncio.Future[None]) -> None:
        if not self.dead:
            self._written, changes, self._pending = None, self._pending, {}
            for key, value in changes.items():
                if value is None:
                    self.durable.pop(key, None)
                else:
                    self.durable[key] = value
        if not written.done():
            written.set_result(None)

    def all(self) -> dict[str, records.Value]:
        """As if it were written now."""
        merged: records.Changes = {**self.durable, **self._pending}
        return {key: value for key, value in merged.items() if value is not None}

    def crash(self) -> None:
        self.dead = True

    async def written(self) -> None:
        if self._written is not None:
            await asyncio.shield(self._written)
        if self.dead:
            raise JournalUnusable("the process is dead")

    def close(self) -> None:
        """Nothing is open."""


class Machine:
    """What is really on each GPU."""

    def __init__(self, wrong: list[str]) -> None:
        self._on: dict[int, set[str]] = {gpu: set() for gpu in range(POOL.gpus)}
        self._wrong = wrong

    def enter(self, who: str, gpus: Sequence[int]) -> None:
        for gpu in gpus:
            if others := self._on[gpu] - {who}:
                self._wrong.append(f"{who} is let onto GPU {gpu}, and {', '.join(sorted(others))} is on it")
            self._on[gpu].add(who)

    def leave(self, who: str, gpus: Sequence[int]) -> None:
        for gpu in gpus:
            self._on[gpu].discard(who)

    def users(self) -> set[str]:
        return {who for users in self._on.values() for who in users}


class Fleet:
    """A backend and a coordinator: workers, which of them are lent, and which have a rank."""

    def __init__(self, machine: Machine, dice: random.Random) -> None:
        self.machine, self._dice = machine, dice
        self.all: dict[str, dict[str, Worker]] = {}
        self.lent: dict[str, dict[str, str]] = {}
        self.joined: set[str] = set()  # workers that the coordinator knows
        self.ranked: set[str] = set()  # those of them that have a rank on their GPUs
        self.changed: Callable[[str], None] = lambda uid: None
        self._made = 0

    # As the control loop sees it

    def workers(self, uid: str) -> list[Worker]:
        return list(self.all.get(uid, {}).values())

    def look(self, uid: str) -> Any:
        """A run, as far as it is asked: who has joined, and who is lent and has no rank any more."""
        here = [one.name for one in self.workers(uid) if one.alive and one.name in self.joined]
        members = {name: SimpleNamespace(name=name, role=Role.ACTIVE) for name in here}
        lent = {name: why for name, why in self.lent.get(uid, {}).items() if name not in self.ranked}
        run = SimpleNamespace(lent=lent, not_before=0.0, round=None, members=members, running=None, target=0)
        return SimpleNamespace(run=run)

    # What the loop orders

    def start(self, uid: Uid, gpus: Sequence[int]) -> None:
        self._made += 1
        worker = Worker(f"{uid}-w{self._made}", uid, "n0", _now(), tuple(gpus))
        self.all.setdefault(uid, {})[worker.name] = worker
        self._later(self._rank, uid, worker.name)
        self.changed(uid)

    def lend(self, uid: Uid, lent: Mapping[str, str]) -> None:
        before, self.lent[uid] = self.lent.get(uid, {}), dict(lent)
        for worker in self.workers(uid):
            if worker.alive and worker.name in lent and worker.name not in before:
                self._later(self._unrank, uid, worker.name)
            elif worker.alive and worker.name in before and worker.name not in lent:
                self._later(self._rank, uid, worker.name)

    def end(self, uid: str, name: str) -> None:
        """Its agent is dead; its rank may go on for a while."""
        worker = self.all[uid][name]
        if worker.alive:
            self.all[uid][name] = replace(worker, ended_at=_now())
            self._later(self._clear, uid, name, longest=CLEARED_S)
            self.changed(uid)

    def _later(self, what: Any, *words: Any, longest: float = 1.5) -> None:
        asyncio.get_running_loop().call_later(self._dice.uniform(0.0, longest), what, *words)

    def _rank(self, uid: str, name: str) -> None:
        """The coordinator gives it one if nobody has said meanwhile that it may have none."""
        worker = self.all.get(uid, {}).get(name)
        if worker is not None and worker.alive:
            self.joined.add(name)
            self.changed(uid)
        if worker is not None and worker.alive and name not in self.lent.get(uid, {}) and name not in self.ranked:
            self.ranked.add(name)
            self.machine.enter(name, worker.gpus)
            self.changed(uid)

    def _unrank(self, uid: str, name: str) -> None:
        worker = self.all.get(uid, {}).get(name)
        if worker is not None and worker.alive and name in self.lent.get(uid, {}):
            self.ranked.discard(name)
            self.machine.leave(name, worker.gpus)
            self.changed(uid)

    def _clear(self, uid: str, name: str) -> None:
        worker = self.all[uid][name]
        self.ranked.discard(name)
        self.machine.leave(name, worker.gpus)
        self.all[uid][name] = replace(worker, cleared=True)
        self.changed(uid)


def _now() -> datetime:
    return EPOCH + timedelta(seconds=asyncio.get_running_loop().time())


class _Clock:
    def now(self) -> datetime:
        return _now()

    steady = now

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def mark(self) -> Any:
        raise NotImplementedError


class Engine:
    """Hooks of a pipeline; what it has awake is on the machine."""

    def __init__(self, history: History, name: str) -> None:
        self._history, self._name = history, name
        self._bundles = history.maps[name]["actor_infer"].bundles

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        for gpus in ranks.values():
            self._history.machine.enter(f"{self._name} awake", gpus)
        await asyncio.sleep(self._history.dice.choice(HOOK_S))

    async def shrink(self, ranks: Sequence[int]) -> None:
        await asyncio.sleep(self._history.dice.choice(HOOK_S))
        for rank in ranks:
            self._history.machine.leave(f"{self._name} awake", self._bundles[rank])


class History:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.machine = Machine(self.wrong)
        self.fleet = Fleet(self.machine, self.dice)
        self.trainings: dict[str, Training] = {}
        self.maps = {f"p{at}": self._clusters() for at in range(3)}
        self._durable: dict[str, records.Value] = {}
        self._due: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._up = asyncio.Event()
        self._made = 0
        self.chaos = True

    def _clusters(self) -> dict[str, ClusterSpec]:
        infer = range(8) if self.dice.random() < 0.6 else range(self.dice.choice((0, 2, 4)), 8)
        train = ClusterSpec(self.dice.sample(range(POOL.gpus), self.dice.randint(1, 3)))
        return {"actor_train": train, "actor_infer": ClusterSpec(infer, self.dice.choice((1, 1, 2)), 8)}

    # The control plane

    async def serve(self) -> None:
        self.journal = Journal(self._durable)
        self.scheduler = Scheduler(
            POOL,
            self.journal,
            hook_timeout_s=10.0,
            min_turn_s=1.0,
            reserve_after_s=10.0,
            reattach_timeout_s=20.0,
            planner=self._planned,
            on_event=lambda event: self._check(),
        )
        await self.scheduler.start()
        pool = self.scheduler.trainings
        self.claims = PoolClaims(pool, cast(Any, self.fleet), cast(Any, self.fleet), _Clock(), self._told, self._again)
        self._leaving = set(self.claims.begin(list(self.trainings.values())))
        self._check_adopted()
        pool.heard_by(self._wake)
        self.fleet.changed = self._wake
        self._loops = [asyncio.create_task(self._loop(uid)) for uid in self.trainings]
        for uid in self.trainings:
            self._wake(uid)
        self._up.set()

    async def _crash(self) -> None:
        """As SIGKILL: nothing is finished, what was not written is lost, nobody is told."""
        self.counts["crashes"] += 1
        self._up.clear()
        self.journal.crash()
        self.scheduler.trainings.heard_by(lambda uid: None)
        self.fleet.changed = lambda uid: None
        for task in self._loops:
            task.cancel()
        with contextlib.suppress(JournalUnusable):
            await self.scheduler.stop()
        await asyncio.sleep(self.dice.choice((0.0, 0.5, 5.0)))
        if self.dice.random() < 0.2:
            self._lose_records()
        await self.serve()

    def _lose_records(self) -> None:
        """As one that was written before there was a pool: workers run of which it does not know. Where somebody waits
        for a GPU that another one has, it is the journal that says so, and nobody else: there it has to be whole."""
        there = [one for uid in self.fleet.all for one in self.fleet.workers(uid) if _is_there(one)]
        many = Counter(gpu for worker in there for gpu in worker.gpus)
        for key in [key for key in self._durable if key.startswith("worker/")]:
            alone = all(many[gpu] <= 1 for gpu in self._durable[key]["gpus"])
            if alone and self._durable[key]["training"] in self.trainings and self.dice.random() < 0.5:
                del self._durable[key]
                self.counts["records lost"] += 1

    def _planned(self, shares: Shares, now: float) -> SharePlan:
        made = plan(shares, now)
        self.wrong += invariants.broken_by(shares, made)
        return made

    def _told(self, uid: Uid, event: object) -> None:
        self.counts["lent or back"] += 1

    def _wake(self, uid: str) -> None:
        if uid in self.trainings:
            self._due.setdefault(uid, asyncio.Event()).set()
        elif self._up.is_set() and uid in self._leaving and self.claims.forget(Uid(uid)):
            self._leaving.discard(Uid(uid))

    def _again(self, uid: Uid, after_s: float) -> None:
        asyncio.get_running_loop().call_later(after_s, lambda: self._wake(uid))

    async def _loop(self, uid: str) -> None:
        """One look after the other, as the control loop has it."""
        due = self._due.setdefault(uid, asyncio.Event())
        while uid in self.trainings:
            await due.wait()
            due.clear()
            if (training := self.trainings.get(uid)) is None:
                return
            if training.spec.suspend:
                self.claims.know(training)
                for worker in self.fleet.workers(uid):
                    self.fleet.end(uid, worker.name)
            else:
                await self._carry_out(training, self.claims.grant(training))
            self._check()

    async def _carry_out(self, training: Training, grant: Grant) -> None:
        uid = training.uid
        if grant.admitted and not training.status.holds("Admitted"):
            self.counts["admitted"] += 1
        await asyncio.sleep(self.dice.choice((0.0, 0.0, 0.05)))
        if self.fleet.lent.get(uid, {}).keys() - grant.lent.keys():
            await self.claims.written()
        self.fleet.lend(uid, grant.lent)
        here = [one for one in self.fleet.workers(uid) if _is_there(one)]
        for one in here:
            if one.alive and (one.name in grant.overdue or one.name in grant.surplus):
                self.fleet.end(uid, one.name)
        taken = {one.gpus for one in here}
        free = [gpus for gpus in grant.places or () if gpus not in taken]
        missing = grant.workers - sum(one.alive and one.name not in grant.lent for one in here)
        if free and missing > 0:
            await self.claims.written()
            for gpus in free[:missing] if uid in self.trainings else ():
                self.fleet.start(uid, gpus)
                self.counts["started"] += 1
        for one in [one for one in here if one.alive and one.name not in grant.lent][grant.workers :]:
            self.fleet.end(uid, one.name)  # it shrinks in its own way

    # What must hold

    def _check(self) -> None:
        shares = self.scheduler.shares
        self.counts["checks"] += 1
        self.wrong += invariants.broken(shares)
        snapshot = self.scheduler.snapshot()
        every = sorted([*snapshot.leases, *snapshot.idle, *snapshot.workers])
        if every != list(range(POOL.gpus)):
            self.wrong.append(f"not every GPU is accounted for once: {every}")
        if not self.journal.dead:
            kept = records.read(self.journal.all(), Shares(POOL), "the journal").shares
            for name in ("leases", "workers", "pipelines", "rollouts", "requests"):
                if getattr(kept, name) != getattr(shares, name):
                    self.wrong.append(f"the journal has other {name}")
            if {uid: _lasting(one) for uid, one in kept.crews.items()} != {
                uid: _lasting(one) for uid, one in shares.crews.items()
            }:
                self.wrong.append("the journal has other crews")

    def _check_adopted(self) -> None:
        """What has a rank now is somebody's, after every restart."""
        shares = self.scheduler.shares
        known = {gpu for one in shares.workers.values() for gpu in gpus_of(one.mask)}
        for uid in self.fleet.all:
            for worker in self.fleet.workers(uid):
                if worker.name in self.fleet.ranked and not known.issuperset(worker.gpus):
                    self.wrong.append(f"{worker.name} has GPU {worker.gpus}, and is forgotten")

    # What happens

    async def run(self, events: int) -> None:
        await self.serve()
        lives = [asyncio.create_task(self._live(name)) for name in self.maps]
        for _ in range(events):
            await self._something()
            await asyncio.sleep(self.dice.choice((0.0, 0.1, 1.0, 4.0)))
            assert not self.wrong, self.wrong[:3]
        self.chaos = False
        await self._calm(lives)
        assert not self.wrong, self.wrong[:3]
        self._up.clear()
        await self.scheduler.stop()
        for task in self._loops:
            task.cancel()

    async def _something(self) -> None:
        (what,) = self.dice.choices(
            (self._submit, self._scale, self._suspend, self._end, self._kill, self._crash), weights=(4, 3, 2, 2, 6, 2)
        )
        await what()

    async def _submit(self) -> None:
        if len(self.trainings) >= 4:
            return
        self._made += 1
        least = self.dice.randint(1, 2)
        target = least + self.dice.randint(0, 2)
        uid = f"t{self._made}"
        self.trainings[uid] = a_training(
            uid,
            uid=uid,
            world=(least, target, target + self.dice.randint(0, 4)),
            elasticity=self.dice.choice(("fixed", "lend", "fill", "fill")),
            resources=Resources(gpus=self.dice.choice((1, 1, 2))),
        )
        self.claims.know(self.trainings[uid])
        self._loops.append(asyncio.create_task(self._loop(uid)))
        self._wake(uid)

    async def _scale(self) -> None:
        if self.trainings:
            uid = self.dice.choice(sorted(self.trainings))
            size = self.trainings[uid].spec.world_size
            self._edit(uid, world_size=WorldSize(size.min, self.dice.randint(size.min, size.max), size.max))

    async def _suspend(self) -> None:
        """Or let it go on."""
        if self.trainings:
            uid = self.dice.choice(sorted(self.trainings))
            self._edit(uid, suspend=not self.trainings[uid].spec.suspend)
            self.counts["suspended or resumed"] += 1

    def _edit(self, uid: str, **fields: Any) -> None:
        training = self.trainings[uid]
        self.trainings[uid] = replace(training, spec=replace(training.spec, **fields))
        self.claims.know(self.trainings[uid])
        self._wake(uid)

    async def _end(self) -> None:
        if self.trainings:
            self._finish(self.dice.choice(sorted(self.trainings)))

    def _finish(self, uid: str) -> None:
        """It is over: its workers end, each in its own time, and only then is what they had free."""
        del self.trainings[uid]
        self._due[uid].set()
        self._leaving.add(Uid(uid))
        for worker in self.fleet.workers(uid):
            self.fleet.end(uid, worker.name)
        self._wake(uid)
        self.counts["ended"] += 1

    async def _kill(self) -> None:
        there = [one for uid in self.trainings for one in self.fleet.workers(uid) if one.alive]
        if there:
            worker = self.dice.choice(there)
            self.fleet.end(worker.uid, worker.name)
            self.counts["killed"] += 1

    # Pipelines

    async def _live(self, name: str) -> None:
        while self.chaos:
            try:
                await self._up.wait()
                await self._enter(name)
                while self.chaos:
                    await self._step(name, timeout=self.dice.choice((3.0, 30.0)))
                    await asyncio.sleep(self.dice.uniform(0.0, 6.0))
            except MusterError as error:
                self.counts[type(error).__name__] += 1
                await asyncio.sleep(0.1)

    async def _enter(self, name: str) -> None:
        """It comes, or comes back after a crash, and lets go of what it had."""
        await self.scheduler.register_pipeline(name, clusters=self.maps[name], hooks=Engine(self, name))
        await self.scheduler.admit_pipeline(name)
        self.machine.leave(f"{name} trains", range(POOL.gpus))
        await self.scheduler.notify_release_gpus(name, "actor_train")
        await self.scheduler.await_release_gpus(name, timeout=BOUND_S)

    async def _step(self, name: str, timeout: float) -> None:
        if self.dice.random() < 0.7:
            await self.scheduler.request_gpus(name, "actor_infer", Priority.GENERATION, 64, timeout)
            for done in (16, 40, 60):
                await asyncio.sleep(self.dice.uniform(0.0, 3.0))
                await self.scheduler.report_progress(ProgressReport(name, done, 64))
            await self.scheduler.clear_progress(name)
        gpus = await self.scheduler.request_gpus(name, "actor_train", Priority.ACTOR_TRAINING, timeout=timeout)
        self.machine.enter(f"{name} trains", gpus)
        self.counts["trained"] += 1
        await self.scheduler.await_release_gpus(name, timeout=BOUND_S)
        await asyncio.sleep(self.dice.uniform(0.0, 4.0))
        self.machine.leave(f"{name} trains", range(POOL.gpus))
        await self.scheduler.notify_release_gpus(name, "actor_train")

    # In the end nobody is in anybody's way

    async def _calm(self, lives: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.wait(lives)
        for uid in [uid for uid, one in self.trainings.items() if one.spec.suspend]:
            self._edit(uid, suspend=False)
        for uid in [uid for uid, one in self.trainings.items() if not _can_move(one)]:
            self._finish(uid)
        minima = {uid: one.spec.world_size.min * one.spec.resources.gpus for uid, one in self.trainings.items()}
        while sum(minima.values()) > 3:
            uid = max(minima, key=lambda one: (minima[one], one))
            del minima[uid]
            self._finish(uid)
        for name in self.maps:
            await self._enter(name)
        for name in self.maps:
            await self._step(name, timeout=BOUND_S)
        await asyncio.sleep(BOUND_S)
        self._check()
        self._whole()
        for uid in list(self.trainings):
            self._finish(uid)
        await asyncio.sleep(BOUND_S)
        assert self.scheduler.snapshot().idle == tuple(range(POOL.gpus)), self.scheduler.snapshot()
        assert not self.machine.users()

    def _whole(self) -> None:
        """With nobody else there every training has its minimum, and what fills has filled."""
        for uid, training in self.trainings.items():
            has = len(self.scheduler.trainings.held(uid))
            if has < training.spec.world_size.min:
                self.wrong.append(f"{uid} has {has} workers' GPUs, and nobody else wants them")
            ranks = sum(one.name in self.fleet.ranked for one in self.fleet.workers(uid))
            if ranks != has:
                self.wrong.append(f"{uid} may have {has} ranks and has {ranks}")


def _is_there(worker: Worker) -> bool:
    return worker.alive or not worker.cleared


def _can_move(training: Training) -> bool:
    """A minimum is never taken: it has to be had elsewhere first, beside what is there, and where it fits."""
    size = training.spec.world_size
    most = size.max if training.spec.elasticity == "fill" else size.target
    return training.spec.elasticity != "fixed" and most > size.min and training.spec.resources.gpus == 1


def _lasting(crew: Any) -> Any:
    """What of a crew is for a journal to say."""
    return replace(crew, using=0, ready=None, resting=0, parked=0)
