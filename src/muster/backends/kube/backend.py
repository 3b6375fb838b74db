"""Each worker is a Pod that the Training owns.

A worker is written down before its Pod is created, under a name that no worker had before. So every Pod has a record:
a control plane that dies in between finds the Pod, or finds that there is none. A Pod that turns up after its worker
was given up, because an answer got lost, is deleted as soon as it is seen. A Pod's finalizer goes when its end is in
the store, never before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from muster import errors
from muster.backends import records
from muster.backends.kube import logs, pod_removal, pods, render
from muster.backends.kube.creating import NameTaken, create
from muster.backends.kube.pod_cache import PodCache
from muster.backends.kube.pod_orders import PodOrders
from muster.backends.kube.pod_removal import PodRemoval
from muster.backends.kube.pod_times import PodTimes
from muster.backends.kube.pods import Pod
from muster.backends.kube.shared_objects import SharedObjects
from muster.backends.kube.topology import Topology
from muster.background import Tasks
from muster.core.training.reconcile import USAGE_ERROR
from muster.kube.client import Informer, KubeApi
from muster.ports import Clock, LogQuery, Store, Write
from muster.types.event import Event
from muster.types.training import Key, Spec, Training, Uid
from muster.types.worker import SHORTAGE, Capacity, Worker

PATIENCE = timedelta(minutes=10)  # images may be large, but a container that runs has its own
_Place = tuple[Uid, str]


class KubeBackend:
    def __init__(
        self,
        api: KubeApi,
        store: Store,
        clock: Clock,
        *,
        coordinator: str,
        mesh_endpoint: str = "",
        image: str = "",
        agent_image: str = "",
        user: int | None = render.USER,
        home: str = "",
        api_url: str = "",
        changed: Callable[[Uid], None] = lambda uid: None,
    ) -> None:
        """`coordinator`, `mesh_endpoint` and `api_url` are where Pods find them; `image` is for trainings that name
        none, `agent_image` is the source of the agent's copy, `user` is who their workers run as, `home` the control
        plane's own namespace."""
        self._api = api
        self._store = store
        self._clock = clock
        where = {"coordinator": coordinator, "mesh_endpoint": mesh_endpoint, "api_url": api_url, "home": home}
        self.orders = PodOrders(api, clock, **where, image=image, agent_image=agent_image, user=user)
        self.changed = changed
        self._workers: dict[Uid, dict[str, Worker]] = {}
        self._keys: dict[Uid, Key] = {}
        self._asked: dict[_Place, bool] = {}  # who was told to end, and whether by force
        self._times = PodTimes(clock)
        self._writing: dict[_Place, asyncio.Task[None]] = {}  # ends that are on their way to the store
        self._shared = SharedObjects(api)
        self._refused: set[Uid] = set()  # trainings whose last Pod the cluster did not want
        self._adopted = False  # what is seen before is looked at then
        self._quiet = True
        self._cache = PodCache(self._seen)
        selected = {"labelSelector": render.UID}
        self._informer = Informer(api, "/api/v1/pods", self._cache, selected, cut=PodCache.digest)
        self._tasks = Tasks(pod_removal.tell)
        self._removal = PodRemoval(api, self._cache, self._tasks)
        self._topology = Topology(api, clock, self._tasks, self._is_at)
        self._listeners = logs.PodListeners()

    # What is there

    def workers(self, uid: Uid) -> Sequence[Worker]:
        return tuple(self._workers.get(uid, {}).values())

    @property
    def patience(self) -> timedelta:
        return PATIENCE

    def capacity(self) -> Capacity | None:
        return None

    def alive_of(self, uid: Uid) -> int:
        return sum(worker.alive for worker in self._workers.get(uid, {}).values())

    def alive(self) -> int:
        return sum(worker.alive for workers in self._workers.values() for worker in workers.values())

    def plan(self, training: Training) -> Mapping[str, Any]:
        return self.orders.plan(training)

    # Watching and adoption

    async def start_watching(self) -> None:
        """Read which Pods there are, and follow them from then on. `adopt` comes next."""
        await self._informer.start()
        self._tasks.start(self._informer.run())

    async def adopt(self, last_alive: datetime | None = None) -> int:
        """Take over workers that a control plane before us started; returns how many still run."""
        for kept in records.oldest_first(self._store):
            worker, key = records.read(kept)
            self._keys[worker.uid] = key
            self._workers.setdefault(worker.uid, {})[worker.name] = worker
        self._adopted = True
        for pod in self._cache:
            if pod.name not in self._workers.get(pod.training, {}):
                await self._take_in(pod)
            self._seen(pod, False)
        missing = [
            worker
            for workers in self._workers.values()
            for worker in workers.values()
            if worker.alive and self._pod(worker.uid, worker.name) is None
        ]
        at = last_alive or self._clock.steady()
        why = "its Pod was gone when the control plane came back"
        how = pods.Termination(None, "NodeLost", why, at)
        await asyncio.gather(*(self._end(worker, None, how) for worker in missing))
        self._quiet = False
        return self.alive()

    async def _take_in(self, pod: Pod) -> None:
        """A Pod of a training that we know, though nobody wrote it down: its record was lost."""
        stored = self._store.get(Key(pod.namespace, pod.training_name))
        if not pod.ours or stored is None or stored.uid != pod.training:
            return
        worker = Worker(pod.name, pod.training, pod.node, self._times.at(pod.created_at), tuple(range(pod.gpus)))
        self._keys[pod.training] = stored.key
        self._workers.setdefault(pod.training, {})[pod.name] = worker
        await self._note(worker, records.started(worker, stored.key, self._clock, shown=", found in the cluster"))

    # Starting

    async def start(self, training: Training, name: str, gpus: tuple[int, ...], token: str) -> Worker:
        gpus = tuple(range(training.spec.resources.gpus))
        worker = Worker(name, training.uid, "", self._clock.steady(), gpus, waiting=pods.ORDERED)
        self._keys[training.uid] = training.key
        order = await self.orders.order(training, name)
        if wrong := self.orders.impossible(training, order):
            return await self._refuse(worker, USAGE_ERROR, wrong)
        try:
            await self._shared.provide(training, token)
            if training.uid in self._refused:  # nothing is written before the cluster would take it
                await create(self._api, "pods", order, dry=True)
        except errors.MusterError as error:
            if (code := _verdict(error)) is None:
                raise
            return await self._refuse(worker, code, error.message)
        self._workers.setdefault(training.uid, {})[name] = worker
        try:
            await self._note(worker, self._begun(worker), durable=True)
        except (errors.MusterError, asyncio.CancelledError):
            del self._workers[training.uid][name]
            raise
        await self._order(worker, order)
        return self._workers[training.uid][name]

    def _begun(self, worker: Worker) -> Event:
        shown = f" with {len(worker.gpus)} GPUs" if worker.gpus else ""
        return records.started(worker, self._keys[worker.uid], self._clock, shown=shown)

    async def _order(self, worker: Worker, order: render.Json) -> None:
        """Create the Pod of a worker that is written down. What comes of it is known when this returns."""
        place = (worker.uid, worker.name)
        try:
            self._cache.put(await _created(self._api, self._keys[worker.uid].namespace, worker, order))
        except errors.MusterError as error:
            if (code := _verdict(error)) is not None:
                await self._give_up(worker, code, error.message)
            elif self._pod(*place) is None:
                # An answer that got lost may have been a yes: the Pod is deleted if it turns up.
                self._refused.add(worker.uid)
                await self._give_up(worker, None, error.message)
                raise
        self._refused.discard(worker.uid)
        if place in self._asked and (pod := self._pod(*place)) is not None and not pod.leaving:
            await self._removal.ask(pod, kill=self._asked[place])

    async def _refuse(self, worker: Worker, code: int, why: str) -> Worker:
        """Nothing was created: its start and its end are written at once."""
        over = pods.ended(
            worker, None, pods.Termination(code, "Error", f"cannot be started: {why}", None, why), self._clock.steady()
        )
        await self._note(over, self._begun(over), self._exit(over), durable=True)
        self._workers.setdefault(worker.uid, {})[worker.name] = over
        return over

    async def _give_up(self, worker: Worker, code: int | None, why: str) -> None:
        reason = "" if code is None else "Error"
        await self._end(worker, None, pods.Termination(code, reason, f"cannot be started: {why}", None, why))

    # Observing

    def _pod(self, uid: Uid, name: str) -> Pod | None:
        key = self._keys.get(uid)
        pod = self._cache.get(key.namespace, name) if key is not None else None
        return pod if pod is not None and pod.training == uid and pod.ours else None

    def _seen(self, pod: Pod, gone: bool) -> None:
        """A Pod as it is now, or was when it went."""
        if not self._adopted:
            return
        self._listeners.tell(pod.training)
        pod = self._times.of(pod, watched=not self._quiet)
        worker = self._workers.get(pod.training, {}).get(pod.name) if pod.ours else None
        how = pods.gone(pod) if gone else pods.end(pod)
        if how is None:
            self._removal.watch(pod)
        if worker is None or self._keys[pod.training].namespace != pod.namespace:
            if how is not None and not gone:
                self._removal.release(pod)
            return
        if worker.alive and how is None:
            self._show(self._topology.placed(pods.observed(worker, pod), self._spec(worker.uid)))
        elif worker.alive and how is not None:
            self._end(worker, pod, how)
        elif how is None and not pod.leaving:  # it turned up after its worker was given up
            self._removal.kill(pod)
        elif how is not None and not gone and (worker.uid, worker.name) not in self._writing:
            self._removal.release(pod)

    def _spec(self, uid: Uid) -> Spec | None:
        stored = self._store.get(self._keys[uid])
        return stored.training.spec if stored is not None and stored.uid == uid else None

    def _is_at(self, placed: Worker) -> None:
        """Its domain has been found out since it was last seen."""
        worker = self._workers.get(placed.uid, {}).get(placed.name)
        if worker is not None and worker.alive:
            self._show(replace(worker, domain=placed.domain))

    def _show(self, worker: Worker) -> None:
        if worker != self._workers[worker.uid][worker.name]:
            self._workers[worker.uid][worker.name] = worker
            self._tell(worker.uid)

    def _tell(self, uid: Uid) -> None:
        """Whoever is told begins with all that was adopted."""
        if not self._quiet:
            self.changed(uid)

    # Ending

    async def kill(self, training: Training, worker: str, rank: int | None) -> int:
        hint = f"kubectl delete pod {worker} -n {training.metadata.namespace} --grace-period=0 --force"
        raise errors.Conflict("its workers are Pods, whose processes the control plane cannot kill", hint=hint)

    async def stop(self, uid: Uid, name: str, *, why: str, kill: bool = False) -> None:
        worker, place = self._workers.get(uid, {}).get(name), (uid, name)
        before = self._asked.get(place)
        if worker is None or not worker.alive or (before is not None and (before or not kill)):
            return
        self._asked[place] = kill
        self._workers[uid][name] = replace(worker, stopping=True, why_ended=why)
        pod = self._pod(uid, name)
        if pod is None or (pod.leaving and not kill):
            return  # it is just being created and hears of it then, or it is on its way already
        try:
            await self._removal.ask(pod, kill=kill)
        except errors.MusterError:
            self._asked.pop(place, None)
            if (now := self._workers[uid][name]).alive:  # so that it is asked again
                self._workers[uid][name] = replace(now, stopping=worker.stopping, why_ended=worker.why_ended)
            raise

    def _end(self, worker: Worker, pod: Pod | None, how: pods.Termination) -> asyncio.Task[None]:
        """It counts as ended at once; it is written down, and then its Pod may go."""
        place = (worker.uid, worker.name)
        over = pods.ended(worker, pod, how, self._clock.steady())
        self._workers[worker.uid][worker.name] = over
        self._forget_orders(self._keys[worker.uid], *place)
        self._writing[place] = self._tasks.start(self._write_end(over))
        return self._writing[place]

    async def _write_end(self, over: Worker) -> None:
        place = (over.uid, over.name)
        try:
            await self._note(over, self._exit(over))
        finally:
            self._writing.pop(place, None)
            self._tell(over.uid)
        if (left := self._pod(*place)) is not None:
            self._removal.release(left)

    def _forget_orders(self, key: Key, uid: Uid, name: str) -> None:
        self._asked.pop((uid, name), None)
        self._times.forget(uid, name)
        self._removal.forget(key.namespace, name)

    def _exit(self, over: Worker) -> Event:
        return records.exited(over, self._keys[over.uid], self._clock, self._store)

    # Writing down

    async def _note(self, worker: Worker, *events: Event, durable: bool = False) -> None:
        await records.write(self._store, worker, self._keys[worker.uid], *events, durable=durable)

    async def log_bytes_taken(self, uid: Uid) -> int | None:
        return None

    async def forget(self, uid: Uid) -> None:
        """Its Pods go with it, at once: nothing waits for the garbage collector."""
        await asyncio.gather(*(task for place, task in self._writing.items() if place[0] == uid))
        gone, key = self._workers.pop(uid, {}), self._keys.pop(uid, None)
        self._shared.forget(uid)
        self._refused.discard(uid)
        left: list[Pod | None] = []
        if key is not None:
            for name in gone:
                self._forget_orders(key, uid, name)
            left = [self._cache.get(key.namespace, name) for name in gone]
        await asyncio.gather(*(self._removal.remove(pod) for pod in left if pod is not None and pod.training == uid))
        if gone:
            await self._store.write(Write(records=records.removals(uid, gone), lazy=True))

    # Logs

    def logs(self, uid: Uid, query: LogQuery, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        return logs.read(self._api, lambda: self._with_logs(uid), self._listeners, uid, query, ended)

    def _with_logs(self, uid: Uid) -> list[Pod]:
        """Oldest first."""
        return [pod for name in self._workers.get(uid, {}) if (pod := self._pod(uid, name)) is not None]

    # Life

    async def close(self) -> None:
        """Let go of everything without ending anything."""
        self._removal.close()
        self._tasks.cancel()
        await self._tasks.finish()


async def _created(api: KubeApi, namespace: str, worker: Worker, order: render.Json) -> Pod:
    """If its name is taken it is by its own Pod, where an answer got lost, or by somebody else's."""
    try:
        return pods.read(await create(api, "pods", order))
    except errors.AlreadyExists:
        path = f"/api/v1/namespaces/{namespace}/pods"
        found, _ = await api.list(path, {"fieldSelector": f"metadata.name={worker.name}"})
    for pod in map(pods.read, found):
        if pod.ours and pod.training == worker.uid:
            return pod
    raise NameTaken(f"the name {worker.name} is taken by a Pod of somebody else")


def _verdict(error: errors.MusterError) -> int | None:
    """What a refusal means for a worker, as an exit code: never, or not now. None: it is not about this worker."""
    if isinstance(error, errors.InvalidRequest | errors.TooLarge):
        return USAGE_ERROR
    over_quota = isinstance(error, errors.Forbidden) and "exceeded quota" in error.message
    return SHORTAGE if over_quota or isinstance(error, NameTaken) else None
