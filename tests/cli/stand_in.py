"""A stand-in for the SDK's client: trainings in a dictionary, answers as the test wrote them, orders remembered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from muster.core.training.explain import Explanation
from muster.errors import MusterError, NotFound
from muster.sdk.streams import Seen
from muster.sdk.submission import training_of
from muster.types.event import Event
from muster.types.metrics import Metrics
from muster.types.training import Metadata, SparesStatus, Spec, Status, Training, WorldSize, WorldStatus
from muster.types.usage import Usage

LONG_AGO = datetime.now(UTC) - timedelta(hours=2)


def a_training(
    name: str = "demo", *, phase: Any = "ready", spec: Mapping[str, Any] | None = None, **status: Any
) -> Training:
    status.setdefault("world_size", WorldStatus(ready=2, target=2, min=2, max=4))
    status.setdefault("spares", SparesStatus(1, 1))
    status.setdefault("observed_generation", 1)
    status.setdefault("round", 0)
    return Training(
        Metadata(name, uid=f"uid-{name}", generation=1, resource_version="7", creation_timestamp=LONG_AGO),
        Spec(**{"script": "train.py", "world_size": WorldSize(2, 2, 4), "spares": 1, **(spec or {})}),
        Status(phase=phase, **status),
    )


@dataclass
class StandInHandle:
    client: StandIn
    training: Training

    @property
    def name(self) -> str:
        return self.training.metadata.name

    def scale(self, target: int) -> WorldStatus:
        self.client.orders.append(("scale", self.name, target))
        return replace(self.training.status.world_size, target=target)

    def cancel(self, grace_seconds: float | None = None) -> None:
        self.client.orders.append(("cancel", self.name, grace_seconds))

    def kill(self, rank: int, *, worker: bool = False) -> None:
        self.client.orders.append(("kill", self.name, rank, worker))

    def suspend(self) -> None:
        self.client.orders.append(("suspend", self.name))

    def resume(self) -> None:
        self.client.orders.append(("resume", self.name))

    def delete(self, timeout: float | None = None) -> None:
        self.client.orders.append(("delete", self.name))

    def logs(self, **asked: Any) -> Iterator[str]:
        self.client.orders.append(("logs", self.name, asked))
        yield from self.client.lines

    def events(self, since: int = 0, *, limit: int | None = None) -> list[Event]:
        found = [event for event in self.client.journal if not since or event.id > since]
        return found if limit is None else found[-limit:]

    def usage(self) -> Usage:
        return Usage("default", self.name, log_bytes=3 << 20, journal_bytes=512)

    def metrics(self) -> Metrics:
        return self.client.metrics

    def wait(self, timeout: float | None = None) -> WorldStatus:
        return self._wait("complete", timeout)

    def wait_until_target_world(self, timeout: float | None = None) -> WorldStatus:
        return self._wait("target", timeout)

    def wait_until_min_world(self, timeout: float | None = None) -> WorldStatus:
        return self._wait("min", timeout)

    def _wait(self, goal: str, timeout: float | None) -> WorldStatus:
        self.client.orders.append(("wait", goal, timeout))
        if isinstance(self.client.answer, MusterError):
            raise self.client.answer
        self.training = self.client.answer or self.training
        return self.training.status.world_size


@dataclass
class StandIn:
    """What the tests say is there, and what the commands did to it."""

    trainings: dict[str, Training] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    journal: list[Event] = field(default_factory=list)
    used: list[Usage] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    history: Sequence[Training | Event] = field(default_factory=list)  # what a watch tells
    interrupts: bool = False  # Ctrl-C is pressed at the end of the history
    interrupts_submit: bool = False  # Ctrl-C is pressed before there is an answer
    answer: Training | MusterError | None = None  # what a wait comes to
    pools: tuple[Mapping[str, Any], ...] = ()
    namespace: str = "default"
    far: bool = False  # it does not see our files
    backends: tuple[str, ...] = ("local",)
    warning: str = ""
    orders: list[tuple[Any, ...]] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)  # how the client was opened

    def is_far(self) -> bool:
        return self.far

    def add(self, *trainings: Training) -> None:
        self.trainings |= {training.metadata.name: training for training in trainings}

    def get(self, name: str) -> StandInHandle:
        if name not in self.trainings:
            raise NotFound(f"there is no training {name!r} in namespace 'default'")
        return StandInHandle(self, self.trainings[name])

    def list(self, label_selector: str | None = None, phase: str | None = None) -> Sequence[StandInHandle]:
        self.orders.append(("list", label_selector, phase))
        return [StandInHandle(self, one) for one in self.trainings.values() if phase in (None, one.status.phase)]

    def run(self, flow: Any) -> Sequence[Any]:
        if flow.__name__ == "_pools":
            return self.pools
        if flow.__name__ == "backends":
            return self.backends
        self.orders.append(("list all",))
        return [*self.trainings.values()]

    def iterate(self, flow: Any) -> Iterator[Seen | Event]:
        for news in self.history:
            yield news if isinstance(news, Event) else Seen("MODIFIED", news)
        if self.interrupts:
            raise KeyboardInterrupt

    def train(self, **fields: Any) -> StandInHandle:
        if fields.pop("force", False):
            self.orders.append(("force",))
        training = training_of(fields)
        self.orders.append(("train", training.spec))
        if self.interrupts_submit:
            raise KeyboardInterrupt
        training = replace(training, metadata=replace(training.metadata, uid=f"uid-{training.metadata.name}"))
        return StandInHandle(self, training)

    def apply(self, manifest: Mapping[str, Any], *, force: bool = False) -> StandInHandle:
        self.orders.append(("apply", manifest, "force") if force else ("apply", manifest))
        return StandInHandle(self, a_training(manifest["metadata"]["name"]))

    def usage(self, since: Any = None, by: str | None = None) -> Sequence[Usage]:
        self.orders.append(("usage", since, by))
        return self.used

    def events(self, name: str | None = None, *, all_namespaces: bool = False) -> Sequence[Event]:
        if name is None:
            self.orders.append(("events", all_namespaces))
            return self.journal
        raise NotFound(f"there is no training {name!r}")

    def explain(self, name: str) -> Explanation:
        self.get(name)
        return Explanation("demo is pending: needs 2 GPUs.", ("Admitted is False for 5s: needs 2 GPUs",))
