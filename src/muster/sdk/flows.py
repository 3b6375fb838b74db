"""What does each call of the SDK do, step by step?

All logic lives here once, as generators that yield effects; `drive` carries them out for synchronous and for
asynchronous callers. A lost connection is an answer like any other: plain calls are repeated for a while where that
is safe, waits and streams go on until their own time is over.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from muster.backoff import Backoff
from muster.core.training import waits
from muster.core.training.explain import Explanation
from muster.core.training.waits import Receipt, Wait
from muster.errors import (
    AlreadyExists,
    InvalidRequest,
    MusterError,
    NotFound,
    ScaleSuperseded,
    TooManyRequests,
    Unavailable,
    from_wire,
)
from muster.sdk.effects import CALL_TIMEOUT_S, Flow, HttpRequest, Locate, Lost, Now, Pause, Response
from muster.types import codec
from muster.types.codec import Invalid, Problem
from muster.types.event import Event
from muster.types.metrics import Metrics
from muster.types.training import Key, Training, WorldStatus
from muster.types.usage import Usage

if TYPE_CHECKING:
    from muster.sdk.shipping import Packed

T = TypeVar("T")

LONG_POLL_S = 30.0  # the longest that one look asks the server to hold its answer
SILENCE_S = 5.0  # how much later than promised an answer may come before the connection counts as lost
RETURN_S = 10.0  # how long a plain call waits for a server that was there before
RETRY = Backoff(0.05, 1.0)  # while a server is away
STOPPED_S = 60.0  # how long a wait lasts for one that was stopped on purpose: it may be for an upgrade
MOST_FAILED_STARTS = 5  # an embedded control plane that fails that often in a row will not come by itself
PAGE = 500
SEND_TIMEOUT_S = 600.0
BUSY_S = 60.0  # how long a package is sent again to a server that has too many to check
_CODE = re.compile(r"[-\w]{1,128}", re.ASCII)


@dataclass
class Handle:
    """What a DistributedTraining knows: the training as last read, and the receipt of its own last scale."""

    training: Training
    receipt: Receipt | None = None

    @property
    def path(self) -> str:
        return path_of(self.training.key)

    def ask(self, method: str, suffix: str = "", params: Mapping[str, str] | None = None, **more: Any) -> HttpRequest:
        """A request about this very training: another one that took over its name is not meant."""
        uid = self.training.uid
        headers = {"X-Muster-Uid": str(uid)} if uid else {}
        return HttpRequest(method, f"{self.path}{suffix}", params or {}, headers=headers, **more)


def path_of(key: Key) -> str:
    return f"{all_of(key.namespace)}/{_safe('metadata.name', key.name)}"


def all_of(namespace: str | None) -> str:
    return (
        "/v1/trainings" if namespace is None else f"/v1/namespaces/{_safe('metadata.namespace', namespace)}/trainings"
    )


def _safe(field: str, name: str) -> str:
    """A name goes into a path, so nothing that would change the path may be in it."""
    if not name or not all(char.isalnum() or char in "-._" for char in name) or set(name) == {"."}:
        problem = Problem(field, f"{name[:80]!r} is not a name: lower-case letters, digits and dashes")
        raise InvalidRequest(f"{problem.field}: {problem.message}", problems=(problem,))
    return name


# One call ----------------------------------------------------------------------------------------


def call(request: HttpRequest, *, again: HttpRequest | None = None, left: float = math.inf) -> Flow[Response]:
    """The server's answer; errors are raised as what they stand for.

    When the connection is lost, the server is looked for and asked once more, with `again` if that is another
    request. A plain call gives a server that has answered before time to come back; a wait (`left`) has its own.
    """
    answer: Response | Lost = yield request
    until, failures = None if left == math.inf else 0.0, 0
    while isinstance(answer, Lost) and (request.repeatable or not answer.sent):
        found: Lost | None = yield Locate(max(left, SILENCE_S))
        if isinstance(found, Lost):
            raise unavailable(found)
        answer = yield again or request
        if not isinstance(answer, Lost) or not answer.known or until == 0.0:
            break
        now: float = yield Now()
        until = until or now + RETURN_S
        if now >= until:
            break
        failures += 1
        yield Pause(RETRY.after(failures))
    if isinstance(answer, Lost):
        raise unavailable(answer)
    if answer.status >= 400:
        raise from_wire(answer.status, answer.json)
    return answer


def unavailable(lost: Lost) -> Unavailable:
    if lost.hint:
        return Unavailable(lost.reason, hint=lost.hint)
    return Unavailable(
        f"the control plane does not answer: {lost.reason}", hint="muster server status shows where it should be"
    )


def _training(answer: Response) -> Training:
    return read(Training, answer.json)


def read(kind: type[T], data: object) -> T:
    """A record from an answer; fields that a newer server added are dropped."""
    if isinstance(data, dict):
        data = {name: value for name, value in data.items() if name not in ("apiVersion", "kind")}
    try:
        return codec.from_wire(kind, data, strict=False)
    except Invalid as wrong:
        raise MusterError(f"the server's answer cannot be understood: {wrong}") from wrong


def items(answer: Response) -> list[Any]:
    body = answer.json
    items = body.get("items") if isinstance(body, dict) else None
    if not isinstance(items, list):
        raise MusterError("the server's answer cannot be understood: it has no list of items")
    return items


# Reading -----------------------------------------------------------------------------------------


def get(key: Key) -> Flow[Training]:
    return _training((yield from call(HttpRequest("GET", path_of(key)))))


def refresh(handle: Handle) -> Flow[None]:
    yield from look(handle, handle.ask("GET"))


def look(handle: Handle, request: HttpRequest, left: float = math.inf) -> Flow[Training]:
    """Read the handle's own training. Another one that took over its name is not it."""
    # A look that the server was to hold is not repeated as it is: another server may count versions differently, and
    # the time that it was to be held for has partly passed.
    again = _poll(handle, None, left) if request.method == "GET" else None
    training = _training((yield from call(request, again=again, left=left)))
    known = handle.training.uid
    if known and training.uid and training.uid != known:
        raise NotFound(
            f"training {training.key} was deleted; another one has its name now",
            hint=f"get {training.metadata.name!r} again to follow the new one",
        )
    handle.training = training
    handle.receipt = waits.after_look(handle.receipt, training)
    return training


def listed(namespace: str | None, label_selector: str | None, phase: str | None) -> Flow[tuple[list[Training], str]]:
    """Every training of a namespace or of all, page by page, and the version from which a watch goes on."""
    asked = {"labelSelector": label_selector, "phase": phase, "limit": str(PAGE)}
    params = {name: value for name, value in asked.items() if value is not None}
    found: list[Training] = []
    version = ""
    while True:
        answer = yield from call(HttpRequest("GET", all_of(namespace), params))
        found += [read(Training, item) for item in items(answer)]
        metadata = answer.json.get("metadata") or {}
        # The first page's version: what changed while later pages were read is then seen again, never missed.
        version = version or str(metadata.get("resourceVersion") or "")
        if not metadata.get("continue"):
            return found, version
        params["continue"] = str(metadata["continue"])


Since = int | Event | datetime | str
"""From where on a journal is read: behind an entry or its number, or from a time, as ISO 8601 if it is a text."""


def events(key: Key, since: Since | None = None) -> Flow[list[Event]]:
    return (yield from _events(HttpRequest("GET", f"{path_of(key)}/events", _from(since))))


def all_events(namespace: str | None) -> Flow[list[Event]]:
    """The newest of a namespace, or of all."""
    return (yield from _events(HttpRequest("GET", "/v1/events", {} if namespace is None else {"namespace": namespace})))


def events_of(handle: Handle, since: Since | None = None, limit: int | None = None) -> Flow[list[Event]]:
    asked = _from(since) | ({} if limit is None else {"limit": str(limit)})
    return (yield from _events(handle.ask("GET", "/events", asked)))


def _from(since: Since | None) -> dict[str, str]:
    if since is None:
        return {}
    if isinstance(since, str):
        with contextlib.suppress(ValueError):
            since = datetime.fromisoformat(since)
    if isinstance(since, datetime):
        return {"since": codec.show_time(since)}
    after = since.id if isinstance(since, Event) else since
    if isinstance(after, int) and not isinstance(after, bool):
        return {"after": str(after)}
    problem = Problem("since", f"must be an event, its id, or a time like 2026-11-18T09:30:00Z, not {since!r:.80}")
    raise InvalidRequest(f"{problem.field} {problem.message}", problems=(problem,))


def _events(request: HttpRequest, left: float = math.inf) -> Flow[list[Event]]:
    answer = yield from call(request, left=left)
    return [read(Event, item) for item in items(answer)]


def metrics_of(handle: Handle, names: Iterable[str], after: float | None) -> Flow[Metrics]:
    asked = {"names": ",".join(names), "after": "" if after is None else f"{after:.3f}"}
    answer = yield from call(handle.ask("GET", "/metrics", {name: value for name, value in asked.items() if value}))
    return read(Metrics, answer.json)


def usage_of(handle: Handle) -> Flow[Usage]:
    answer = yield from call(handle.ask("GET", "/usage"))
    if isinstance(answer.json, dict) and "items" in answer.json:
        key = handle.training.key
        nothing = Usage(namespace=key.namespace, training=key.name, uid=handle.training.uid)
        return next((read(Usage, item) for item in items(answer)), nothing)
    return read(Usage, answer.json)


def usage(since: str | None, by: str | None) -> Flow[list[Usage]]:
    params = {name: value for name, value in (("since", since), ("by", by)) if value is not None}
    answer = yield from call(HttpRequest("GET", "/v1/usage", params))
    return [read(Usage, item) for item in items(answer)]


def explain(key: Key) -> Flow[Explanation]:
    body = (yield from call(HttpRequest("GET", f"{path_of(key)}/explain"))).json
    if not isinstance(body, dict):
        raise MusterError("the server's answer cannot be understood: it is no explanation")
    return Explanation(str(body.get("summary", "")), tuple(str(line) for line in body.get("details") or ()))


# Writing -----------------------------------------------------------------------------------------


# What says nothing is not sent: a control plane that is older may not know of it.
_NEW: Mapping[str, Any] = {
    "package": None,
    "requirements": [],
    "storage": [],
    "suspend": False,
    "elasticity": "fixed",
    "bench": False,
}


def create(training: Training, idempotency_key: str, *, force: bool = False) -> Flow[Training]:
    headers = {"Idempotency-Key": idempotency_key}
    path = all_of(training.metadata.namespace)
    request = HttpRequest("POST", path, _forced(force), json=_request(training), headers=headers)
    return _training((yield from call(request)))


def _forced(force: bool) -> dict[str, str]:
    return {"force": "true"} if force else {}


def plan(training: Training, *, force: bool = False) -> Flow[Mapping[str, Any]]:
    path, params = all_of(training.metadata.namespace), {"dryRun": "true", **_forced(force)}
    body = (yield from call(HttpRequest("POST", path, params, json=_request(training)))).json
    told = body.get("plan") if isinstance(body, dict) else None
    if not isinstance(told, dict):
        raise MusterError("the server's answer cannot be understood: it has no plan")
    return told


def _request(training: Training) -> dict[str, Any]:
    # The server fills these in; sending empty ones would claim to know them.
    wire = training.to_wire()
    wire.pop("status", None)
    wire["spec"] = {name: value for name, value in wire["spec"].items() if value != _NEW.get(name, ...)}
    kept = ("name", "namespace", "labels", "annotations")
    wire["metadata"] = {name: wire["metadata"][name] for name in kept if name in wire["metadata"]}
    return wire


def sees(place: str) -> Flow[bool]:
    """Whether the control plane sees the same files as whoever is at that place. One that does not say is an old one:
    its files are taken to be ours, as they always were."""
    told = (yield from call(HttpRequest("GET", "/v1/whoami"))).json
    theirs = told.get("place") if isinstance(told, dict) else None
    return theirs is None or (bool(place) and theirs == place)


def backends() -> Flow[tuple[str, ...]]:
    """What the control plane runs workers with; nothing, if it is an old one that does not say."""
    told = (yield from call(HttpRequest("GET", "/v1/whoami"))).json
    found = told.get("backends") if isinstance(told, dict) else None
    return tuple(map(str, found)) if isinstance(found, list) else ()


def sign_in_code() -> Flow[str]:
    """A code that signs a browser in, once and soon. Nothing is asked twice: a code that was lost ends by itself."""
    told = (yield from call(HttpRequest("POST", "/v1/sign-in-codes"))).json
    code = told.get("code") if isinstance(told, dict) else None
    if not isinstance(code, str) or not _CODE.fullmatch(code):  # it becomes part of an address
        raise MusterError("the server's answer cannot be understood: it has no code")
    return code


def send_package(namespace: str, packed: Packed) -> Flow[bool]:
    """Have that code there; False if it was there already."""
    path = f"/v1/namespaces/{_safe('metadata.namespace', namespace)}/packages/{packed.digest}"
    try:
        yield from call(HttpRequest("GET", path))
        return False
    except NotFound:
        pass
    headers = {"Content-Type": "application/octet-stream"}
    put = HttpRequest("PUT", path, content=packed.content(), headers=headers, timeout_s=SEND_TIMEOUT_S)
    began: float = yield Now()
    failures = 0
    while True:
        try:
            yield from call(put)
            return True
        except NotFound as error:
            raise MusterError("the control plane takes no code", hint="it may be older than this client") from error
        except TooManyRequests:
            now: float = yield Now()
            failures += 1
            if now + RETRY.after(failures) - began > BUSY_S:
                raise
            yield Pause(RETRY.after(failures))


def apply(manifest: Mapping[str, Any], namespace: str, idempotency_key: str, *, force: bool = False) -> Flow[Training]:
    """Create what the manifest describes, or bring the training of that name in line with it."""
    metadata = manifest.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(metadata, Mapping) or not isinstance(name, str):
        problem = Problem("metadata.name", "is required")
        raise InvalidRequest("the manifest has no metadata.name", problems=(problem,))
    key = Key(str(metadata.get("namespace") or namespace), name)
    try:
        yield from get(key)
    except NotFound:
        body = {**manifest, "metadata": {**metadata, "namespace": key.namespace}}
        headers = {"Idempotency-Key": idempotency_key}
        request = HttpRequest("POST", all_of(key.namespace), _forced(force), json=body, headers=headers)
        try:
            return _training((yield from call(request)))
        except AlreadyExists:
            pass  # somebody created it in between: then it is there to be changed
    headers = {"Content-Type": "application/merge-patch+json"}
    request = HttpRequest("PATCH", path_of(key), json=_patch(manifest, metadata), headers=headers)
    return _training((yield from call(request)))


def _patch(manifest: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a manifest that may change a training that exists."""
    patch: dict[str, Any] = {}
    about = {name: metadata[name] for name in ("labels", "annotations") if name in metadata}
    if about:
        patch["metadata"] = about
    spec = manifest.get("spec")
    if isinstance(spec, Mapping):
        programs = ("command", "script", "module")
        named = any(name in spec for name in programs)
        # A merge patch keeps what it does not name, so the program that is replaced has to be named.
        patch["spec"] = {**(dict.fromkeys(programs) if named else {}), **spec}
    return patch


def scale(handle: Handle, target: int) -> Flow[WorldStatus]:
    """Ask for another size. A training that has ended is refused before anything is written."""
    yield from refresh(handle)
    if handle.training.is_terminal:
        raise waits.refusal(handle.training, target)
    before = handle.receipt
    # From here on it is this handle that moves the target: a wait of it beside this call must not blame another writer.
    handle.receipt = replace(before, over=True) if before is not None else None
    try:
        training = yield from look(handle, handle.ask("POST", "/scale", json={"target": target}))
    except MusterError as error:
        if not isinstance(error, Unavailable):  # else nobody knows whether it was written
            handle.receipt = before
        raise
    handle.receipt = waits.after_look(Receipt(target, training.generation), training)
    return waits.world_of(training, target=target)


def cancel(handle: Handle, grace_seconds: float | None) -> Flow[None]:
    body = {} if grace_seconds is None else {"graceSeconds": grace_seconds}
    yield from look(handle, handle.ask("POST", "/cancel", json=body))


def kill(handle: Handle, rank: int, whole_worker: bool) -> Flow[None]:
    """Kill a rank, or every process of its worker. Another round than the handle saw is refused."""
    body = {"rank": rank, "wholeWorker": whole_worker, "round": handle.training.status.round}
    yield from look(handle, handle.ask("POST", "/kill", json=body))


def leave(handle: Handle) -> Flow[None]:
    """Nobody holds it any more: it is cancelled if it still runs. One that has ended, or is gone, is left as it is."""
    if handle.training.is_terminal:
        return
    try:
        yield from cancel(handle, None)
    except NotFound:
        return


def suspend(handle: Handle, suspended: bool) -> Flow[None]:
    """Said twice, it changes nothing."""
    asked = handle.ask("PATCH", json={"spec": {"suspend": suspended}})
    headers = {**asked.headers, "Content-Type": "application/merge-patch+json"}
    yield from look(handle, replace(asked, headers=headers))


def delete(handle: Handle, timeout: float | None) -> Flow[None]:
    """Have it removed, and come back when it is gone."""
    deadline = yield from _deadline(timeout)
    answer: Response | Lost = yield handle.ask("DELETE")
    if isinstance(answer, Lost):
        try:
            yield from call(handle.ask("DELETE"))
        except NotFound:
            return  # the first order had arrived
    elif answer.status >= 400:
        raise from_wire(answer.status, answer.json)
    outage = Outage()
    while True:
        began: float = yield Now()
        left = math.inf if deadline is None else deadline - began
        try:
            yield from look(handle, _poll(handle, None if outage.failures else handle.training, left), left)
            outage = Outage()
        except NotFound:
            return
        except Unavailable as lost:
            if left > 0:
                outage = yield from outage.wait(lost, left)
        if left <= 0:
            raise waits.timed_out(Wait("result", timeout), handle.training, "it has not been removed yet")


# Waiting -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outage:
    """A control plane that is away: how often it was not reached, how often starting it failed, and since when it is
    known that somebody has stopped it."""

    failures: int = 0
    failed_starts: int = 0
    stopped_since: float | None = None

    def wait(self, lost: Unavailable, left: float = math.inf) -> Flow[Outage]:
        """Pause, look for the control plane, and say how the outage stands. Gives up if it cannot be started."""
        failures = self.failures + 1
        yield Pause(max(0.0, min(RETRY.after(failures), left)))
        found: Lost | None = yield Locate(max(left, SILENCE_S))
        if not isinstance(found, Lost):
            return Outage(failures)
        if found.stopped:
            now: float = yield Now()
            since = now if self.stopped_since is None else self.stopped_since
            if now - since >= STOPPED_S:
                raise unavailable(found) from lost
            return Outage(failures, self.failed_starts, since)
        if self.failed_starts + 1 >= MOST_FAILED_STARTS:
            raise unavailable(found) from lost
        return Outage(failures, self.failed_starts + 1)


def wait(handle: Handle, goal: waits.Goal, timeout: float | None) -> Flow[WorldStatus]:
    """Look, and look again whenever the server has news, until `core.training.waits` says that the wait is over."""
    deadline = yield from _deadline(timeout)
    seen: Training | None = None
    outage = Outage()
    while True:
        began: float = yield Now()
        left = math.inf if deadline is None else deadline - began
        try:
            training = yield from look(handle, _poll(handle, None if outage.failures else seen, left), left)
            if goal == "target":
                yield from _look_back(handle, training, left)
        except Unavailable as lost:
            if left <= 0:
                raise waits.timed_out(Wait(goal, timeout, handle.receipt), handle.training, lost.message) from lost
            outage = yield from outage.wait(lost, left)
            continue
        asked = Wait(goal, timeout, handle.receipt)
        verdict = waits.judge(asked, training, waits.Look(began, deadline, first=seen is None))
        if isinstance(verdict, waits.Done):
            return verdict.world
        if isinstance(verdict, waits.Raise):
            if isinstance(verdict.error, ScaleSuperseded) and handle.receipt is asked.receipt:
                # The caller gets this error once: a later wait of this handle waits for the other writer's target.
                handle.receipt = replace(asked.receipt, over=True) if asked.receipt is not None else None
            raise verdict.error
        seen, outage = training, Outage()


def _look_back(handle: Handle, training: Training, left: float) -> Flow[None]:
    """Before another writer is blamed: had the target that it moved been reached, when this handle did not look?"""
    receipt = handle.receipt
    if receipt is None or training.is_terminal or waits.superseded(training, receipt) is None:
        return
    told = yield from _events(handle.ask("GET", "/events"), left)
    if handle.receipt is receipt:
        handle.receipt = waits.after_news(receipt, told)


def _deadline(timeout: float | None) -> Flow[float | None]:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout) or timeout < 0:
        problem = Problem("timeout", f"must be None or a number of seconds from 0, not {timeout!r}")
        raise InvalidRequest(f"{problem.field} {problem.message}", problems=(problem,))
    now: float = yield Now()
    return None if timeout == math.inf else now + timeout


def _poll(handle: Handle, seen: Training | None, left: float) -> HttpRequest:
    """A look that the server answers at once, or, once something was seen, when there is something newer."""
    if seen is None or left <= 0:
        return handle.ask("GET", timeout_s=min(CALL_TIMEOUT_S, max(left, SILENCE_S)))
    hold_s = max(0.001, min(LONG_POLL_S, left))
    params = {"resourceVersion": seen.metadata.resource_version, "timeoutSeconds": f"{hold_s:.3f}"}
    return handle.ask("GET", "", params, timeout_s=hold_s + SILENCE_S)
