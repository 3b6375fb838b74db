"""How does a command reach the control plane, and find the training that the user meant?

The only place of the command line that opens a client of the SDK; tests put a stand-in in the place of `open_client`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from muster import files
from muster.errors import Forbidden, MusterError, NotFound, TrainingCancelled, TrainingFailed, from_wire
from muster.sdk import home
from muster.types.event import Event
from muster.types.training import DEFAULT_NAMESPACE, Training

if TYPE_CHECKING:
    from muster.core.training.explain import Explanation
    from muster.sdk.client import Client
    from muster.sdk.effects import Flow
    from muster.sdk.training import DistributedTraining

T = TypeVar("T")

Namespace = Annotated[
    str, typer.Option("-n", "--namespace", envvar="MUSTER_NAMESPACE", metavar="NS", help="Which namespace.")
]
Url = Annotated[
    str | None,
    typer.Option("--url", envvar="MUSTER_URL", metavar="URL", help="Control plane; by default this machine's own."),
]
Token = Annotated[str | None, typer.Option("--token", envvar="MUSTER_TOKEN", metavar="TOKEN", help="Who is asking.")]


def complete_names(incomplete: str) -> list[str]:
    """Names for a shell to offer. Pressing tab starts no control plane, and an error there would only confuse."""
    try:
        running = home.running(files.home())
        url = os.environ.get("MUSTER_URL") or (running.url if running else None)
        if url is None:
            return []
        client = open_client(url, os.environ.get("MUSTER_TOKEN"), os.environ.get("MUSTER_NAMESPACE") or DEFAULT)
        names = [handle.name for handle in client.list() if handle.name.startswith(incomplete)]
        return [name for name in names if all(char.isalnum() or char in "-._" for char in name)]  # a shell takes them
    except MusterError:
        return []


Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the training.", autocompletion=complete_names)]
Names = Annotated[list[str], typer.Argument(metavar="NAME…", help="Names of trainings.", autocompletion=complete_names)]

DEFAULT = DEFAULT_NAMESPACE


def open_client(url: str | None, token: str | None, namespace: str) -> Client:
    """The control plane that the user means; the SDK starts the embedded one if there is none."""
    from muster.sdk.client import Client

    return Client(url=url, token=token, namespace=namespace)


def find(client: Client, name: str) -> DistributedTraining:
    """The training of that name; one that does not exist is answered with the nearest that does."""
    return _or_nearest(client, name, lambda: client.get(name))


def explained(client: Client, name: str) -> Explanation:
    return _or_nearest(client, name, lambda: client.explain(name))


def listed(client: Client, selector: str | None, phase: str | None, *, every: bool) -> list[Training]:
    """The trainings of the client's namespace, or of all that the token may see."""
    if every:
        return client.run(_all(selector, phase))
    return [handle.training for handle in client.list(selector, phase)]


def pools(client: Client) -> tuple[Mapping[str, Any], ...]:
    """All pools, each as it is now."""
    try:
        return client.run(_pools())
    except (NotFound, Forbidden):
        return ()  # an older control plane has none


def handle_on(client: Client, training: Training) -> DistributedTraining:
    """A handle on that very training."""
    from muster.sdk.training import DistributedTraining

    return DistributedTraining(client, training)


def everywhere(client: Client) -> list[DistributedTraining]:
    """A handle on every training, whatever its namespace."""
    return [handle_on(client, training) for training in listed(client, None, None, every=True)]


def changes(client: Client, handle: DistributedTraining) -> Iterator[Training | Event]:
    """A training each time that it has changed, until it is deleted. Nothing since it was read is missed.

    Entries of its journal come between, as they are written.
    """
    for seen in watched(client, handle.training.metadata.resource_version or None):
        if isinstance(seen, Event):
            if seen.uid == handle.training.uid:
                yield seen
            continue
        deleted, training = seen
        if training.uid != handle.training.uid:
            continue
        if deleted:
            return
        yield training


def watched(client: Client, version: str | None) -> Iterator[tuple[bool, Training] | Event]:
    """Every change of the namespace's trainings since a list of that version, with whether it was deleted."""
    from muster.sdk import streams

    for seen in client.iterate(streams.watch(client.namespace, version, events=True)):
        yield seen if isinstance(seen, Event) else (seen.kind == "DELETED", seen.training)


def wait_for_end(handle: DistributedTraining) -> None:
    """Until it has ended, in whichever way."""
    try:
        handle.wait()
    except (TrainingFailed, TrainingCancelled):
        return


def _all(selector: str | None, phase: str | None) -> Flow[list[Training]]:
    from muster.sdk import flows
    from muster.sdk.effects import HttpRequest

    asked = {"labelSelector": selector, "phase": phase, "limit": str(flows.PAGE)}
    params = {name: value for name, value in asked.items() if value is not None}
    found: list[Training] = []
    while True:
        answer = yield from flows.call(HttpRequest("GET", "/v1/trainings", params))
        found += [flows.read(Training, item) for item in flows.items(answer)]
        metadata: dict[str, Any] = answer.json.get("metadata") or {}
        if not metadata.get("continue"):
            return found
        params["continue"] = str(metadata["continue"])


def _pools() -> Flow[tuple[Mapping[str, Any], ...]]:
    """Once, without patience: whoever asks asks again soon, or does without."""
    from muster.sdk import flows
    from muster.sdk.effects import HttpRequest, Lost

    answer = yield HttpRequest("GET", "/v1/pools")
    if isinstance(answer, Lost):
        raise flows.unavailable(answer)
    if answer.status >= 400:
        raise from_wire(answer.status, answer.json)
    return tuple(answer.json["items"])


def _or_nearest(client: Client, name: str, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except NotFound as error:
        raise NotFound(error.message, hint=_nearest(client, name) or error.hint) from error


def _nearest(client: Client, name: str) -> str:
    try:
        names = [handle.name for handle in client.list()]
    except MusterError:
        return ""  # the first error is the one to tell
    return nearest(name, names)


def nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, 3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return "muster ps lists what there is; -n NAMESPACE looks elsewhere" if names else "there is no training here yet"
