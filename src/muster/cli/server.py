"""`muster server`: start, stop and look at this machine's own control plane.

Only `start` starts one. Whether one runs is said by the lock that it holds, never by a pid in a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from muster import files, mounts
from muster.cli import durations, exits, session, systemd_unit
from muster.cli.output import Report, write_data, write_table
from muster.errors import Conflict, MusterError, NotFound, Unavailable
from muster.sdk import home

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from muster.daemon.backups import Restored
    from muster.sdk.home import Running
    from muster.sdk.training import DistributedTraining

app = typer.Typer(rich_markup_mode=None)

# The variables that a control plane reads when it starts.
_SETTINGS = (
    "MUSTER_GPUS",
    "MUSTER_POOL_GPUS",
    "MUSTER_POOL_GPUS_PER_NODE",
    "MUSTER_LOG_BYTES",
    "MUSTER_AUDIT_BYTES",
    "MUSTER_AUDIT_FILES",
    "MUSTER_DOMAIN",
    "MUSTER_MESH_ENDPOINT",
)
_STOP_S = 30.0  # how long it may take to end by itself


@app.callback(
    invoke_without_command=True,
    epilog="Example: muster server --store kube --backend kube, in a cluster",
)
def server(
    ctx: typer.Context,
    store: str | None = typer.Option(None, metavar="sqlite|kube", help="Who keeps the objects."),
    backend: str | None = typer.Option(None, metavar="local|kube", help="Who runs the workers."),
    listen: str | None = typer.Option(None, metavar="HOST:PORT", help="Where the API listens."),
    tls_cert: Path | None = typer.Option(None, exists=True, dir_okay=False, metavar="FILE", help="Its certificate."),
    tls_key: Path | None = typer.Option(None, exists=True, dir_okay=False, metavar="FILE", help="The key to it."),
    insecure: bool = typer.Option(False, "--insecure", help="Listen beyond loopback without TLS."),
    etcd: str | None = typer.Option(None, metavar="URL", help="An etcd for the mesh's keys."),
    log_bytes: str | None = typer.Option(None, metavar="N", help="Kept of each rank's logs; 0: everything (1Gi)."),
    namespace: str | None = typer.Option(None, metavar="NS", help="In a cluster: its own namespace."),
    identity: str | None = typer.Option(None, metavar="NAME", help="In a cluster: its name among its replicas."),
    address: str | None = typer.Option(None, metavar="IP", help="In a cluster: where the Service finds it."),
    advertise: str | None = typer.Option(None, metavar="HOST", help="In a cluster: where workers find whoever leads."),
    image: str | None = typer.Option(None, metavar="IMAGE", help="In a cluster: for trainings that name none."),
    agent_image: str | None = typer.Option(
        None, metavar="IMAGE", help="In a cluster: an image with muster, from which other images get the agent."
    ),
    worker_user: str | None = typer.Option(
        None, metavar="UID|image", help="In a cluster: who workers run as (65532), or the image's own user."
    ),
    coordinator_port: int | None = typer.Option(None, metavar="PORT", help="In a cluster: for the workers (8471)."),
    mesh_port: int | None = typer.Option(None, metavar="PORT", help="In a cluster: for the mesh's keys (8472)."),
) -> None:
    """Start, stop and look at a control plane. Without a command it runs here, in the foreground, until it is ended."""
    given = {name: value for name, value in ctx.params.items() if value not in (None, False)}
    if ctx.invoked_subcommand is not None:
        if given:
            raise exits.Misused(f"options of {ctx.invoked_subcommand} come after it")
        return
    if not given:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(exits.USAGE)
    options = []
    for name, value in given.items():
        options += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    _become(files.home(), options)


def _become(where: Path, options: list[str]) -> None:
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "muster.daemon", "--home", str(where), *options])


@app.command(epilog="Example: muster server start --listen 0.0.0.0:8470 --tls-cert cert.pem --tls-key key.pem")
def start(
    listen: str | None = typer.Option(None, metavar="HOST:PORT", help="Where to listen; a free port of loopback."),
    tls_cert: Path | None = typer.Option(None, exists=True, dir_okay=False, metavar="FILE", help="Its certificate."),
    tls_key: Path | None = typer.Option(None, exists=True, dir_okay=False, metavar="FILE", help="The key to it."),
    insecure: bool = typer.Option(False, help="Listen beyond loopback without TLS: tokens travel in clear."),
    etcd: str | None = typer.Option(None, metavar="URL", help="An etcd for the mesh's keys, like http://host:2379."),
    log_bytes: int | None = typer.Option(
        None,
        parser=durations.size,
        metavar="N",
        help="Kept of a rank's output, and of its errors, like 500M; 0: everything (1Gi).",
    ),
    events: int | None = typer.Option(
        None, min=0, metavar="N", help="Entries of the journal that are kept in all; 0: all (1000000)."
    ),
    events_per_training: int | None = typer.Option(
        None, min=0, metavar="N", help="The same of each training; what is dropped still counts as usage (10000)."
    ),
    forget: bool = typer.Option(
        False, "--forget", help="Give up workers that run and that its database does not know."
    ),
    foreground: bool = typer.Option(False, help="Stay, and log here; for a supervisor."),
) -> None:
    """Start the control plane, unless it runs already. Trainings that outlived the last one are adopted."""
    if (tls_cert is None) != (tls_key is None):
        raise exits.Misused("--tls-cert and --tls-key need each other")
    if listen is not None:
        _check_listen(listen, tls=tls_cert is not None, insecure=insecure)
    options = _options(listen, tls_cert, tls_key, insecure=insecure)
    if etcd is not None:
        options += ["--etcd", etcd]
    if log_bytes is not None:
        options += ["--log-bytes", str(log_bytes)]
    for name, count in (("--events", events), ("--events-per-training", events_per_training)):
        options += [] if count is None else [name, str(count)]
    if forget:
        options += ["--forget"]
    where = files.home()
    if home.is_locked(where):
        if foreground:
            raise _runs(where)
        if missing := _not_in_force(home.running(where), options, os.environ):
            raise _runs(where, missing)
        typer.echo(_runs(where).message, err=True)
        return
    if foreground:
        _become(where, options)
    _start(where, options)


@app.command(epilog="Example: muster server install --listen 127.0.0.1:8470")
def install(
    listen: str | None = typer.Option(None, metavar="HOST:PORT", help="Where to listen; a free port of loopback."),
    tls_cert: Path | None = typer.Option(None, exists=True, dir_okay=False, metavar="FILE", help="Its certificate."),
    tls_key: Path | None = typer.Option(None, exists=True, dir_okay=False, metavar="FILE", help="The key to it."),
    insecure: bool = typer.Option(False, help="Listen beyond loopback without TLS: tokens travel in clear."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the unit, and write nothing."),
) -> None:
    """Let systemd start the control plane with this user's session, and again whenever it ends by itself."""
    if (tls_cert is None) != (tls_key is None):
        raise exits.Misused("--tls-cert and --tls-key need each other")
    if listen is not None:
        _check_listen(listen, tls=tls_cert is not None, insecure=insecure)
    where, path = files.home(), systemd_unit.path(os.environ)
    command = [sys.executable, "-m", "muster.daemon", "--home", str(where)]
    try:
        unit = systemd_unit.render([*command, *_options(listen, tls_cert, tls_key, insecure=insecure)], os.environ)
    except ValueError as error:
        raise exits.Misused(str(error)) from error
    if dry_run:
        typer.echo(unit, nl=False)
        return
    home.must_be_here(where)
    if home.is_locked(where):
        raise Conflict("a control plane runs that systemd did not start", hint="muster server stop, then install again")
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    systemd_unit.write(path, unit)
    typer.echo(f"the unit is in {path}", err=True)
    _tell_systemd(("daemon-reload",), ("enable", "--now", systemd_unit.NAME))
    typer.echo("to have it run while you are not logged in: loginctl enable-linger", err=True)


@app.command(epilog="Example: muster server uninstall")
def uninstall() -> None:
    """Remove the unit that `muster server install` wrote, and stop its control plane. Trainings go on."""
    path = systemd_unit.path(os.environ)
    if not systemd_unit.is_ours(path):
        raise NotFound(f"there is no unit of muster in {path}", hint="muster server install writes it")
    _tell_systemd(("disable", "--now", systemd_unit.NAME))
    path.unlink()
    typer.echo(f"{path} is removed", err=True)
    _tell_systemd(("daemon-reload",))


def _tell_systemd(*orders: tuple[str, ...]) -> None:
    """Give orders to this user's systemd, or print them where it does not answer, for the user to type."""
    for index, order in enumerate(orders):
        if problem := systemd_unit.order(order):
            later = " && ".join(f"systemctl --user {' '.join(words)}" for words in orders[index:])
            typer.echo(f"systemd did not take the order: {problem}", err=True)
            typer.echo(f"type this in a session that has a systemd of its own: {later}", err=True)
            return


def _runs(where: Path, missing: Sequence[str] = ()) -> Conflict:
    running = home.running(where)
    at = f" at {running.url}" if running else ""
    story = f", and these settings are not in force: {', '.join(missing)}" if missing else ""
    hint = "muster server stop, then the same command again; trainings go on meanwhile"
    return Conflict(f"the control plane runs already{at}{story}", hint=hint)


def _not_in_force(running: Running | None, options: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the asked settings that the running control plane does not have. What cannot be read counts as missing."""
    arguments, settings = _started_with(running)
    asked = [(name, value) for name in _SETTINGS if (value := env.get(name))]
    missing = [f"{name}={value}" for name, value in asked if settings.get(name) != value]
    words = list(options)
    while words:
        size = 2 if len(words) > 1 and not words[1].startswith("--") else 1
        option, words = words[:size], words[size:]
        if not any(arguments[start : start + size] == option for start in range(len(arguments))):
            missing.append(" ".join(option))
    return missing


def _started_with(running: Running | None) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the variables with which the control plane was started, as the kernel has them."""
    if running is None:
        return [], {}
    try:
        arguments, variables = (
            Path(f"/proc/{running.pid}/{name}").read_bytes().decode(errors="replace").split("\0")
            for name in ("cmdline", "environ")
        )
    except OSError:
        return [], {}
    return arguments, dict(text.split("=", 1) for text in variables if "=" in text)


def _start(where: Path, options: list[str]) -> str:
    from muster.sdk.find import Search, find

    if kind := mounts.network_type(where):
        story = (
            f"{where} is on a network file system ({kind}): one machine can serve it, and the database is slower there"
        )
        typer.echo(f"{story}; export MUSTER_HOME=FOLDER to have it on a disk of this machine", err=True)
    search = Search(home=where)
    found = find(Search(home=where, daemon=(*search.daemon, *options)))
    typer.echo(f"the control plane listens at {found.url}", err=True)
    return found.url


def _check_listen(listen: str, *, tls: bool, insecure: bool) -> None:
    """The daemon checks it as well; here it is still a mistake of the command line."""
    from muster.server.auth import check_listen
    from muster.world.wire import parse_address

    try:
        host, _ = parse_address(listen)
        check_listen(host, tls=tls, insecure=insecure)
    except ValueError as error:
        raise exits.Misused(f"--listen: {error}", hint="muster server start --listen 127.0.0.1:8470") from error


def _options(listen: str | None, cert: Path | None, key: Path | None, *, insecure: bool) -> list[str]:
    options = [] if listen is None else ["--listen", listen]
    if cert is not None and key is not None:
        options += ["--tls-cert", str(cert.absolute()), "--tls-key", str(key.absolute())]
    return options + (["--insecure"] if insecure else [])


@app.command(epilog="Example: muster server stop --cancel")
def stop(
    cancel: bool = typer.Option(False, "--cancel", help="Cancel all trainings first, and wait for their end."),
) -> None:
    """Stop the control plane. Trainings go on without it, and are adopted when it starts again."""
    where = files.home()
    running = home.running(where)
    if running is None:
        if home.is_locked(where):
            raise Unavailable("the control plane is still starting", hint="try again in a moment")
        typer.echo("the control plane does not run", err=True)
        return
    active = _active(where, running, needed=cancel)
    if cancel:
        _cancel(active)
        active = []
    with contextlib.suppress(OSError):  # a disk that is full keeps nobody from stopping it
        home.mark_stopped(where, True)
    try:
        _stop(where, running)
    except MusterError:
        home.mark_stopped(where, False)
        raise
    typer.echo(f"the control plane (pid {running.pid}) has stopped", err=True)
    if active:
        names = ", ".join(str(handle.training.key) for handle in active)
        typer.echo(f"these trainings go on, and are adopted at the next start: {names}", err=True)


def _stop(where: Path, running: Running) -> None:
    try:
        os.kill(running.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended by itself
    except PermissionError as error:
        raise MusterError(f"the control plane (pid {running.pid}) belongs to another user") from error
    if not home.wait_until_unlocked(where, _STOP_S):
        hint = f"kill -9 {running.pid} loses nothing: trainings go on and are adopted"
        raise MusterError(f"the control plane (pid {running.pid}) has not stopped in {_STOP_S:.0f} s", hint=hint)


def _active(where: Path, running: Running, *, needed: bool) -> list[DistributedTraining]:
    """The trainings that are not over. Without --cancel not knowing them is no reason not to stop."""
    try:
        client = session.open_client(running.url, home.token(where), session.DEFAULT)
        return [handle for handle in session.everywhere(client) if not handle.training.is_terminal]
    except MusterError as error:
        if needed:
            raise
        typer.echo(f"which trainings go on is not known: {error.message}", err=True)
        return []


def _cancel(active: list[DistributedTraining]) -> None:
    for handle in active:
        handle.cancel()
    for handle in active:
        typer.echo(f"waiting for {handle.training.key} to end", err=True)
        session.wait_for_end(handle)


@app.command(epilog="Example: muster server status -o json")
def status(output: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print it.")) -> None:
    """Say whether the control plane runs, and where. Exits 7 if it does not."""
    running = home.running(files.home())
    if running is None:
        raise Unavailable("the control plane does not run", hint="muster server start")
    if output is Report.TABLE:
        write_table(
            ("PID", "URL", "VERSION", "STARTED"), [(running.pid, running.url, running.version, running.started_at)]
        )
        typer.echo(f"in a browser: {running.url}/ (its token is in {files.home() / 'token'})", err=True)
    else:
        write_data(running.to_wire(), output)


# What it keeps -----------------------------------------------------------------------------------


@app.command(epilog="Example: muster server backup ~/muster-monday.tar")
def backup(
    file: Path = typer.Argument(metavar="FILE", help="Where to put it; only you will be able to read it."),
    force: bool = typer.Option(False, "--force", help="Replace a file of that name."),
    output: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print what is in it."),
) -> None:
    """Write all that the control plane keeps to one file, while it runs or not: trainings, events, tokens, quotas.

    Logs, checkpoints and the embedded token are not in it.
    """
    from muster.daemon import backups
    from muster.types.codec import to_wire

    home.must_be_here(files.home())
    made = backups.make(files.home(), file.absolute(), force=force)
    if output is Report.TABLE:
        what = "1 training with its journal is" if made.trainings == 1 else f"{made.trainings} trainings are"
        typer.echo(f"{what} in {file}, and: {', '.join(sorted(made.files))}", err=True)
    else:
        write_data({"file": str(file.absolute()), **to_wire(made)}, output)


@app.command(epilog="Example: muster server restore ~/muster-monday.tar")
def restore(
    file: Path = typer.Argument(metavar="FILE", help="A backup, or a copy of a muster.db."),
    force: bool = typer.Option(False, "--force", help="Also one of another home, which becomes this one's."),
    output: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print what was done."),
) -> None:
    """Put a backup back. What was there is kept beside; workers that it knows are adopted at the next start."""
    from muster.daemon import backups
    from muster.types.codec import to_wire

    home.must_be_here(files.home())
    done = backups.restore(files.home(), file.absolute(), force=force)
    if output is not Report.TABLE:
        write_data({"file": str(file.absolute()), **to_wire(done)}, output)
        return
    for line in _story_of(done):
        typer.echo(line, err=True)


def _story_of(done: Restored) -> Iterator[str]:
    from muster.types.codec import show_time

    what = "1 training is" if done.trainings == 1 else f"{done.trainings} trainings are"
    yield f"{what} back, as of {show_time(done.made_at) if done.made_at else 'the time of that copy'}"
    if done.before is not None:
        yield f"what was there is kept in {done.before}"
    if done.files:
        yield f"what was missing came from the backup: {', '.join(done.files)}"
    if done.only_logs:
        yield f"{len(done.only_logs)} trainings are not in it; their logs stay where they are"
    if done.adopted:
        yield f"workers that run, and are adopted at the next start: {', '.join(done.adopted)}"
    if done.unknown:
        yield f"workers that run, and that it does not know: {', '.join(done.unknown)}"
    yield f"next: {'muster server forget, which gives those up' if done.unknown else 'muster server start'}"


@app.command(epilog="Example: muster server forget")
def forget(output: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print it.")) -> None:
    """Start the control plane with what its database has, and give up what that does not know.

    For when something of it is lost and there is no backup: workers that it does not know end.
    """
    from muster.core.home import loss
    from muster.daemon import home as homes

    where = files.home()
    if home.is_locked(where):
        raise _runs(where)
    found = homes.look(where)
    what, names = loss(found), [name for _, name in found.strangers]
    url = _start(where, ["--forget"])
    if output is not Report.TABLE:
        write_data({"url": url, "accepted": what, "workers": names, "onlyLogs": found.unexplained}, output)
        return
    typer.echo(f"accepted: {what}" if what else "nothing was lost: there was nothing to forget", err=True)
    if names:
        typer.echo(f"given up: {', '.join(names)}", err=True)
