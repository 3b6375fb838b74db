"""`muster bench`: how fast is what trainings run on?"""

from __future__ import annotations

import json
import re
import secrets
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

from muster.cli import durations, exits, session
from muster.cli.output import Report, tell, write_data, write_table
from muster.cli.run import world_size_of
from muster.errors import InternalError, TrainingFailed, WaitTimeout
from muster.types import plural

if TYPE_CHECKING:
    from muster.sdk.training import DistributedTraining

app = typer.Typer(
    help="Measure what trainings run on.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: muster bench net --workers 4",
)

MODULE, MARK = "muster.node.allreduce", "muster-bench-net "
SIZES = "1KiB,8KiB,64KiB,512KiB,4MiB,16MiB,64MiB"
LARGEST = 2**30
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Via(StrEnum):
    AUTO = "auto"
    GLOO = "gloo"
    NCCL = "nccl"


@app.callback()
def bench() -> None:
    """Keeps `net` a verb of its own while it is the only one."""


@app.command(epilog="Example: muster bench net --workers 4 --via gloo --sizes 1KiB,1MiB -o json")
def net(
    workers: str = typer.Option("2", metavar="MIN:TARGET:MAX|N", help="Between how many workers."),
    nproc: int = typer.Option(1, min=1, metavar="N", help="Ranks per worker."),
    gpus: int = typer.Option(0, min=0, metavar="N", help="GPUs per worker."),
    via: Via = typer.Option(Via.AUTO, help="What carries it: nccl where there are GPUs, else gloo."),
    sizes: str = typer.Option(SIZES, metavar="SIZE,…", help="How much is added up at a time."),
    repeat: int = typer.Option(100, min=5, metavar="N", help="How often each size, at most."),
    image: str | None = typer.Option(None, metavar="IMAGE", help="What workers run in, where they run in images."),
    backend: str = typer.Option("local", metavar="NAME", help="Where workers run."),
    mesh: bool = typer.Option(True, help="Wait until all workers reach each other."),
    mesh_timeout: float = typer.Option(
        60.0, parser=durations.option, metavar="D", help="Go on without that after so long (60s)."
    ),
    probe_address: str | None = typer.Option(None, metavar="A", help="Where workers are reached over an overlay."),
    timeout: float = typer.Option(600.0, parser=durations.option, metavar="D", help="Give up after so long (10m)."),
    name: str | None = typer.Option(None, help="The name of the training that measures."),
    keep: bool = typer.Option(False, help="Do not delete that training at the end."),
    output: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print it."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Measure all-reduce latency and bandwidth between the workers of a training."""
    size = world_size_of(workers)
    if size.min * nproc < 2:
        raise exits.Misused("all-reduce needs at least two ranks", hint="muster bench net --workers 2")
    args = ["--via", via.value, "--sizes", ",".join(map(str, sizes_of(sizes))), "--repeat", str(repeat)]
    client = session.open_client(url, token, namespace)
    handle = client.train(
        name=name or "bench-net-" + _suffix(),
        module=MODULE,
        args=args,
        world_size=size,
        procs_per_worker=nproc,
        resources={"gpus": gpus},
        max_restarts=0,
        backend=backend,
        image=image,
        mesh={"required": mesh, "timeout_seconds": mesh_timeout, "probe_address": probe_address},
    )
    tell(f"{handle.name} measures between {plural.workers(size.target)}")
    found = _result(handle, timeout)
    if not keep:
        handle.delete()
    _show(found, output)


def _suffix() -> str:
    return secrets.token_hex(3)


def _result(handle: DistributedTraining, timeout: float) -> dict[str, Any]:
    """What rank 0 printed, and whether the mesh was what it should be."""
    try:
        handle.result(timeout=timeout)
    except TrainingFailed as error:
        error.hint = error.hint or f"muster logs {handle.name}"
        raise
    except (WaitTimeout, KeyboardInterrupt):  # nobody waits for it any more
        handle.cancel()
        raise
    lines = [line.partition(MARK)[2] for line in handle.logs(rank=0) if MARK in line]
    if not lines:
        raise InternalError(f"{handle.name} ended without a result", hint=f"muster logs {handle.name}")
    alerts = [event.message for event in handle.events() if event.reason == "DegradedMesh"]
    found: dict[str, Any] = json.loads(lines[-1])
    found["mesh"] = "degraded" if alerts else "ready" if handle.training.spec.mesh.required else "none"
    return {"training": handle.name, **found, "meshMessage": alerts[0] if alerts else ""}


def _show(found: dict[str, Any], output: Report) -> None:
    if found["mesh"] == "degraded":
        tell(f"this ran over a degraded mesh: {found['meshMessage']}")
    if output is not Report.TABLE:
        write_data(found, output)
        return
    tell(f"all-reduce of {found['ranks']} ranks on {plural.workers(found['workers'])} over {found['via']}")
    spots = ("p10", "p50", "p90")
    titles = ["SIZE", "TIMES", *(f"{one} ms" for one in spots), *(f"{one} MB/s" for one in spots)]
    rows = [
        [
            show_size(one["bytes"]),
            one["count"],
            *(f"{one['seconds'][spot] * 1000:.3f}" for spot in spots),
            *(f"{one['bytesPerSecond'][spot] / 1e6:.1f}" for spot in spots),
        ]
        for one in found["sizes"]
    ]
    write_table(titles, rows)


def sizes_of(text: str) -> list[int]:
    """Bytes, from words like 1KiB and 64MiB."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,12})\s*(B|KiB|MiB|GiB)?\s*", word, re.IGNORECASE | re.ASCII)
        size = int(match[1]) * _UNITS[(match[2] or "B").lower()] if match else 0
        if not 4 <= size <= LARGEST:
            hint = f"muster bench net --sizes {SIZES}"
            raise exits.Misused(f"--sizes: {word!r} is not a size from 4 to 1GiB", hint=hint)
        found.append(size)
    return found


def show_size(size: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if size >= _UNITS[unit.lower()] and size % _UNITS[unit.lower()] == 0:
            return f"{size // _UNITS[unit.lower()]} {unit}"
    return f"{size} B"
