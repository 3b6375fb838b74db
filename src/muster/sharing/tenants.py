"""Who speaks for which pipeline? How processes come for one, take one another's place, fall silent and end.

A pipeline belongs to one process at a time. Another one that registers it has to wait until the one before is known to
be over: its round has ended, says whoever runs trainings; or it has been silent for so long that it was quarantined.
If it is heard meanwhile, it lives, and the newcomer is refused. What a process held ends with it.

What a process says of itself (its name, its training, its round) is used for what it registers, and for nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from muster.core.sharing import demand, leases
from muster.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    JournalUnusable,
    MusterError,
    NotFound,
    QuotaExceeded,
    RequestRefused,
    SchedulerStopped,
)
from muster.sharing import families
from muster.sharing.actions import Actions, hooks_for
from muster.sharing.pending_calls import PendingCalls
from muster.sharing.scheduler import Scheduler
from muster.types.pools import Registration
from muster.types.sharing import (
    GENERATION_CLUSTER,
    ClusterSpec,
    Gpu,
    Pipeline,
    PipelineId,
    PipelineProcess,
    Shares,
    Tenant,
)

log = logging.getLogger("muster.sharing")

LOOK_S = 1.0  # pause between looks at the children of living pipelines and at the survivors of dead ones
LOOK_SHARE = 20  # a pause lasts at least so many times as long as the look, which is slow with many processes
MOST_OF_TOKEN = 32  # pipelines that one token has registered
MOST_OF_NAMESPACE = 128  # pipelines that all tokens of one namespace have registered
AT_ONCE_S = 0.05  # how long a call that does not wait may still take to end


class Rounds(Protocol):
    """What whoever runs trainings knows of their rounds."""

    def knows(self, training: str) -> bool:
        """Whether there is a training of that uid."""

    def over(self, training: str, number: int) -> str:
        """Why no process of that round is left; "" while one may be, and in doubt."""


@dataclass(frozen=True)
class TokenRights:
    """The rights of a caller's token over pipelines."""

    token: str
    is_admin: bool
    peers: frozenset[str]  # the tokens that share a namespace with it
    writes_for: Callable[[str], bool]  # whether it may write in the namespace of the training with that uid

    def may_end(self, tenant: Tenant) -> bool:
        return self.is_admin or (tenant.training is not None and self.writes_for(tenant.training))

    def may_register(self, tenant: Tenant) -> bool:
        """Whether the token may speak for a pipeline that has no session, or register it again."""
        return tenant.token == self.token or self.may_end(tenant)


@dataclass(frozen=True)
class Granted:
    gpus: tuple[Gpu, ...]
    text: str = ""


@dataclass(frozen=True)
class StillWaiting:
    """Asking again with the same key goes on where this left off."""

    reason: str


@dataclass(eq=False)
class Arrival:
    """A registration under way."""

    form: Registration
    session: str | None
    tenant: Tenant
    task: asyncio.Task[None]
    heard: float
    turn: asyncio.Future[None] | None = None  # done when the process before it is over

    @property
    def waits(self) -> bool:
        return self.turn is not None and not self.turn.done()


@dataclass(eq=False)
class Remote:
    """A pipeline in another process, as this one knows it."""

    actions: Actions
    heard: float
    attached: bool = False  # its hooks are these actions
    tells: bool = False  # they ask it whether its GPUs are vacated
    session: str | None = None  # the digest of the session that registered it last; None: see its tenant
    arrival: Arrival | None = None
    calls: PendingCalls[Granted] = field(default_factory=PendingCalls)

    def is_arriving(self, session: str | None) -> bool:
        """Whether that is the voice of the process whose registration is under way."""
        return self.arrival is not None and not self.arrival.task.done() and self.arrival.session == session

    def clear(self) -> None:
        """Nobody speaks for it any more."""
        self.calls.cancel_all()
        self.calls, self.attached, self.session = PendingCalls(), False, None

    def forgive(self, until: float) -> None:
        """That nothing was heard before then."""
        self.heard = max(self.heard, until)
        if self.arrival is not None:
            self.arrival.heard = max(self.arrival.heard, until)


@dataclass(eq=False)
class Watch:
    """The processes of a pipeline on this machine, with a descriptor that shows the end of the first process."""

    processes: tuple[PipelineProcess, ...]
    children: tuple[PipelineProcess, ...]
    pidfd: int | None = None
    is_over: bool = False


class Tenants:
    """The processes behind a pool's pipelines."""

    def __init__(
        self, scheduler: Scheduler, ttl_s: float, rounds: Rounds | None = None, devices: Sequence[str] = ()
    ) -> None:
        self._scheduler = scheduler
        self._ttl_s = ttl_s
        self._rounds = rounds
        self._devices = devices
        self._watches: dict[str, Watch] = {}
        self._process_ended = asyncio.Event()
        self._remotes: dict[str, Remote] = {}
        self._running = False
        self._tasks: list[asyncio.Task[None]] = []
        self._rounds_changed = asyncio.Event()
        # They grow over a restart as well: whoever remembers one from before must not take a new one for old.
        self._epochs: Iterator[int] = itertools.count(time.time_ns() // 1000)

    def start(self) -> None:
        self._running = True
        self._rounds_changed.set()  # what ended while nobody looked
        for name in [one.pipeline_id for one in self._scheduler.shares.pipelines.values() if one.killed]:
            self._remote(name)  # if it lives, it will be heard
        self._process_ended.set()
        loops = (self._watch(), self._follow_rounds(), self._follow_processes())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def stop(self) -> None:
        self._running = False
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for watch in self._watches.values():
            _end_watch(watch)
        self._watches.clear()
        for remote in self._remotes.values():
            _end_turn(remote, SchedulerStopped("the scheduler has stopped"))

    def wake(self) -> None:
        """Let those who fetch actions look again."""
        for remote in self._remotes.values():
            remote.actions.wake()

    # Coming and going

    async def register(
        self,
        pipeline: str,
        form: Registration,
        wait_s: float,
        session: str | None = None,
        tenant: Tenant | None = None,
        rights: TokenRights | None = None,
    ) -> StillWaiting | None:
        """None once it is registered. It may have to wait for the process before it, or to shrink all its ranks.

        Without `rights` the caller is this process itself, which may register everything.
        """
        self._must_run()
        deadline = _now() + self.hold(wait_s)
        await self._end_if_over(pipeline)
        await self._end_if_gone(pipeline)
        self._check_rights(pipeline, session, rights)
        tenant = self._credible(pipeline, _named(tenant, session), form)
        _must_not_be_killed(self._scheduler.shares, PipelineId(pipeline), tenant)
        if form.only_attach:
            self._check_attach(pipeline, session, tenant)
            self.heard(pipeline, session)
        while (other := self._remote(pipeline).arrival) is not None and other.session != session:
            if tenant.process is not None and tenant.process == other.tenant.process:
                other.task.cancel()  # the same process begins anew
            await asyncio.wait({other.task}, timeout=max(0.0, deadline - _now()))
            if not other.task.done():
                return StillWaiting(f"{pipeline} is being registered by another process")
            if self._remote(pipeline).arrival is other:
                break
        self._check_room(pipeline, rights)
        remote = self._remote(pipeline)
        arrival = self._arrival(pipeline, remote, form, session, tenant)
        await asyncio.wait({arrival.task}, timeout=max(AT_ONCE_S, deadline - _now()))
        if not arrival.task.done():
            before = (
                f"the process that registered {pipeline} before has not ended: it may be silent for {self._ttl_s:g} s"
            )
            return StillWaiting(before if arrival.waits else f"{pipeline} has to shrink all its ranks first")
        self._settle_arrival(pipeline, remote, arrival)
        return None

    def _check_rights(self, pipeline: str, session: str | None, rights: TokenRights | None) -> None:
        """Raise Forbidden if the caller may not register that pipeline again."""
        there = self._scheduler.shares.pipelines.get(PipelineId(pipeline))
        if there is None or rights is None:
            return
        if not rights.may_register(there.tenant):
            hint = f"use the token that registered it, or ask an admin to type muster share kill {pipeline}"
            raise Forbidden(f"{pipeline} was registered with another token than {rights.token!r}", hint=hint)
        if session is None:
            self.must_be_current(pipeline, None)

    def _check_room(self, pipeline: str, rights: TokenRights | None) -> None:
        """Raise QuotaExceeded if the token, or its namespace, has as many pipelines as it may have."""
        pipelines = self._scheduler.shares.pipelines
        if rights is None or rights.is_admin or PipelineId(pipeline) in pipelines:
            return
        arriving = [
            remote.arrival.tenant.token
            for name, remote in self._remotes.items()
            if remote.arrival is not None and name != pipeline and PipelineId(name) not in pipelines
        ]
        tokens = [one.tenant.token for one in pipelines.values()] + arriving
        own, shared = tokens.count(rights.token), sum(token in rights.peers for token in tokens)
        for whose, current, limit in (
            (f"token {rights.token!r}", own, MOST_OF_TOKEN),
            (f"the namespaces of token {rights.token!r}", shared, MOST_OF_NAMESPACE),
        ):
            if current >= limit:
                raise QuotaExceeded(
                    f"{pipeline} cannot be registered: {whose} may have {limit} pipelines and has {current}",
                    hint="unregister pipelines that have ended",
                    resource="pipelines",
                    current=current,
                    requested=1,
                    limit=limit,
                )

    def _credible(self, pipeline: str, tenant: Tenant, form: Registration) -> Tenant:
        """What counts of what a process says of itself. A training that nobody here knows is none."""
        there = self._scheduler.shares.pipelines.get(PipelineId(pipeline))
        if form.only_attach and there is not None and there.tenant.process == tenant.process:
            return there.tenant
        if there is not None and not tenant.processes and there.tenant.process == tenant.process:
            tenant = replace(tenant, processes=there.tenant.processes, children=there.tenant.children)
        if tenant.training is None or tenant.round is None:
            return replace(tenant, training=None, round=None)
        if self._rounds is None or not self._rounds.knows(tenant.training):
            return replace(tenant, training=None, round=None)
        if why := self._rounds.over(tenant.training, tenant.round):
            raise RequestRefused(f"{pipeline} cannot be registered by a rank of a round that has ended: {why}")
        return replace(tenant, processes=(), children=())  # the end of its round proves the end of all ranks

    def _check_attach(self, pipeline: str, session: str | None, tenant: Tenant) -> None:
        there = demand.known(self._scheduler.shares, PipelineId(pipeline))
        if there.quarantined:
            raise demand.frozen(there)
        self.must_be_current(pipeline, session)
        if tenant.is_another_than(there.tenant):
            raise _is_replaced(pipeline)

    def must_be_current(self, pipeline: str, session: str | None) -> None:
        """Raise if another session controls the pipeline: Forbidden without a session, AlreadyExists with a wrong one.

        The digest of the session is in the journal, so this holds over a restart.
        """
        current = self._session_of(pipeline)
        if current and session is None:
            raise Forbidden(
                f"{pipeline} is controlled only with the session that registered it",
                hint="send the header Pipeline-Session; an admin can type muster share kill " + pipeline,
            )
        if current and session is not None and not hmac.compare_digest(current, digest_of(session)):
            raise _is_replaced(pipeline)

    def _session_of(self, pipeline: str) -> str:
        remote = self._remotes.get(pipeline)
        if remote is not None and remote.session is not None:
            return remote.session
        there = self._scheduler.shares.pipelines.get(PipelineId(pipeline))
        return "" if there is None else there.tenant.session

    def is_current(self, pipeline: str, session: str | None) -> bool:
        """Return whether that session controls the pipeline."""
        current = self._session_of(pipeline)
        return bool(current) and session is not None and hmac.compare_digest(current, digest_of(session))

    def must_speak(self, pipeline: str, session: str | None, rights: TokenRights) -> None:
        """Raise if that caller may not speak for the pipeline. A waiting newcomer may: `heard` bounds what it does."""
        remote = self._remotes.get(pipeline)
        there = self._scheduler.shares.pipelines.get(PipelineId(pipeline))
        if there is None or (session is not None and remote is not None and remote.is_arriving(session)):
            return
        self.must_be_current(pipeline, session)
        if not self._session_of(pipeline) and not rights.may_register(there.tenant):
            raise Forbidden(f"{pipeline} was registered with another token than {rights.token!r}")

    def _arrival(
        self, pipeline: str, remote: Remote, form: Registration, session: str | None, tenant: Tenant
    ) -> Arrival:
        """The registration under way; a repeated call joins it."""
        there = remote.arrival
        if there is not None and there.session == session:
            running = not there.task.done()
            if running and there.form != form:
                raise Conflict(f"{pipeline} is being registered with other values")
            if there.form == form and (running or there.task.cancelled() or there.task.exception() is not None):
                there.heard = _now()
                return there  # a failure that nobody came to hear is told now
        task = asyncio.create_task(self._register(pipeline, remote, form, session, tenant))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        remote.arrival = Arrival(form, session, tenant, task, _now())
        return remote.arrival

    def _settle_arrival(self, pipeline: str, remote: Remote, arrival: Arrival) -> None:
        """How it ended, told once."""
        if remote.arrival is arrival:
            remote.arrival = None
        if PipelineId(pipeline) not in self._scheduler.shares.pipelines and self._remotes.get(pipeline) is remote:
            del self._remotes[pipeline]
        if arrival.task.cancelled():
            raise Conflict(f"the registration of {pipeline} was given up: it had become silent")
        arrival.task.result()
        remote.heard = _now()

    async def _register(
        self, pipeline: str, remote: Remote, form: Registration, session: str | None, tenant: Tenant
    ) -> None:
        shares = leases.registered(self._scheduler.shares, PipelineId(pipeline), form.specs, form.weight)
        there = shares.pipelines[PipelineId(pipeline)]
        if tenant.is_another_than(there.tenant):
            if not there.quarantined or there.killed:
                await self._vacancy(remote)
            remote.actions.wake()
            remote.actions = Actions(self._epochs)  # what the one before was asked is not for this one
        before, remote.session = remote.session, digest_of(session)
        try:
            if not self._is_as(pipeline, remote, form, tenant):
                infer = form.specs.get(GENERATION_CLUSTER, ClusterSpec())
                hooks = hooks_for(remote.actions, infer, vacated=form.vacated)
                await self._scheduler.register_pipeline(pipeline, form.specs, hooks, form.weight, tenant=tenant)
                remote.attached, remote.tells, remote.heard = True, form.vacated, _now()
            if form.admit:
                await self._scheduler.admit_pipeline(pipeline)
        except (MusterError, asyncio.CancelledError):
            remote.session = before
            raise

    async def _vacancy(self, remote: Remote) -> None:
        """Until the process before is over. If it lives, it fetches again at once, and is heard."""
        assert remote.arrival is not None
        remote.arrival.turn = asyncio.get_running_loop().create_future()
        remote.actions.wake()
        await remote.arrival.turn

    def vacated(self, pipeline: str) -> None:
        """It was quarantined or unregistered: whoever waits for its place, or fetches its actions, should know."""
        if (remote := self._remotes.get(pipeline)) is not None:
            _end_turn(remote)
            remote.actions.wake()

    def _is_as(self, pipeline: str, remote: Remote, form: Registration, tenant: Tenant) -> bool:
        """Whether it is registered just so, with its actions as hooks: then there is nothing to do."""
        there = self._scheduler.shares.pipelines.get(PipelineId(pipeline))
        if there is None or not there.movable or not remote.attached or remote.tells != form.vacated:
            return False
        if tenant.process is not None and tenant != there.tenant:
            return False
        return dict(there.clusters) == form.specs and there.weight == form.weight

    async def unregister(self, pipeline: str, why: str = "") -> None:
        self._must_run()
        await self._scheduler.unregister_pipeline(pipeline, why)
        self.forget(pipeline)

    def forget(self, pipeline: str) -> None:
        """It is unregistered: nobody speaks for it any more."""
        remote = self._remotes.get(pipeline)
        if remote is None or PipelineId(pipeline) in self._scheduler.shares.pipelines:
            return
        if remote.arrival is not None and not remote.arrival.task.done() and not remote.arrival.waits:
            remote.actions.wake()
            return  # somebody has come for its place already
        remote.clear()
        self.vacated(pipeline)
        if remote.arrival is None or remote.arrival.task.done():  # else somebody comes for its place
            del self._remotes[pipeline]

    # Rounds

    def training_changed(self, training: str) -> None:
        """Something has happened to a training or its rounds."""
        if any(one.tenant.training == training for one in self._scheduler.shares.pipelines.values()):
            self._rounds_changed.set()

    async def _follow_rounds(self) -> None:
        """End what pipelines hold whose round, or training, is over."""
        while True:
            await self._rounds_changed.wait()
            self._rounds_changed.clear()
            for pipeline in list(self._scheduler.shares.pipelines):
                with contextlib.suppress(SchedulerStopped):
                    try:
                        await self._end_if_over(pipeline)
                    except JournalUnusable as error:  # the next look at who is silent is one at rounds, too
                        log.error("what %s held cannot be ended: %s", pipeline, error.message)

    async def _end_if_over(self, pipeline: str) -> None:
        there = self._scheduler.shares.pipelines.get(PipelineId(pipeline))
        if there is not None and (why := self._over(there.tenant)):
            await self.unregister(pipeline, why)

    def _over(self, tenant: Tenant) -> str:
        if self._rounds is None or tenant.training is None or tenant.round is None:
            return ""
        return self._rounds.over(tenant.training, tenant.round)

    # Processes

    async def _follow_processes(self) -> None:
        """End pipelines whose processes are gone, and record the children of those that live."""
        rest_s, clock = LOOK_S, asyncio.get_running_loop().time
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._process_ended.wait()
            began = clock()
            self._process_ended.clear()
            for pipeline in list(self._watches.keys() | self._scheduler.shares.pipelines):
                with contextlib.suppress(SchedulerStopped, NotFound):
                    try:
                        await self._end_if_gone(pipeline)
                    except JournalUnusable as error:  # the next look tries again
                        log.error("what %s held cannot be ended: %s", pipeline, error.message)
            await self._look_at_children()
            rest_s = max(LOOK_S, LOOK_SHARE * (clock() - began))

    async def _end_if_gone(self, pipeline: str) -> None:
        """End a pipeline if its family is gone. If only its process is gone, quarantine it and name the survivors."""
        there = self._scheduler.shares.pipelines.get(PipelineId(pipeline))
        watch = self._watched(pipeline, there)
        if there is None or watch is None or not watch.is_over:
            return
        family = self._family(pipeline, there)
        pipelines, runs = self._scheduler.shares.pipelines, frozenset(self._scheduler.shares.crews)
        others = tuple(self._family(name, other) for name, other in pipelines.items() if other is not there)
        neighbours = families.Neighbours(others, runs)
        try:
            remaining = await asyncio.to_thread(families.survivors, family, self._devices_of(there), neighbours)
        except (families.Unknowable, OSError) as error:
            remaining = f"whether its family is gone cannot be seen: {error}"
        after = self._scheduler.shares.pipelines.get(PipelineId(pipeline))
        if after is None or after.tenant.processes != watch.processes:
            return  # another process has registered the pipeline since
        ended = f"its process {watch.processes[0].pid} has ended"
        if remaining:
            advice = f"end it, or run muster share kill {pipeline} --force"
            await self._scheduler.renew_quarantine(pipeline, f"{ended}, but {remaining}: {advice}")
        else:
            await self.unregister(pipeline, f"{ended}, and nothing of it is left on its GPUs")

    def _watched(self, pipeline: str, there: Pipeline | None) -> Watch | None:
        """Return the watch on the first process of a pipeline; None if that process cannot be watched."""
        watch = self._watches.get(pipeline)
        processes = () if there is None else there.tenant.processes
        if watch is not None and watch.processes == processes:
            return watch
        if watch is not None:
            _end_watch(self._watches.pop(pipeline))
        if there is None or not processes:
            return None
        try:
            pidfd = families.open_pidfd(processes[0])
        except (families.Unknowable, OSError):
            return None  # only silence can show its end
        watch = self._watches[pipeline] = Watch(processes, there.tenant.children, pidfd, is_over=pidfd is None)
        if pidfd is not None:
            asyncio.get_running_loop().add_reader(pidfd, self._note_end, watch)
        return watch

    def _note_end(self, watch: Watch) -> None:
        _end_watch(watch)
        watch.is_over = True
        self._process_ended.set()

    async def _look_at_children(self) -> None:
        living = {name: watch for name, watch in self._watches.items() if not watch.is_over}
        if living:
            by_pipeline = {name: (*watch.processes, *watch.children) for name, watch in living.items()}
            for name, processes in (await asyncio.to_thread(families.descendants, by_pipeline)).items():
                living[name].children = processes

    def _family(self, name: str, there: Pipeline) -> families.Family:
        watch = self._watches.get(name)
        children = there.tenant.children if watch is None else watch.children
        return families.Family(there.tenant.process or "", there.tenant.processes, children)

    def _devices_of(self, there: Pipeline) -> list[str]:
        gpus = sorted({gpu for spec in there.clusters.values() for gpu in spec.gpus})
        return [self._devices[gpu] for gpu in gpus if gpu < len(self._devices)]

    # Silence

    def heard(self, pipeline: str, session: str | None = None, *, fetching: bool = False) -> None:
        """A call of that pipeline has come. Raises AlreadyExists for one of a former process.

        One that waits for its place may only fetch, and is no voice of the process whose place that is.
        """
        remote = self._remotes.get(pipeline)
        if remote is None:
            self.must_be_current(pipeline, session)
            return
        arrival = remote.arrival
        if arrival is not None and remote.is_arriving(session):
            arrival.heard = _now()
            if arrival.waits and fetching:
                return
            if arrival.waits and session is not None:
                raise Conflict(f"{pipeline} is not registered yet: the process before has not ended")
        self.must_be_current(pipeline, session)
        if (
            arrival is not None
            and arrival.waits
            and session is not None
            and not is_killed(self._scheduler.shares, pipeline)
        ):
            _end_turn(remote, _lives(pipeline))
        remote.heard = _now()

    async def _watch(self) -> None:
        """Quarantine whoever is silent for too long. A time at which nobody could be heard does not count."""
        step = self._ttl_s / 4
        while True:
            before = _now()
            await asyncio.sleep(step)
            stood_still = _now() - before - step > step
            for pipeline, remote in list(self._remotes.items()):
                if stood_still:
                    remote.forgive(_now() - step)
                try:
                    await self._end_silent(pipeline, remote)
                except JournalUnusable as error:  # it is silent at the next look, too
                    log.error("%s is silent and cannot be quarantined: %s", pipeline, error.message)
            self._rounds_changed.set()

    async def _end_silent(self, pipeline: str, remote: Remote) -> None:
        arrival = remote.arrival
        if arrival is not None and not arrival.task.done() and self._is_silent(arrival.heard):
            arrival.task.cancel()  # it holds nothing, and keeps others from coming
        there = self._scheduler.shares.pipelines.get(PipelineId(pipeline))
        watch = self._watched(pipeline, there)
        survived = watch is not None and watch.is_over  # a process of its family still runs
        if there is not None and there.killed and self._is_silent(remote.heard) and not survived:
            with contextlib.suppress(SchedulerStopped):
                await self.unregister(pipeline, f"it was killed, and nothing was heard of it for {self._ttl_s:g} s")
            return
        if there is None or there.quarantined or not remote.attached or not self._is_silent(remote.heard):
            return
        with contextlib.suppress(SchedulerStopped, NotFound):
            state = "its process still runs" if watch else "whether its process has ended cannot be seen from here"
            await self._scheduler.quarantine_pipeline(pipeline, f"nothing was heard for {self._ttl_s:g} s; {state}")
            remote.attached = False

    def _is_silent(self, heard: float) -> bool:
        return _now() - heard > self._ttl_s

    def hold(self, wait_s: float) -> float:
        """How long a call may be held: a pipeline that waits inside one is silent, so not for longer than half."""
        return max(AT_ONCE_S, min(wait_s, self._ttl_s / 2))

    # Parts

    def _must_run(self) -> None:
        if not self._running:
            raise SchedulerStopped("the scheduler has stopped")

    def known(self, pipeline: str) -> Remote:
        self._must_run()
        if pipeline not in self._remotes:
            demand.known(self._scheduler.shares, PipelineId(pipeline))
        return self._remote(pipeline)

    def find(self, pipeline: str) -> Remote | None:
        return self._remotes.get(pipeline)

    def _remote(self, pipeline: str) -> Remote:
        if pipeline not in self._remotes:
            self._remotes[pipeline] = Remote(Actions(self._epochs), _now())
        return self._remotes[pipeline]


def _now() -> float:
    return asyncio.get_running_loop().time()


def is_killed(shares: Shares, pipeline: str) -> bool:
    there = shares.pipelines.get(PipelineId(pipeline))
    return there is not None and bool(there.killed)


def _must_not_be_killed(shares: Shares, pipeline: PipelineId, tenant: Tenant) -> None:
    """Another process than the killed one may come, and waits until that one is gone."""
    there = shares.pipelines.get(pipeline)
    if there is None or not there.killed or not tenant.is_another_than(there.tenant):
        leases.check_not_killed(shares, pipeline, tenant)


def digest_of(session: str | None) -> str:
    """Return the part of a session that is kept; "" without a session. Who reads the journal cannot use it."""
    return "" if session is None else hashlib.sha256(session.encode()).hexdigest()


def _named(tenant: Tenant | None, session: str | None) -> Tenant:
    """A process that does not name itself is known by its session; one without a session cannot be told from others."""
    tenant = tenant or Tenant()
    if session is None:
        return Tenant(token=tenant.token)
    digest = digest_of(session)
    return replace(tenant, process=tenant.process or f"session-{digest[:32]}", session=digest)


def _end_watch(watch: Watch) -> None:
    if watch.pidfd is not None:
        asyncio.get_running_loop().remove_reader(watch.pidfd)
        os.close(watch.pidfd)
        watch.pidfd = None


def _end_turn(remote: Remote, error: MusterError | None = None) -> None:
    """Whoever waits for that place waits no more."""
    arrival = remote.arrival
    if arrival is None or arrival.turn is None or arrival.turn.done():
        return
    if error is None:
        arrival.turn.set_result(None)
    else:
        arrival.turn.set_exception(error)


def _lives(pipeline: str) -> AlreadyExists:
    return AlreadyExists(
        f"{pipeline} is registered by another process, which was heard just now",
        hint="end that process, or type muster share kill, then register again",
    )


def _is_replaced(pipeline: str) -> AlreadyExists:
    return AlreadyExists(
        f"{pipeline} was registered by another process since",
        hint="this one holds nothing any more; register it again to take over",
    )
