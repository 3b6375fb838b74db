"""`muster share`: see how several pipelines share GPUs."""

from __future__ import annotations

import importlib.util
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from muster.cli import exits, output, pools
from muster.errors import how_to_install

if TYPE_CHECKING:
    from muster.sim import policies

app = typer.Typer(
    help="See how several RL pipelines share the same GPUs.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: muster share demo",
)
app.add_typer(pools.app)  # without a name: its commands are this group's

SIMULATE = """Run pipelines on virtual time under the real scheduler and under baselines, and compare.

The ratio is mean makespan ÷ mean lower bound; a resize is one rank in one shrink or expand. A scenario file is JSON:

\b
  {"name": "mine", "gpus": 4, "slots": 8, "pipelines": [
    {"batch": 64, "median_s": 40, "sigma": 1.0, "cap_s": 600, "steps": 3},
    {"batch": 32, "median_s": 20, "train": [2, 3], "weight": 2.0}]}

\b
Of the whole: gpus (8), gpus_per_node (gpus), slots per worker (8),
  shrink_s (2), expand_s (6), turn_s (10), log_probs_s (10), training_s (40).
Of a pipeline: batch, median_s, sigma (0.5), cap_s (none), steps (1),
  train (the next pair of GPUs), infer (all GPUs), tp_size (1), weight (1),
  count (1: so many alike).
"""


class Form(StrEnum):
    TABLE = "table"
    JSON = "json"
    PNG = "png"


class TraceForm(StrEnum):
    JSON = "json"
    PNG = "png"


@app.command(epilog="Example: muster share demo --rollouts 3")
def demo(
    rollouts: int = typer.Option(5, min=2, max=100, help="How often each pipeline generates and trains."),
    seed: int = typer.Option(0, min=0, help="Which tasks and which first weights."),
) -> None:
    """Two small, real RL pipelines and a training that fills what they leave share five GPU slots of this machine."""
    from muster import demos

    if importlib.util.find_spec("torch") is None:
        raise exits.Misused("the demo trains with torch", hint=how_to_install("torch"))
    raise typer.Exit(demos.run(rollouts, seed))


@app.command(
    help=SIMULATE, epilog="Example: muster share simulate --scenario mixed --policy muster,gap-ratio --seeds 1-5"
)
def simulate(
    scenario: str = typer.Option(
        "all", metavar="NAME|FILE", help="tail, mixed, even, skewed, all of them, or a JSON file."
    ),
    policy: str = typer.Option(
        "muster,gap-ratio,static,serial", metavar="NAMES", help="Which policies to compare, with commas."
    ),
    seeds: str = typer.Option("1-5", metavar="N-M", help="Which random draws: 1-5, 3, or 1,4,9."),
    fill: bool = typer.Option(
        False,
        "--fill",
        help="Beside the pipelines, under muster, a training that fills what they leave; -o table or json.",
    ),
    form: Form = typer.Option(Form.TABLE, "-o", "--output", help="How to show the result."),
    file: Path = typer.Option(Path("share.png"), metavar="FILE", help="Where -o png puts the picture."),
    record: Path | None = typer.Option(
        None, metavar="FILE", help="Also keep the first policy's first run, for muster share trace."
    ),
) -> None:
    from muster.sim import policies, results, scenarios, trace, useful

    chosen = list(scenarios.BUILT_IN.values()) if scenario == "all" else [scenarios.find(scenario)]
    wanted = _policies(policy)
    drawn = _seeds(seeds)
    if fill:
        worth = [useful.filled(one, drawn) for one in chosen]
        if form is Form.TABLE:
            output.write_table(useful.TITLES, [one.row() for one in worth])
        else:
            output.write_data([one.as_data() for one in worth], "json")
        return
    if record is not None:
        trace.save(policies.simulate(chosen[0], wanted[0], drawn[0]).recording, record)
    if form is Form.PNG:
        runs = [policies.simulate(one, each, drawn[0]) for one in chosen for each in wanted]
        titles = [f"{run.scenario}, {run.policy}, seed {run.seed}: {run.makespan:.0f} s" for run in runs]
        trace.draw([(title, run.recording) for title, run in zip(titles, runs, strict=True)], file)
        print(file)
        return
    found = [summary for one in chosen for summary in results.compare(one, wanted, drawn)]
    if form is Form.JSON:
        output.write_data([one.as_data() for one in found], "json")
    else:
        output.write_table(results.TITLES, [results.row(one) for one in found])


@app.command(epilog="Example: muster share trace run.json > trace.json; open it in https://ui.perfetto.dev")
def trace(
    file: Path = typer.Argument(
        ..., metavar="FILE", help="A recording (simulate --record FILE), or a pool's events as JSON lines."
    ),
    form: TraceForm = typer.Option(TraceForm.JSON, "-o", "--output", help="A trace, or a picture of the GPUs."),
    to: Path | None = typer.Option(None, metavar="FILE", help="Where it goes; a trace is printed otherwise."),
) -> None:
    """Leases, queue and decisions with their reasons, as a Chrome/Perfetto trace or a picture."""
    from muster.sim import trace as traces

    recording = traces.load(file)
    if form is TraceForm.PNG:
        picture = to or file.with_suffix(".png")
        traces.draw([(file.stem, recording)], picture)
        print(picture)
    elif to is not None:
        to.write_text(json.dumps(traces.chrome(recording)))
        print(to)
    else:
        print(json.dumps(traces.chrome(recording)))


def _policies(text: str) -> list[policies.Policy]:
    from muster.sim.policies import Policy

    known = [policy.value for policy in Policy]
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise exits.Misused(f"there is no policy {name!r}", hint=f"these are: {', '.join(known)}")
    if not wanted:
        raise exits.Misused("--policy names nothing", hint=f"these are: {', '.join(known)}")
    return [Policy(name) for name in wanted]


def _seeds(text: str) -> list[int]:
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        found = []
    if not found:
        raise exits.Misused(f"--seeds {text} is not a number or a range", hint="for example 1-5, 3, or 1,4,9")
    return found
