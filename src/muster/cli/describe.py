"""`muster describe`, `events` and `explain`: what is going on with one training, and why?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from muster import trimming
from muster.cli import exits, session, timeline
from muster.cli.output import Report, Story, write_data, write_table
from muster.cli.pool import holder_of, purpose_of
from muster.cli.safe_text import line
from muster.core.training import state_words
from muster.core.training.explain import explain as explain_training
from muster.core.training.explain import show_age, show_round_times
from muster.errors import NotFound
from muster.types.codec import to_wire
from muster.types.event import EMBEDDED

if TYPE_CHECKING:
    from muster.sdk.client import Client
    from muster.types.event import Event
    from muster.types.training import Training, WorkerStatus
    from muster.types.usage import Usage

app = typer.Typer(rich_markup_mode=None)

_EVENTS_SHOWN = 10
_RANKS_SHOWN = 32


@app.command(epilog="Example: muster describe demo")
def describe(
    name: session.Name,
    output: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print it."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Tell all about a training: spec, conditions, ranks, exits, what it used and takes, and its last events."""
    client = session.open_client(url, token, namespace)
    handle = session.find(client, name)
    found, used = handle.events(), handle.usage()
    lent = [] if handle.training.spec.elasticity == "fixed" else _lent(session.pools(client), handle.training)
    if output is not Report.TABLE:
        events = [to_wire(event) for event in found]
        told = {"training": handle.training.to_wire(), "usage": to_wire(used), "lent": lent, "events": events}
        write_data(told, output)
        return
    print("\n".join(map(line, description(handle.training, found, datetime.now(UTC), used, lent))))


def _lent(found: Sequence[Mapping[str, Any]], training: Training) -> list[Mapping[str, Any]]:
    """GPUs that its workers wait for, with who has them."""
    name = f"{training.metadata.namespace}/{training.metadata.name}"
    return [one for pool in found for one in pool.get("holders", ()) if one.get("lentBy") == name]


def _journal(client: Client, name: str) -> Sequence[Event]:
    """Also of a training that was deleted: the journal keeps them."""
    try:
        return session.find(client, name).events()
    except NotFound as missing:
        try:
            return client.events(name)
        except NotFound:
            raise missing from None


@app.command(epilog="Example: muster events demo -o png --file timeline.png")
def events(
    name: str | None = typer.Argument(
        None, metavar="[NAME]", help="Name of the training; without one, all.", autocompletion=session.complete_names
    ),
    every: bool = typer.Option(False, "-A", "--all-namespaces", help="Without NAME: from every namespace."),
    output: Story = typer.Option(Story.TABLE, "-o", "--output", help="How to print them; png is a timeline."),
    file: Path | None = typer.Option(None, metavar="FILE", help="Where -o png puts it (NAME.png)."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """List what happened to a training, or lately to all of them, oldest first, with who did it and why."""
    if file is not None and output is not Story.PNG:
        raise exits.Misused("--file is for a picture", hint=f"muster events {name or 'NAME'} -o png --file {file}")
    if name is None and output is Story.PNG:
        raise exits.Misused("a picture is of one training", hint="muster events NAME -o png")
    if name is not None and every:
        raise exits.Misused("NAME is in one namespace", hint=f"muster events {name} -n NAMESPACE")
    client = session.open_client(url, token, namespace)
    found = client.events(all_namespaces=every) if name is None else _journal(client, name)
    if name is not None and output is Story.PNG:
        picture = file or Path(f"{name}.png")
        timeline.draw(name, found, datetime.now(UTC), picture)
        print(picture)
        return
    if output is not Story.TABLE:
        write_data({"items": [to_wire(event) for event in found]}, output)
        return
    now = datetime.now(UTC)
    ages = [show_age(now - event.at) if event.at else "-" for event in found]
    rows = [
        (
            age,
            *_about(event, named=name is not None, every=every),
            event.type,
            event.reason,
            "-" if event.round is None else event.round,
            "owner" if event.actor == EMBEDDED else event.actor,
            event.message,
        )
        for age, event in zip(ages, found, strict=True)
    ]
    about = () if name is not None else ("NAMESPACE", "NAME") if every else ("NAME",)
    write_table(("AGE", *about, "TYPE", "REASON", "ROUND", "ACTOR", "MESSAGE"), rows)


def _about(event: Event, *, named: bool, every: bool) -> tuple[str, ...]:
    """Which training it is about, where that is not clear."""
    return () if named else (event.namespace, event.training) if every else (event.training,)


@app.command(epilog="Example: muster explain demo")
def explain(
    name: session.Name,
    output: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print it."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Say why a training is pending, below its minimum or resizing, or how it ended."""
    client = session.open_client(url, token, namespace)
    found = session.explained(client, name)
    if output is not Report.TABLE:
        write_data({"summary": found.summary, "details": list(found.details)}, output)
        return
    print(line(found.summary))
    for detail in found.details:
        print(f"  {line(detail)}")


# The text of describe ----------------------------------------------------------------------------


def description(
    training: Training,
    events: Sequence[Event],
    now: datetime,
    used: Usage | None = None,
    lent: Sequence[Mapping[str, Any]] = (),
) -> Iterator[str]:
    """Lines for a person. Values of variables are left out; `get -o json` has those that are not secret."""
    yield from _fields({**_head(training, now), **_taken(used)})
    yield from _section("Conditions", _conditions(training, now))
    yield from _section("State", _state(training, now))
    yield from _section("Workers", _workers(training, now))
    yield from _section("Ranks", _ranks(training, now))
    yield from _section("Lent", _lent_workers(lent))
    yield from _section("Exits", _exits(training))
    yield from _section("Events", _events(events, now))


def _head(training: Training, now: datetime) -> Mapping[str, object]:
    metadata, spec, status = training.metadata, training.spec, training.status
    size, created, ended = spec.world_size, metadata.creation_timestamp, training.is_terminal
    program = " ".join(spec.command or ((spec.script,) if spec.script else ("-m", spec.module or "")))
    asked = {"cpu": spec.resources.cpu, "memory": spec.resources.memory, "gpus": spec.resources.gpus or None}
    return {
        "Name": metadata.name,
        "Namespace": metadata.namespace,
        "Labels": ", ".join(f"{key}={value}" for key, value in metadata.labels.items()),
        "Phase": status.phase,
        "Summary": explain_training(training, (), now).summary,
        "Age": show_age(now - created) if created else "",
        "Program": " ".join((program, *spec.args)),
        "Directory": spec.working_dir,
        "Interpreter": spec.interpreter,
        "Variables": ", ".join(spec.env),
        "Workers": ("" if ended else f"{status.world_size.ready} ready, ")
        + f"{size.target} wanted, {size.min} to {size.max} allowed",
        "Spares": ("" if ended else f"{status.spares.ready} ready, ") + f"{spec.spares} wanted",
        "Per worker": ", ".join(
            [
                f"{spec.procs_per_worker} rank{'s' * (spec.procs_per_worker > 1)}",
                *(f"{value} {key}" for key, value in asked.items() if value is not None),
            ]
        ),
        "Round": _round(training),
        "Restarts": f"{status.restarts} of {spec.max_restarts}",
        "Lease": f"{spec.lease_seconds:g} s",
        "Bench": _bench(training),
        "Priority": spec.priority or None,
        "Generation": f"{metadata.generation}, acted on {status.observed_generation}",
    }


def _round(training: Training) -> str:
    status = training.status
    if status.round is None:
        return "none yet"
    took = show_round_times(status)
    return f"{status.round}; {took}" if took else str(status.round)


def _bench(training: Training) -> str:
    """What was measured between its workers; that it is not yet, as long as it can be."""
    found, asked = training.status.bench, training.spec.bench
    return str(found) if found is not None else "not measured yet" if asked and not training.is_terminal else ""


def _taken(used: Usage | None) -> Mapping[str, object]:
    sizes = {} if used is None else {"logs": used.log_bytes, "journal": used.journal_bytes}
    return {"Takes": ", ".join(f"{what} {trimming.show(size)}" for what, size in sizes.items() if size is not None)}


def _fields(fields: Mapping[str, object]) -> Iterator[str]:
    shown = {name: value for name, value in fields.items() if value not in ("", None)}
    width = max(len(name) for name in shown) + 3
    yield from (f"{name + ':':<{width}}{value}" for name, value in shown.items())


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    found = list(lines)
    if found:
        yield ""
        yield f"{title}:"
        yield from (f"  {line}" for line in found)


def _conditions(training: Training, now: datetime) -> Iterator[str]:
    for one in training.status.conditions:
        since = f" for {show_age(now - one.last_transition_time)}" if one.last_transition_time else ""
        why = one.message or one.reason
        yield f"{one.type} is {one.status}{since}" + (f": {why}" if why else "")


def _state(training: Training, now: datetime) -> Iterator[str]:
    state = training.status.kept_state
    if state is not None:
        age = f"{show_age(now - state.safe_at)}" if state.safe_at else ""
        yield from _fields(state_words.facts(state, age))


def _workers(training: Training, now: datetime) -> Iterator[str]:
    """Those with a rank first, then spares and the rest; all spares are shown before the last of many others."""
    found = training.status.workers
    spares = [one for one in found if one.role != "active"][: _RANKS_SHOWN // 2]
    shown = [one for one in found if one.role == "active"][: _RANKS_SHOWN - len(spares)] + spares
    for one in shown:
        ranks = f", rank{'s' * ('-' in one.ranks)} {one.ranks}" if one.ranks else ""
        age = f" for {show_age(now - one.since)}" if one.since else ""
        where = f" on {one.node}" if one.node else ""
        yield f"{one.name} {_part(one, training)}{age}{where}{ranks}" + (f": {one.note}" if one.note else "")
    if len(found) > len(shown):
        yield f"and {len(found) - len(shown)} more"


def _part(worker: WorkerStatus, training: Training) -> str:
    """What it does, in one word; a spare by whether it was there when the round formed."""
    formed = min((rank.started_at for rank in training.status.ranks if rank.started_at), default=None)
    if worker.role != "spare" or worker.since is None or formed is None:
        return worker.role
    return "standby" if worker.since <= formed else "hot spare"


def _ranks(training: Training, now: datetime) -> Iterator[str]:
    ranks = training.status.ranks
    for one in ranks[:_RANKS_SHOWN]:
        step = "" if one.step is None else f", step {one.step}"
        age = f" for {show_age(now - one.started_at)}" if one.started_at and one.phase == "running" else ""
        yield f"rank {one.rank} {one.phase}{age} on {one.worker or '-'}, round {one.round}{step}"
    if len(ranks) > _RANKS_SHOWN:
        yield f"and {len(ranks) - _RANKS_SHOWN} more"


def _lent_workers(lent: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Workers without a rank that wait for their GPUs: they are neither spares nor lost."""
    for one in lent[:_RANKS_SHOWN]:
        where = "free, and on its way back"
        if (holder := holder_of(one)) is not None:
            since = f" since {one['seconds']:.0f} s" if one.get("seconds") is not None else ""
            where = f"with {holder}, {purpose_of(one) or 'for its workers'}{since}"
        yield f"{one.get('lentWorker') or 'a worker'} lent: GPU {one['gpu']} is {where}"
    if len(lent) > _RANKS_SHOWN:
        yield f"and {len(lent) - _RANKS_SHOWN} more"


def _exits(training: Training) -> Iterator[str]:
    exits = training.status.rank_exits
    if exits is not None and not exits:
        yield "none: no rank had started"
    for one in (exits or ())[:_RANKS_SHOWN]:
        where = f" on {one.worker}" if one.worker else ""
        yield f"{one}{where}, round {one.round}"
        if one.failed:
            yield from (f"    {line}" for line in one.stderr_tail[-5:])
    if exits and len(exits) > _RANKS_SHOWN:
        yield f"and {len(exits) - _RANKS_SHOWN} more"


def _events(events: Sequence[Event], now: datetime) -> Iterator[str]:
    for event in events[-_EVENTS_SHOWN:]:
        age = show_age(now - event.at) if event.at else "-"
        mark = "! " if event.type == "Warning" else ""
        yield f"{age:>6}  {mark}{event.reason}" + (f": {event.message}" if event.message else "")
