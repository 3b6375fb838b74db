"""What does a Pod say about its worker: does it run, why not yet, and how did it end? Pure.

Of each Pod only a digest is kept: a cluster has thousands, and little of each counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from muster.backends import records
from muster.backends.kube import quantities
from muster.backends.kube.render import TRAINING, UID
from muster.core.training.reconcile import USAGE_ERROR
from muster.types.pod_template import CONTAINER, GPU
from muster.types.training import KIND, Uid
from muster.types.worker import Worker

Json = dict[str, Any]

ORDERED = "its Pod has been ordered"
MOST_WORDS = 600  # of a message that is shown
INIT_FAILED = 1  # the code of a worker whose init container failed, whatever that container's was
# What the platform calls the causes of an end, in our words.
_CAUSES = {
    "Evicted": "Evicted",
    "NodeLost": "NodeLost",
    "Preempting": "Preempted",
    "NodeShutdown": "NodeLost",
    "Shutdown": "NodeLost",
    "Terminated": "NodeLost",  # of a whole Pod: its node was shut down
    "PreemptionByScheduler": "Preempted",
    "PreemptionByKubeScheduler": "Preempted",
    "DeletionByTaintManager": "Evicted",
    "EvictionByEvictionAPI": "Evicted",
    "TerminationByKubelet": "Evicted",
    "DeletionByPodGC": "NodeLost",
}
MOST_GPUS = 1024  # as a training can ask for
_NO_PROGRAM = ("executable file not found", "no such file or directory", "permission denied")


@dataclass(frozen=True, slots=True)
class Pod:
    namespace: str
    name: str
    uid: str
    version: int
    training: Uid
    training_name: str
    owner: str  # the uid of the Training that it belongs to
    created_at: datetime
    finalizers: tuple[str, ...] = ()
    node: str = ""
    gpus: int = 0
    grace_s: int | None = None  # how long it may take to leave, once it was told to
    phase: str = "Pending"
    cause: str = ""  # Evicted, NodeLost, Preempted: what the platform did to it
    said: str = ""  # the platform's words about it
    waiting: str = ""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    exit_code: int | None = None
    exit_reason: str = ""
    last_words: str = ""
    others_run: bool = False  # containers beside the worker's do
    init_failed: str = ""  # which of its first containers ended with which code, so that the worker's never ran

    @property
    def place(self) -> tuple[str, str]:
        return self.namespace, self.name

    @property
    def leaving(self) -> bool:
        return self.grace_s is not None

    @property
    def ours(self) -> bool:
        return self.owner == self.training

    @property
    def lingers(self) -> bool:
        """Its worker has ended, and a container beside it holds on to what the Pod has."""
        return self.others_run and (self.exit_code is not None or self.ended_at is not None) and not self.leaving


@dataclass(frozen=True)
class Termination:
    """How a worker ended; `at` is None where nobody saw when."""

    exit_code: int | None
    reason: str
    why: str
    at: datetime | None = None
    last_words: str = ""


# Reading -----------------------------------------------------------------------------------------


def read(item: Mapping[str, Any]) -> Pod:
    about, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    labels = about.get("labels") or {}
    grace = about.get("deletionGracePeriodSeconds")
    known = Pod(
        namespace=about["namespace"],
        name=about["name"],
        uid=about["uid"],
        version=int(about["resourceVersion"]),
        training=Uid(labels.get(UID, "")),
        training_name=labels.get(TRAINING, ""),
        owner=next((one["uid"] for one in about.get("ownerReferences") or () if one.get("kind") == KIND), ""),
        created_at=time_of(about["creationTimestamp"]),
        finalizers=tuple(about.get("finalizers") or ()),
        node=spec.get("nodeName") or "",
        gpus=_gpus(spec),
        grace_s=None if not about.get("deletionTimestamp") else int(grace or 0),
        phase=status.get("phase") or "Pending",
        cause=_cause(status),
        said=str(status.get("message") or "")[:MOST_WORDS],
        others_run=any(
            "running" in (one.get("state") or {})
            for one in status.get("containerStatuses") or ()
            if one["name"] != CONTAINER
        ),
        init_failed=_init_failed(status),
    )
    return _with_container(known, status)


def _init_failed(status: Mapping[str, Any]) -> str:
    for one in status.get("initContainerStatuses") or ():
        over = (one.get("state") or {}).get("terminated") or {}
        if over.get("exitCode"):
            words = records.last_words(str(over.get("message") or "")[-records.LAST_WORDS :])
            return f"its init container {one['name']} ended with exit code {over['exitCode']}" + (
                f": {words}" if words else ""
            )
    return ""


def _with_container(pod: Pod, status: Mapping[str, Any]) -> Pod:
    states = [one.get("state") or {} for one in status.get("containerStatuses") or () if one["name"] == CONTAINER]
    state: Json = next(iter(states), {})
    if (over := state.get("terminated")) is not None:
        message = str(over.get("message") or "")
        code, reason = over.get("exitCode"), over.get("reason") or ""
        if reason in ("StartError", "ContainerCannotRun") and any(words in message for words in _NO_PROGRAM):
            code = USAGE_ERROR  # nor will it start elsewhere
        return replace(
            pod,
            started_at=_maybe(over.get("startedAt")),
            ended_at=_maybe(over.get("finishedAt")),
            exit_code=code,
            exit_reason=reason,
            last_words="" if code == 0 else records.last_words(message[-records.LAST_WORDS :]),
        )
    if (running := state.get("running")) is not None:
        return replace(pod, started_at=_maybe(running.get("startedAt")))
    waiting = state.get("waiting") or {}
    if waiting.get("reason") == "PodInitializing":
        waiting = _initializing(status) or waiting
    return replace(pod, waiting=_waiting(pod, waiting, status.get("conditions") or ()))


def _initializing(status: Mapping[str, Any]) -> Json:
    """What the first of its init containers that has not ended waits for, or does."""
    for one in status.get("initContainerStatuses") or ():
        state = one.get("state") or {}
        if "terminated" not in state:
            told = state.get("waiting") or {}
            reason = f"init container {one['name']}: {told.get('reason') or 'runs'}"
            return {"reason": reason, "message": told.get("message") or ""}
    return {}


def _waiting(pod: Pod, container: Mapping[str, Any], conditions: Iterable[Mapping[str, Any]]) -> str:
    """Why it does not run yet, in the scheduler's or the kubelet's words."""
    if not pod.node:
        placed = next((one for one in conditions if one.get("type") == "PodScheduled"), {})
        said = placed.get("message") or placed.get("reason") or "no node has been chosen for it yet"
        return str(said)[:MOST_WORDS]
    reason, message = container.get("reason") or "ContainerCreating", container.get("message") or ""
    return f"{reason}{f': {message}' if message else ''} (node {pod.node})"[:MOST_WORDS]


def _cause(status: Mapping[str, Any]) -> str:
    disrupted = (
        one.get("reason") or ""
        for one in status.get("conditions") or ()
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True"
    )
    return next((_CAUSES[one] for one in (status.get("reason") or "", *disrupted) if one in _CAUSES), "")


def _gpus(spec: Mapping[str, Any]) -> int:
    """How many; a thousand is shown as 1k. A Pod that others made may ask for more than a training can."""
    worker: Json = next((one for one in spec.get("containers") or () if one.get("name", CONTAINER) == CONTAINER), {})
    shown = quantities.read(((worker.get("resources") or {}).get("limits") or {}).get(GPU) or 0)
    return 0 if shown is None else min(MOST_GPUS, int(shown))


def time_of(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _maybe(text: str | None) -> datetime | None:
    return time_of(text) if text else None


# What it means -----------------------------------------------------------------------------------


def end(pod: Pod) -> Termination | None:
    """How it ended; None while it may still run."""
    if pod.exit_code is not None or pod.ended_at is not None:
        return _exited(pod)
    if pod.phase == "Succeeded":
        return Termination(0, "", "exit code 0")
    if pod.phase == "Failed" and pod.init_failed:
        return Termination(INIT_FAILED, "Error", pod.init_failed, last_words=pod.init_failed)
    if pod.phase == "Failed":
        reason = pod.cause or "Error"
        return Termination(None, reason, f"{reason}: {pod.said or 'its Pod failed before it ran'}", last_words=pod.said)
    if pod.cause == "NodeLost":
        return Termination(None, "NodeLost", pod.said or f"its node {pod.node} was lost")
    if pod.leaving and not pod.node:
        return Termination(None, pod.cause, "its Pod was deleted before it ran")
    return _unseen(pod) if pod.grace_s == 0 else None


def gone(pod: Pod) -> Termination:
    """Its Pod is no more; this is how it was last seen."""
    return end(pod) or _unseen(pod)


def _unseen(pod: Pod) -> Termination:
    """Removed without a word from its node: by force, or because there is no such node."""
    where = f"its node {pod.node}" if pod.node else "the cluster"
    reason = pod.cause or ("NodeLost" if pod.node else "")
    return Termination(None, reason, f"its Pod was removed, and {where} did not say how it ended")


def _exited(pod: Pod) -> Termination:
    code = pod.exit_code
    reason = ""
    if code != 0:
        reason = "OOMKilled" if pod.exit_reason == "OOMKilled" else pod.cause or "Error"
    why = f"exit code {code}" + (f" ({reason})" if reason not in ("", "Error") else "")
    if pod.leaving and not pod.cause:
        why = f"its Pod was deleted: {why}"
    return Termination(
        code, reason, f"{why}: {pod.said}" if pod.cause and pod.said else why, pod.ended_at, pod.last_words
    )


def observed(worker: Worker, pod: Pod) -> Worker:
    """A worker that has not ended, as its Pod shows it. It counts as started when its container runs."""
    return replace(
        worker,
        node=pod.node,
        mesh_name=pod.node,
        started_at=max(pod.started_at or worker.started_at, worker.started_at),
        stopping=worker.stopping or pod.leaving,
        waiting="" if pod.started_at is not None else pod.waiting or ORDERED,
    )


def ended(worker: Worker, pod: Pod | None, how: Termination, now: datetime) -> Worker:
    """What was asked of it tells more than the code with which it obeyed."""
    shown = worker if pod is None else observed(worker, pod)
    asked = shown.stopping and how.reason == "Error"
    return replace(
        shown,
        waiting="",
        ended_at=max(min(how.at or now, now), shown.started_at),  # clocks of nodes may be wrong
        exit_code=how.exit_code,
        reason="" if asked else how.reason,
        why_ended=worker.why_ended or how.why,
        cleared=how.exit_code is not None,  # a container ends with all its processes
        last_words="" if worker.stopping else how.last_words,
    )
