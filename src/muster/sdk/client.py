"""How does a program speak to the control plane?

A `Client` finds it (argument, `MUSTER_URL`, context file) when it is first needed, or starts the embedded one. It may
be shared by threads and by event loops. Every method has an `_async` twin that drives the same flow.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, Unpack

from muster import files
from muster.core.training.explain import Explanation
from muster.sdk import flows, streams, submission
from muster.sdk.drive import AsyncDriver, Link, SyncDriver
from muster.sdk.effects import Flow
from muster.sdk.find import Search
from muster.sdk.streams import Kind
from muster.sdk.submission import SubmitOptions
from muster.sdk.training import DistributedTraining
from muster.types import plural
from muster.types.codec import show_time
from muster.types.event import Event
from muster.types.training import DEFAULT_NAMESPACE, Key, Training
from muster.types.usage import Usage

if TYPE_CHECKING:
    from muster.sdk.shipping import Packed

log = logging.getLogger("muster.sdk")
T = TypeVar("T")
Trainings = list[DistributedTraining]  # inside the class, `list` is its method
Usages = list[Usage]


class Change(NamedTuple):
    """One change that a watch saw."""

    type: Kind
    training: DistributedTraining


class Client:
    """A connection to the control plane, and the namespace that is meant."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        *,
        search: Search | None = None,
    ) -> None:
        self.namespace = namespace
        self._link = Link(search or Search.of(url, token))
        self._sync = SyncDriver(self._link)
        self._async = AsyncDriver(self._link)

    @property
    def url(self) -> str:
        """Where the control plane is; it is looked for if that is not known yet."""
        return (self._link.server or self._link.locate()).url

    @property
    def warning(self) -> str:
        """What is wrong with the control plane itself, as it said in its last answer; empty if nothing is."""
        return self._link.warning

    # Trainings

    def get(self, name: str) -> DistributedTraining:
        """The training of that name."""
        return self._handle(self.run(flows.get(Key(self.namespace, name))))

    async def get_async(self, name: str) -> DistributedTraining:
        return self._handle(await self.run_async(flows.get(Key(self.namespace, name))))

    def list(
        self, label_selector: str | None = None, phase: str | None = None, *, all_namespaces: bool = False
    ) -> Trainings:
        """All trainings of the namespace, or those with such labels or in that phase."""
        flow = flows.listed(None if all_namespaces else self.namespace, label_selector, phase)
        found, _ = self.run(flow)
        return [self._handle(training) for training in found]

    async def list_async(
        self, label_selector: str | None = None, phase: str | None = None, *, all_namespaces: bool = False
    ) -> Trainings:
        flow = flows.listed(None if all_namespaces else self.namespace, label_selector, phase)
        found, _ = await self.run_async(flow)
        return [self._handle(training) for training in found]

    def watch(self, resource_version: str | None = None, *, all_namespaces: bool = False) -> Iterator[Change]:
        """Every change of the namespace's trainings, for ever; without a version, what is there comes first."""
        for seen in self.iterate(streams.watch(None if all_namespaces else self.namespace, resource_version)):
            yield Change(seen.kind, self._handle(seen.training))

    async def watch_async(
        self, resource_version: str | None = None, *, all_namespaces: bool = False
    ) -> AsyncIterator[Change]:
        flow = streams.watch(None if all_namespaces else self.namespace, resource_version)
        async with contextlib.aclosing(self.iterate_async(flow)) as changes:
            async for seen in changes:
                yield Change(seen.kind, self._handle(seen.training))

    def train(
        self,
        *,
        script: str | os.PathLike[str] | None = None,
        module: str | None = None,
        command: Sequence[str] | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[SubmitOptions],
    ) -> DistributedTraining:
        """Submit a training: the fields of its spec in snake_case, and `name`, `labels`, `annotations`.

        `ship`: send the working directory along; by default where the control plane does not see it.
        `force`: also what can never start: a script that is not there, more GPUs than there are.
        """
        given: dict[str, Any] = {"script": script, "module": module, "command": command, **options}
        ship, force = given.pop("ship", None), bool(given.pop("force", False))
        if ship or (ship is None and _is_here(given) and self.is_far()):
            packed, given = _packed(given)
            self.run(flows.send_package(given.get("namespace") or self.namespace, packed))
        elif not force and (missing := submission.missing_script(given)) is not None and not self.is_far():
            raise missing
        given = submission.with_callers_own(given, far=self.is_far())
        return self.submit(submission.training_of(given, self.namespace), idempotency_key, force=force)

    def is_far(self) -> bool:
        """Whether the control plane does not see the files that we see. The embedded one does: nobody has to ask."""
        return self._link.search.url is not None and not self.run(flows.sees(files.place()))

    async def is_far_async(self) -> bool:
        return self._link.search.url is not None and not await self.run_async(flows.sees(files.place()))

    async def train_async(
        self,
        *,
        script: str | os.PathLike[str] | None = None,
        module: str | None = None,
        command: Sequence[str] | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[SubmitOptions],
    ) -> DistributedTraining:
        given: dict[str, Any] = {"script": script, "module": module, "command": command, **options}
        ship, force = given.pop("ship", None), bool(given.pop("force", False))
        if ship or (ship is None and _is_here(given) and await self.is_far_async()):
            import asyncio

            packed, given = await asyncio.to_thread(_packed, given)
            await self.run_async(flows.send_package(given.get("namespace") or self.namespace, packed))
        elif not force and (missing := submission.missing_script(given)) is not None and not await self.is_far_async():
            raise missing
        given = submission.with_callers_own(given, far=await self.is_far_async())
        return await self.submit_async(submission.training_of(given, self.namespace), idempotency_key, force=force)

    def submit(
        self, training: Training, idempotency_key: str | None = None, *, force: bool = False
    ) -> DistributedTraining:
        """Submit a training that is already described; a repeat with the same key gives the first one."""
        key = idempotency_key or secrets.token_hex(16)
        return self._handle(self.run(flows.create(training, key, force=force)))

    async def submit_async(
        self, training: Training, idempotency_key: str | None = None, *, force: bool = False
    ) -> DistributedTraining:
        key = idempotency_key or secrets.token_hex(16)
        return self._handle(await self.run_async(flows.create(training, key, force=force)))

    def plan(self, training: Training, *, force: bool = False) -> Mapping[str, Any]:
        """What would be started for a training; nothing is."""
        return self.run(flows.plan(training, force=force))

    async def plan_async(self, training: Training, *, force: bool = False) -> Mapping[str, Any]:
        return await self.run_async(flows.plan(training, force=force))

    def apply(self, manifest: Mapping[str, Any], *, force: bool = False) -> DistributedTraining:
        """Create what the manifest describes, or bring the training of that name in line with it."""
        return self._handle(self.run(flows.apply(manifest, self.namespace, secrets.token_hex(16), force=force)))

    async def apply_async(self, manifest: Mapping[str, Any], *, force: bool = False) -> DistributedTraining:
        flow = flows.apply(manifest, self.namespace, secrets.token_hex(16), force=force)
        return self._handle(await self.run_async(flow))

    # What is known about them

    def usage(self, since: datetime | str | None = None, by: str | None = None) -> Usages:
        """What was used, per training or per whatever `by` names."""
        return self.run(flows.usage(_shown(since), by))

    async def usage_async(self, since: datetime | str | None = None, by: str | None = None) -> Usages:
        return await self.run_async(flows.usage(_shown(since), by))

    def events(
        self, name: str | None = None, since: flows.Since | None = None, *, all_namespaces: bool = False
    ) -> Sequence[Event]:
        """What happened to a training, oldest first; the journal outlives a training that was deleted.

        Without a name: the newest of all trainings of the namespace, or of all namespaces.
        """
        return self.run(self._events(name, since, all_namespaces))

    async def events_async(
        self, name: str | None = None, since: flows.Since | None = None, *, all_namespaces: bool = False
    ) -> Sequence[Event]:
        return await self.run_async(self._events(name, since, all_namespaces))

    def _events(self, name: str | None, since: flows.Since | None, all_namespaces: bool) -> Flow[Sequence[Event]]:
        if name is not None:
            return flows.events(Key(self.namespace, name), since)
        return flows.all_events(None if all_namespaces else self.namespace)

    def explain(self, name: str) -> Explanation:
        """Why it is pending, below its minimum, or resizing."""
        return self.run(flows.explain(Key(self.namespace, name)))

    async def explain_async(self, name: str) -> Explanation:
        return await self.run_async(flows.explain(Key(self.namespace, name)))

    # Carrying flows out

    def run(self, flow: Flow[T]) -> T:
        return self._sync.run(flow)

    async def run_async(self, flow: Flow[T]) -> T:
        return await self._async.run(flow)

    def iterate(self, flow: Flow[None]) -> Generator[Any, None, None]:
        return self._sync.iterate(flow)

    def iterate_async(self, flow: Flow[None]) -> AsyncGenerator[Any, None]:
        return self._async.iterate(flow)

    def close(self) -> None:
        self._sync.close()

    async def close_async(self) -> None:
        await self._async.close()
        self._sync.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close_async()

    def _handle(self, training: Training) -> DistributedTraining:
        return DistributedTraining(self, training)


def _is_here(given: Mapping[str, Any]) -> bool:
    from muster.sdk import shipping

    return shipping.is_here(given)


def _packed(given: Mapping[str, Any]) -> tuple[Packed, dict[str, Any]]:
    """The code that goes along, and the request that names it."""
    from muster import package
    from muster.sdk import shipping

    folder, placed = shipping.placed(given)
    parcel = shipping.collect(folder)
    for warning in parcel.warnings():
        log.warning("%s", warning)
    packed = shipping.pack(parcel, files.home() / "cache")
    size = package.shown(packed.size)
    log.info("with the code of %s: %s, %s packed", folder, plural.counted(len(parcel.entries), "file"), size)
    return packed, placed | {"package": packed.digest}


def default_client() -> Client:
    """The client of calls that name none; the environment says whom it speaks to."""
    names = ("MUSTER_URL", "MUSTER_TOKEN", "MUSTER_HOME", "MUSTER_CA", "MUSTER_INSECURE", "HOME")
    told = tuple(os.environ.get(name) for name in names)
    return _client_for(told, os.getpid())


@functools.lru_cache(maxsize=8)
def _client_for(told: tuple[str | None, ...], pid: int) -> Client:
    """One per environment and process: a forked child must not share its parent's sockets."""
    return Client()


def _shown(since: datetime | str | None) -> str | None:
    return show_time(since) if isinstance(since, datetime) else since
