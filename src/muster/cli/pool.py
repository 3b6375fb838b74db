"""`muster pool`: who has which GPU, since when and for what, who waits and why, and who used how much?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import typer

from muster.cli import exits, output, pools, session
from muster.cli.output import Report
from muster.core.training.explain import show_age
from muster.errors import MusterError
from muster.types import plural

app = typer.Typer(rich_markup_mode=None)

WATCH_S = 2.0
_USED_SHOWN = 20


@app.command(epilog="Example: muster pool -o json")
def pool(
    pool: pools.PoolName = "default",
    form: pools.Form = Report.TABLE,
    watch: bool = typer.Option(False, "-w", "--watch", help="Show it again every two seconds, until Ctrl-C."),
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Show every GPU of a pool: who has it, for what and since when; then who waits and why, and totals."""
    if watch and form is not Report.TABLE:
        raise exits.Misused("--watch is for the table", hint="muster pool --watch")
    while True:
        found = pools.asked(url, token, "GET", pools.path_of(pool))
        if form is not Report.TABLE:
            output.write_data(found, form)
        else:
            _show(found)
        if not watch:
            return
        print(flush=True)
        time.sleep(WATCH_S)


def _show(found: Mapping[str, Any]) -> None:
    if "holders" not in found:
        raise MusterError("this control plane is older and does not tell that", hint="muster share status")
    rows = [_row(one) for one in found["holders"]]
    output.write_table(("GPU", "DEVICE", "HOLDER", "FOR", "STATE", "SINCE", "REASON"), rows)
    if found["waiting"]:
        print()
        output.write_table(
            ("WAITING", "FOR", "HAS", "SINCE", "REASON"), [_waiting_row(one) for one in found["waiting"]]
        )
        if (more := found["waitingCount"] - len(found["waiting"])) > 0:
            output.tell(f"and {more} more wait")
    if found["quarantined"]:
        print()
        output.write_table(("QUARANTINED", "REASON"), list(found["quarantined"].items()))
    print()
    output.write_table(("USED BY", "GPUS", "GPU-HOURS", "SHARE"), list(_used_rows(found["usage"])))
    print()
    print(_totals(found))


def holder_of(one: Mapping[str, Any]) -> str | None:
    """Who has a GPU, in words."""
    if one.get("pipeline") is not None:
        return str(one["pipeline"])
    return f"training {one['training']}" if one.get("training") is not None else None


def purpose_of(one: Mapping[str, Any]) -> str | None:
    """What it has it for."""
    if one.get("pipeline") is not None:
        what = "generation" if one["cluster"] == "actor_infer" else one["cluster"]
        return f"{what} (rank {one['rank']})"
    return one.get("worker") if one.get("training") is not None else None


def _row(one: Mapping[str, Any]) -> Sequence[object]:
    lent = f"lent by {one['lentBy']}" if one.get("lentBy") is not None else ""
    reason = "; ".join(filter(None, (lent, one.get("reason", ""))))
    return (one["gpu"], one.get("device"), holder_of(one), purpose_of(one), one["state"], _age(one), reason)


def _waiting_row(one: Mapping[str, Any]) -> Sequence[object]:
    if one.get("pipeline") is not None:
        return (one["pipeline"], f"{one['cluster']} ({one['priority']})", None, _age(one), one["reason"])
    has = plural.workers(one.get("wanted") or 0, f"{one.get('workers')} of ")
    return (f"training {one.get('training')}", "workers", has, _age(one), one["reason"])


def _used_rows(used: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[object]]:
    whole = sum(one["gpuSeconds"] for one in used) or 1.0
    for one in used[:_USED_SHOWN]:
        yield (_user(one), one["gpus"], f"{one['gpuSeconds'] / 3600:.3f}", f"{one['gpuSeconds'] / whole:.1%}")
    if rest := used[_USED_SHOWN:]:
        seconds = sum(one["gpuSeconds"] for one in rest)
        gpus = sum(one["gpus"] for one in rest)
        yield (f"{len(rest)} others", gpus, f"{seconds / 3600:.3f}", f"{seconds / whole:.1%}")


def _user(one: Mapping[str, Any]) -> str:
    if one["kind"] == "idle":
        return "nobody"
    if one["kind"] == "lost":
        return "out of use"
    if not one["name"]:
        return f"former {one['kind']}s"
    return f"training {one['name']}" if one["kind"] == "training" else str(one["name"])


def _totals(found: Mapping[str, Any]) -> str:
    holders = found["holders"]
    counted = {
        "with pipelines": sum(one.get("pipeline") is not None for one in holders),
        "with trainings": sum(one.get("training") is not None for one in holders),
        "lent": sum(one.get("lentBy") is not None and holder_of(one) is not None for one in holders),
        "idle": sum(one["state"] == "idle" for one in holders),
        "out of use": sum(one["state"] == "lost" for one in holders),
        "waiting": found["waitingCount"],
    }
    told = [f"{number} {what}" for what, number in counted.items() if number or what in ("idle", "waiting")]
    return f"{len(holders)} GPUs: {', '.join(told)}"


def _age(one: Mapping[str, Any]) -> str | None:
    seconds = one.get("seconds")
    return None if seconds is None else show_age(timedelta(seconds=seconds))
