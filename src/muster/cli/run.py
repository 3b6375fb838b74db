"""`muster run`: submit a training and follow it. The front door."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from muster import files
from muster.cli import durations, exits, follow, output, pod_words, session
from muster.cli.safe_text import shown
from muster.sdk import submission, travelling
from muster.types import plural
from muster.types.training import WorldSize, size_problem

if TYPE_CHECKING:
    from muster.sdk.client import Client
    from muster.sdk.training import DistributedTraining

app = typer.Typer(rich_markup_mode=None)
_READ_BYTES = 1 << 20  # of a script, to see which variables it reads
_NAMED = 5
_LAUNCHERS = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed")

_EXAMPLE = """\b
Example: muster run train.py --workers 2:2:4 --spares 1 -- --lr 3e-4
         muster run -m pkg.train --nproc 4 --gpus 4 -d
         muster run --command -- ./train.sh --fast"""


@app.command(epilog=_EXAMPLE)
def run(
    program: list[str] = typer.Argument(None, metavar="SCRIPT [-- ARGS…]", help="The script, and arguments behind --."),
    workers: str = typer.Option("1", metavar="MIN:TARGET:MAX|MIN:MAX|N", help="How many workers train together."),
    spares: int = typer.Option(0, min=0, metavar="K", help="How many more wait to take over."),
    nproc: int = typer.Option(1, min=1, metavar="N", help="Ranks per worker."),
    name: str | None = typer.Option(None, help="Its name; made from the script's if not given."),
    detach: bool = typer.Option(False, "-d", "--detach", help="Print the name and come back at once."),
    module: str | None = typer.Option(None, "-m", "--module", metavar="MODULE", help="Run a module, like python -m."),
    command: bool = typer.Option(False, "--command", help="What follows is a program of any kind, not a script."),
    gpus: int = typer.Option(0, min=0, metavar="N", help="GPUs per worker."),
    cpu: float | None = typer.Option(None, metavar="N", help="CPUs per worker."),
    memory: str | None = typer.Option(None, metavar="AMOUNT", help="Memory per worker, like 4Gi."),
    max_restarts: int = typer.Option(3, min=0, metavar="N", help="How many crashes it survives."),
    lease: float | None = typer.Option(
        None, parser=durations.option, metavar="D", help="A worker that is silent for so long is lost (1.5s)."
    ),
    hang_timeout: float | None = typer.Option(
        None, parser=durations.option, metavar="D", help="Restart when no rank advances for so long."
    ),
    deadline: float | None = typer.Option(
        None, parser=durations.option, metavar="D", help="Fail when it has run, or waited to begin, for so long."
    ),
    grace: float | None = typer.Option(
        None,
        parser=durations.option,
        metavar="D",
        help="What ranks get between SIGTERM and SIGKILL, unless one crashed (15s).",
    ),
    ttl: float | None = typer.Option(
        None, parser=durations.option, metavar="D", help="Remove it so long after its end."
    ),
    log_bytes: int | None = typer.Option(
        None, parser=durations.size, metavar="N", help="Kept of a rank's output, and of its errors, like 500M; 0: all."
    ),
    warm: str = typer.Option("auto", metavar="auto|always|never", help="Fork ranks from a process that is warm."),
    preload: list[str] = typer.Option(
        [], metavar="auto|none|MOD[,MOD]", help="Import this ahead, beside what the program imports; none: nothing."
    ),
    patience: float | None = typer.Option(
        None, parser=durations.option, metavar="D", help="Fail when it is below MIN for so long (5m)."
    ),
    env: list[str] = typer.Option([], metavar="K=V", help="A variable for the ranks; K alone passes yours on."),
    env_pass: list[str] = typer.Option(
        [], "--env-pass", metavar="K", help="Pass a variable of yours on; one that looks like a secret is never shown."
    ),
    interpreter: str | None = typer.Option(
        None, metavar="PATH|none", help="Python for the workers; yours, or none for the control plane's."
    ),
    secret_env: list[str] = typer.Option([], metavar="K", help="One that is secret: its value is never shown."),
    label: list[str] = typer.Option([], "-l", "--label", metavar="K=V", help="A label to find it by."),
    priority: int = typer.Option(0, help="Higher goes first when GPUs are short."),
    elasticity: str = typer.Option(
        "fixed",
        metavar="fixed|lend|fill",
        help="Lend GPUs above MIN to others that need them, or also fill idle ones up to MAX.",
    ),
    mesh: bool = typer.Option(False, "--mesh", help="Hold ranks until all workers reach each other."),
    mesh_timeout: float | None = typer.Option(
        None, parser=durations.option, metavar="D", help="Start them anyway after so long (60s)."
    ),
    probe_address: str | None = typer.Option(None, metavar="A", help="Where workers are reached over an overlay."),
    ship: bool | None = typer.Option(
        None,
        "--ship/--no-ship",
        help="Send this folder along; by default where the control plane does not see it.",
        show_default=False,
    ),
    requirements: Path | None = typer.Option(
        None, metavar="FILE", help="Make an environment with these packages on each worker."
    ),
    force: bool = typer.Option(False, "--force", help="Submit it even if it can never start here."),
    dry_run: bool = typer.Option(False, "--dry-run", help="List what would be sent, or show the plan; run nothing."),
    segment: int | None = typer.Option(
        None, min=1, metavar="N", help="Only whole groups of N workers from one domain train."
    ),
    topology_key: str | None = typer.Option(
        None, metavar="LABEL", help="The label of nodes that names a worker's domain, on Kubernetes."
    ),
    storage: list[str] = typer.Option(
        [],
        metavar="NAME=MOUNT:size=S|claim=C",
        help="A volume for checkpoints; also class=, access=, keep=false behind commas.",
    ),
    template: str | None = typer.Option(None, metavar="FILE", help="A partial Pod for its workers, on Kubernetes."),
    bench: bool = typer.Option(
        False,
        "--bench",
        help="Measure all-reduce between workers first, for a minute at most, and tell what was found.",
    ),
    suspend: bool = typer.Option(False, "--suspend", help="Submit it, and start no worker before it is resumed."),
    remove: bool = typer.Option(False, "--rm", help="Delete it once it has ended."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Submit a training and follow it to its end. Ctrl-C leaves it running and says how to come back."""
    if detach and remove:
        raise exits.Misused("--rm needs someone to stay until the end, and -d leaves", hint="muster delete NAME")
    asked = program_of(program or [], module, command=command, force=force)
    variables = _variables(env, "--env", os.environ)
    passed = _variables([name.partition("=")[0] for name in env_pass], "--env-pass", os.environ)
    variables = {name: value for name, value in passed.items() if name not in variables} | variables
    hidden = [name for name in passed if travelling.is_secret(name, passed[name])]
    secrets = _variables([*hidden, *secret_env], "--secret-env", os.environ | variables)
    fields: dict[str, Any] = {
        **asked,
        "world_size": world_size_of(workers),
        "spares": spares,
        "procs_per_worker": nproc,
        "resources": {"gpus": gpus, "cpu": cpu, "memory": memory},
        "max_restarts": max_restarts,
        "env": variables | secrets,
        "secret_env": tuple(secrets),
        "priority": priority,
        **_given(
            lease_seconds=lease,
            hang_timeout_seconds=hang_timeout,
            active_deadline_seconds=deadline,
            stop_grace_seconds=grace,
            ttl_seconds_after_finished=ttl,
            log_bytes=log_bytes,
            below_minimum_timeout_seconds=patience,
        ),
        **({"warm": warm} if warm != "auto" else {}),
        **({"preload": named} if (named := _modules(preload)) else {}),
        "mesh": _mesh(mesh, timeout_seconds=mesh_timeout, probe_address=probe_address),
        **_given(segment=segment),
        **({"topology_key": topology_key} if topology_key is not None else {}),
        **({"storage": [pod_words.storage_of(one) for one in storage]} if storage else {}),
        **({"template": pod_words.template_of(template)} if template is not None else {}),
        **({"suspend": True} if suspend else {}),
        **({"bench": True} if bench else {}),
        **({"elasticity": elasticity} if elasticity != "fixed" else {}),
        "labels": _pairs(label, "--label"),
        "name": name,
        **({"requirements": requirements} if requirements is not None else {}),
        **({"ship": ship} if ship is not None else {}),
        **({"force": True} if force else {}),
        **({"interpreter": None if interpreter == "none" else interpreter} if interpreter is not None else {}),
    }
    fields["resources"] = {key: value for key, value in fields["resources"].items() if value is not None}
    client = session.open_client(url, token, namespace)
    _warn_of_environment(client, fields)
    if dry_run:
        _show_plan(client, fields)
        return
    _tell_of_code()
    _tell_of_variables(asked, fields["env"])
    try:
        handle = client.train(**fields)
    except KeyboardInterrupt:
        typer.echo("interrupted while it was submitted: muster ps tells whether it was", err=True)
        raise
    if detach:
        print(shown(handle.name))
        return
    _follow(client, handle, namespace, remove=remove)


def _warn_of_environment(client: Client, fields: Mapping[str, Any]) -> None:
    """Print one line if the ranks get another Python than that of the active environment."""
    active = submission.active_environment(os.environ)
    if active is None or not submission.sends_interpreter(fields, far=client.is_far()):
        return
    python = shlex.quote(os.path.join(active, "bin", "python"))
    text = (
        f"muster: the active environment {active} is not used: the ranks run the Python of muster, {sys.executable}; "
        f"install muster in {active}, or type --interpreter {python}"
    )
    typer.echo(shown(text), err=True)


def _tell_of_code() -> None:
    """What goes along is said on stderr, and what stays behind."""
    told = logging.StreamHandler()
    told.setFormatter(logging.Formatter("muster: %(message)s"))
    log = logging.getLogger("muster.sdk")
    log.addHandler(told)
    log.setLevel(logging.INFO)
    log.propagate = False


def _tell_of_variables(asked: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Print one hint about exported variables that the ranks may miss."""
    text, known = "", travelling.variables(os.environ) | dict(env)
    with contextlib.suppress(OSError, KeyError):
        text = Path(asked["script"]).read_bytes()[:_READ_BYTES].decode(errors="replace")
    if names := travelling.left_behind(os.environ, known, text):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        listed = f"{', '.join(names[:_NAMED])}{more}"
        typer.echo(f"muster: exported here, but not sent to the ranks: {listed}; --env-pass NAME sends one", err=True)


def _show_plan(client: Client, fields: Mapping[str, Any]) -> None:
    """What would travel, file by file; where nothing does, what would be started."""
    from muster import package
    from muster.sdk import shipping

    given = {name: value for name, value in fields.items() if name not in ("ship", "force")}
    if fields.get("ship") or ("ship" not in fields and shipping.is_here(given) and client.is_far()):
        folder, _ = shipping.placed(given)
        parcel = shipping.collect(folder)
        for entry in parcel.entries:
            print(shown(f"{entry.name} -> {entry.link}" if entry.link is not None else entry.name))
        for line in parcel.explanations():
            typer.echo(f"muster: {shown(line)}", err=True)
        packed = shipping.pack(parcel, files.home() / "cache")
        sizes = f"{package.shown(parcel.size)}, {package.shown(packed.size)} packed"
        typer.echo(f"{plural.counted(len(parcel.entries), 'file')} of {folder} would be sent: {sizes}", err=True)
        return
    given = submission.with_callers_own(given, far=client.is_far())
    if given["env"]:
        typer.echo(f"muster: variables of the ranks: {shown(', '.join(sorted(given['env'])))}", err=True)
    plan = client.plan(submission.training_of(given, client.namespace), force=fields.get("force", False))
    output.write_data(plan, output.Report.YAML)
    typer.echo("nothing would be sent: the control plane sees this folder", err=True)


def _follow(client: Client, handle: DistributedTraining, namespace: str, *, remove: bool) -> None:
    try:
        with follow.shown() as show:
            ended = follow.follow(handle, lambda: session.changes(client, handle), show)
    except KeyboardInterrupt:
        sys.stdout.flush()
        typer.echo(follow.come_back(handle.name, namespace, removing=remove), err=True)
        raise typer.Exit(exits.INTERRUPT) from None
    left = f"{shown(handle.name)} was deleted by someone else"
    typer.echo(follow.ending(ended) if ended.is_terminal else left, err=True)
    if remove and ended.is_terminal:
        handle.delete()
    raise typer.Exit(follow.exit_code(ended))


def _modules(words: list[str]) -> tuple[str, ...]:
    """What happens anyway is not sent: a control plane that is older may not know of it."""
    return tuple(name for word in words for name in word.split(",") if name and name != "auto")


def _mesh(required: bool, **values: float | str | None) -> dict[str, Any]:
    asked = {name: value for name, value in values.items() if value is not None}
    if asked and not required:
        option = "--mesh-timeout" if "timeout_seconds" in asked else "--probe-address"
        raise exits.Misused(f"{option} is of no use without --mesh")
    return {"required": required, **asked}


def _given(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


# What the words mean -----------------------------------------------------------------------------


def program_of(words: list[str], module: str | None, *, command: bool, force: bool = False) -> dict[str, Any]:
    """One of script, module and command, from what was typed. A script that is not there is refused."""
    if module is not None and command:
        raise exits.Misused("-m and --command exclude each other")
    if module is not None:
        return {"module": module, "args": words}
    if not words:
        hint = "muster run train.py, muster run -m MODULE, or muster run --command -- PROGRAM"
        raise exits.Misused("nothing to run was given", hint=hint)
    if command:
        return {"command": words}
    script = words[0]
    if not force and not Path(script).is_file():
        hint = _without_launcher(" ".join(words).split()) or _nearest_script(script)
        raise exits.Misused(f"there is no script {script!r} in {os.getcwd()}", hint=hint)
    if not force and (kind := submission.other_program(script)):
        path = script if os.sep in script else f"./{script}"
        starts = [] if os.access(script, os.X_OK) else submission.interpreter_words(script)
        hint = f"muster run --command -- {shlex.join([*starts, path, *words[1:]])}"
        raise exits.Misused(f"{script} is {kind}, not a Python script", hint=hint)
    return {"script": script, "args": words[1:]}


def _without_launcher(words: list[str]) -> str:
    """What to type for `python train.py …` and the like; nothing if that is not what was typed."""
    if not words or not _LAUNCHERS.fullmatch(os.path.basename(words[0])):
        return ""
    at = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    script = words[at:] if at is not None else ["train.py"]
    behind = ["--", *script[1:]] if len(script) > 1 else []
    return f"muster run stands in the place of {words[0]}: {' '.join(['muster run', script[0], *behind])}"


def _nearest_script(script: str) -> str:
    path = Path(script)
    if path.is_dir():
        return f"{script} is a directory; muster run -m MODULE runs a package"
    folder = path.parent if path.parent.is_dir() else Path()
    names = [one.name for one in folder.glob("*.py")]
    close = difflib.get_close_matches(path.name, names, 1) or difflib.get_close_matches(f"{path.name}.py", names, 1)
    return f"did you mean {folder / close[0]}?" if close else "--command runs a program that is no Python script"


def world_size_of(text: str) -> WorldSize:
    """MIN:TARGET:MAX; MIN:MAX aims at MAX; N alone is fixed."""
    parts = text.split(":")
    if not 1 <= len(parts) <= 3 or not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        hint = "muster run train.py --workers 2:2:4 starts with two, and scales up to four"
        raise exits.Misused(f"--workers: {text!r} is not MIN:TARGET:MAX, MIN:MAX or N", hint=hint)
    numbers = [int(part) for part in parts]
    least, target, most = {1: numbers * 3, 2: [*numbers, numbers[-1]], 3: numbers}[len(parts)]
    if problem := size_problem(least, target, most):
        raise exits.Misused(f"--workers: {problem}", hint="--workers 2:2:4 starts with two, and scales up to four")
    return WorldSize(min=least, target=target, max=most)


def _variables(given: list[str], option: str, known: Mapping[str, str]) -> dict[str, str]:
    """K=V, or K alone for the value that is known already."""
    found = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals and key not in known:
            raise exits.Misused(f"{option}: {key!r} is not set here", hint=f"{option} {key}=VALUE")
        found[key] = value if equals else known[key]
    return found


def _pairs(given: list[str], option: str) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    if bad := [key for key, equals, _ in pairs if not equals or not key]:
        raise exits.Misused(f"{option}: {bad[0]!r} is not K=V")
    return {key: value for key, _, value in pairs}
